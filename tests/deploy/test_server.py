"""The server around page and APIs: whom it answers, and how it ends."""

import asyncio
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

from sd_tpu import app
from sd_tpu.folders import cache_folder, data_folder, temporary_folder
from sd_tpu.http import gate
from sd_tpu.http.access import Access, read_keys
from sd_tpu.http.gate import Gate, Names
from tests.support.processes import told_by

PATIENCE = 120.0  # seconds
# What a shell starts in the background ignores Ctrl+C, and so would what these tests start.
# A step takes a fifth of a second, so that pictures are under way when the server is to end.
INTERRUPTIBLE = """
import dataclasses, runpy, signal, time
from sd_tpu.serving.worker import Worker
signal.signal(signal.SIGINT, signal.default_int_handler)
execute = Worker.execute
def slowly(self, plan):
    report = execute(self, plan)
    if not plan.rows:
        return report
    time.sleep(0.2)
    return dataclasses.replace(report, advance_seconds=report.advance_seconds + 0.2)
Worker.execute = slowly
runpy.run_path("app.py", run_name="__main__")
"""

HELD = """
import pathlib, runpy, time
from sd_tpu.serving.worker import Worker
compile = Worker._compile
def held(self, batch):
    while not pathlib.Path("{go}").exists():
        time.sleep(0.05)
    return compile(self, batch)
Worker._compile = held
runpy.run_path("app.py", run_name="__main__")
"""


def ask(names: Names, path: str = "/", root: str = "", **headers: str) -> httpx.Response:
    """What a server of these names answers, whose page says "page" and whose API says "api"; it is
    told that it lies in the folder `root` of a site.
    """
    served = Gate(
        PlainTextResponse("page"),
        names=names,
        access=Access(("a-key",)),
        api=PlainTextResponse("api"),
        paths=("/v1/",),
    )

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(served, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, headers=headers)

    return asyncio.run(post())


# --- whom it answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "localhost:7860",
        "127.0.0.1:7860",
        "[::1]:7860",
        "192.0.2.7",
        "pictures.example.org",
        "any.example.net",
    ],
)
def test_the_server_answers_to_its_own_names(host):
    names = Names(frozenset({"pictures.example.org", "*.example.net"}))
    assert ask(names, host=host).text == "page"
    assert ask(names, "/v1/models", host=host).text == "api"


def test_the_tools_for_assistants_ask_for_the_key_of_the_apis():
    assert ask(Names(), "/gradio_api/mcp/").status_code == 401
    assert ask(Names(), "/gradio_api/mcp/", authorization="Bearer a-key").text == "page"
    assert ask(Names(), "/draw/gradio_api/mcp/", root="/draw").status_code == 401
    assert ask(Names(), "/draw/v1/models", root="/draw").text == "api"


PATHS = [
    ("/v1/models", "api"),
    ("/v1", "api"),
    ("/v1x", "page"),
    ("/", "page"),
    ("/gradio_api/mcp/", "401"),
    ("/gradio_api/mcp", "401"),
    ("/gradio_api/mcpx", "page"),
    ("/gradio_api/file=http://a.example/x", "403"),
    ("/gradio_api/proxy=http://a", "403"),
    ("/monitoring/summary", "403"),
    ("/monitoring", "403"),
    ("/monitorings", "page"),
]


