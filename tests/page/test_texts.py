"""The page's languages: every text in each of them, and which one is whose."""

import ast
import json
import re
from pathlib import Path
from string import Formatter

import pytest
from jinja2 import Environment
from jinja2.ext import extract_from_ast

import sd_tpu
from sd_tpu.gallery.status import at_step, duration, ready
from sd_tpu.language import ENGLISH, LANGUAGES, language_of
from sd_tpu.page.layout import Texts
from sd_tpu.page.theme import script
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence
from sd_tpu.settings import SETTINGS, Picture, RequestError

ROOT = Path(sd_tpu.__file__).parent
OTHERS = [name for name in LANGUAGES if name != "en"]
SAYING = {"Sentence", "SentenceError", "RequestError", "HistoryError", "Closing", "say", "label"}
OFF_THE_PAGE = ("cli/", "training/teach.py")  # whose sentences the page never says
# Which stand elsewhere: in the table of settings, or are said a second time.
KNOWN = {
    "label",
    "self.caption",
    "self.caption_empty",
    "text",
    "text.template",
    "GARBLED.template",
    "GONE.template",
    "FORGOTTEN.template",
}


def texts() -> dict[str, ast.AST]:
    """Every text that the program says by calling one of SAYING, and where."""
    found = {}
    for file in set(ROOT.rglob("*.py")) - {ROOT / "sentence.py"}:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and node.args
                and not file.relative_to(ROOT).as_posix().startswith(OFF_THE_PAGE)
                and getattr(node.func, "id", getattr(node.func, "attr", "")) in SAYING
            ):
                found |= said(node.args[0], f"{file.name}, line {node.lineno}")
    page = ROOT / "page" / "page.html"
    tree = Environment().parse(page.read_text("utf-8"))
    for line, _, (text, *_) in extract_from_ast(tree, ["say"], babel_style=False):
        found[text] = f"{page.name}, line {line}"
    return found


def said(text: ast.AST, where: str) -> dict[str, str]:
    if isinstance(text, ast.Constant):
        return {text.value: where}
    assert ast.unparse(text) in KNOWN, (
        f"{where}: {ast.unparse(text)} should be a plain text, and facts by name"
    )
    return {}


def of_settings() -> set[str]:
    return {text for setting in SETTINGS.values() for text in setting.texts()}


def placeholders(text: str) -> list[tuple]:
    return sorted(part[1:] for part in Formatter().parse(text) if part[1] is not None)


@pytest.mark.parametrize("name", OTHERS)
def test_every_text_is_in_every_catalogue_and_nothing_else(name):
    assert set(LANGUAGES[name].messages) == {*texts(), *of_settings(), ", "}


@pytest.mark.parametrize("name", OTHERS)
def test_translations_speak_of_the_same_facts_without_markup(name):
    for english, text in LANGUAGES[name].messages.items():
        assert text and placeholders(english) == placeholders(text), text
        assert not re.search('[<>&"]', english + text), text


@pytest.mark.parametrize("name", OTHERS)
def test_a_translation_is_one(name):
    same = {text for text, told in LANGUAGES[name].messages.items() if text == told}
    assert same <= {
        ", ",
        "PNG",
        "{label}: {prompt}",
        "{reason}",
        "{whose}{reason}",
        "{name}{of}",
        "{what} ({reason}).",
        "{what} {turn}",
    }


@pytest.mark.parametrize(
    "tags, name",
    [
        (["ko"], "ko"),
        (["zh-Hans"], "zh"),
        (["ar"], "ar"),
        (["en"], "en"),
        (["de"], "en"),
        ([None], "en"),
        ([[]], "en"),
        ([], "en"),
        (["de-DE", " de;q=0.9", " AR-EG;q=0.8", " ko;q=0.7"], "ar"),
        (["zh-TW"], "zh"),
        (["korean"], "en"),
    ],
)
def test_a_page_is_answered_in_the_first_of_its_languages_that_is_spoken(tags, name):
    assert language_of(*tags) is LANGUAGES[name]


def refusal(values: dict) -> Sentence:
    with pytest.raises(RequestError) as caught:
        Request.check(values, Picture())
    return caught.value.sentence


def test_a_refusal_is_told_in_each_language():
    told = refusal({"prompts": ["a", "b"], "overrides": [None, {"steps": 0}]})
    assert told == "Steps of prompt 2 should be from 1 to 200, not 0."
    said = {name: language.translate(told) for name, language in LANGUAGES.items()}
    assert said["en"] == told
    assert said["ko"] == "프롬프트 2의 스텝: 1에서 200 사이여야 합니다(입력: 0)."
    assert said["zh"] == "提示词 2 的步数应在 1 到 200 之间，而不是 0。"
    assert said["ar"] == "الخطوات (الوصف 2): يجب إدخال قيمة من 1 إلى 200، لا \u20680\u2069."


def test_what_a_value_says_is_never_taken_for_a_template():
    told = refusal({"prompts": ["a"], "sampler": "{0} {steps} {{"})
    assert "'{0} {steps} {{'" in told
    for language in LANGUAGES.values():
        assert "'{0} {steps} {{'" in language.translate(told)


def test_texts_are_said_within_texts():
    left = at_step(3, 20, 40)
    assert ENGLISH.translate(left) == left == "Step 3 of 20, about 40 s left"
    assert LANGUAGES["ko"].translate(left) == "스텝 3 / 20, 약 40초 남음"
    assert LANGUAGES["zh"].translate(*ready([1, 4])) == "第 1、4 张图片已完成。"
    assert ENGLISH.translate(*ready([1, 4])) == "Pictures 1, 4 are ready."
    assert duration(150) == "2 min"


def test_a_page_is_filled_with_the_texts_of_one_language():
    texts = Texts()
    places = [
        texts.render(lambda language: f'<p class="a">\\1 {language.tag}\n</p></script>'),
        texts.label("Prompt {number}", number=2),
    ]
    assert texts.fill(b"a __text_9__ fox", LANGUAGES["zh"]) == b"a __text_9__ fox"
    page = json.dumps({"html": f"{places[1]}, {places[0]}", "label": places[1]}).encode()
    filled = texts.fill(page, LANGUAGES["zh"])
    assert b"<" not in filled  # which could end the script that the page is in
    assert json.loads(filled) == {
        "html": '提示词 2, <p class="a">\\1 zh-Hans\n</p></script>',
        "label": "提示词 2",
    }


def test_the_script_is_told_how_many_boxes_there_are_and_how_settings_belong_together():
    told, _ = script().removeprefix("window.sdTpuSettings = ").split(";\n", 1)
    assert json.loads(told) == {
        "boxes": 8,
        "seeds": 2**32,
        "sides": ["height", "width"],
        "offered": ["size", "model", "style"],
        "uses": {
            "strength": "init_image",
            "control_scale": "control_image",
            "reference_scale": "reference",
        },
    }
