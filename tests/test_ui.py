"""The page in a real browser, the endpoints beside it, and the program that starts them."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import gradio_client
import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

import app
from sd_tpu import ui
from sd_tpu.engine import Engine, Failed, Progress, Queued
from sd_tpu.images import read_png
from sd_tpu.request import MAX_SEED, Request

PATIENCE = 30_000  # ms: what a step of a test may take on a busy machine
FLAGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]
PROMPTS = [f"picture number {i} <b>&" for i in range(1, 9)]
LONG = 200  # steps


@pytest.fixture(scope="module")
def engine(checkpoints) -> Iterator[Engine]:
    engine = Engine.open(checkpoints["sd1"], devices=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def address(engine) -> Iterator[str]:
    page = ui.build(engine)
    assert engine.ready.wait(60)
    yield ui.launch(page, server_name="127.0.0.1")
    page.close(verbose=False)


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    program = shutil.which("chromium")
    if not program:
        pytest.fail("The browser tests need Debian's chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        # One context for all tabs: it caches the page's files. A tab is a session of its own.
        yield browser.new_context(viewport={"width": 1440, "height": 900})
        browser.close()


@pytest.fixture
def tab(browser, address) -> Iterator[Page]:
    with browser.new_page() as tab:
        yield visit(tab, address)


@pytest.fixture(scope="module")
def client(address) -> gradio_client.Client:
    return gradio_client.Client(address, verbose=False)


def visit(tab: Page, address: str) -> Page:
    tab.set_default_timeout(PATIENCE)
    tab.goto(address)
    expect(generate(tab)).to_be_enabled(timeout=PATIENCE)
    return tab


def generate(tab: Page):
    return tab.get_by_role("button", name="Generate")


def status(tab: Page):
    return tab.locator("#status").get_by_role("status")


def says(tab: Page, text: str | re.Pattern) -> None:
    expect(status(tab)).to_contain_text(text, timeout=PATIENCE)


def fill(tab: Page, prompts: list[str], seed: int | None = None, steps: int = 2) -> None:
    # Opened first: Gradio makes a folded part only then, and what is typed into a box in the very
    # moment it appears is lost to Gradio. Filling the prompts gives it the time a person takes.
    if not tab.get_by_label("Steps").is_visible():
        tab.get_by_role("button", name="Settings").click()
        expect(tab.get_by_label("Steps")).not_to_have_value("", timeout=PATIENCE)
    for i, prompt in enumerate(prompts, start=1):
        tab.get_by_label(f"Prompt {i}", exact=True).fill(prompt)
    if seed is not None:
        tab.get_by_label("Seed").fill(str(seed))
    tab.get_by_label("Steps").fill(str(steps))
    tab.get_by_label("Steps").blur()


def make(tab: Page) -> None:
    generate(tab).click()
    says(tab, "Done in")


def alts(tab: Page) -> list[str]:
    return tab.locator("figure img").evaluate_all("all => all.map(image => image.alt)")


def corners(tab: Page) -> list[list[float]]:
    return tab.locator("figure").evaluate_all("""figures => figures.map(figure => {
        const box = figure.getBoundingClientRect();
        return [box.x, box.y, box.width, box.height];
    })""")


def test_eight_prompts_become_eight_pictures_in_their_places(tab):
    fill(tab, PROMPTS, seed=40)
    before = corners(tab)
    make(tab)
    places = tab.locator("figure")
    assert alts(tab) == PROMPTS
    for i, prompt in enumerate(PROMPTS):
        expect(places.nth(i)).to_contain_text(prompt)
        expect(places.nth(i)).to_contain_text(f"Seed {40 + i}")
        width = places.nth(i).locator("img").evaluate(
            "image => image.decode().then(() => image.naturalWidth)"
        )
        assert width == 32
    assert corners(tab) == before, "the layout has shifted"
    says(tab, "seed 40")


def test_an_empty_box_is_skipped_and_keeps_its_place(tab):
    fill(tab, ["first", "", "   ", "fourth", "", "", "", ""], seed=7)
    make(tab)
    assert alts(tab) == ["first", "fourth"]
    expect(tab.locator("figure").nth(0).locator("img")).to_have_attribute("alt", "first")
    expect(tab.locator("figure").nth(3).locator("img")).to_have_attribute("alt", "fourth")
    expect(tab.locator("figure").nth(3)).to_contain_text("Seed 10")


def test_previews_form_and_stop_ends_the_run(tab, engine):
    fill(tab, PROMPTS, steps=LONG)
    tab.get_by_label("Sampler").click()
    tab.get_by_role("option", name="Heun").click()
    generate(tab).click()
    says(tab, re.compile(rf"Step \d+ of {LONG}"))
    expect(tab.locator("figure.forming img").first).to_be_visible(timeout=PATIENCE)
    tab.get_by_role("button", name="Stop").click()
    says(tab, "Stopped")
    expect(tab.locator("figure.stopped")).to_have_count(8)
    expect(tab.get_by_role("link", name="Download")).to_have_count(0)
    assert not any(engine._occupants)
    fill(tab, PROMPTS)
    make(tab)
    expect(tab.get_by_role("link", name="Download")).to_have_count(8)


def test_a_tab_that_closes_takes_its_job_along(browser, address, engine):
    with browser.new_page() as tab:
        visit(tab, address)
        fill(tab, PROMPTS, steps=LONG)
        generate(tab).click()
        says(tab, "Step")
        job = next(occupant.job for occupant in engine._occupants if occupant)
    while any(engine._occupants):
        time.sleep(0.05)
    assert max(job._steps.values()) < LONG, "the job of a closed tab went on to its end"


@pytest.mark.parametrize(("label", "value", "sentence"), [
    ("Seed", "-5", f"Seed should be from 0 to {MAX_SEED}, not -5."),
    ("Steps", "0", "Steps should be from 1 to 200, not 0."),
    ("Guidance", "51", "Guidance should be from 0 to 50, not 51."),
])
def test_a_bad_value_is_answered_in_a_sentence_and_costs_no_prompt(tab, label, value, sentence):
    fill(tab, PROMPTS)
    tab.get_by_label(label).fill(value)
    generate(tab).click()
    says(tab, sentence)
    assert tab.get_by_label("Prompt 8").input_value() == PROMPTS[7]
    expect(generate(tab)).to_be_enabled()


def test_no_prompt_at_all_is_answered_in_a_sentence(tab):
    fill(tab, [""] * 8)
    generate(tab).click()
    says(tab, "There is no prompt yet")


def test_words_that_the_model_will_not_see_are_told(tab):
    fill(tab, ["word " * 76 + "the unseen end", *[""] * 7])
    make(tab)
    says(tab, "the unseen end")


def test_the_downloaded_file_carries_the_settings_of_its_picture(tab, tmp_path):
    fill(tab, ["", "ein Café, größer", *[""] * 6], seed=8, steps=3)
    make(tab)
    with tab.expect_download() as download:
        tab.get_by_role("link", name="Download picture 2").click()
    assert download.value.suggested_filename == "9-ein-café-größer.png"
    download.value.save_as(tmp_path / "picture.png")
    asked = read_png((tmp_path / "picture.png").read_bytes())
    assert (asked.prompts, asked.seed, asked.steps) == (("ein Café, größer",), 9, 3)


def test_minus_one_draws_a_seed_that_can_be_used_again(tab):
    seed = tab.get_by_label("Seed")
    fill(tab, ["first", *[""] * 7], seed=3)
    tab.get_by_role("button", name="Random").click()
    expect(seed).to_have_value("-1")
    make(tab)
    drawn = re.search(r"seed (\d+)", status(tab).inner_text())[1]
    expect(tab.locator("figure").first).to_contain_text(f"Seed {drawn}")
    tab.get_by_role("button", name="Reuse last").click()
    expect(seed).to_have_value(drawn)


@pytest.mark.parametrize(("event", "sentence"), [
    (Queued(1, "compiling for the first time"), "Compiling for the first time…"),
    (Queued(3, "waiting for a free place"), "Queued as number 3"),
    (Progress(4, 20, {}), "Step 4 of 20"),
    (Failed("The device is out of memory."), "The device is out of memory."),
])
def test_the_progress_line_says_what_is_happening(event, sentence):
    assert ui._sentence(event, Request(prompts=("a",))) == sentence


def test_control_enter_generates(tab):
    fill(tab, ["first", *[""] * 7])
    tab.get_by_label("Prompt 1", exact=True).press("Control+Enter")
    says(tab, "Done in")


def test_every_sampler_offers_its_own_spacings(tab):
    fill(tab, ["first", *[""] * 7])
    tab.get_by_label("Sampler").click()
    tab.get_by_role("option", name="DPM++ 2S").click()
    tab.get_by_label("Spacing").click()
    expect(tab.get_by_role("option")).to_have_text(
        [re.compile(name) for name in ["the model's own", "linspace", "karras", "exponential"]]
    )
    tab.keyboard.press("Escape")
    make(tab)


def test_two_people_see_and_stop_only_what_is_their_own(browser, tab, address):
    fill(tab, ["mine"] * 8, steps=LONG)
    generate(tab).click()
    says(tab, "Step")
    with browser.new_page() as other:
        visit(other, address)
        fill(other, ["theirs"] * 8, steps=LONG)
        generate(other).click()
        says(other, re.compile("Queued|Step"))
        other.get_by_role("button", name="Stop").click()
        says(other, "Stopped")
        expect(other.locator("figure")).to_contain_text(["theirs"] * 8)
    seen = status(tab).inner_text()
    if seen.startswith("Step"):
        expect(status(tab)).not_to_have_text(seen, timeout=PATIENCE)
    says(tab, re.compile("Step|Done in"))
    assert alts(tab) == ["mine"] * 8


def test_the_page_asks_no_other_host(browser, address):
    asked = []
    with browser.new_page() as tab:
        tab.on("request", lambda request: asked.append(request.url))
        visit(tab, address)
        fill(tab, ["first", *[""] * 7])
        make(tab)
    others = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert asked and not others


def test_a_phone_needs_no_sideways_scrolling(browser, address):
    with browser.new_page() as tab:
        tab.set_viewport_size({"width": 390, "height": 844})
        visit(tab, address)
        fill(tab, ["w" * 300, *PROMPTS[1:]], seed=MAX_SEED)
        make(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        ends = tab.locator("textarea, input, button, figure").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().right)"
        )
        assert max(ends) <= 390, "something is cut off at the edge"
        left = {round(x) for x, *_ in corners(tab)}
        assert len(left) == 2, "the gallery should have two columns"


def test_programs_get_pictures_in_their_places_and_the_seed(client):
    pictures, seed, sentence = client.predict(
        ["first", "", "third"], seed=5, steps=2, guidance=2.5, sampler="euler", spacing="karras",
        negative_prompt="blur", api_name="/generate",
    )
    assert (pictures[1], seed) == (None, 5) and sentence.startswith("Done in")
    asked = read_png(Path(pictures[2]).read_bytes())
    assert asked == Request(prompts=("third",), seed=7, steps=2, guidance=2.5, sampler="euler",
                            spacing="karras", negative_prompt="blur", height=32, width=32)


@pytest.mark.parametrize(("values", "sentence"), [
    ({"prompts": ["a"] * 9}, "There are 9 prompts; at most 8 fit."),
    ({"prompts": ["a" * 4001]}, "Prompt 1 has 4001 characters; at most 4000 are accepted."),
    ({"prompts": "a"}, "The prompts should be a list of texts."),
    ({"prompts": ["a"], "seed": -2}, f"Seed should be from 0 to {MAX_SEED}, not -2."),
    ({"prompts": ["a"], "steps": "many"}, "Steps should be a whole number, not 'many'."),
    ({"prompts": ["a"], "sampler": "magic"}, "Sampler 'magic' is unknown; there are ddim, "),
])
def test_programs_are_refused_by_the_sentence_of_the_page(client, values, sentence):
    with pytest.raises(gradio_client.exceptions.AppError, match=f"^{re.escape(sentence)}"):
        client.predict(**values, api_name="/generate")


def test_programs_can_list_the_samplers(client):
    listed = {entry["key"]: entry for entry in client.predict(api_name="/samplers")}
    assert listed["dpmpp_2m"]["label"] == "DPM++ 2M"
    assert "karras" in listed["dpmpp_2m"]["spacings"]


def test_the_endpoints_are_documented(client):
    endpoints = client.view_api(print_info=False, return_format="dict")["named_endpoints"]
    assert set(endpoints) == {"/generate", "/samplers"}
    names = [each["parameter_name"] for each in endpoints["/generate"]["parameters"]]
    assert names == ["prompts", "seed", "negative_prompt", "steps", "guidance", "sampler",
                     "spacing"]


@pytest.mark.parametrize("flags", [["--model", "/nowhere"], ["--size", "63x64"],
                                   ["--host", "no.such.host.invalid"], ["--port", "TAKEN"]])
def test_a_program_that_cannot_start_says_why_in_a_sentence(flags, address, capsys):
    taken = address.strip("/").rpartition(":")[2]
    assert app.main([flag.replace("TAKEN", taken) for flag in flags]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("sd_tpu: ") and printed.count("\n") == 1
