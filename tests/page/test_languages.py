"""The page in other languages, in a real browser set to each."""

import re
from collections.abc import Iterator

import httpx
import pytest
from axe_core_python.sync_playwright import Axe

from sd_tpu.language import LANGUAGES
from sd_tpu.sampling.samplers import SAMPLERS
from tests.support.pages import served
from tests.support.visitor import LONG, PATIENCE, PROMPTS, expect, figures, more, says, tools, visit

LOCALES = {"ko": "ko-KR", "zh": "zh-TW", "ar": "ar-EG"}

NAMES = {  # which are the same in all languages
    *"sd_tpu Alt API CLIP CPU Ctrl Enter Esc LoRA PNG SDXL Shift TPU ZIP".split(),
    *(word for sampler in SAMPLERS.values() for word in re.findall("[A-Za-z]+", sampler.label)),
}

# Words in Latin letters that are to be seen, read out or shown as hints, but for prompts and what
# is marked as foreign: what the model says of itself, and names of programs. Two elements have
# names that Gradio says in English in every language.
WORDS = """() => {
    const foreign = "[lang=en], bdi, .words, option, #history-panel p, script, style, footer";
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
    with chromium.new_context(
        locale=LOCALES[request.param], viewport={"width": 1440, "height": 900}
    ) as context:
        yield visit(context.new_page(), keeping), LANGUAGES[request.param]


def fill(tab, prompts: list[str], steps: int = 2) -> None:
    settings = tab.locator("[aria-controls=settings-panel]")
    if settings.get_attribute("aria-expanded") == "false":
        settings.click()
    for number, prompt in enumerate([*prompts, *[""] * 8][:8]):
        tab.locator(".prompt textarea").nth(number).fill(prompt)
    number = tab.locator("#settings-panel [name=steps]")
    number.fill(str(steps))
    number.press("Escape")


def unfold_each(tab) -> Iterator[None]:
    """Opens one panel after the other; the settings, whose button comes last, stay open."""
    tab.locator("summary").evaluate_all("all => all.forEach((each) => each.click())")
    for fold in tab.locator(".fold").all():
        fold.evaluate("fold => fold.click()")
        if fold.get_attribute("aria-controls") == "history-panel":
            expect(tab.locator("#history-panel img").first).to_be_visible(timeout=PATIENCE)
        yield


def make(tab) -> None:
    tab.locator("#generate").click()
    expect(tab.locator("#line .over")).to_be_visible(timeout=PATIENCE)


def test_the_whole_page_is_in_the_visitors_language(abroad, slow_engine):
    tab, language = abroad
    say = language.say
    root = tab.locator("html")
    expect(root).to_have_attribute("lang", language.tag)
    expect(root).to_have_attribute("dir", language.direction)
    says(tab, say("Ready"))
    fill(tab, ["1"] * 8, steps=LONG)
    tab.get_by_role("button", name=say("Draw eight")).click()
    step = re.escape(say("Step {step} of {steps}", step=0, steps=LONG))
    says(tab, re.compile(step.replace("0", r"\d+", 1)))
    tab.get_by_role("button", name=say("Stop"), exact=True).click()
    says(tab, say("Stopped"))
    expect(figures(tab).first).to_contain_text(say("Stopped early"))
    fill(tab, ["1", "2"])
    make(tab)
    done = re.escape(say("Done in {seconds:.1f} s, seed {seed}", seconds=0, seed=0))
    says(tab, re.compile(done.replace("0", r"\d+")))
    expect(tab.locator("#news")).to_contain_text(tab.locator("#line").inner_text().strip())
    words = {word for _ in unfold_each(tab) for word in tab.evaluate(WORDS)}
    expect(tab.locator("#history-panel img")).to_have_count(2, timeout=PATIENCE)
    again = say("Again: put prompt, seed and settings of picture {number} back", number=1)
    more(tab, 1).get_by_role("button", name=again).click()
    says(tab, say("Prompt, seed and settings of the picture are in the boxes."))
    spacing = tab.locator("#settings-panel").get_by_label(say("Spacing"), exact=True)
    expect(spacing.locator("option").first).to_have_text(say("the model's own"))
    figures(tab).first.locator(".view").click()
    expect(tab.get_by_role("dialog").get_by_text(say("Close"))).to_be_visible()
    assert (words | set(tab.evaluate(WORDS))) - NAMES == set()


def test_a_refusal_is_in_the_visitors_language(abroad):
    tab, language = abroad
    fill(tab, ["1"], steps=0)
    tab.locator("#generate").click()
    told = language.messages["{name} should be from {least} to {most}, not {value}."]
    says(tab, re.sub(".*{least}", "", told).split("{most}")[0] + "200")
    expect(tab.locator("[aria-invalid]")).to_be_focused()
    fill(tab, [])
    tab.locator("#generate").click()
    empty = "There is no prompt yet: write what you would like to see in a box."
    says(tab, language.messages[empty])
    expect(tab.locator("#news")).to_have_text(language.messages[empty])


@pytest.mark.parametrize(("locale", "name"), [("zh-HK", "zh"), ("de-DE", "en")])
def test_a_page_is_in_a_language_that_it_speaks_or_that_is_chosen(chromium, keeping, locale, name):
    with chromium.new_context(locale=locale) as context:
        tab = visit(context.new_page(), keeping)
        shows(tab, LANGUAGES[name])
        box = tab.locator(".prompt textarea").first
        box.fill("kept")
        for chosen in ("ko", "ar"):
            tools(tab).locator("#language").select_option(chosen)
            tab.wait_for_function(f"document.documentElement.lang === '{chosen}'")
            tab.wait_for_function("window.sdTpu?.arrived")
            shows(tab, LANGUAGES[chosen])
            expect(box).to_have_value("kept")
        another = visit(context.new_page(), keeping)  # as chosen there
        shows(another, LANGUAGES["ar"])


def test_an_address_that_names_a_language_counts_more_than_what_was_chosen(chromium, keeping):
    with chromium.new_context() as context:
        context.add_init_script("""localStorage.setItem("sd_tpu language", '"ar"')""")
        shows(visit(context.new_page(), f"{keeping}?lang=ko"), LANGUAGES["ko"])
        shows(visit(context.new_page(), keeping), LANGUAGES["ar"])


def test_what_was_chosen_and_is_spoken_no_more_is_asked_for_once(chromium, keeping):
    with chromium.new_context() as context:
        context.add_init_script("""localStorage.setItem("sd_tpu language", '"tlh"')""")
        asked = []
        tab = context.new_page()
        tab.on("request", lambda each: each.is_navigation_request() and asked.append(each.url))
        visit(tab, keeping)
        shows(tab, LANGUAGES["en"])
        assert asked == [keeping, f"{keeping}?lang=tlh"]


def test_a_page_holds_one_language_which_caches_are_told_of(keeping):
    told = {name: each.say("Draw eight") for name, each in LANGUAGES.items()}
    for name, each in LANGUAGES.items():
        page = httpx.get(keeping, headers={"accept-language": f"de, {name};q=0.5"})
        assert f'<html lang="{each.tag}" dir="{each.direction}"' in page.text
        assert [one for one, text in told.items() if text in page.text] == [name]
        assert "Accept-Language" in page.headers["vary"]
    config = httpx.get(f"{keeping}config", headers={"accept-language": "ko"}).json()
    labels = [each["props"].get("label") for each in config["components"]]
    assert LANGUAGES["ko"].say("Prompt {number}", number=1) in labels
    chosen = httpx.get(keeping, params={"lang": "ko"}, headers={"accept-language": "ar"})
    assert told["ko"] in chosen.text


def shows(tab, language) -> None:
    """Waits for a page in this language."""
    expect(tab.locator("#generate span")).to_have_text(language.say("Draw eight"))
    expect(tab.locator(".tagline")).to_have_text(language.say("Eight prompts, eight pictures"))
    expect(tab.locator("html")).to_have_attribute("lang", language.tag)
    expect(tab.locator("html")).to_have_attribute("dir", language.direction)
    name = language.say("Prompt {number}", number=1)
    expect(tab.get_by_label(name, exact=True)).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow("opens every panel")
def test_a_phone_in_arabic_shows_everything_from_the_right(chromium, keeping, scheme):
    with chromium.new_context(
        locale="ar-EG", color_scheme=scheme, viewport={"width": 390, "height": 844}
    ) as context:
        tab = visit(context.new_page(), keeping)
        fill(tab, ["w" * 300, *PROMPTS[1:]])
        make(tab)
        for _ in unfold_each(tab):
            ends = tab.locator("textarea, input, button, figure, a, p, dd").evaluate_all(
                "all => all.filter(each => each.checkVisibility() && !each.closest('#tools'))"
                ".map(each => each.getBoundingClientRect()).flatMap(box => [box.left, box.right])"
            )
            assert min(ends) >= 0 and max(ends) <= 390, "something is cut off at the edge"
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        expect(tab.locator("#history-panel img")).to_have_count(8)
        first, second = (figures(tab).nth(index).bounding_box() for index in (0, 1))
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
        forth, back = (
            tab.locator("#viewer").get_by_label(LANGUAGES["ar"].say(text)).bounding_box()
            for text in ("Next picture", "Previous picture")
        )
        assert forth["x"] < back["x"]
