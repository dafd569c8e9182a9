"""Styles: what prompts are put into, from a list as A1111 keeps it."""

import unicodedata

import pytest

from sd_tpu.settings import MAX_PROMPT_LENGTH, SETTINGS, Picture, RequestError
from sd_tpu.styles import Styles

LIST = """\ufeffname,prompt,negative_prompt
Watercolour,"watercolour of {prompt}, {prompt} again",photo
Sharp,"sharp, ""so"" sharp",
"Two, lines","{prompt},
bright","{prompt}, dull"
Old
,nameless,
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "styles.csv").write_text(LIST, "utf-8")
    return tmp_path / "styles.csv"


def applied(styles, prompt, negative, name):
    drawn = styles.applied(Picture(prompt=prompt, negative_prompt=negative, style=name, steps=3))
    assert (drawn.style, drawn.steps) == ("", 3)
    return drawn.prompt, drawn.negative_prompt


@pytest.mark.parametrize(
    "name, prompt, negative, told",
    [
        ("Watercolour", "a fox", "fog", ("watercolour of a fox, a fox again", "fog, photo")),
        ("Watercolour", "a fox", "", ("watercolour of a fox, a fox again", "photo")),
        ("Sharp", "a fox", "fog", ('a fox, sharp, "so" sharp', "fog")),
        ("Two, lines", "a fox", "fog", ("a fox,\nbright", "fog, dull")),
        ("Old", "a fox", "", ("a fox", "")),
        ("", "a {prompt}", "fog", ("a {prompt}", "fog")),
    ],
)
def test_prompts_are_put_into_a_style_as_a1111_does_it(name, prompt, negative, told, file):
    assert applied(Styles(file), prompt, negative, name) == told


def test_a_list_is_read_again_when_it_has_changed_and_can_be_read(file):
    styles = Styles(file)
    assert [*styles.templates()] == ["Watercolour", "Sharp", "Two, lines", "Old"]
    file.write_text("name,prompt\nNew,new {prompt}\n")
    assert applied(styles, "x", "", "New") == ("new x", "")
    for broken in ("name;prompt\n", "\x00"):
        file.write_text(broken)
        assert [*styles.templates()] == ["New"]
    file.unlink()
    assert [*styles.templates()] == ["New"]


def test_what_is_no_style_is_refused_by_name(file):
    for styles, told in (
        (Styles(file), "Style 'no' is unknown; there are Watercolour, Sharp, Two, lines, Old."),
        (Styles(), "The style 'no' was asked for, but no list of styles was given."),
    ):
        with pytest.raises(RequestError, match=f"^{told}$"):
            applied(styles, "x", "", "no")
    with pytest.raises(RequestError, match=f"^Negative prompt has .* at most {MAX_PROMPT_LENGTH}"):
        applied(Styles(file), "x", "x" * (MAX_PROMPT_LENGTH - 1), "Watercolour")


def test_what_is_no_list_is_refused_at_the_start(file):
    for broken in ("", "a,b\n", "prompt\nx\n"):
        file.write_text(broken)
        with pytest.raises(ValueError, match="its first line should be name,prompt"):
            Styles(file)
    with pytest.raises(OSError):
        Styles(file.with_name("nowhere.csv"))


def test_both_normal_forms_of_a_name_are_one(file):
    file.write_text(f"name,prompt\n{unicodedata.normalize('NFD', 'Éclair')},sweet\n")
    styles = Styles(file)
    assert [*styles.templates()] == ["Éclair"]
    for form in ("NFC", "NFD"):
        assert applied(styles, "a", "", unicodedata.normalize(form, "Éclair")) == ("a, sweet", "")
    for name in ("model", "style", "controlnet", "ip_adapter"):
        assert SETTINGS[name].check("e\u0301 ") == "é"
