"""What is asked for: the boxes, the seed, the settings, and all that fills them."""

import pickle
import re
from io import BytesIO

import pytest
from PIL import Image

from sd_tpu.language import ENGLISH
from sd_tpu.links import read_link, write_link
from sd_tpu.page import form as form_module
from sd_tpu.page.boxes import remark
from sd_tpu.page.layout import sample_sets
from sd_tpu.pictures.images import MAX_FILE_BYTES
from sd_tpu.request import Request
from sd_tpu.settings import MAX_SEED, Picture, RequestError
from tests.support.asking import make_request
from tests.support.pages import settings_png
from tests.support.visitor import (
    PATIENCE,
    PROMPTS,
    box,
    choose,
    corners,
    expect,
    fill,
    generate,
    make,
    more,
    newcomer,
    of_all,
    prompts,
    says,
    seed_box,
    setting,
    tool,
    unfold,
    visit,
)

EMPTY = [""] * 7


@pytest.fixture
def form(page_engine):
    """What a page holds of a request, as page.js sends it."""
    asked = Request.check({"prompts": PROMPTS, "seed": 1}, page_engine.catalog)
    return form_module.show(asked.values(), page_engine.catalog)


@pytest.mark.parametrize(
    "contents",
    [
        None,
        {},
        [],
        "a cat",
        [None],
        7,
        {"prompts": []},
        {"prompts": [], "seed": "", "settings": 7, "overrides": []},
        {"prompts": [], "seed": "", "settings": {}, "overrides": [7]},
    ],
)
def test_contents_that_are_not_those_of_a_form_are_refused_in_a_sentence(contents):
    with pytest.raises(RequestError, match="What is filled in cannot be read"):
        form_module.read(contents)


@pytest.mark.parametrize(
    "part, name, content, sentence",
    [
        ("prompts", 2, [], "Prompt 3 should be text"),
        (None, "seed", "x", "Seed should be a whole number"),
        ("settings", "steps", {}, "Steps should be a whole number"),
        ("settings", "sampler", ["ddim"], "Sampler .* is unknown"),
        ("settings", "size", "33×32", "sides are multiples of"),
        ("settings", "size", "40000×40000", "too large"),
        ("settings", "size", "wide×high", "should be a whole number"),
        *(("settings", "size", content, "cannot be read") for content in ([], "512", "8×8×8")),
        *(
            ("overrides", 0, {"steps": content}, "Steps of prompt 1 should be a whole")
            for content in ([], {}, 5.7, True, "5.7")
        ),
        ("overrides", 0, {"colour": "red"}, "Unknown settings of prompt 1: colour"),
    ],
)
def test_contents_of_any_kind_are_refused_in_a_sentence(
    form, page_engine, part, name, content, sentence
):
    assert Request.check(form_module.read(form), page_engine.catalog).indices() == [*range(8)]
    (form[part] if part else form)[name] = content
    with pytest.raises(RequestError, match=sentence):
        Request.check(form_module.read(form), page_engine.catalog)


def test_a_request_of_another_size_is_shown_and_read_with_it(page_engine):
    here = page_engine.defaults
    high = Request.check({"prompts": ["a cat"], "height": 2 * here.height}, page_engine.catalog)
    shown = form_module.show(high.values(), page_engine.catalog)
    assert shown["settings"]["size"] == f"{here.width}×{2 * here.height}"
    read = Request.check(form_module.read(shown), page_engine.catalog)
    assert [picture for picture in read.pictures if picture] == [*high.pictures]


