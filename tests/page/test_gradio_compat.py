"""What `sd_tpu.gradio_compat` relies on inside Gradio: where a later one differs, this fails."""

import asyncio
import inspect
from pathlib import Path

import fastapi
import gradio as gr
import pytest
from fastapi.testclient import TestClient
from gradio import blocks, component_meta, processing_utils, queueing, route_utils, routes, utils
from gradio.networking import setup_tunnel
from gradio.state_holder import SessionState, StateHolder
from gradio.tunneling import CURRENT_TUNNELS, Tunnel

from sd_tpu import gradio_compat
from tests.support.processes import told_by
from tests.support.visitor import visit

WITHOUT_STUBS = """
import pathlib
read, read_text = [], pathlib.Path.read_text
pathlib.Path.read_text = lambda self, *how, **more: read.append(self) or read_text(
    self, *how, **more
)
import sd_tpu.gradio_compat
assert not [each for each in read if "gradio" in each.parts and each.suffix[:3] == ".py"], read
"""


@pytest.fixture
def mounted() -> tuple[gr.Blocks, fastapi.FastAPI]:
    """A page of Gradio's alone, and the site in which it is mounted."""
    with gr.Blocks() as page:
        gr.Textbox()
    return page, gr.mount_gradio_app(fastapi.FastAPI(), page, "/", mcp_server=True)


def parameters(function) -> list[str]:
    return [*inspect.signature(function).parameters]


@pytest.mark.slow("imports Gradio in a process of its own")
def test_no_stubs_are_written_while_gradio_is_imported():
    assert "inspect.getfile(" in inspect.getsource(component_meta.create_or_modify_pyi)
    told_by(WITHOUT_STUBS)


def test_tracebacks_are_printed_by_the_modules_that_log_them_here():
    for module in (queueing, routes, route_utils, utils):
        assert hasattr(module.traceback, "print_exc")  # ty: ignore[missing-attribute]
    assert "traceback.print_exc()" in inspect.getsource(queueing)


def test_one_function_fetches_what_visitors_give_addresses_of():
    fetching = inspect.getsource(blocks.Block.async_move_resource_to_block_cache)
    assert "processing_utils.async_ssrf_protected_download(" in fetching
    assert inspect.iscoroutinefunction(processing_utils.async_ssrf_protected_download)


def test_what_is_handed_in_lies_in_one_folder_and_comes_by_one_path(mounted):
    _, site = mounted
    with TestClient(site) as client:
        (path,) = client.post(gradio_compat.UPLOAD_PATH, files={"files": ("a.txt", b"x")}).json()
    assert Path(path).is_relative_to(gradio_compat.upload_folder().resolve())


def test_the_pages_own_files_are_beside_its_template():
    assert "<script" in (gradio_compat.FRONTEND / "index.html").read_text("utf-8")
    assert any((gradio_compat.FRONTEND / "assets").glob("*.js"))


def test_files_of_a_pages_sets_are_pruned(mounted):
    page, _ = mounted
    assert all(isinstance(each, set) for each in page.temp_file_sets)
    assert ".temp_file_sets" in inspect.getsource(utils) + inspect.getsource(route_utils)


def test_an_event_has_the_scripts_whole_message():
    assert gr.EventData(None, {"do": "stop"})._data == {"do": "stop"}


def test_a_mounted_page_has_another_application_than_the_one_that_is_served(mounted):
    page, site = mounted
    served = site.routes[-1].app
    assert isinstance(served, routes.App) and page.app is not served
    assert isinstance(served.state_holder, StateHolder)
    assert isinstance(served.stop_event, asyncio.Event)
    assert "app.stop_event.wait()" in inspect.getsource(routes)


def test_a_mounted_page_does_not_know_that_it_is_served(mounted):
    page, _ = mounted
    assert page.has_launched is False
    assert "blocks.has_launched" in inspect.getsource(processing_utils._check_allowed)


def test_tools_have_an_address_of_the_page(mounted):
    page, _ = mounted
    assert page.mcp_server_obj._local_url is None
    page.mcp_server_obj._local_url = "http://127.0.0.1:7860/"
    assert page.mcp_server_obj.local_url == "http://127.0.0.1:7860/"


def test_sessions_are_kept_where_ours_stand_in(mounted):
    page, _ = mounted
    assert parameters(StateHolder.__getitem__) == ["self", "session_id"]
    assert parameters(StateHolder.delete_all_expired_state) == ["self"]
    assert ".state_holder.delete_all_expired_state()" in inspect.getsource(route_utils)
    assert parameters(SessionState.__setitem__) == ["self", "key", "value"]
    assert parameters(SessionState._update_value_in_config) == ["self", "key", "value"]
    session = SessionState(page)
    assert session.blocks_config.blocks.keys() == page.default_config.blocks.keys()
    assert session.blocks_config.fns is not None


def test_the_queue_lists_what_sessions_wait_for(mounted):
    queue = mounted[0]._queue
    assert [*queue.pending_messages_per_session] == [*queue.pending_event_ids_session] == []
    assert "session_hash" in parameters(queue.clean_events)
    assert inspect.iscoroutinefunction(queue.clean_events)


def test_tunnels_are_dug_and_known():
    asked = ["local_host", "local_port", "share_token", "share_server_address"]
    assert parameters(setup_tunnel) == [*asked, "share_server_tls_certificate"]
    assert isinstance(CURRENT_TUNNELS, list) and parameters(Tunnel.kill) == ["self"]


COUNT_FRAMES = """window.wanted = 0;
const ofBrowser = window.requestAnimationFrame;
window.requestAnimationFrame = (callback) => {
    window.wanted += 1;
    return ofBrowser.call(window, callback);
};"""
WANTED = """() => new Promise((resolve) => {
    const before = window.wanted;
    setTimeout(() => resolve(window.wanted - before), 500);
})"""


A_FRAME = """() => new Promise((resolve) => {
    const before = performance.now();
    requestAnimationFrame(() => resolve(performance.now() - before));
})"""


def test_no_frame_is_wanted_once_the_page_is_there(visitor, address):
    with visitor.new_page() as tab:
        tab.add_init_script(COUNT_FRAMES)
        visit(tab, address)
        assert tab.evaluate("window.wanted") > 0
        waits = [tab.evaluate(A_FRAME) for _ in range(3)]
        assert min(waits) < 500, "who wants a frame gets it at once"
        quiet = 0  # looks in a row; Gradio's sign of loading moves on for some seconds
        for _ in range(60):
            quiet = quiet + 1 if tab.evaluate(WANTED) < 4 else 0
            if quiet == 4:
                break
        assert quiet == 4
