"""The page's languages: every string in each of them, and which one is whose."""

import ast
import re
from pathlib import Path
from string import Formatter

import pytest

import sd_tpu
from sd_tpu.page import texts
from sd_tpu.page.texts import ENGLISH, LANGUAGES, Phrase, Translations, match_language
from sd_tpu.request import ACCELERATIONS, Request, RequestError, Settings
from sd_tpu.sentence import Sentence

ROOT = Path(sd_tpu.__file__).parent
OTHERS = [name for name in LANGUAGES if name != "en"]
TELLERS = {"Sentence", "SentenceError", "RequestError", "HistoryError"}


def calls(*names: str) -> list[ast.Call]:
    """Every call of a function or method of one of these names in the program."""
    files = set(ROOT.rglob("*.py")) - {ROOT / "sentence.py"}
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return [node for node in nodes if isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) in names]


def templates() -> set[str]:
    """The English templates of all sentences outside the page's own strings."""
    return {call.args[0].value for call in calls(*TELLERS)}


def placeholders(text: str) -> list[tuple]:
    return sorted(part[1:] for part in Formatter().parse(text) if part[1] is not None)


def test_every_sentence_can_be_found_by_its_template():
    for call in calls(*TELLERS):
        assert isinstance(call.args[0], ast.Constant), (
            f"line {call.lineno}: {ast.unparse(call)} should have a plain text, and facts by name")


@pytest.mark.parametrize("name", OTHERS)
def test_every_string_is_in_every_language(name):
    language = LANGUAGES[name]
    assert list(language.texts) == list(ENGLISH.texts)
    assert set(language.sentences) == templates()


@pytest.mark.parametrize("name", OTHERS)
def test_translations_speak_of_the_same_facts(name):
    language = LANGUAGES[name]
    pairs = [(ENGLISH.texts[key], text) for key, text in language.texts.items()]
    for english, text in [*pairs, *language.sentences.items()]:
        assert placeholders(english) == placeholders(text), text


@pytest.mark.parametrize("name", LANGUAGES)
def test_no_string_holds_markup(name):
    strings = [*LANGUAGES[name].texts.values(), *LANGUAGES[name].sentences.values()]
    assert not [text for text in strings if re.search('[<>&"]', text)]


@pytest.mark.parametrize("name", OTHERS)
def test_a_translation_is_one(name):
    same = {key for key, text in LANGUAGES[name].texts.items() if text == ENGLISH.texts[key]}
    assert same <= {"comma", "history_save", "labelled"}


def test_every_string_is_used():
    code = "".join(file.read_text("utf-8") for file in (ROOT / "page").glob("*.py"))
    # Of parts, such as a deed or a setting's name.
    made_up = "cell_.*|label_.*|(again|vary|history_.*)_help|(again|vary)_done"
    made_up += f"|({'|'.join(ACCELERATIONS)})(_help)?"
    assert not [key for key in ENGLISH.texts
                if not re.search(f"[\"']{key}[\"']", code) and not re.fullmatch(made_up, key)]


@pytest.mark.parametrize(("header", "name"), [
    ("ko", "ko"),
    ("ko-KR,ko;q=0.9,en-US;q=0.8,en;q=0.7", "ko"),
    ("zh-TW", "zh"),
    ("zh-Hant-HK,en;q=0.5", "zh"),
    ("ar-EG", "ar"),
    ("AR", "ar"),
    ("de-DE,de;q=0.9,ko;q=0.5,en;q=0.4", "ko"),
    ("en;q=0.5, ar;q=0.8", "ar"),
    ("ko;q=0, zh", "zh"),
    ("de", "en"),
    ("*", "en"),
    ("", "en"),
    ("ko;q=high", "en"),
    ("ko;q=nan", "en"),
    (";;,=,ko-;q=, ar;q=0.1", "ko"),
    ("arab, kok, zhx", "en"),
    ("\x00" * 5000 + ",,,,", "en"),
])
def test_a_visitor_gets_the_language_that_his_browser_likes_best(header, name):
    assert match_language(header) is LANGUAGES[name]


def refusal(values: dict) -> Sentence:
    with pytest.raises(RequestError) as caught:
        Request.check(values, Settings())
    return caught.value.sentence


def test_a_refusal_is_told_in_each_language():
    told = refusal({"prompts": ["a", "b"], "own": [None, {"steps": 0}]})
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


def test_phrases_are_said_within_phrases():
    left = Phrase("step_left", step=3, steps=20, time=texts.duration(40))
    assert ENGLISH.translate(left) == "Step 3 of 20, about 40 s left"
    assert LANGUAGES["ko"].translate(left) == "스텝 3 / 20, 약 40초 남음"
    several = Phrase("pictures_ready", places=[1, 4])
    assert LANGUAGES["zh"].translate(several) == "第 1、4 张图片已完成。"


def test_what_is_rendered_for_the_browser_has_no_braces_left():
    translations = Translations()
    marker = translations.render(lambda language: f"<p>{{{language.tag}}}</p>")
    key = re.search('"key": "([^"]*)"', marker)[1]
    assert translations.translations_dict["zh"][key] == "<p>&#123;zh-Hans&#125;</p>"