@pytest.mark.parametrize(
    "values, setting, index",
    [
        ({"prompts": ["a"], "steps": 0}, "steps", None),
        ({"prompts": ["a", "b"], "overrides": [None, {"guidance": "lots"}]}, "guidance", 1),
        ({"prompts": ["a", "b"], "overrides": [None, {"mask_blur": 99}]}, "mask_blur", 1),
        ({"prompts": ["a"], "sampler": "none"}, "sampler", None),
        ({"prompts": ["a"], "sampler": "ddim", "spacing": "karras"}, "spacing", None),
        ({"prompts": ["a", "b"], "overrides": [None, {"guidance_start": 1}]}, "guidance_start", 1),
        ({"prompts": ["a", "b"], "overrides": [None, {"mask": "0" * 64}]}, "mask", 1),
        ({"prompts": ["a", 7]}, "prompt", 1),
        ({"prompts": ["a", "b __c__"]}, "prompt", 1),
        ({"prompts": ["a"], "seed": "x"}, "seed", None),
        ({"prompts": ["a"], "style": "Inkk"}, "style", None),
        ({"prompts": ["a", "b"], "overrides": [None, {"model": "x"}]}, "model", 1),
        ({"prompts": ["a"], "width": 1}, "width", None),
        ({"prompts": ["a", "b"], "overrides": [None, {"height": 60000}]}, "width", 1),
        ({"prompts": []}, "", None),
        ({"prompts": ["a", "b"], "overrides": [None, {"wrong": 1}]}, "", 1),
    ],
)
def test_a_refusal_says_which_setting_of_which_picture_it_is_about(
    page_engine, values, setting, index
):
    with pytest.raises(RequestError) as refused:
        Request.check(values, page_engine.catalog)
    assert (refused.value.setting, refused.value.index) == (setting, index)
    again = pickle.loads(pickle.dumps(refused.value))
    assert (str(again), again.setting, again.index) == (str(refused.value), setting, index)


def test_the_first_prompt_is_copied_to_all_boxes_all_are_cleared_and_samples_fill_them(tab):
    assert all(prompts(tab))
    box(tab, 1).fill("")
    box(tab, 2).fill("a fox")
    tool(tab, "Copy the first to all").click()
    expect(box(tab, 8)).to_have_value("a fox")
    assert prompts(tab) == ["a fox"] * 8
    tool(tab, "Clear").click()
    expect(box(tab, 1)).to_have_value("")
    assert prompts(tab) == [""] * 8
    tool(tab, "Sample prompts").click()
    expect(box(tab, 1)).not_to_have_value("")


def test_sample_prompts_come_by_the_eight():
    assert sample_sets(tuple("abcdefghij")) == [list("abcdefgh"), ["i", "j", *[""] * 6]]
    assert sample_sets(()) == [[""] * 8]


def test_a_list_fills_the_boxes_line_by_line(tab):
    unfold(tab, "Paste a list")
    tab.get_by_label("One prompt per line").fill("\n".join(["one", "", " two ", "three"]))
    tab.get_by_role("button", name="Fill the boxes").click()
    says(tab, "The list is in the boxes.")
    expect(tab.locator("#line")).to_be_in_viewport()
    assert prompts(tab) == ["one", "two", "three", *[""] * 5]
    expect(tab.locator("#sheet")).to_be_hidden()
    unfold(tab, "Paste a list")
    tab.get_by_label("One prompt per line").fill("\n".join(f"line {i}" for i in range(10)))
    tab.get_by_role("button", name="Fill the boxes").click()
    says(tab, "The list has 10 prompts; the first 8 are in the boxes.")
    expect(box(tab, 8)).to_have_value("line 7")


def test_each_box_counts_its_tokens_and_shows_what_is_cut_off(tab):
    count = tab.locator(".card .remark").first
    before = corners(tab)
    box(tab, 1).fill("word " * 70)
    expect(count).to_have_text("72 / 77 tokens")
    box(tab, 1).fill("word " * 224 + "and the unseen end")
    expect(count).to_have_text("234 / 231 tokens, cut off: “the unseen end”")
    box(tab, 1).fill("")
    expect(count).to_have_text("")
    box(tab, 1).fill("w " * 2001)
    expect(count).to_have_text("4002 of at most 4000 characters")
    box(tab, 1).fill("a cat")  # which is far from the limit
    expect(count).to_have_text("")
    assert corners(tab) == before, "the layout has shifted"


