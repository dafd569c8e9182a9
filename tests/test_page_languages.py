"""The page in other languages, in a real browser set to each."""

import re

import pytest
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import expect
from test_page_history import served
from visitor import LONG, PATIENCE, PROMPTS, figures, says, visit

from sd_tpu.page.texts import LANGUAGES
from sd_tpu.samplers import SAMPLERS

LOCALES = {"ko": "ko-KR", "zh": "zh-TW", "ar": "ar-EG"}

NAMES = {  # which are the same in all languages
    *"API CPU Ctrl Enter Esc PNG TPU ZIP".split(),
    *(word for sampler in SAMPLERS.values() for word in re.findall("[A-Za-z]+", sampler.label)),
}

# Words in Latin letters that are to be seen, read out or shown as hints, but for prompts and what
# is marked as foreign: what the model says of itself, and names of programs. Two elements have
# names that Gradio says in English in every language.
WORDS = """() => {
    const foreign = "[lang=en], bdi, .words, #history p, script, style, footer, .upload-container";
    const seen = [...document.body.querySelectorAll("*")].filter(
        (each) => each.checkVisibility() && !each.closest(foreign));
    const texts = seen.flatMap((each) => [
        ...[...each.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)
            .map((node) => node.data),
        ...["aria-label", "title", "placeholder", "alt", "data-confirm", "data-copied"]
            .map((name) => each.getAttribute(name) ?? ""),
    ]);
    return texts.flatMap((text) => text.match(/[A-Za-z_]{2,}[A-Za-z_0-9]*/g) ?? []);
}"""


@pytest.fixture(scope="module")
def keeping(page_engine, tmp_path_factory):
    """Where a page with a history is served."""
    with served(page_engine, tmp_path_factory.mktemp("history")) as address:
        yield address


@pytest.fixture(params=LOCALES)
def abroad(request, chromium, keeping):
    """A tab of a browser in each language, and the language."""
    with chromium.new_context(locale=LOCALES[request.param],
                              viewport={"width": 1440, "height": 900}) as context:
        yield visit(context.new_page(), keeping), LANGUAGES[request.param]


def fill(tab, prompts: list[str], steps: int = 2) -> None:
    fold = tab.locator("[aria-controls=settings-panel]")
    if fold.get_attribute("aria-expanded") == "false":
        fold.click()
    for number, prompt in enumerate([*prompts, *[""] * 8][:8]):
        tab.locator(".prompt textarea").nth(number).fill(prompt)
    number = tab.locator("#settings-panel input[type=number]").first
    number.fill(str(steps))
    number.blur()


def unfold_all(tab) -> None:
    tab.locator(".fold[aria-expanded=false], summary").evaluate_all(
        "all => all.forEach((each) => each.click())")


def make(tab) -> None:
    tab.locator("#generate").click()
    expect(tab.locator("#line .over")).to_be_visible(timeout=PATIENCE)


def test_the_whole_page_is_in_the_visitors_language(abroad, slow_engine):
    tab, language = abroad
    say = language.say
    root = tab.locator("html")
    expect(root).to_have_attribute("lang", language.tag)
    expect(root).to_have_attribute("dir", language.direction)
    says(tab, say("ready"))
    fill(tab, ["1"] * 8, steps=LONG)
    tab.get_by_role("button", name=say("generate"), exact=True).click()
    says(tab, re.compile(re.escape(say("step", step=0, steps=LONG)).replace("0", r"\d+", 1)))
    tab.get_by_role("button", name=say("stop"), exact=True).click()
    says(tab, say("stopped"))
    expect(figures(tab).first).to_contain_text(say("cell_stopped"))
    fill(tab, ["1", "2"])
    make(tab)
    says(tab, re.compile(re.escape(say("done", seconds=0, seed=0)).replace("0", r"\d+")))
    expect(tab.locator("#news")).to_contain_text(tab.locator("#line").inner_text().strip())
    expect(figures(tab).first).to_contain_text(say("again"))
    unfold_all(tab)
    expect(tab.locator("#history img")).to_have_count(2, timeout=PATIENCE)
    tab.get_by_role("button", name=say("again_help", number=1)).click()
    says(tab, say("again_done", number=1))
    tab.locator("#settings-panel").get_by_label(say("spacing"), exact=True).click()
    expect(tab.get_by_role("option", name=say("own"))).to_be_visible()
    tab.keyboard.press("Escape")
    expect(tab.get_by_role("option")).to_have_count(0)
    figures(tab).first.locator(".view").click()
    expect(tab.get_by_role("dialog").get_by_text(say("close"))).to_be_visible()
    assert set(tab.evaluate(WORDS)) - NAMES == set()


