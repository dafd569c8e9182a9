"""Wildcards in requests to an engine, and in the styles that it applies."""

import dataclasses
import re

import pytest

from sd_tpu.request import Request
from sd_tpu.settings import RequestError
from sd_tpu.styles import Styles

SEVEN = [""] * 7  # boxes left empty


def test_a_request_has_the_values_and_not_the_signs(page_engine):
    catalog = page_engine.catalog
    asked = Request.check({"prompts": ["a {red|green} fox", *SEVEN], "seed": 3}, catalog)
    assert asked.prompts[:3] == ("a red fox", "a green fox", "")
    assert [picture.seed for picture in asked.pictures if picture] == [3, 4]
    assert Request.check(asked.values(), catalog) == asked


def test_a_style_comes_first_and_then_the_wildcards_that_it_brought(
    page_engine, tmp_path, monkeypatch
):
    """Each picture has its own value, by its seed: alone as well as beside others."""
    (tmp_path / "styles.csv").write_text(
        'name,prompt\nAny,"__colour__ {prompt}, {ink|oil}"\nGone,{prompt} __nobody__\n'
    )
    catalog = page_engine.catalog
    monkeypatch.setattr(catalog, "styles", Styles(tmp_path / "styles.csv"))
    asked = Request.check({"prompts": ["a {fox|cat}", *SEVEN], "style": "Any", "seed": 3}, catalog)
    assert asked.prompts[:3] == ("a fox", "a cat", "") and asked.pictures[0].style == "Any"
    many = Request.check({"prompts": ["a fox"] * 8, "style": "Any"}, catalog)
    for request in (asked, many):
        drawn = page_engine.resolver.named(request)
        assert all(
            re.fullmatch("(red|blue) a (fox|cat), (ink|oil)", picture.prompt) and not picture.style
            for picture in drawn.pictures
            if picture
        )
        for index in request.indices():
            assert (
                page_engine.resolver.named(request.only(index)).pictures[0] == drawn.pictures[index]
            )
    assert len({*drawn.prompts}) > 2
    way = dataclasses.replace(asked.pictures[0], to_prompt="a hen", to_seed=8, share=0.5)
    assert re.fullmatch("(red|blue) a hen, (ink|oil)", catalog.styled(way).to_prompt)
    assert (
        catalog.styled(way).to_prompt
        == catalog.styled(dataclasses.replace(way, prompt="a hen", seed=8)).prompt
    ), "that of the last picture"
    with pytest.raises(RequestError, match=r"^Style of prompt 2 asks for a value of 'nobody'"):
        Request.check({"prompts": ["a", "b"], "overrides": [None, {"style": "Gone"}]}, catalog)