def test_words_that_a_small_model_was_never_shown_are_named(page_engine, monkeypatch):
    first = page_engine.catalog.open("").checkpoint
    card = first.card.model_copy(update={"words": ("a", "cat", "s")})
    monkeypatch.setattr(first, "card", card)
    assert remark("a cat", "a cat", page_engine, "") == ("", "")
    kind, told = remark("a WIZARD's <hat>", "a WIZARD's <hat>", page_engine, "")
    assert (kind, ENGLISH.translate(told)) == ("unknown", "Unknown: “wizard, hat”")
    emphasised = "a (cat:1.3) BREAK [a cat]"
    assert remark(emphasised, emphasised, page_engine, "") == ("", ""), "signs of the grammar"


def test_control_enter_generates(tab):
    for prompt, keys in (("first", "Control+Enter"), ("second", "Meta+Enter")):
        fill(tab, [prompt, *EMPTY])
        box(tab, 1).press(keys)
        expect(tab.locator("figure.done img")).to_have_attribute("alt", prompt, timeout=PATIENCE)


def test_nothing_can_be_done_before_what_was_saved_is_there(visitor, address):
    with newcomer(visitor, address) as tab:
        box(tab, 1).fill("saved")
        tab.add_init_script("""Object.defineProperty(window, "sdTpu", { configurable: true,
            get() { return window.held; },
            set(page) {
                const { arrive } = page;
                window.held = page;
                page.arrive = (saved) => { window.goOn = () => arrive.call(page, saved); };
            } });""")
        tab.reload()
        tab.wait_for_function("window.goOn !== undefined")
        for index in (box(tab, 1), generate(tab)):
            assert index.evaluate("place => place.closest('[inert]') !== null")
        tab.keyboard.press("Control+Enter")
        tab.evaluate("window.goOn()")
        expect(box(tab, 1)).to_have_value("saved")
        assert tab.locator("[inert]").count() == 0
        assert "Ready" in tab.locator("#line").inner_text(), "nothing was begun"


def test_what_was_filled_in_survives_a_reload(tab):
    fill(tab, PROMPTS, seed=77, steps=9)
    setting(tab, "Negative prompt").fill("blur")
    choose(setting(tab, "Sampler"), "DPM++ 2S")
    choose(setting(tab, "Spacing"), "karras")
    tab.reload()
    expect(box(tab, 1)).to_have_value(PROMPTS[0])
    assert prompts(tab) == PROMPTS
    unfold(tab, "Settings")
    expect(seed_box(tab)).to_have_value("77")
    expect(setting(tab, "Steps")).to_have_value("9")
    expect(setting(tab, "Negative prompt")).to_have_value("blur")
    expect(setting(tab, "Sampler")).to_have_value("dpmpp_2s")
    expect(setting(tab, "Spacing")).to_have_value("karras")


def test_on_a_phone_a_prompt_that_goes_on_below_its_box_shows_that(visitor, address):
    with newcomer(visitor, address, phone=True) as tab:
        long = box(tab, 1)

        def edge() -> bytes:
            """The pixels at the foot of the box."""
            tab.mouse.move(0, 0)
            at = long.bounding_box()
            clip = {"x": at["x"] + 8, "y": at["y"] + at["height"] - 8, "width": 40, "height": 6}
            return tab.screenshot(clip=clip)

        long.fill("a fox")
        long.blur()
        bare = edge()
        long.fill("a fox\nin the snow\n\n\nthe last word")
        long.evaluate("box => { box.blur(); box.scrollTop = 20 }")  # where a line is empty
        expect(long).to_have_attribute("data-more", "")
        assert edge() != bare
        long.evaluate("box => { box.scrollTop = box.scrollHeight }")
        expect(long).not_to_have_attribute("data-more", "")
        long.fill("a fox\nin the snow")
        expect(long).not_to_have_attribute("data-more", "")
        long.fill("a fox in the snow at night")
        long.blur()  # while somebody writes, all of it is seen
        tab.set_viewport_size({"width": 320, "height": 844})
        expect(long).to_have_attribute("data-more", "")


