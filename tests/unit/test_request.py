"""What a request may hold, and the sentence somebody reads when it may not."""

import dataclasses
import math

import numpy as np
import pytest

from sd_tpu.request import NOT_YET, Request, extended, finished, reworded
from sd_tpu.settings import (
    MAX_SEED,
    OVERRIDABLE,
    RANDOM,
    SETTINGS,
    SIDES,
    Number,
    Picture,
    RequestError,
    drawn_seed,
)

DEFAULTS = Picture(sampler="ddim", spacing="trailing", height=64, width=96)


def check(**values) -> Request:
    return Request.check({"prompts": ["a cat"], **values}, DEFAULTS)


def picture(**values) -> Picture:
    return check(**values).pictures[0]


REFUSALS = {
    "no prompts": (dict(prompts=[]), "There is no prompt yet: write what you would like to see"),
    "blank prompts": (dict(prompts=["", " \n", None]), "There is no prompt yet"),
    "prompts None": (dict(prompts=None), "There is no prompt yet"),
    "nine prompts": (dict(prompts=["a"] * 9), "There are 9 prompts; at most 8 fit."),
    "one text": (dict(prompts="a cat"), "The prompts should be a list of texts."),
    "a number of prompts": (dict(prompts=3), "The prompts should be a list of texts."),
    "a dictionary": (dict(prompts={"a": 1}), "The prompts should be a list of texts."),
    "a prompt of bytes": (dict(prompts=["a", b"b"]), "Prompt 2 should be text, not bytes."),
    "a long prompt": (
        dict(prompts=["a" * 4001]),
        "Prompt 1 has 4001 characters; at most 4000 are accepted.",
    ),
    "a negative list": (dict(negative_prompt=["a"]), "Negative prompt should be text, not list."),
    "a long negative": (dict(negative_prompt="a" * 5000), "Negative prompt has 5000 characters"),
    "steps 0": (dict(steps=0), "Steps should be from 1 to 200, not 0."),
    "steps over": (dict(steps=201), "Steps should be from 1 to 200, not 201."),
    "steps 2.5": (dict(steps=2.5), "Steps should be a whole number, not 2.5."),
    "steps True": (dict(steps=True), "Steps should be a whole number, not True."),
    "steps '3'": (dict(steps="3"), "Steps should be a whole number, not '3'."),
    "steps NaN": (dict(steps=math.nan), "Steps should be a whole number, not nan."),
    "steps inf": (dict(steps=math.inf), "Steps should be a whole number, not inf."),
    "steps complex": (dict(steps=3 + 0j), "Steps should be a whole number, not (3+0j)."),
    "steps nested": (dict(steps=[[["a" * 99] * 9] * 9]), "Steps should be a whole number, not [[["),
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
    "spacing": (
        dict(spacing="wide"),
        "Spacing 'wide' is unknown; there are leading, linspace, trailing, karras, expon",
    ),
    "spacing False": (dict(spacing=False), "Spacing False is unknown"),
    "no such spacing": (
        dict(sampler="lcm", spacing="karras"),
        "LCM has no karras spacing; it has trailing.",
    ),
    "size": (
        dict(width=512, height=512),
        "Pictures of 512x512 were asked for; this server makes 96x64.",
    ),
    "width -1": (dict(width=-1), "Width should be from 1 to 65536, not -1."),
    "guidance start over": (
        dict(guidance_start=1.5),
        "Guidance start should be from 0 to 1, not 1.5.",
    ),
    "guidance stop negative": (
        dict(guidance_stop=-0.5),
        "Guidance stop should be from 0 to 1, not -0.5.",
    ),
    "guidance stop text": (dict(guidance_stop="x"), "Guidance stop should be a number, not 'x'."),
    "guidance stops first": (
        dict(guidance_start=0.75, guidance_stop=0.5),
        "Guidance should start before it stops, not start at 0.75 and stop at 0.5.",
    ),
    "guidance of no steps": (
        dict(guidance_start=1),
        "Guidance should start before it stops, not start at 1 and stop at 1.",
    ),
    "cache interval 0": (dict(cache_interval=0), "Cache interval should be from 1 to 10, not 0."),
    "cache interval over": (dict(cache_interval=11), "Cache interval should be from 1 to 10, not"),
    "cache interval 1.5": (
        dict(cache_interval=1.5),
        "Cache interval should be a whole number, not 1.5.",
    ),
    "unknown keys": (dict(cfg=1, beta=2), "Unknown settings: beta, cfg."),
    "own text": (dict(overrides="steps"), "The overrides should be a list, one for each prompt."),
    "own by name": (dict(overrides={"steps": 3}), "The overrides should be a list, one for each"),
    "own number": (dict(overrides=3), "The overrides should be a list, one for each prompt."),
    "too many own": (dict(overrides=[None, None]), "There are 2 overrides for 1 prompts."),
    "own list of lists": (
        dict(overrides=[["steps", 3]]),
        "The overrides of prompt 1 should be values by name, not ['steps'",
    ),
    "own unknown keys": (
        dict(overrides=[{"prompts": 9, 3: 4, "x" * 99: 5}]),
        f"Unknown settings of prompt 1: 3, prompts, {'x' * 40}.",
    ),
    "own size": (
        dict(overrides=[{"width": 512}]),
        "Pictures of 512x64 were asked for; this server makes 96x64.",
    ),
}