@pytest.mark.parametrize(
    "root", ["", "/v", "/v1", "/gradio", "/gradio_api", "/monitoring", "/g", "/draw", "/a/b"]
)
@pytest.mark.parametrize("left_on", [False, True], ids=["folder taken off", "folder left on"])
def test_the_same_doors_are_locked_below_every_folder_of_a_site(root, left_on):
    for path, whom in PATHS:
        asked = f"{root}{path}" if left_on else path
        if not left_on and root and f"{asked}/".startswith(f"{root}/"):
            continue  # the path within the folder that a router takes off once more
        answer = ask(Names(), asked, root=root)
        assert whom in (answer.text, str(answer.status_code)), asked


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "example.org",
        "evilexample.net",
        "127.0.0.1.evil.example",
        "",
    ],
)
def test_a_name_that_leads_here_but_is_not_the_servers_is_refused_in_a_sentence(host):
    answer = ask(Names(frozenset({"pictures.example.org", "*.example.net"})), host=host)
    assert answer.status_code == 403 and "does not answer to the name" in answer.text


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:7860", "http://127.0.0.1:7860", 200),
        ("localhost:7860", "http://127.0.0.1:3000", 200),
        ("192.0.2.7:7860", "http://192.0.2.7:7860", 200),
        ("192.0.2.7:7860", "http://192.0.2.7:3000", 403),
        ("192.0.2.7:7860", "https://pictures.example.org", 200),  # behind a proxy
        ("127.0.0.1:7860", "http://[x", 403),
        ("127.0.0.1:7860", "https://evil.example", 403),
        ("127.0.0.1:7860", "http://192.0.2.9", 403),
        ("127.0.0.1:7860", "null", 403),
    ],
)
def test_what_a_page_of_another_website_asks_for_is_refused(host, origin, status):
    names = Names(frozenset({"pictures.example.org"}))
    assert ask(names, host=host, origin=origin).status_code == status


def test_of_a_body_no_more_is_taken_than_a_picture_needs(monkeypatch):
    monkeypatch.setattr(gate, "MAX_BODY_BYTES", 1 << 20)
    assert ask(Names(), **{"content-length": str(1 << 20)}).text == "page"
    assert ask(Names(), **{"content-length": str((1 << 20) + 1)}).status_code == 413
    taken = []

    async def swallow(scope, receive, send) -> None:
        while (message := await receive())["type"] == "http.request":
            taken.append(len(message["body"]))

    async def endless():
        return {"type": "http.request", "body": bytes(1 << 16), "more_body": True}

    asyncio.run(
        Gate(swallow, names=Names(), access=Access(), api=None, paths=())(
            {"type": "http", "path": "/", "headers": [(b"host", b"localhost")]}, endless, None
        )
    )
    assert sum(taken) == 1 << 20


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=https://evil.example/x.png",
        "/gradio_api/file/http://evil.example/x.png",
        "/gradio_api/file=HTTPS%3A//evil.example/x.png",
        "/gradio_api/process_recording",
    ],
)
def test_nothing_of_another_website_is_passed_on_as_the_servers_own(path):
    assert ask(Names(), path).status_code == 403
    assert ask(Names(), f"/draw{path}", root="/draw").status_code == 403
    assert ask(Names(), "/gradio_api/file=/tmp/a/https.png").text == "page"


def test_what_an_assistant_says_of_its_address_is_not_passed_on():
    headers = []

    async def page(scope, receive, send) -> None:
        headers.append(Headers(scope=scope))
        await PlainTextResponse("page")(scope, receive, send)

    served = Gate(page, names=Names(), access=Access(("a-key",)), api=None, paths=())

    async def post() -> None:
        transport = httpx.ASGITransport(served, client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post(
                "/gradio_api/mcp/",
                headers={"authorization": "Bearer a-key", "x-forwarded-for": "198.51.100.1"},
            )

    asyncio.run(post())
    assert headers[0].getlist("x-forwarded-for") == ["192.0.2.7"]


@pytest.mark.parametrize(("path", "told"), [("/", True), ("/assets/a.js", False)])
def test_files_of_the_page_obey_its_policy_and_have_none(path, told):
    headers = ask(Names(), path).headers
    assert ("content-security-policy" in headers) is told
    assert headers["x-content-type-options"] == "nosniff"


def test_browsers_are_told_what_the_page_may_load_and_who_may_show_it():
    headers = ask(Names()).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert "object-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'self' http://localhost:*" in headers["content-security-policy"]


@pytest.mark.parametrize(
    ("variable", "value", "frames"),
    [("SYSTEM", "spaces", "https://huggingface.co"), ("COLAB_RELEASE_TAG", "release", "https:")],
)
def test_a_space_and_a_hosted_notebook_answer_to_every_name_and_are_shown_there(
    variable, value, frames, monkeypatch
):
    monkeypatch.setenv(variable, value)
    answer = ask(Names.here([]), host="somebody-drawing.example", origin="https://any.example")
    assert answer.text == "page"
    assert f"frame-ancestors 'self' {frames}" in answer.headers["content-security-policy"]


def test_a_shared_link_and_a_proxys_address_are_names_of_the_server(monkeypatch):
    monkeypatch.setenv("GRADIO_ROOT_PATH", "https://pictures.example.org/draw")
    names = Names.here(["Given.example.org"], share=True)
    for host in ("abc.gradio.live", "pictures.example.org", "given.example.org"):
        assert ask(names, host=host).status_code == 200
    assert ask(Names.here([]), host="abc.gradio.live").status_code == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [("abc.gradio.live", 200), ("other.gradio.live", 403), ("localhost:7860", 403)],
)
def test_a_shared_link_is_asked_by_its_own_page_and_not_by_what_others_share(host, status):
    names = Names.here([], share=True)
    assert ask(names, host=host, origin="https://abc.gradio.live").status_code == status