def test_a_bad_value_is_answered_in_a_sentence_and_costs_no_prompt(tab):
    fill(tab, PROMPTS)
    for label, value, sentence in (
        ("Seed", "-5", f"Seed should be from 0 to {MAX_SEED}, not -5."),
        ("Steps", "0", "Steps should be from 1 to 200, not 0."),
        ("Guidance", "51", "Guidance should be from 0 to 50, not 51."),
    ):
        before = setting(tab, label).input_value()
        setting(tab, label).fill(value)
        generate(tab).click()
        says(tab, sentence)
        expect(tab.locator("#news")).to_contain_text(sentence)
        assert box(tab, 8).input_value() == PROMPTS[7]
        expect(generate(tab)).to_be_enabled()
        setting(tab, label).fill(before)


def test_a_refusal_stands_no_longer_than_its_reason_or_the_next_thing_done(tab):
    tool(tab, "Clear").click()
    generate(tab).click()
    says(tab, "There is no prompt yet")
    tab.get_by_role("button", name="Undo", exact=True).click()
    says(tab, "The boxes are as they were.")
    tab.get_by_role("button", name="Reuse last").click()
    says(tab, "There is no seed to reuse yet")
    unfold(tab, "Settings")
    says(tab, "Ready")


def test_an_emptied_setting_shows_what_is_taken_instead(tab):
    fill(tab, ["first", *EMPTY])
    setting(tab, "Steps").fill("")
    expect(setting(tab, "Steps")).to_have_attribute("placeholder", "20 (the model's own)")
    generate(tab).click()
    says(tab, "Done in")
    expect(of_all(tab)).to_have_attribute("data-link", re.compile("&steps=20&"))


def test_every_sampler_offers_its_own_spacings(tab):
    fill(tab, ["first", *EMPTY])
    choose(setting(tab, "Sampler"), "DPM++ 2S")
    expect(setting(tab, "Spacing").locator("option:enabled")).to_have_text(
        ["the model's own", "linspace", "karras", "exponential"]
    )
    make(tab)


def test_a_model_offers_the_samplers_that_it_takes_and_their_spacings(
    page_engine, visitor, address, monkeypatch
):
    taken = {"euler": (), "heun": ("karras",)}
    monkeypatch.setattr(page_engine.catalog, "samplers", lambda model: taken)
    with visitor.new_page() as tab:
        visit(tab, address)
        expect(setting(tab, "Sampler").locator("option:enabled")).to_have_text(["Euler", "Heun"])
        choose(setting(tab, "Sampler"), "Heun")
        own = "the model's own"
        expect(setting(tab, "Spacing").locator("option:enabled")).to_have_text([own, "karras"])
        choose(setting(tab, "Sampler"), "Euler")
        expect(setting(tab, "Spacing").locator("option:enabled")).to_have_text([own])


def test_a_link_opens_the_page_with_the_same_prompts_seed_and_settings(tab, visitor, address):
    fill(tab, ["a fox", "", "größer & schöner = 100 %", *[""] * 5], seed=12, steps=3)
    make(tab)
    tab.evaluate("history.replaceState(null, '', '?lang=en')")  # which is not for others
    tool(tab, "Copy link").click()
    says(tab, "Link copied")
    link = tab.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{address}#prompt=a+fox&")
    with visitor.new_page() as other:
        visit(other, link)
        says(other, "The link's prompts, seed and settings are in the boxes.")
        assert prompts(other) == ["a fox", "", "größer & schöner = 100 %", *[""] * 5]
        expect(seed_box(other)).to_have_value("12")
        expect(setting(other, "Steps")).to_have_value("3")
        assert "#" not in other.url, "a reload should keep what has been changed since"


