"""The panel Teach: pictures become a LoRA, while others draw."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page

from sd_tpu.language import ENGLISH
from sd_tpu.page import build, close, launch, teach
from sd_tpu.page import files as files_of_gradio
from sd_tpu.page.teach import CURVE, TeachPanel, curve
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.teaching import Teaching, TrainingRequest
from sd_tpu.serving.training_run import STOPPED, TrainingRun
from sd_tpu.settings import RequestError
from tests.support.pages import png
from tests.support.visitor import PATIENCE, box, expect, make, newcomer, press, setting, unfold

TAUGHT = 120_000  # ms: compiling included
HELP = re.compile("become a LoRA")


def photo(number: int) -> bytes:
    return png(np.random.default_rng(number).integers(0, 256, (40, 32, 3), np.uint8))


def files(*names: str) -> list[dict]:
    return [
        {"name": name, "mimeType": "image/png", "buffer": photo(number)}
        for number, name in enumerate(names)
    ]


def text(name: str, content: bytes, kind: str = "text/plain") -> dict:
    return {"name": name, "mimeType": kind, "buffer": content}


FOUR = files("zork on a hill.png", "IMG_1.png", "IMG_2.png", "IMG_3.png")


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A page that teaches, on an engine of its own."""
    folder = tmp_path_factory.mktemp("teaching")
    (folder / "loras").mkdir()
    engine = Engine.open(checkpoints["sd1"], devices=1, lora_dir=folder / "loras")
    teaching = Teaching.open(engine, folder / "runs", folder / "loras")
    page = build(engine, None, teaching)
    assert engine.ready.wait(300)
    yield SimpleNamespace(address=launch(page), engine=engine, teaching=teaching)
    close(page)
    teaching.close()
    engine.close()


@pytest.fixture
def tab(chromium, server) -> Iterator[Page]:
    viewport = {"width": 1440, "height": 900}
    with (
        chromium.new_context(viewport=viewport) as visitor,
        newcomer(visitor, server.address) as tab,
    ):
        unfold(tab, "Teach")
        yield tab


def panel(tab: Page) -> Locator:
    return tab.locator("#teach-panel")


def hand_in(tab: Page, *given: dict) -> None:
    panel(tab).locator("[type=file]").set_input_files([*given])


def says(tab: Page, words: str | re.Pattern) -> None:
    expect(panel(tab).locator(".estimate")).to_have_text(re.compile(words), timeout=PATIENCE)


def start(tab: Page) -> Locator:
    return panel(tab).get_by_role("button", name="Start", exact=True)


def violations(tab: Page) -> list[str]:
    return [each["id"] for each in Axe().run(tab)["violations"]]


@pytest.mark.slow("trains in a browser")
def test_four_pictures_become_a_lora_that_prompts_can_name(tab, server):
    hand_in(tab, *FOUR, text("IMG_2.txt", b"in the rain"))
    captions = panel(tab).locator("textarea")
    expect(captions).to_have_count(4)
    assert [each.input_value() for each in captions.all()] == [
        "zork on a hill",
        "",
        "in the rain",
        "",
    ]
    expect(start(tab)).to_be_disabled()
    panel(tab).get_by_role("textbox", name="Name").fill("zork")
    expect(panel(tab).locator("li small").nth(2)).to_have_text("a zork, in the rain")
    captions.nth(1).fill("on a roof")
    expect(panel(tab).locator("li small").nth(1)).to_have_text("a zork, on a roof")
    panel(tab).locator("summary").click()
    panel(tab).get_by_role("textbox", name="Steps").fill("8")
    panel(tab).get_by_role("textbox", name="Rank").fill("4")
    says(tab, r"^About .* while nothing is drawn\. \d+ MB for the model")
    assert violations(tab) == []
    start(tab).click()
    run = panel(tab).locator("section")
    expect(run.get_by_role("heading")).to_have_text("zork")
    expect(panel(tab).locator("li")).to_have_count(0)
    expect(run).to_contain_text("Done. Write", timeout=TAUGHT)
    expect(run.locator("polyline")).to_have_count(1)
    rows = run.locator("tbody tr")
    expect(rows).to_have_count(5, timeout=PATIENCE)  # without it, and four kept states
    expect(run.locator("td img")).to_have_count(5 * 8, timeout=TAUGHT)
    assert violations(tab) == []
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(tab) == []
    tab.set_viewport_size({"width": 1440, "height": 900})
    assert {"zork", "zork-4"} <= server.engine.adapters.loras().keys()
    rows.nth(2).get_by_role("button", name="Keep this one").click()
    expect(run).to_have_count(0)
    assert [*server.engine.adapters.loras()] == ["zork"]
    panel(tab).press("Escape")
    box(tab, 1).fill("a zork <lora:zork:1>")
    setting(tab, "Steps").fill("2")
    make(tab)


