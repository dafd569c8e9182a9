"""What a request may hold, and the sentence somebody reads when it may not."""

import math

import numpy as np
import pytest

from sd_tpu.request import MAX_SEED, Request, RequestError, Settings

DEFAULTS = Settings(sampler="ddim", spacing="trailing", height=64, width=96)


def check(**values) -> Request:
    return Request.check({"prompts": ["a cat"], **values}, DEFAULTS)


REFUSALS = {
    "no prompts": (dict(prompts=[]), "There is no prompt yet: write what you would like to see"),
    "blank prompts": (dict(prompts=["", " \n", None]), "There is no prompt yet"),
    "prompts None": (dict(prompts=None), "There is no prompt yet"),
    "nine prompts": (dict(prompts=["a"] * 9), "There are 9 prompts; at most 8 fit."),
    "one text": (dict(prompts="a cat"), "The prompts should be a list of texts."),
    "a number of prompts": (dict(prompts=3), "The prompts should be a list of texts."),
    "a dictionary": (dict(prompts={"a": 1}), "The prompts should be a list of texts."),
    "a prompt of bytes": (dict(prompts=["a", b"b"]), "Prompt 2 should be text, not bytes."),
    "a long prompt": (dict(prompts=["a" * 4001]),
                      "Prompt 1 has 4001 characters; at most 4000 are accepted."),
    "a negative list": (dict(negative_prompt=["a"]),
                        "The negative prompt should be text, not list."),
    "a long negative": (dict(negative_prompt="a" * 5000), "The negative prompt has 5000 charac"),
    "steps 0": (dict(steps=0), "Steps should be from 1 to 200, not 0."),
    "steps over": (dict(steps=201), "Steps should be from 1 to 200, not 201."),
    "steps 2.5": (dict(steps=2.5), "Steps should be a whole number, not 2.5."),
    "steps True": (dict(steps=True), "Steps should be a whole number, not True."),
    "steps '3'": (dict(steps="3"), "Steps should be a whole number, not '3'."),
    "steps NaN": (dict(steps=math.nan), "Steps should be a whole number, not nan."),
    "steps inf": (dict(steps=math.inf), "Steps should be a whole number, not inf."),
    "steps complex": (dict(steps=3 + 0j), "Steps should be a whole number, not (3+0j)."),
    "guidance NaN": (dict(guidance=math.nan), "Guidance should be a number, not nan."),
    "guidance inf": (dict(guidance=-math.inf), "Guidance should be a number, not -inf."),
    "guidance negative": (dict(guidance=-0.5), "Guidance should be from 0 to 50, not -0.5."),
    "guidance over": (dict(guidance=51), "Guidance should be from 0 to 50, not 51."),
    "guidance huge": (dict(guidance=10**400), "Guidance should be a number, not 1000"),
    "guidance False": (dict(guidance=False), "Guidance should be a number, not False."),
    "guidance text": (dict(guidance="7"), "Guidance should be a number, not '7'."),
    "seed -1": (dict(seed=-1), "Seed should be from 0 to 4294967295, not -1."),
    "seed over": (dict(seed=2**32), "Seed should be from 0 to 4294967295, not 4294967296."),
    "seed huge": (dict(seed=10**400), "Seed should be a whole number, not 1000"),
    "sampler": (dict(sampler="magic"), "Sampler 'magic' is unknown; there are ddim, ddpm, pndm"),
    "sampler list": (dict(sampler=["ddim"]), "Sampler ['ddim'] is unknown; there are ddim"),
    "spacing": (dict(spacing="wide"),
                "Spacing 'wide' is unknown; there are leading, linspace, trailing, karras, expon"),
    "spacing False": (dict(spacing=False), "Spacing False is unknown"),
    "no such spacing": (dict(sampler="lcm", spacing="karras"),
                        "LCM has no karras spacing; it has trailing."),
    "size": (dict(width=512, height=512),
             "Pictures of 512x512 were asked for; this server makes 96x64."),
    "width -1": (dict(width=-1), "Width should be from 1 to 65536, not -1."),
    "unknown keys": (dict(cfg=1, beta=2), "Unknown settings: beta, cfg."),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_served_is_refused_in_one_sentence_that_says_why(case):
    values, sentence = REFUSALS[case]
    with pytest.raises(RequestError) as caught:
        check(**values)
    message = str(caught.value)
    assert message.startswith(sentence)
    assert message.endswith((".", "box.")) and "\n" not in message


def test_what_is_left_open_takes_the_default():
    assert check() == check(seed=None, steps=None, spacing=None, width=None) == Request(
        prompts=("a cat",), seed=0, negative_prompt="", steps=20, guidance=7.5, sampler="ddim",
        spacing="trailing", height=64, width=96,
    )


def test_good_values_are_normalised():
    request = check(prompts=["  a\ncat \u2028", None, "\ud800dog"], negative_prompt=" \tblur ",
                    seed=np.uint32(7), steps=np.float32(12), guidance=np.float32(0.5))
    assert request.prompts == ("a\ncat", "", "dog")
    assert request.negative_prompt == "blur"
    values = (request.seed, request.steps, request.guidance)
    assert values == (7, 12, 0.5) and list(map(type, values)) == [int, int, float]


def test_the_limits_themselves_are_accepted():
    request = check(prompts=["a" * 4000] * 8, seed=MAX_SEED, steps=200, guidance=50)
    assert (request.seed, request.steps, request.guidance) == (MAX_SEED, 200, 50.0)
    assert check(seed=0, steps=1, guidance=0).guidance == 0.0


def test_the_default_spacing_is_not_forced_on_another_sampler():
    assert check(sampler="dpmpp_2s").spacing is None
    assert check(sampler="dpmpp_2s", spacing="karras").spacing == "karras"
    assert check(sampler="ddim").spacing == "trailing"


def test_an_empty_spacing_is_the_checkpoints_own():
    assert check(spacing="").spacing is None


def test_checking_a_request_again_changes_nothing():
    request = check(prompts=["a", "", "b"], sampler="heun", spacing="karras", seed=3, steps=9)
    assert Request.check(vars(request), DEFAULTS) == request


def test_places_are_the_prompts_that_are_not_blank():
    assert check(prompts=["", "a", " ", "b"]).places() == [1, 3]


def test_seeds_follow_the_place_and_wrap_around():
    request = check(prompts=["a", "", "b"], seed=MAX_SEED - 1)
    assert [request.image_seed(i) for i in range(3)] == [MAX_SEED - 1, MAX_SEED, 0]


def test_only_is_the_request_that_makes_one_picture_again():
    request = check(prompts=["a", "", "b"], seed=MAX_SEED, negative_prompt="c", steps=5)
    alone = request.only(2)
    assert (alone.prompts, alone.seed) == (("b",), 1)
    assert (alone.negative_prompt, alone.steps) == ("c", 5)
    assert alone.image_seed(0) == request.image_seed(2)