def test_a_bad_link_is_answered_in_a_sentence_also_where_the_page_is_open_already(visitor, address):
    with visitor.new_page() as tab:
        visit(tab, f"{address}#anything")
        says(tab, "The link cannot be read.")
        expect(box(tab, 1)).not_to_have_value("")
        for fragment, sentence in (
            ("prompt=a&steps=900", "Steps should be from 1 to 200, not 900."),
            ("prompt=a&colour=red", "Unknown settings: colour."),
        ):
            tab.goto(f"{address}#{fragment}")
            says(tab, sentence)
            expect(box(tab, 1)).not_to_have_value("")


def test_a_link_cannot_bring_markup_along(tab, address):
    tab.goto(f"{address}#prompt=a&sampler=%3Cimg%20src%3Dx%20onerror%3D%22window.hit%3D1%22%3E")
    says(tab, "is unknown; there are")
    expect(tab.locator("#news")).to_contain_text("<img")
    assert tab.locator("#news img, #line img").count() == 0
    assert tab.evaluate("window.hit") is None


@pytest.mark.parametrize(
    "request_",
    [
        make_request(prompts=("a", "", "b&c=d#é"), seed=0, guidance=0.0, spacing="karras"),
        make_request(prompts=("", "x\ny"), seed=MAX_SEED, negative_prompt='no, "none"', steps=1),
    ],
)
def test_a_link_says_what_was_asked_for(request_):
    assert Request.check(read_link(write_link(request_)), Picture(model="m")) == request_


@pytest.mark.parametrize("text", ["prompt=a&" * 40, "prompt=" + "a" * (1 << 20), "a;b", "="])
def test_a_link_that_is_none_of_ours_is_refused(text):
    with pytest.raises(RequestError):
        Request.check(read_link(text), Picture())


def test_a_links_style_is_chosen_also_if_it_is_gone_or_newer_than_the_page(
    tab, page_engine, monkeypatch
):
    monkeypatch.setattr(page_engine.catalog.styles, "templates", lambda: {"New": ("new", "")})
    choose(setting(tab, "Style"), "Bright")
    for style, shown in (("Ink", ""), ("New", "New")):
        request = make_request(prompts=("a fox",), height=32, width=32, style=style)
        tab.evaluate("link => { location.hash = link; }", write_link(request))
        expect(setting(tab, "Style")).to_have_value(shown, timeout=PATIENCE)


def drop(tab, data: bytes, name: str = "picture.png") -> None:
    unfold(tab, "Read a picture")
    tab.locator("#read-panel input[type=file]").set_input_files(
        {"name": name, "mimeType": "image/png", "buffer": data}
    )


def test_a_picture_of_ours_puts_its_settings_back(tab):
    drop(tab, settings_png())
    says(
        tab,
        "of picture.png are in the boxes. It was drawn by m, which is not here. It was made "
        "at 4096×4096; here pictures are 32×32.",
    )
    assert prompts(tab) == ["a fox", "a hen", *[""] * 6]
    unfold(tab, "Settings")
    expect(seed_box(tab)).to_have_value("31")
    expect(setting(tab, "Steps")).to_have_value("7")
    expect(setting(tab, "Sampler")).to_have_value("heun")
    expect(setting(tab, "Spacing")).to_have_value("karras")
    expect(setting(tab, "Negative prompt")).to_have_value("blur")
    drop(
        tab,
        settings_png(
            "a hen\nNegative prompt: dark\nSteps: 5, Sampler: Euler a, CFG scale: 4, "
            "Seed: 6, Size: 32x32"
        ),
        "a1111.png",
    )
    says(tab, "of a1111.png are in the boxes.")
    assert prompts(tab) == ["a hen", *EMPTY]
    expect(setting(tab, "Sampler")).to_have_value("euler_ancestral")
    photo = BytesIO()
    Image.new("RGB", (16, 16)).save(
        photo, "JPEG", comment=b"a fox\nSteps: 5, Sampler: Heun, CFG scale: 4, Seed: 6, Size: 32x32"
    )
    drop(tab, photo.getvalue(), "photo.jpg")
    says(tab, "of photo.jpg are in the boxes.")
    assert prompts(tab) == ["a fox", *EMPTY]
    drop(
        tab,
        settings_png(
            "a hen\nSteps: 5, Sampler: DDIM, CFG scale: 4, Seed: 6, Size: 32x32, "
            "Token downsampling: 2"
        ),
    )
    says(
        tab,
        "It was drawn with token downsampling 2, which is set when a page is started; here "
        "it is 1.",
    )
    drop(
        tab,
        settings_png("a cow\nSteps: 500, Sampler: Undefined, CFG scale: 4, Seed: 6, Size: 32x32"),
    )
    says(tab, "Sampler, Steps of the picture cannot be used here.")
    assert prompts(tab) == ["a cow", *EMPTY]