# --- how it ends --------------------------------------------------------------------------------


def test_importing_the_page_takes_no_time_for_editors_stubs():
    program = (
        "import ast, inspect; from unittest import mock; from sd_tpu import app\n"
        "getfile = inspect.getfile\n"
        "with mock.patch.object(ast, 'get_source_segment') as looked_up: "
        "app._import_page(); print('looked up', looked_up.call_count, inspect.getfile is getfile)"
    )
    assert "looked up 0 True" in told_by(program).stdout


def test_leaving_is_not_held_up_by_what_still_runs():
    program = (
        "import atexit, threading; from sd_tpu.cli import leave\n"
        "atexit.register(print, 'by its own way'); "
        "threading.Thread(target=threading.Event().wait).start(); print('told'); leave(0)"
    )
    assert told_by(program, timeout=PATIENCE).stdout == "told\n"


def test_gradios_files_do_not_outlive_their_server_even_if_it_was_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    killed, others = tmp_path / f"sd_tpu-page-{gone.pid}-x", tmp_path / "somebody-elses"
    for folder in (killed, others):
        folder.mkdir()
        (folder / "picture.png").write_bytes(b"")
    with temporary_folder() as first, temporary_folder() as second:
        assert first.parent == tmp_path and first.is_dir() and second.is_dir()
        assert os.environ["GRADIO_TEMP_DIR"] == str(second)
        (second / "picture.png").write_bytes(b"")
        later = time.time() - 95 * 86400  # by a clock that is set right only now
        os.utime(second, (later, later))
        os.environ["GRADIO_TEMP_DIR"] = str(tmp_path)
        another = "from sd_tpu.folders import temporary_folder\nwith temporary_folder(): pass"
        root = Path(app.__file__).parents[1]
        subprocess.run([sys.executable, "-c", another], check=True, cwd=root)
        assert (second / "picture.png").is_file()
    assert [*tmp_path.iterdir()] == [others] and os.environ["GRADIO_TEMP_DIR"] == str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--api-key", "k"], "The APIs are not served without --api."),
        (["--api", "--api-key", " "], "An API key is not empty."),
        (["--api", "--api-public", "--api-key", "k"], "leave one of them out"),
        (["--api", "--api-key-file", "EMPTY"], "There is no API key in"),
        (["--decoder-for", "pictures"], "name one with --decoder."),
    ],
)
def test_flags_that_cannot_be_meant_are_refused_before_anything_is_loaded(
    flags, sentence, tmp_path, capsys
):
    (tmp_path / "keys").write_text("# none yet\n\n")
    assert app.main([flag.replace("EMPTY", str(tmp_path / "keys")) for flag in flags]) == 2
    assert sentence in capsys.readouterr().err


def test_keys_are_read_from_what_an_editor_marked_as_utf_8(tmp_path):
    (tmp_path / "keys").write_text("\ufefffirst\n# not this\nsecond\n", "utf-8")
    assert read_keys(tmp_path / "keys") == ("first", "second")


