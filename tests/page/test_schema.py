"""Messages of the page: which are taken, and that each has somebody to answer it."""

import hashlib
from pathlib import Path

import pydantic
import pytest

from sd_tpu.page import schema

FORM = {
    "prompts": ["a cat"],
    "seed": "7",
    "settings": {"steps": "4"},
    "overrides": [{}],
    "keep": [True],
}
ASKED = {"lang": "en", "browser": None, "run": None, "form": FORM}


def test_a_message_keeps_the_fields_that_it_has_and_no_others():
    vary = {**ASKED, "do": "vary", "index": 3}
    assert schema.read({**vary, "shown": "x"}) == vary
    assert "shown" not in schema.read({**ASKED, "do": "show"}), "that of the last run"


@pytest.mark.parametrize(
    "wrong",
    [
        {"do": "nothing"},
        {"do": "_fill"},
        {"do": "vary"},
        {"do": "vary", "index": 8},
        {"do": "vary", "index": -1},
        {"do": "vary", "index": "3"},
        {"do": "change", "indices": [0], "words": "red"},
        {"do": "change", "indices": [0], "words": "red", "strength": "0.5"},
        {"do": "change", "indices": [0], "words": ["red"], "strength": 0.5},
        {"do": "change", "indices": [], "words": "red", "strength": 0.5},
        {"do": "around", "indices": [8], "strength": 0.5},
        {"do": "choose", "index": 0, "variant": "1"},
        {"do": "finish", "indices": []},
        {"do": "styles", "seen": [1]},
        {"do": "look", "indices": [*range(8), 0]},
        {"do": "zip", "indices": [*range(8), 0]},
        {"do": "journey", "index": 0, "to": 1, "count": "8"},
        {"do": "history", "act": "drop"},
        {"do": "history", "act": "show", "pages": "1"},
        {"do": "read"},
        {"do": "generate", "form": None},
        {"do": "generate", "form": {**FORM, "prompts": "a cat"}},
        {"do": "generate", "form": {**FORM, "seed": 7}},
        {"do": "generate", "form": {**FORM, "settings": {"steps": 4}}},
        {"do": "generate", "form": {**FORM, "overrides": [None]}},
        {"do": "generate", "form": {**FORM, "colour": "red"}},
    ],
)
def test_a_message_that_the_page_never_sends_is_refused(wrong):
    schema.read({**ASKED, "do": "generate"})
    with pytest.raises(pydantic.ValidationError):
        schema.read({**ASKED, **wrong})


@pytest.mark.parametrize("wrong", [None, [], "generate", {}, {"do": "generate"}])
def test_what_is_no_message_is_refused(wrong):
    with pytest.raises(pydantic.ValidationError):
        schema.read(wrong)


def test_the_types_of_the_script_are_those_of_the_schema():
    types = Path(schema.__file__).parent / "script" / "messages.d.ts"
    made_of = hashlib.sha256(schema.json_schema().encode()).hexdigest()[:16]
    assert types.read_text("utf-8").partition("\n")[0].endswith(made_of), "make script"