def test_a_file_that_cannot_be_read_is_answered_in_a_sentence(tab, tmp_path):
    before = prompts(tab)
    for data, sentence in (
        (b"no picture", "The file is not a picture, or is damaged."),
        (settings_png()[:-20], "The file is not a whole PNG picture."),
        (settings_png(""), "The picture carries no settings"),
    ):
        drop(tab, data)
        says(tab, sentence)
        assert prompts(tab) == before
    # Nor is a huge one even sent.
    (tmp_path / "huge.png").write_bytes(b"\0" * (MAX_FILE_BYTES + 1))
    unfold(tab, "Read a picture")
    tab.locator("#read-panel input[type=file]").set_input_files(tmp_path / "huge.png")
    says(tab, "The file is larger than 64 MiB.")


# --- what can be taken back ---------------------------------------------------------------------


def test_what_was_replaced_comes_back_step_by_step_also_after_a_reload(tab):
    undo = tab.get_by_role("button", name="Undo")
    fill(tab, PROMPTS, seed=5, steps=7)
    expect(undo).to_be_disabled()
    tool(tab, "Clear").click()
    expect(box(tab, 1)).to_have_value("")
    drop(tab, settings_png())
    says(tab, "of picture.png are in the boxes.")
    tool(tab, "Copy the first to all").click()
    expect(box(tab, 8)).to_have_value("a fox")
    undo.click()
    expect(tab.locator("#news")).to_have_text("The boxes are as they were.")
    assert prompts(tab) == ["a fox", "a hen", *[""] * 6]
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    undo.click()
    expect(box(tab, 1)).to_have_value("")
    undo.click()
    expect(box(tab, 8)).to_have_value(PROMPTS[7])
    assert prompts(tab) == PROMPTS
    unfold(tab, "Settings")
    expect(seed_box(tab)).to_have_value("5")
    expect(setting(tab, "Steps")).to_have_value("7")
    expect(undo).to_be_disabled()


def test_what_is_typed_after_a_replacement_can_be_done_again(tab):
    undo, redo = (tab.get_by_role("button", name=name) for name in ("Undo", "Redo"))
    fill(tab, PROMPTS)
    tool(tab, "Clear").click()
    expect(box(tab, 1)).to_have_value("")
    box(tab, 1).fill("typed")
    undo.press("Enter")
    expect(box(tab, 1)).to_have_value(PROMPTS[0])
    expect(undo).to_be_disabled()
    expect(redo).to_be_focused()
    drop(tab, b"no picture")  # which replaces nothing
    says(tab, "The file is not a picture")
    redo.click()
    expect(box(tab, 1)).to_have_value("typed")
    expect(redo).to_be_disabled()
    undo.click()
    expect(box(tab, 8)).to_have_value(PROMPTS[7])