def test_flags_of_the_environment_that_cannot_be_read_are_said_to_be_of_there(monkeypatch, capsys):
    monkeypatch.setenv("SD_TPU_FLAGS", "--model 'a")
    with pytest.raises(SystemExit, match="2"):
        app.main([])
    assert "The flags in SD_TPU_FLAGS cannot be read: No closing quot" in capsys.readouterr().err


@pytest.mark.slow("starts the server")
def test_a_page_that_cannot_be_served_after_all_is_a_sentence(monkeypatch, capsys, tmp_path):
    served, listeners = app.bind, []

    def bind(host=None, port=None):  # whose port another program takes while the model is read
        listener = served(host, port)
        if listeners:
            listener.close()
            raise OSError("Address already in use")
        listeners.append(listener)
        return listener

    monkeypatch.setattr(app, "bind", bind)
    monkeypatch.setattr("sd_tpu.page.bind", bind)
    assert app.main(["--no-history"]) == 2
    assert "sd_tpu: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow("starts the server, and waits for what it draws")
def test_sigterm_lets_what_runs_be_finished_and_ctrl_c_ends_at_once(ending, least, tmp_path):
    (tmp_path / "keys").write_text("a-key\n")
    files = tmp_path / "files"
    program = subprocess.Popen(
        [
            sys.executable,
            "-c",
            INTERRUPTIBLE,
            "--model",
            str(least),
            "--devices",
            "1",
            "--no-history",
            "--grace",
            "100",
            "--api",
            "--api-key-file",
            str(tmp_path / "keys"),
        ],
        cwd=Path(app.__file__).parents[1],
        env={**os.environ, "GRADIO_TEMP_DIR": str(files)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    address = next(
        (found[1] for line in program.stdout if (found := re.match("Ready on (http[^ ]+) ", line))),
        None,
    )
    assert address, program.stderr.read()
    answers = []

    def draw() -> None:
        try:
            answers.append(post("drawn to its end", 2))
        except httpx.TransportError as error:
            answers.append(error)

    def post(prompt: str, count: int) -> httpx.Response:
        return httpx.post(
            f"{address}sdapi/v1/txt2img",
            auth=("", "a-key"),
            timeout=PATIENCE,
            json={"prompt": prompt, "steps": 20, "batch_size": count},
        )

    thread = threading.Thread(target=draw)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not httpx.get(f"{address}sdapi/v1/progress", auth=("", "a-key")).json()["progress"]:
        assert time.monotonic() < deadline and not answers
    program.send_signal(ending)
    if ending == signal.SIGTERM:
        assert program.stdout.readline().startswith("Ending")
        refused = post("too late", 1)
        assert refused.status_code == 503 and "shutting down" in refused.json()["detail"]
    thread.join()
    assert program.wait(PATIENCE) == (0 if ending == signal.SIGTERM else 130)
    program.stdout.close()
    if ending == signal.SIGTERM:
        assert len(answers[0].json()["images"]) == 2
    else:
        assert isinstance(answers[0], httpx.TransportError) or answers[0].status_code == 500
        assert program.stderr.read() == "Stopped.\n"
    program.stderr.close()
    assert not list(files.glob("sd_tpu-*"))


def test_without_a_home_the_folders_are_this_users_own_temporary_ones(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    folder = data_folder()
    home = tmp_path / f"sd_tpu-{os.getuid()}"
    assert folder.is_relative_to(home) and home.stat().st_mode & 0o777 == 0o700
    assert cache_folder().is_relative_to(home)
    home.rmdir()
    home.symlink_to(tmp_path / "somebody")  # that another user has put there
    assert not data_folder().is_relative_to(home)


@pytest.mark.parametrize(
    ("variable", "value", "sound"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", True),
        ("HTTP_PROXY", "http://127.0.0.1:9", True),
        ("NO_PROXY", "[::1],example.org", True),
        ("NO_PROXY", "", True),
        ("NO_PROXY", "*", True),
        ("HTTPS_PROXY", "socks4://127.0.0.1:9", False),
        ("ALL_PROXY", "what://x", False),
    ],
)
def test_a_proxy_of_the_environment_is_used_or_named_before_anything_is_loaded(
    monkeypatch, variable, value, sound
):
    for each in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(each, "")
    monkeypatch.setenv(variable, value)
    if sound:
        app._check_proxies()
        names = {*os.environ["NO_PROXY"].split(",")}
        assert {"127.0.0.1", "localhost", "::1"} <= names or names == {"*"} == {value}
        assert "example.org" not in value or "example.org" in os.environ["no_proxy"]
    else:
        with pytest.raises(ValueError, match="A proxy in the environment"):
            app._check_proxies()


@pytest.mark.slow("starts the server, and waits for what it draws")
@pytest.mark.parametrize("ended", [False, True])
def test_the_address_answers_before_programs_are_compiled_and_what_is_asked_for_waits(
    least, tmp_path, ended
):
    go, flags = tmp_path / "go", ["--devices", "1", "--no-history", "--api", "--api-public"]
    flags += ["--grace", "100"]
    program = subprocess.Popen(
        [sys.executable, "-c", HELD.format(go=go), "--model", str(least), *flags],
        cwd=Path(app.__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    address = next(
        found[1] for line in program.stdout if (found := re.match("Open (http[^ ]+) ", line))
    )
    assert "sdTpu" in httpx.get(address).text
    assert httpx.get(f"{address}readyz").status_code == 503
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(
            httpx.post(
                f"{address}sdapi/v1/txt2img", timeout=PATIENCE, json={"prompt": "a cat", "steps": 2}
            )
        )
    )
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while "sd_tpu_jobs 1.0" not in httpx.get(f"{address}metrics").text:
        assert time.monotonic() < deadline
    if ended:  # what is waited for is drawn all the same
        program.send_signal(signal.SIGTERM)
        assert program.stdout.readline().startswith("Ending")
    go.touch()
    if not ended:
        assert program.stdout.readline().startswith(f"Ready on {address} after")
    thread.join()
    assert len(answers[0].json()["images"]) == 1
    if not ended:
        assert httpx.get(f"{address}readyz").status_code == 200
        program.send_signal(signal.SIGTERM)
    assert program.wait(PATIENCE) == 0
    program.stdout.close()


@pytest.mark.slow("serves two pages")
def test_a_process_serves_one_page_as_long_as_nobody_closes_it(page_engine, monkeypatch):
    assert page_engine.ready.wait(PATIENCE)
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    app.serve(page_engine, share=False)  # nobody has a name for it
    gc.collect()
    (first,) = app._served
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    assert httpx.get(first.address).status_code == 200 and folder.is_dir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    second = app.serve(page_engine, share=False, port=port)
    with pytest.raises(httpx.ConnectError):
        httpx.get(first.address)
    assert not folder.exists()
    assert first.address in first._repr_html_()
    assert httpx.get(f"{second.address}readyz").status_code == 200
    second.close()
    second.close()  # changes nothing
    with pytest.raises(httpx.ConnectError):
        httpx.get(second.address)
    assert "GRADIO_TEMP_DIR" not in os.environ


@pytest.mark.parametrize("checker", ["StableDiffusionSafetyChecker", None])
def test_who_shares_a_model_without_its_safety_checker_is_told(
    page_engine, monkeypatch, caplog, checker
):
    configs = page_engine.checkpoint.configs
    index = {**configs["model_index"], "safety_checker": ["stable_diffusion", checker]}
    monkeypatch.setitem(configs, "model_index", index)
    pages = SimpleNamespace(
        build=lambda *_: None, launch=lambda *_, **__: "https://a.example/", close=lambda _: None
    )
    monkeypatch.setattr(app, "_import_page", lambda: pages)
    app.serve(page_engine, share=True).close()
    assert ("safety_checker=True" in caplog.text) == bool(checker)