def test_a_refusal_is_in_the_visitors_language(abroad):
    tab, language = abroad
    fill(tab, ["1"], steps=0)
    tab.locator("#generate").click()
    told = language.sentences["{name} should be from {least} to {most}, not {value}."]
    says(tab, re.sub(".*{least}", "", told).split("{most}")[0] + "200")
    fill(tab, [])
    tab.locator("#generate").click()
    empty = "There is no prompt yet: write what you would like to see in a box."
    says(tab, language.sentences[empty])
    expect(tab.locator("#news")).to_have_text(language.sentences[empty])


@pytest.mark.parametrize(("locale", "accepted", "name"), [
    ("de-DE", "de-DE,de;q=0.9,ar;q=0.8", "ar"),
    ("zh-HK", "zh-HK,zh;q=0.9", "zh"),
    ("de-DE", "de", "en"),
])
def test_a_language_that_gradio_does_not_find_is_put_right(chromium, keeping, locale, accepted,
                                                           name):
    language = LANGUAGES[name]
    with chromium.new_context(locale=locale,
                              extra_http_headers={"Accept-Language": accepted}) as context:
        tab = visit(context.new_page(), keeping)
        expect(tab.locator("#generate")).to_have_text(language.say("generate"))
        expect(tab.get_by_role("heading")).to_have_text(language.say("heading"))
        expect(tab.locator("html")).to_have_attribute("lang", language.tag)
        expect(tab.locator("html")).to_have_attribute("dir", language.direction)
        box = tab.get_by_label(f"{language.say('prompt')} 1", exact=True)
        stored = "JSON.stringify(localStorage)"
        before = tab.evaluate(stored)
        box.fill("kept")
        tab.wait_for_function(f"before => {stored} != before", arg=before)
        tab.wait_for_timeout(300)  # should that have been the page's own, of when it opened
        tab.reload()
        expect(box).to_have_value("kept")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_arabic_shows_everything_from_the_right(chromium, keeping, scheme):
    with chromium.new_context(locale="ar-EG", color_scheme=scheme,
                              viewport={"width": 390, "height": 844}) as context:
        tab = visit(context.new_page(), keeping)
        fill(tab, ["w" * 300, *PROMPTS[1:]])
        make(tab)
        unfold_all(tab)
        expect(tab.locator("#history img")).to_have_count(8, timeout=PATIENCE)
        ends = tab.locator("textarea, input, button, figure, a, p, dd").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect()).flatMap(box => "
            "[box.left, box.right])")
        assert min(ends) >= 0 and max(ends) <= 390, "something is cut off at the edge"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        first, second = (figures(tab).nth(place).bounding_box() for place in (0, 1))
        assert first["x"] > second["x"] and first["y"] == second["y"]
        assert Axe().run(tab)["violations"] == []


def test_the_full_screen_view_is_leafed_through_from_right_to_left(chromium, keeping):
    with chromium.new_context(locale="ar-EG") as context:
        tab = visit(context.new_page(), keeping)
        fill(tab, ["first", "second", "third"])
        make(tab)
        figures(tab).first.locator(".view").click()
        picture = tab.get_by_role("dialog").get_by_role("img")
        tab.keyboard.press("ArrowLeft")
        expect(picture).to_have_attribute("alt", "second")
        tab.keyboard.press("ArrowRight")
        expect(picture).to_have_attribute("alt", "first")
        forth, back = (tab.get_by_label(LANGUAGES["ar"].say(key)).bounding_box()
                       for key in ("next", "previous"))
        assert forth["x"] < back["x"]