@pytest.mark.slow("replaces the form in a browser again and again")
def test_whatever_replaces_what_is_filled_in_can_be_taken_back(tab):
    undo = tab.get_by_role("button", name="Undo")
    fill(tab, PROMPTS, seed=5, steps=3)
    unfold(tab, "Settings for prompt 2")
    own = tab.locator("#overrides-panel").get_by_label("Steps")
    own.fill("2")
    make(tab)
    unfold(tab, "Paste a list")
    tab.get_by_label("One prompt per line").fill("one")
    kept = [*PROMPTS, "5", "3", "2"]

    def filled():
        return [
            *prompts(tab),
            seed_box(tab).input_value(),
            setting(tab, "Steps").input_value(),
            own.input_value(),
        ]

    for name in (
        "Copy the first to all",
        "Clear",
        "Sample prompts",
        "Fill the boxes",
        "Random",
        "Clear prompt 2's own settings",
        "Again: put prompt, seed and settings of picture 3",
    ):
        expect(undo).to_be_disabled()
        if name == "Fill the boxes":
            unfold(tab, "Paste a list")
        if name.startswith("Again"):
            more(tab, 3).get_by_role("button", name=name).click()
        elif name in tab.locator("#more-tools").inner_html():
            tool(tab, name).click()
        else:
            tab.get_by_role("button", name=name).click()
        expect(undo).to_be_enabled()
        assert filled() != kept, name
        undo.click()
        expect(undo).to_be_disabled()
        assert filled() == kept, name


def test_a_link_takes_nothing_away_for_good(tab, address, page_engine):
    fill(tab, PROMPTS)
    tab.reload()
    tab.wait_for_function("window.sdTpu?.arrived")
    fox = Request.check({"prompts": ["a fox"], "seed": 1}, page_engine.catalog)
    tab.goto(f"{address}#{write_link(fox)}")
    expect(box(tab, 1)).to_have_value("a fox")
    tab.get_by_role("button", name="Undo").click()
    expect(box(tab, 1)).to_have_value(PROMPTS[0])
    assert prompts(tab) == PROMPTS


def test_a_list_that_is_pasted_into_a_box_can_fill_those_after_it(tab):
    fill(tab, ["one", "two", "three", "four", "five", *[""] * 3])
    box(tab, 2).evaluate("""box => {
        const pasted = new DataTransfer();
        pasted.setData("text", "1. a cat\\n2. a dog");
        box.dispatchEvent(new ClipboardEvent("paste", { clipboardData: pasted, bubbles: true }));
    }""")
    says(tab, "2 prompts were pasted.")
    tab.locator("#line button").click()
    assert prompts(tab) == ["one", "a cat", "a dog", "four", "five", "", "", ""]
    expect(box(tab, 2)).to_be_focused()
    tab.get_by_role("button", name="Undo").click()
    assert prompts(tab)[:3] == ["one", "two", "three"]


def test_the_button_says_what_it_would_draw(tab):
    fill(tab, ["one", "two", *[""] * 6], seed=5)
    expect(generate(tab)).to_have_text(re.compile(r"Draw 2\s+\d+ s"))
    make(tab)
    expect(generate(tab)).to_have_text(re.compile(r"^\s*Draw\s*$"))
    seed_box(tab).fill("-1")
    expect(generate(tab)).to_have_text(re.compile("Draw 2"))
    box(tab, 3).fill("three")
    expect(generate(tab)).to_have_text(re.compile("Draw 3"))


def test_a_key_computes_few_styles_anew(tab):
    """A rule that decides by :has() on the whole page would have all of them computed each time."""
    events: list[dict] = []
    devtools = tab.context.new_cdp_session(tab)
    devtools.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
    ended: list[dict] = []
    devtools.on("Tracing.tracingComplete", lambda data: ended.append(data))
    devtools.send("Tracing.start", {"traceConfig": {"includedCategories": ["devtools.timeline"]}})
    box(tab, 1).press_sequentially("a cat")
    devtools.send("Tracing.end")
    for _ in range(PATIENCE // 20):
        if ended:
            break
        tab.wait_for_timeout(20)
    computed = [
        event["args"].get("elementCount", 0)
        for event in events
        if event["name"] == "UpdateLayoutTree"
    ]
    everything = tab.evaluate("document.querySelectorAll('*').length")
    assert 0 < max(computed) < everything / 5