@pytest.mark.slow("compiles a step")
def test_a_run_is_stopped_and_gone_on_with_by_its_own_browser_alone(tab, server, chromium):
    hand_in(tab, *FOUR)
    panel(tab).get_by_role("textbox", name="Name").fill("blob")
    panel(tab).locator("summary").click()
    panel(tab).get_by_role("textbox", name="Steps").fill("50000")
    expect(start(tab)).to_be_enabled()
    start(tab).click()
    run = panel(tab).locator("section")
    expect(run.get_by_role("button", name="Stop")).to_be_focused()
    expect(run).to_contain_text(re.compile("Step [1-9].* of 50000, about"), timeout=TAUGHT)
    with chromium.new_context() as other, newcomer(other, server.address) as stranger:
        unfold(stranger, "Teach")
        expect(panel(stranger)).to_contain_text(HELP)
        expect(panel(stranger).locator("section")).to_have_count(0)
    run.get_by_role("button", name="Stop").click()
    expect(run).to_contain_text(re.compile(r"Stopped after step \d+ of 50000"), timeout=PATIENCE)
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    unfold(tab, "Teach")
    expect(run).to_have_accessible_name("blob")
    press(tab, run.get_by_role("button", name="Go on"))
    expect(run.get_by_role("button", name="Stop")).to_be_focused()
    expect(run).to_contain_text(re.compile("Step [1-9].* of 50000, about"), timeout=TAUGHT)
    run.get_by_role("button", name="Stop").click()
    expect(run).to_contain_text("Stopped after", timeout=PATIENCE)
    expect(tab.locator("#news [role=status]")).to_contain_text(re.compile("^blob: Stopped after"))
    expect(run.get_by_role("button", name="Go on")).to_be_focused()
    run.get_by_role("button", name="Discard").click()
    expect(run).to_have_count(0)
    expect(panel(tab).locator("[type=file]")).to_be_focused()
    assert not [name for name in server.engine.adapters.loras() if name.startswith("blob")]


def test_what_cannot_be_taught_is_said_before_anything_is_begun(tab, server):
    hand_in(tab, FOUR[0])
    says(tab, "A model is taught by 4 to 40 pictures, not 1")
    expect(start(tab)).to_be_disabled()
    hand_in(tab, text("fake.png", b"this is a text", "image/png"))
    expect(tab.locator("#line .wrong")).to_contain_text("fake.png is in no format")
    expect(panel(tab).locator("li")).to_have_count(1)
    hand_in(tab, *files(*(f"{number}.png" for number in range(499))))
    says(tab, "4 to 40 pictures, not 500")
    expect(panel(tab).locator("li")).to_have_count(1)
    caption = panel(tab).locator("textarea").first
    caption.focus()
    hand_in(tab, *FOUR[1:])
    expect(panel(tab).locator("li")).to_have_count(4)
    expect(caption).to_be_focused()
    for name, sentence in (("a/b", "cannot be the name"), ("", "Give what is taught a name")):
        panel(tab).get_by_role("textbox", name="Name").fill(name)
        says(tab, sentence)
        expect(start(tab)).to_be_disabled()
    (server.teaching._loras / "known.safetensors").touch()
    panel(tab).get_by_role("textbox", name="Name").fill("known")
    says(tab, "The name known is taken")
    panel(tab).get_by_role("textbox", name="Name").fill("fine")
    panel(tab).locator("summary").click()
    panel(tab).get_by_role("textbox", name="Rank").fill("1000")
    says(tab, "Rank should be from 4 to 128, not 1000")
    panel(tab).get_by_role("textbox", name="Rank").fill("many")
    says(tab, "Rank should be a whole number, not")
    panel(tab).get_by_role("textbox", name="Rank").fill("16")
    expect(start(tab)).to_be_enabled()
    panel(tab).get_by_role("button", name=re.compile("^Remove: IMG_3")).click()
    says(tab, "not 3")
    expect(panel(tab).get_by_role("button", name=re.compile("^Remove: IMG_2"))).to_be_focused()
    panel(tab).get_by_role("button", name=re.compile("^Remove: zork")).click()
    expect(panel(tab).get_by_role("button", name=re.compile("^Remove: IMG_1"))).to_be_focused()
    expect(panel(tab).get_by_role("textbox", name="What it shows 1")).to_have_value("")
    assert not server.teaching._runs