OWN_REFUSALS = {
    "steps": (dict(steps=0), "Steps of prompt 3 should be from 1 to 200, not 0."),
    "steps text": (dict(steps="3"), "Steps of prompt 3 should be a whole number, not '3'."),
    "guidance": (dict(guidance=51), "Guidance of prompt 3 should be from 0 to 50, not 51."),
    "guidance text": (dict(guidance="x"), "Guidance of prompt 3 should be a number, not 'x'."),
    "seed": (dict(seed=-1), "Seed of prompt 3 should be from 0 to 4294967295, not -1."),
    "sampler": (dict(sampler="magic"), "Sampler 'magic' of prompt 3 is unknown; there are ddim,"),
    "spacing": (dict(spacing="wide"), "Spacing 'wide' of prompt 3 is unknown; there are leading"),
    "no such spacing": (
        dict(sampler="lcm", spacing="karras"),
        "LCM of prompt 3 has no karras spacing; it has trailing.",
    ),
    "no such spacing here": (dict(spacing="karras"), "DDIM of prompt 3 has no karras spacing; it"),
    "negative": (dict(negative_prompt=3), "Negative prompt of prompt 3 should be text, not int"),
    "long negative": (dict(negative_prompt="a" * 5000), "Negative prompt of prompt 3 has 5000"),
    "guidance start": (dict(guidance_start=-1), "Guidance start of prompt 3 should be from 0 to 1"),
    "guidance stop": (dict(guidance_stop="x"), "Guidance stop of prompt 3 should be a number, not"),
    "guidance stops first": (
        dict(guidance_stop=0),
        "Guidance of prompt 3 should start before it stops, not start at 0 and stop at 0.",
    ),
    "cache interval": (dict(cache_interval=0), "Cache interval of prompt 3 should be from 1 to 10"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_served_is_refused_in_one_sentence_that_says_why(case):
    values, sentence = REFUSALS[case]
    with pytest.raises(RequestError) as caught:
        check(**values)
    message = str(caught.value)
    assert message.startswith(sentence)
    assert message.endswith((".", "box.")) and "\n" not in message and len(message) < 300


@pytest.mark.parametrize("case", OWN_REFUSALS)
def test_a_bad_value_of_one_picture_is_refused_by_a_sentence_that_names_its_prompt(case):
    own, sentence = OWN_REFUSALS[case]
    with pytest.raises(RequestError) as caught:
        check(prompts=["a", "", "b"], overrides=[{"steps": 3}, None, own])
    message = str(caught.value)
    assert message.startswith(sentence) and message.endswith(".") and "\n" not in message


def test_what_is_left_open_takes_the_default():
    assert (
        check()
        == check(seed=None, steps=None, spacing=None, width=None)
        == Request(
            (
                Picture(
                    prompt="a cat",
                    seed=0,
                    negative_prompt="",
                    steps=20,
                    guidance=7.5,
                    sampler="ddim",
                    spacing="trailing",
                    height=64,
                    width=96,
                ),
            )
        )
    )


def test_good_values_are_normalised():
    request = check(
        prompts=["  a\ncat \u2028", None, "\ud800dog"],
        negative_prompt=" \tblur ",
        seed=np.uint32(7),
        steps=np.float32(12),
        guidance=np.float32(0.5),
    )
    assert request.prompts == ("a\ncat", "", "dog")
    first = request.pictures[0]
    assert first.negative_prompt == "blur"
    values = (first.seed, first.steps, first.guidance)
    assert values == (7, 12, 0.5) and list(map(type, values)) == [int, int, float]


def test_the_limits_themselves_are_accepted():
    first, *_ = check(prompts=["a" * 4000] * 8, seed=MAX_SEED, steps=200, guidance=50).pictures
    assert (first.seed, first.steps, first.guidance) == (MAX_SEED, 200, 50.0)
    assert picture(seed=0, steps=1, guidance=0).guidance == 0.0
    made = picture(guidance_start=0, guidance_stop=1, cache_interval=10)
    assert (made.guidance_start, made.guidance_stop, made.cache_interval) == (0, 1, 10)


def test_the_default_spacing_is_not_forced_on_another_sampler():
    assert picture(sampler="dpmpp_2s").spacing == ""
    assert picture(sampler="dpmpp_2s", spacing="karras").spacing == "karras"
    assert picture(sampler="ddim").spacing == "trailing"


def test_an_empty_spacing_is_the_checkpoints_own():
    assert picture(spacing="").spacing == ""


def test_what_a_request_says_of_itself_makes_it_again():
    request = check(prompts=["a", "", "b"], sampler="heun", spacing="karras", seed=3, steps=9)
    assert Request.check(request.values(), DEFAULTS) == request


def test_places_are_the_prompts_that_are_not_blank():
    assert check(prompts=["", "a", " ", "b"]).indices() == [1, 3]


def test_seeds_follow_the_place_and_wrap_around():
    request = check(prompts=["a", "b", "c"], seed=MAX_SEED - 1)
    assert [made.seed for made in request.pictures] == [MAX_SEED - 1, MAX_SEED, 0]
    assert request.seed == MAX_SEED - 1


def test_a_seed_is_drawn_where_it_is_asked_for_and_nothing_else_is_changed():
    drawn = {drawn_seed(RANDOM) for _ in range(9)}
    assert len(drawn) == 9 and all(0 <= seed <= MAX_SEED for seed in drawn)
    assert [drawn_seed(seed) for seed in (0, 7, -2, None, "x")] == [0, 7, -2, None, "x"]
    assert drawn_seed(-1.0) >= 0


def test_only_is_the_request_that_makes_one_picture_again():
    request = check(prompts=["a", "", "b"], seed=MAX_SEED, negative_prompt="c", steps=5)
    assert request.only(2) == check(prompts=["b"], seed=1, negative_prompt="c", steps=5)


def test_a_request_grows_to_take_a_picture_up_and_shrinks_to_none():
    request, new = check(overrides=[{"steps": 3}]), picture(seed=1, guidance=0.0)
    grown = request.replaced(3, new)
    assert grown.pictures == (*request.pictures, None, None, new)
    assert grown.replaced(0, None).indices() == [3]
    assert grown.replaced(0, None).replaced(3, None).indices() == []


# --- overrides ----------------------------------------------------------------------------------


def test_a_picture_takes_its_own_settings_and_the_common_ones_where_it_has_none():
    own = dict(
        negative_prompt=" fog ",
        steps=9,
        guidance=2,
        sampler="heun",
        spacing="karras",
        guidance_start=0.1,
        guidance_stop=0.9,
        cache_interval=3,
        seed=77,
    )
    request = check(prompts=["a", "b", "c"], seed=3, steps=5, overrides=[None, own, {"steps": 7}])
    assert request.only(0) == check(prompts=["a"], seed=3, steps=5)
    assert request.only(1) == check(prompts=["b"], **own)
    assert request.only(2) == check(prompts=["c"], seed=5, steps=7)


def test_an_own_negative_prompt_can_be_none_at_all():
    assert picture(negative_prompt="fog", overrides=[{"negative_prompt": ""}]).negative_prompt == ""


def test_own_settings_that_change_nothing_are_none():
    same = dict(
        negative_prompt="", steps=20, guidance=7.5, sampler="ddim", spacing="trailing", seed=4
    )
    plain = check(prompts=["a", "b"], seed=3)
    for own in ([], [None], [{}, {}], [None, same], [{"steps": None}]):
        request = check(prompts=["a", "b"], seed=3, overrides=own)
        assert request == plain and request.values()["overrides"] == []


def test_what_most_pictures_share_is_common_and_the_rest_is_overridden():
    request = check(
        prompts=["", "a", "b", "c"],
        seed=5,
        steps=9,
        overrides=[{"steps": 3}, {"steps": 4, "seed": 0}, None, {"guidance": 2}],
    )
    assert request.common == dataclasses.replace(DEFAULTS, seed=5, steps=9)
    assert [request.overrides(index) for index in range(4)] == [
        {},
        {"steps": 4, "seed": 0},
        {},
        {"guidance": 2.0},
    ]


def test_what_pictures_begin_from_is_left_out_of_what_is_common_with_all_that_belongs_to_it():
    start = dict(init_image="0" * 64, mask="1" * 64, strength=0.5, mask_blur=9)
    request = check(prompts=["a", "b"], steps=9, control_scale=0.5, overrides=[start, start])
    common = request.common_without_inputs
    assert common == dataclasses.replace(DEFAULTS, seed=request.seed, steps=9, control_scale=0.5)
    assert request.values(common)["overrides"] == [start, start]
    assert Request.check(request.values(common), DEFAULTS) == request
    plain = check(prompts=["a"], strength=0.5)
    assert plain.common_without_inputs == plain.common


def test_what_is_as_frequent_is_common_if_it_is_the_default_or_comes_first():
    request = check(prompts=["a", "b"], cache_interval=3, overrides=[None, {"cache_interval": 1}])
    assert request.values()["overrides"] == [{"cache_interval": 3}, None]
    request = check(prompts=["a", "b"], steps=3, overrides=[None, {"steps": 4}])
    assert request.values()["overrides"] == [None, {"steps": 4}]


def test_settings_that_do_not_go_together_are_never_common():
    own = [
        {"sampler": "lcm"},
        {"sampler": "lcm", "seed": 7},
        {"sampler": "euler"},
        {"sampler": "heun"},
        {"sampler": "lms"},
    ]
    request = check(prompts=["a"] * 5, sampler="euler", spacing="karras", overrides=own)
    assert [made.spacing for made in request.pictures] == ["", "", *["karras"] * 3]
    assert Request.check(request.values(), DEFAULTS) == request


def test_an_own_sampler_takes_the_common_spacing_if_it_has_that():
    common = dict(sampler="euler", spacing="karras")
    own = [
        {"sampler": "lcm"},
        {"sampler": "heun"},
        {"sampler": "euler"},
        {"spacing": ""},
        {"sampler": "ddim"},
        {"sampler": "heun", "spacing": "trailing"},
    ]
    request = check(prompts=["a"] * 6, overrides=own, **common)
    spacings = [made.spacing for made in request.pictures]
    assert spacings == ["", "karras", "karras", "", "", "trailing"]


def test_an_own_start_of_guidance_is_held_against_the_common_stop():
    with pytest.raises(RequestError, match=r"^Guidance of prompt 2 should start before it stops"):
        check(prompts=["a", "b"], guidance_stop=0.5, overrides=[None, {"guidance_start": 0.5}])


# --- the table ----------------------------------------------------------------------------------


def test_settings_are_known_to_a1111_and_to_the_shell_by_names_of_their_own():
    assert {name: setting.a1111 for name, setting in SETTINGS.items() if name != setting.a1111} == {
        "guidance": "cfg_scale",
        "model": "sd_model_checkpoint",
        "sampler": "sampler_name",
        "spacing": "scheduler",
        "init_image": "init_images",
        "strength": "denoising_strength",
        "fit": "resize_mode",
        "style": "styles",
        "clip_skip": "CLIP_stop_at_last_layers",
    }
    flags = [setting.flag for name, setting in OVERRIDABLE.items() if name not in {"model", *SIDES}]
    assert "--negative" in flags and "--cache-interval" in flags and None not in flags


@pytest.mark.parametrize("name", SETTINGS)
def test_a_default_is_a_value_that_its_own_check_lets_through_and_can_be_told(name):
    setting = SETTINGS[name]
    assert setting.check(setting.default) == setting.default
    if isinstance(setting.kind, Number):
        assert setting.kind.parse(setting.kind.shown(setting.default)) == setting.default
    if name in OVERRIDABLE:
        assert setting.caption_of(setting.default)


CARD = Picture(
    prompt="a cat", seed=7, steps=4, init_image="a", mask="b", fit="extend", strength=0.9
)


def test_words_follow_the_prompt_of_a_picture_that_starts_from_itself():
    again = reworded(dataclasses.replace(CARD, prompt="a cat, "), " at night ", 0.5, edits=False)
    assert again == dataclasses.replace(
        CARD, prompt="a cat, at night", init_image=NOT_YET, mask="", fit="cover", strength=0.5
    )
    assert reworded(CARD, "at night", 0.1, edits=False).steps > 4, "one step is taken at least"


def test_words_are_the_prompt_of_a_model_that_edits_and_the_picture_its_only_reference():
    card = dataclasses.replace(CARD, reference="c d", reference_scale=0.0)
    again = reworded(card, "at night", 0.5, edits=True)
    assert again == dataclasses.replace(
        card, prompt="at night", init_image="", mask="", reference=NOT_YET, reference_scale=0.6
    )


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (" \n", "Say what should change, in a few words."),
        ("a" * 4001, "has 4001 characters; at most 4000 are accepted."),
        (3, "should be text, not int."),
    ],
)
def test_a_change_without_words_that_can_be_read_is_refused(edits, words, sentence):
    with pytest.raises(RequestError, match=sentence):
        reworded(CARD, words, 0.5, edits=edits)


@pytest.mark.parametrize("strength", [-0.1, 1.1, math.nan])
def test_a_change_by_no_share_is_refused(strength):
    with pytest.raises(RequestError, match="Strength should be"):
        reworded(CARD, "red", strength, edits=False)


def test_an_extension_is_a_start_picture_on_a_larger_canvas_with_a_mask():
    before = picture(strength=0.3, mask_blur=2)
    after, sides = extended(before, (0, 9, 8, 0), 8)
    assert sides == [0, 16, 8, 0] and (after.width, after.height) == (104, 80)
    assert (after.init_image, after.mask, after.strength) == (NOT_YET, NOT_YET, 1.0)
    assert (after.prompt, after.seed, after.mask_blur) == (before.prompt, before.seed, 2)


@pytest.mark.parametrize(
    ("sides", "said"),
    [
        ((0, 0, 0, 0), "there is nothing to draw beside"),
        ((-8, 16, 0, 0), "there is nothing to draw beside"),
        ((0, 0, 1 << 40, 0), "Width should be from"),
    ],
)
def test_an_extension_that_cannot_be_is_refused_in_a_sentence(sides, said):
    with pytest.raises(RequestError, match=said):
        extended(picture(), sides, 8)


@pytest.mark.parametrize(
    "own, changes, steps",
    [
        (20, {"steps": 10}, 40),
        (20, {"steps": 11}, None),
        (20, {"steps": 4, "sampler": "lcm"}, None),
        (150, {"steps": 75}, 200),  # of which there are no more
        (1, {"steps": 1}, None),  # there is nothing below
    ],
)
def test_a_draft_is_finished_in_twice_the_steps_of_its_model(own, changes, steps):
    picture = dataclasses.replace(CARD, **changes)
    anew = finished(picture, own)
    assert anew == (steps and dataclasses.replace(picture, steps=steps))