# --- answers, without a browser -------------------------------------------------------------------


class Kept:
    """What a panel asks of the teaching."""

    def __init__(self, *runs: TrainingRun):
        self.kept, self.started = runs, []

    def runs(self, owner: str) -> list[TrainingRun]:
        return [run for run in self.kept if run.owner == owner]

    def start(self, request: TrainingRequest) -> None:
        self.started.append(request)


def asked(teaching, act: str, **data):
    told = {"act": act, "name": "zork", "steps": "8", "rank": "4", **data}
    filled = {"prompts": [], "seed": 0}
    return TeachPanel(teaching).answer(told, filled, "me", "10.0.0.1", ENGLISH)


@pytest.fixture
def handed_in(tmp_path, monkeypatch) -> list[dict]:
    monkeypatch.setattr(files_of_gradio, "upload_folder", lambda: tmp_path)
    found = [
        {"file": str(tmp_path / f"{number}.png"), "name": f"{number}.png", "text": ""}
        for number in range(4)
    ]
    for number, each in enumerate(found):
        Path(each["file"]).write_bytes(photo(number))
    return found


def test_a_start_says_from_where_and_brings_its_pictures(handed_in):
    teaching = Kept()
    asked(teaching, "start", pictures=handed_in)
    (request,) = teaching.started
    assert request.address == "10.0.0.1"
    assert request.pictures == [photo(number) for number in range(4)]


def test_one_upload_is_no_forty_pictures(handed_in, tmp_path):
    again = {**handed_in[0], "file": f"{tmp_path}/./0.png"}
    for act in ("start", "check"):
        teaching = Kept()
        teaching.check = lambda *_: pytest.fail("it is taken")
        try:
            told = asked(teaching, act, pictures=[*handed_in, again])["note"]
        except RequestError as error:
            told = str(error)
        assert told == "0.png is there twice." and not teaching.started


def test_of_large_pictures_no_more_is_read_than_is_taken(handed_in, monkeypatch):
    read = []
    monkeypatch.setattr(teach, "MAX_BYTES", len(photo(0)) + len(photo(1)) - 1)
    monkeypatch.setattr(
        teach, "read_bytes", lambda file, most: read.append(file) or file.read_bytes()
    )
    with pytest.raises(RequestError, match="The pictures have more than"):
        asked(Kept(), "start", pictures=handed_in)
    assert len(read) == 2


def test_what_a_message_leaves_out_is_no_fault_of_the_server(server):
    with pytest.raises(RequestError, match="A model is taught by 4 to 40 pictures, not 0"):
        asked(server.teaching, "start")
    with pytest.raises(RequestError, match="not there any more"):
        asked(server.teaching, "keep", id="nowhere")


def test_samples_are_read_once(tmp_path, monkeypatch):
    values = dict.fromkeys(("model", "kind"), "thing")
    run = TrainingRun(
        folder=tmp_path, owner="me", name="zork", steps=8, rank=4, size=(32, 32),
        captions=[], prompts=["a", "b"], seed=0, status=STOPPED, kept=[4], **values,
    )  # fmt: skip
    run.keep_samples(0, {0: b"a picture", 1: b"another"})
    (first,) = asked(Kept(run), "show")["runs"]
    assert first["samples"].count("<img") == 2
    monkeypatch.setattr(TrainingRun, "samples", lambda *_: pytest.fail("they are read again"))
    (again,) = asked(Kept(run), "show", seen={run.id: first["key"]})["runs"]
    assert "samples" not in again
    monkeypatch.undo()
    run.keep_samples(4, {0: b"a third"})
    (third,) = asked(Kept(run), "show", seen={run.id: first["key"]})["runs"]
    assert third["samples"].count("<img") == 3


def test_a_page_that_does_not_teach_has_no_panel(chromium, address):
    with chromium.new_context() as visitor, newcomer(visitor, address) as tab:
        assert tab.locator("#teach-panel").count() == 0
        assert tab.get_by_role("button", name="Teach", include_hidden=True).count() == 0


def test_the_curve_of_a_loss_fills_its_picture():
    assert curve([(1, 0.5)]) == ""
    points = [
        tuple(map(float, each.split(","))) for each in curve([(1, 3), (5, 1), (9, 2)]).split()
    ]
    assert points == [(0, 0), (CURVE[0] / 2, CURVE[1]), (CURVE[0], CURVE[1] / 2)]
    assert len(curve([(1, 1), (2, 1)]).split()) == 2
