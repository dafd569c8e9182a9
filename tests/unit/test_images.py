"""Grids, PNG files and A1111's `parameters` text, both ways."""

import contextlib
import dataclasses
import json
import os
import re
import struct
import time
import warnings
import zipfile
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageFont, PngImagePlugin, TiffImagePlugin

from sd_tpu.pictures import images
from sd_tpu.pictures.images import (
    BLANK,
    KEY,
    MAX_CHUNKS,
    SIGNATURE,
    VERSION,
    carries_settings,
    enlarged,
    format_parameters,
    framed,
    make_grid,
    parse_parameters,
    parse_token_downsampling,
    parse_usable,
    read_png,
    read_text,
    to_png,
    to_webp,
    to_zip,
    with_labels,
)
from sd_tpu.request import AnyModelCatalog, Request
from sd_tpu.sampling.samplers import SAMPLERS
from sd_tpu.settings import MAX_PROMPT_LENGTH, MAX_SEED, OVERRIDABLE, Picture, RequestError
from tests.support.asking import make_request

ASKED = dict(
    prompts=('a cat,\nsitting: "proudly"',),
    negative_prompt="blur, fog",
    seed=42,
    guidance=7.0,
    spacing="karras",
    width=768,
    height=512,
)
REQUEST = make_request(**ASKED)
LINE = "Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 42, Size: 768x512"

# --- the text -----------------------------------------------------------------------------------

TRAPS = [
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\0",
    "\x85",
    "\u2028",
    "\u3000",
    '"',
    "\\",
    ",",
    ": ",
    "é",
    "猫",
    "👩\u200d🚀",
    "Negative prompt:",
    "Negative prompt: x",
    LINE,
    "Steps: 1, ",
    'Prompts: "[]"',
    ', Negative: "x"',
]
texts = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(TRAPS)), max_size=6).map("".join)


@st.composite
def owns(draw, common: str) -> dict | None:
    """Any settings of one picture that `Request.check` lets through besides those common ones."""
    values = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "negative_prompt": texts,
                "steps": st.integers(1, 200),
                "guidance": st.floats(0, 50),
                "sampler": st.sampled_from(list(SAMPLERS)),
                "seed": st.integers(0, 2**32 - 1),
                "guidance_start": st.floats(0, 0.5, exclude_max=True),
                "guidance_stop": st.floats(0.5, 1),
                "control_image": st.just("a" * 64),
                "controlnet": texts,
                "control_scale": st.floats(0, 2),
                "detector": st.sampled_from(["", "canny", "scribble", "lineart"]),
                "reference": st.just("b" * 64),
                "ip_adapter": texts,
                "reference_scale": st.floats(0, 2),
                "cache_interval": st.integers(1, 10),
                "width": st.integers(1, 1 << 16),
            },
        )
    )
    spacings = SAMPLERS[values.get("sampler", common)].spacings
    if draw(st.booleans()):
        values["spacing"] = draw(st.sampled_from(["", *spacings]))
    return draw(st.sampled_from([values, None]))


@st.composite
def requests(draw) -> Request:
    """Any request that `Request.check` lets through."""
    sampler = draw(st.sampled_from(list(SAMPLERS)))
    prompts = draw(st.lists(texts, min_size=1, max_size=8))
    if not any(prompt.strip() for prompt in prompts):
        prompts[-1] = "a cat"
    values = {
        "prompts": prompts,
        "negative_prompt": draw(texts),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "steps": draw(st.integers(1, 200)),
        "guidance": draw(st.floats(0, 50)),
        "sampler": sampler,
        "spacing": draw(st.sampled_from(["", *SAMPLERS[sampler].spacings])),
        "guidance_start": draw(st.just(0.0) | st.floats(0, 0.5, exclude_max=True)),
        "guidance_stop": draw(st.just(1.0) | st.floats(0.5, 1)),
        "cache_interval": draw(st.integers(1, 10)),
        "overrides": draw(st.lists(owns(sampler), max_size=len(prompts))),
    }
    sides = st.integers(1, 1 << 16)
    values |= {"model": draw(texts)[:1000].strip(), "height": draw(sides), "width": draw(sides)}
    return Request.check(values, AnyModelCatalog())


CONTROL = (
    "Module: canny, Model: control_v11p_sd15_canny [d14c016b], Weight: 0.8, Resize Mode: "
    "Crop and Resize, Processor Res: 512, Threshold A: 100, Threshold B: 200, "
    "Guidance Start: 0.1, Guidance End: 0.9, Pixel Perfect: False, Control Mode: Balanced"
)


def test_what_a1111s_extension_says_of_a_controlnet_is_understood():
    picture = parse_parameters(f'a cat\n{LINE}, ControlNet 0: "{CONTROL}"').common
    assert (picture.controlnet, picture.detector, picture.control_scale) == (
        "control_v11p_sd15_canny",
        "canny",
        0.8,
    )
    assert (picture.control_start, picture.control_stop, picture.control_image) == (0.1, 0.9, "")
    other = CONTROL.replace("canny,", "openpose_full,").replace(
        "control_v11p_sd15_canny [d14c016b]", "None"
    )
    picture = parse_parameters(f'a cat\n{LINE}, ControlNet 0: "{other}"').common
    assert (picture.controlnet, picture.detector) == ("", "")


def test_a_picture_says_how_much_its_reference_picture_counted():
    text = format_parameters(make_request(**ASKED, reference="b" * 64))
    assert f"Reference picture: {'b' * 64}, Reference strength: 0.6" in text


def test_a_picture_says_what_it_followed_as_a1111s_extension_does():
    request = make_request(
        **ASKED,
        control_image="a" * 64,
        controlnet='my "lines", 2',
        detector="scribble",
        control_scale=1.25,
        control_start=0.1,
    )
    text = format_parameters(request)
    assert parse_parameters(text) == request
    plain = make_request(**ASKED, control_image="a" * 64, controlnet="lines")
    assert (
        'ControlNet 0: "Module: none, Model: lines, Weight: 1, Guidance Start: 0, Guidance End: 1"'
    ) in format_parameters(plain)
    assert "ControlNet" not in format_parameters(REQUEST)


@pytest.mark.slow("tries 150 requests")
@settings(max_examples=150, deadline=None, database=None)
@given(requests())
def test_every_request_comes_back_from_its_text(request):
    assert parse_parameters(format_parameters(request)) == request


def test_an_ordinary_request_is_written_as_a1111_writes_it():
    assert format_parameters(REQUEST, "0123456789") == (
        'a cat,\nsitting: "proudly"\n'
        "Negative prompt: blur, fog\n"
        "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 42, "
        f"Size: 768x512, Model hash: 0123456789, Model: m, Version: sd_tpu {VERSION}"
    )


@pytest.mark.parametrize(
    "model, written",
    [
        ("org/model-1.4", "org/model-1.4"),
        ("a, b", '"a, b"'),
        ('C:\\"x"', '"C:\\\\\\"x\\""'),
        ("a\nSteps: 1", '"a\\nSteps: 1"'),
        ("a  b", "a  b"),
    ],
)
def test_a_value_that_could_be_misread_is_quoted(model, written):
    line = format_parameters(make_request(**ASKED, model=model)).splitlines()[-1]
    assert f"Size: 768x512, Model: {written}, Version: " in line


@pytest.mark.parametrize(
    "prompts, negative, names",
    [
        (("a cat",), "", []),
        (("a 猫\nand a dog, 3: 4",), "no\nfog", []),
        (("a", "b"), "", ["Prompts"]),
        (("", "b"), "fog", ["Prompts"]),
        (("a\r\nb",), "fog", ["Prompts"]),
        (("a",), "fog\0", ["Negative"]),
        (("a\nNegative prompt: b",), "", ["Prompts", "Negative"]),
    ],
)
def test_exact_fields_are_there_only_where_the_plain_text_is_not_enough(prompts, negative, names):
    request = make_request(**{**ASKED, **dict(prompts=prompts, negative_prompt=negative)})
    line = format_parameters(request).splitlines()[-1]
    assert [name for name in ("Prompts", "Negative") if f', {name}: "' in line] == names
    assert parse_parameters(format_parameters(request)) == request


def test_what_a1111_has_no_setting_for_is_written_only_where_it_is_not_the_default():
    exact = format_parameters(REQUEST)
    assert "Guidance" not in exact and "Cache" not in exact
    request = make_request(
        **{**ASKED, **dict(guidance_start=0.25, guidance_stop=0.75, cache_interval=3)}
    )
    text = format_parameters(request)
    assert "Guidance start: 0.25, Guidance stop: 0.75, Cache interval: 3, Version" in text
    assert parse_parameters(text) == request and parse_parameters(exact) == REQUEST
    with pytest.raises(RequestError, match="Cache interval should be from 1 to 10, not 0"):
        parse_parameters(text.replace("Cache interval: 3", "Cache interval: 0"))


def test_what_no_request_can_set_is_written_and_is_no_part_of_the_request():
    text = format_parameters(REQUEST, token_downsampling=2)
    assert "Model: m, Token downsampling: 2, " in text
    assert parse_parameters(text) == REQUEST


@pytest.mark.parametrize(
    ("named", "drawn_with"), [(1, 1), (2, 2), (16, 16), (0, 1), (123, 1), ("x", 1), ("9" * 5000, 1)]
)
def test_the_token_downsampling_of_a_text_is_read_for_whoever_asks(named, drawn_with):
    assert parse_token_downsampling(format_parameters(REQUEST)) == 1
    text = format_parameters(REQUEST, "", 2).replace("downsampling: 2", f"downsampling: {named}")
    assert parse_token_downsampling(text) == drawn_with
    with pytest.raises(RequestError, match="no picture settings"):
        parse_token_downsampling("a cat")


def test_the_text_of_several_prompts_shows_them_to_people_too():
    request = make_request(**{**ASKED, **dict(prompts=("a cat", "", "a dog"))})
    assert format_parameters(request).startswith("a cat\na dog\nNegative prompt: blur, fog\n")


def test_own_settings_are_a_field_that_says_what_differs_and_nothing_else_changes():
    three = {**ASKED, "prompts": ("a cat", "", "a dog", "a hen")}
    mixed = make_request(**three, overrides=(None, None, dict(steps=30, sampler="lcm", spacing="")))
    field = json.dumps('[null, null, {"steps": 30, "sampler": "lcm", "spacing": ""}, null]')
    text = format_parameters(mixed)
    assert text == format_parameters(make_request(**three)) + f", Own settings: {field}"
    assert parse_parameters(text) == mixed


def test_a_text_of_before_a_request_was_made_of_pictures_reads_the_same():
    text = (
        "a\nb\nNegative prompt: fog\nSteps: 9, Sampler: Heun, Schedule type: Karras, "
        "CFG scale: 3, Seed: 4294967295, Size: 64x96, Cache interval: 2, Model: m, "
        'Version: sd_tpu 0.1.0, Prompts: "[\\"a\\", \\"\\", \\"b\\"]", Own settings: '
        '"[null, null, {\\"sampler\\": \\"lcm\\", \\"spacing\\": \\"\\"}]"'
    )
    first = Picture(
        prompt="a",
        negative_prompt="fog",
        steps=9,
        sampler="heun",
        spacing="karras",
        guidance=3.0,
        seed=MAX_SEED,
        width=64,
        height=96,
        cache_interval=2,
        model="m",
    )
    last = dataclasses.replace(first, prompt="b", sampler="lcm", spacing="", seed=1)
    assert parse_parameters(text) == Request((first, None, last))


def test_one_picture_of_a_mixed_request_is_written_as_if_it_had_been_asked_alone():
    own = dict(steps=30, guidance=2.0, sampler="heun", seed=5, negative_prompt="fog", spacing="")
    mixed = make_request(**{**ASKED, **dict(prompts=("a", "b"), overrides=(None, own))})
    text = format_parameters(mixed.only(1))
    assert text.startswith("b\nNegative prompt: fog\nSteps: 30, Sampler: Heun, CFG scale: 2, ")
    assert "Own" not in text


def test_the_longest_request_of_all_comes_back_from_a_png():
    longest = "👩" * MAX_PROMPT_LENGTH
    owns = [dict(negative_prompt=longest[:-1] + str(index)) for index in range(8)]
    request = Request.check(
        {"prompts": [longest] * 8, "negative_prompt": longest, "overrides": owns}, Picture()
    )
    assert read_png(to_png(PIXELS, request)) == request


@pytest.mark.parametrize(
    "sampler, schedule, key, spacing",
    [
        ("Euler a", None, "euler_ancestral", None),
        ("Euler", "Automatic", "euler", None),
        ("Euler", "Uniform", "euler", "linspace"),
        ("Euler", "SGM Uniform", "euler", "trailing"),
        ("Euler", "sgm_uniform", "euler", "trailing"),
        ("DPM++ 2M Karras", None, "dpmpp_2m", "karras"),
        ("DPM++ 2M Karras", "Automatic", "dpmpp_2m", "karras"),
        ("DPM++ 2M Karras", "Exponential", "dpmpp_2m", "karras"),
        ("DPM++ 2M SDE Exponential", None, "dpmpp_2m_sde", "exponential"),
        ("DPM2 Karras", None, "kdpm2", "karras"),
        ("DPM++ 2M", "Karras", "dpmpp_2m", "karras"),
        ("PLMS", None, "pndm", None),
        ("UniPC", None, "unipc", None),
        ("dpmpp_3m", "leading", "dpmpp_3m", "leading"),
    ],
)
def test_a1111s_names_of_samplers_and_schedules_are_understood(sampler, schedule, key, spacing):
    line = LINE.replace("Euler a", sampler)
    if schedule:
        line = line.replace(", CFG", f", Schedule type: {schedule}, CFG")
    (picture,) = parse_parameters("a cat\n" + line).pictures
    assert (picture.sampler, picture.spacing) == (key, spacing or "")


def test_a1111s_own_text_is_read_and_what_means_nothing_here_is_ignored():
    text = (
        "masterpiece, (a cat:1.2), <lora:x:1>\r\nsecond line\r\n"
        "Negative prompt: blur,\r\nfog\r\n"
        "Steps: 25, Sampler: DPM++ 2M SDE Karras, CFG scale: 6.5, Seed: 3735928559, "
        'Size: 640x960, Model hash: 6ce0161689, Model: "v1-5, pruned", Clip skip: 2, '
        'Lora hashes: "x: 3a, y: 4b", Hashes: {"vae": "73", "model": "6c"}, Version: v1.10.1\r\n'
    )
    assert parse_parameters(text) == make_request(
        prompts=("masterpiece, (a cat:1.2), <lora:x:1>\nsecond line",),
        negative_prompt="blur,\nfog",
        steps=25,
        sampler="dpmpp_2m_sde",
        spacing="karras",
        guidance=6.5,
        seed=3735928559,
        width=640,
        height=960,
        model="v1-5, pruned",
        clip_skip=2,
    )


BAD_TEXTS = {
    "nothing": ("", "The text holds no picture settings: no line begins with 'Steps:'."),
    "prose": ("a cat\nand a dog", "The text holds no picture settings"),
    "settings in prose": (f"a cat and {LINE}", "The text holds no picture settings"),
    "steps alone": ("a cat\nSteps: 20", "The picture's settings lack CFG scale, Sampler,"),
    "no prompt": (LINE, "There is no prompt yet"),
    "sampler": (LINE.replace("Euler a", "DPM fast"), "Sampler 'dpm fast' is unknown; there are"),
    "schedule": (LINE + ", Schedule type: Beta", "Spacing 'beta' is unknown; there are"),
    "seed": (LINE.replace("42", "-1"), "Seed should be from 0 to 4294967295, not -1."),
    "huge seed": (LINE.replace("42", "9" * 5000), "Seed should be a whole number, not '999"),
    "steps": (LINE.replace("20", "many"), "Steps should be a whole number, not 'many'."),
    "guidance": (LINE.replace("7,", "nan,"), "Guidance should be a number, not 'nan'."),
    "size": (LINE.replace("768x512", "big"), "The picture's size should be like 512x512"),
    "no size": (LINE.replace("768x512", "0x0"), "Height should be from 1 to 65536, not 0."),
    "garbled": (LINE + ", Prompts: [", "The picture's settings are garbled: Prompts."),
    "deep": (f'{LINE}, Prompts: "{"[" * 200_000}"', "The picture's settings are garbled: Prompts."),
    "nine": (f'{LINE}, Prompts: "{[1] * 9}"', "There are 9 prompts; at most 8 fit."),
    "numbers": (f'{LINE}, Prompts: "[1]"', "Prompt 1 should be text, not int."),
    "one text": (f'{LINE}, Prompts: "3"', "The prompts should be a list of texts."),
    "own garbled": (
        LINE + ", Own settings: [{",
        "The picture's settings are garbled: Own settings.",
    ),
    "own deep": (f'{LINE}, Own settings: "{"[" * 200_000}"', "The picture's settings are garbled"),
    "own one": (f'{LINE}, Own settings: "{{}}"', "The overrides should be a list, one for each"),
    "own text": (f'{LINE}, Own settings: "[3]"', "The overrides of prompt 1 should be values b"),
    "own two": (f'{LINE}, Own settings: "[null, null]"', "There are 2 overrides for 1 prompts."),
    "own name": (
        LINE + ", Own settings: " + json.dumps('[{"' + "x" * 99_999 + '": 1}]'),
        f"Unknown settings of prompt 1: {'x' * 40}.",
    ),
    "own value": (
        LINE + ", Own settings: " + json.dumps('[{"steps": NaN}]'),
        "Steps of prompt 1 should be a whole number, not nan.",
    ),
    "own size": (
        LINE + ", Own settings: " + json.dumps('[{"width": 0}]'),
        "Width of prompt 1 should be from 1 to 65536, not 0.",
    ),
    "too long": ("a" * (1 << 21), "The text is far too long"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_text_that_is_no_request_is_refused_in_one_sentence(case):
    text, sentence = BAD_TEXTS[case]
    with pytest.raises(RequestError) as caught:
        parse_parameters(text if case in ("no prompt", "nothing") else f"a cat\n{text}")
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


names = st.sampled_from([*OVERRIDABLE, "a\nb", "\u202e"]) | st.text(max_size=9)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from([*SAMPLERS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
)


@settings(max_examples=100, deadline=None, database=None)
@given(anything | st.lists(st.dictionaries(names, anything, max_size=3), max_size=1))
def test_whatever_stands_for_own_settings_is_read_or_refused_in_one_short_sentence(value):
    text = f"a cat\n{LINE}, Own settings: {json.dumps(json.dumps(value))}"
    try:
        request = parse_parameters(text)
        assert parse_parameters(format_parameters(request)) == request
    except RequestError as error:
        assert len(str(error)) < 300 and str(error).isprintable()


@pytest.mark.parametrize(
    "piece", ["a ", "a, ", 'a: "\\", ', 'a: "', "a: ", ", ", "\n", "Negative prompt:", "Steps: "]
)
def test_no_text_takes_long_to_read(piece):
    begun = time.process_time()
    for text in (LINE + ", " + piece * (900_000 // len(piece)), piece * 100_000):
        with contextlib.suppress(RequestError):
            parse_parameters("a cat\n" + text)
    assert time.process_time() - begun < 3


def test_a_seed_of_64_bits_is_its_lower_half():
    text = "a cat\n" + re.sub("Seed: [0-9]+", f"Seed: {3 + 2**40}", LINE)
    assert parse_parameters(text).seed == 3
    with pytest.raises(RequestError, match="Seed should be from"):
        parse_parameters(text.replace(str(3 + 2**40), str(1 << 64)))


def test_what_cannot_be_used_of_a_text_costs_nothing_else():
    text = (
        "a cat\nNegative prompt: fog\nSteps: 250, Sampler: Undefined, Schedule type: Beta, "
        "CFG scale: 6, Seed: 1125899906842625, Size: 512 x 768, Clip skip: 99"
    )
    request, unusable = parse_usable(text)
    assert unusable == ["Clip skip", "Sampler", "Schedule type", "Steps"]
    common = request.common
    assert (request.prompts, common.negative_prompt, common.guidance) == (("a cat",), "fog", 6)
    assert (common.seed, common.width, common.height) == (1, 512, 768)
    _, unusable = parse_usable("a cat\nSteps: 9, Size: tall")
    assert unusable == ["CFG scale", "Sampler", "Seed", "Size"]
    good = format_parameters(make_request(**ASKED))
    assert parse_usable(good) == (parse_parameters(good), [])
    with pytest.raises(RequestError):
        parse_parameters(text)


# --- PNG ----------------------------------------------------------------------------------------

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with(*chunks: bytes, width: int = 1, height: int = 1) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            *chunks,
            chunk(b"IDAT", zlib.compress(b"\0\0")),
            chunk(b"IEND", b""),
        ]
    )


@settings(max_examples=25, deadline=None, database=None)
@given(requests())
def test_a_png_brings_pixels_and_request_back(request):
    data = to_png(PIXELS, request)
    np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(data))), PIXELS)
    assert read_png(data) == request


@pytest.mark.parametrize("prompt, kind", [("a café", b"tEXt"), ("a 猫", b"iTXt")])
def test_the_chunk_is_latin_text_where_that_is_enough(prompt, kind):
    data = to_png(PIXELS, make_request(**{**ASKED, **dict(prompts=(prompt,))}))
    assert kind + b"parameters\0" in data


def test_a_path_an_open_file_and_bytes_are_read_alike(tmp_path):
    data = to_png(PIXELS, REQUEST)
    (tmp_path / "a.png").write_bytes(data)
    with open(tmp_path / "a.png", "rb") as file:
        assert read_png(file) == REQUEST
    assert read_png(tmp_path / "a.png") == read_png(str(tmp_path / "a.png")) == REQUEST


def jpeg() -> bytes:
    file = BytesIO()
    Image.fromarray(PIXELS).save(file, "JPEG")
    return file.getvalue()


def with_exif(kind: str, comment: bytes = b"", **tags: Any) -> bytes:
    exif, file = Image.Exif(), BytesIO()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    for name, value in tags.items():
        exif[ExifTags.Base[name]] = value
    Image.fromarray(PIXELS).save(file, kind, exif=exif.tobytes())
    return file.getvalue()


FOREIGN = (
    "a café, 猫 🐱\nNegative prompt: fog\n"
    "Steps: 12, Sampler: Euler, CFG scale: 6, Seed: 41, Size: 64x64"
)
LATIN = FOREIGN.replace("猫 🐱", "ñ")


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "AVIF"])
@pytest.mark.parametrize(
    "comment",
    [
        b"UNICODE\0" + FOREIGN.encode("utf-16-be"),
        b"UNICODE\0" + FOREIGN.encode("utf-16-le"),
        b"UNICODE\0" + FOREIGN.encode("utf-16"),
        b"Unicode\0" + FOREIGN.encode() + b"\0\0",
        b"UNICODE\0\xfe\xff" + FOREIGN.encode("utf-16-be") + b"\0",
        b"ASCII\0\0\0" + FOREIGN.encode(),
        b"\0" * 8 + FOREIGN.encode(),
        FOREIGN.encode("utf-8-sig"),
        b"\0" * 8 + FOREIGN.encode("utf-16-le"),
        FOREIGN.encode("utf-16"),
    ],
)
def test_settings_in_exif_are_read_in_the_letters_that_programs_write(kind, comment):
    assert read_text(with_exif(kind, comment)) == FOREIGN


def test_japanese_and_other_places_of_jpegs_and_gifs_are_read_too():
    japanese = FOREIGN.replace("é", "e").replace(" 🐱", "")
    jis = b"JIS\0\0\0\0\0" + japanese.encode("iso2022_jp")
    assert read_text(with_exif("JPEG", jis)) == japanese
    assert read_text(with_exif("WEBP", ImageDescription=LATIN.encode())) == LATIN
    assert read_text(with_exif("WEBP", XPComment=FOREIGN.encode("utf-16-le"))) == FOREIGN
    for kind in ("JPEG", "GIF"):
        file = BytesIO()
        Image.fromarray(PIXELS).save(file, kind, comment=FOREIGN.encode())
        assert read_text(file.getvalue()) == FOREIGN
    camera = with_exif("JPEG", b"ASCII\0\0\0" + b" " * 40, ImageDescription="a photo")
    assert read_text(camera).strip() in ("", "a photo") and not carries_settings(camera)
    both = with_exif("JPEG", b"ASCII\0\0\0made by hand", ImageDescription=FOREIGN.encode())
    assert read_text(both) == FOREIGN, "what holds settings comes first"


@pytest.mark.parametrize(
    "text",
    [
        chunk(b"tEXt", b"parameters\0" + LATIN.encode("latin-1")),
        chunk(b"tEXt", b"parameters\0" + LATIN.encode()),  # which it should not be in
        chunk(b"zTXt", b"parameters\0\0" + zlib.compress(LATIN.encode("latin-1"))),
        chunk(b"zTXt", b"parameters\0\0" + zlib.compress(LATIN.encode())),
        chunk(b"iTXt", b"parameters\0\0\0\0\0" + LATIN.encode()),
        chunk(b"iTXt", b"parameters\0\1\0en\0\0" + zlib.compress(LATIN.encode())),
        chunk(
            b"eXIf",
            with_exif("JPEG", b"UNICODE\0" + LATIN.encode("utf-16-be"))
            .split(b"Exif\0\0", 1)[1]
            .split(b"\xff\xdb", 1)[0],
        ),
    ],
)
def test_the_text_of_a_png_is_found_before_and_behind_its_pixels(text):
    other = chunk(b"zTXt", b"workflow\0\0" + zlib.compress(b"a" * (1 << 21)))
    before = png_with(*[chunk(b"tEXt", b"Comment\0x")] * 300, other, text)
    behind = png_with()[:-12] + other + text + png_with()[-12:]
    assert read_text(before) == read_text(behind) == LATIN


@pytest.mark.parametrize("prompt", ["Ã©", "a cafÃ© Â°"])
def test_latin_letters_that_look_like_utf8_come_back(prompt):
    request = make_request(**{**ASKED, **dict(prompts=(prompt,))})
    assert read_png(to_png(PIXELS, request)) == request


def test_exif_is_read_with_a_workflow_in_it_up_to_a_bound(monkeypatch):
    data = with_exif("WEBP", b"ASCII\0\0\0" + FOREIGN.encode(), Make=b"w" * 1_000_000)
    assert read_text(data) == FOREIGN
    monkeypatch.setattr(images, "MAX_EXIF_BYTES", 1_000_000)
    assert not read_text(data)


def overlapping(entries: int) -> bytes:
    """EXIF whose every entry is nearly all of it."""
    size = 12 * entries
    return (
        b"Exif\0\0II*\0\x08\0\0\0"
        + struct.pack("<H", entries)
        + b"".join(struct.pack("<HHII", 0x9000 + i, 2, size - 8, 8) for i in range(entries))
        + b"\0" * 4
    )


@pytest.mark.parametrize("kind", ["WEBP", "JPEG", "TIFF"])
def test_exif_that_names_its_bytes_again_and_again_is_not_read_again_and_again(kind, monkeypatch):
    exif, read, file = overlapping(3000), [], BytesIO()  # 100 MB if each were read
    if kind == "TIFF":
        data = exif[6:]
    else:
        Image.fromarray(PIXELS).save(file, kind, exif=exif)
        data = file.getvalue()
    monkeypatch.setattr(
        TiffImagePlugin.ImageFileDirectory_v2,
        "load",
        (
            lambda load: (
                lambda self, fp: (load(self, fp), read.extend(map(len, self._tagdata.values())))
            )
        )(TiffImagePlugin.ImageFileDirectory_v2.load),
    )
    with contextlib.suppress(RequestError), warnings.catch_warnings(action="ignore"):
        read_text(data)
    assert sum(read) < 5_000_000 or kind == "JPEG"  # whose EXIF has 64 KiB at most


def test_a_jpeg_has_one_piece_of_exif():
    data = with_exif("JPEG", b"ASCII\0\0\0" + FOREIGN.encode())
    more = b"\xff\xe1\xff\xffExif\0\0" + b"x" * (0xFFFF - 8)
    with images.open_picture(data[:2] + more * 9 + data[2:]) as image:
        assert len(image.info["exif"]) < 1 << 16


CHINESE = FOREIGN.replace("a café, 猫 🐱", "一个人，一　" * 60)


@pytest.mark.parametrize(
    "comment",
    [
        *(
            code + CHINESE.encode(encoding)
            for code in (b"UNICODE\0", b"\0" * 8, b"", b"ASCII\0\0\0")
            for encoding in ("utf-16-be", "utf-16-le", "utf-8")
        ),
        b"ASCII\0\0\0" + LATIN.encode("latin-1"),
        LATIN.encode("latin-1"),
    ],
)
def test_the_encoding_is_that_in_which_there_is_a_line_of_settings(comment):
    assert read_text(with_exif("WEBP", comment)) in (CHINESE, LATIN)


@pytest.mark.parametrize(
    "comment",
    [
        *(
            b"UNICODE\0" + text.encode(encoding)
            for text in ("一个人，一　" * 60, "伀丽")
            for encoding in ("utf-16-be", "utf-16-le")
        ),
        b"\0" * 8 + "一个人一".encode("utf-16-le"),
        b"ASCII\0\0\0caf\xe9",
        "Steps: 2, Seed: 3, 猫".encode("cp932"),
    ],
)
def test_what_is_in_an_unknown_encoding_is_not_told(comment):
    assert read_text(with_exif("WEBP", comment)) == ""


HEX = with_exif("JPEG", b"UNICODE\0" + FOREIGN.encode("utf-16-be"))
HEX = HEX[HEX.index(b"Exif") : HEX.index(b"\xff\xdb")]


@pytest.mark.parametrize(
    "text",
    [
        chunk(b"tEXt", b"Parameters\0" + LATIN.encode()),
        chunk(b"tEXt", b"Comment\0" + LATIN.encode()),
        chunk(b"tEXt", b"Description\0" + LATIN.encode("latin-1")),
        chunk(b"iTXt", b"UserComment\0\0\0\0\0" + FOREIGN.encode()),
        chunk(
            b"zTXt",
            b"Raw profile type exif\0\0"
            + zlib.compress(b"\nexif\n%8d\n" % len(HEX) + HEX.hex().encode() + b"\n"),
        ),
        chunk(
            b"zTXt",
            b"Raw profile type APP1\0\0"
            + zlib.compress(b"\ngeneric profile\n%8d\n" % len(HEX) + HEX.hex().encode() + b"\n"),
        ),
    ],
)
def test_settings_of_a_png_are_found_under_the_names_that_programs_give_them(text):
    assert read_text(png_with(text)) in (LATIN, FOREIGN)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "JPEG2000", "PPM", "TGA", "BMP"])
def test_a_picture_of_any_kind_carries_a_text_or_none(kind):
    file = BytesIO()
    Image.fromarray(PIXELS).save(file, kind)
    assert read_text(file.getvalue()).partition(" version")[0] in ("", "Created by OpenJPEG")


def test_a_pipe_is_no_picture(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(RequestError, match="not a regular file"):
        read_png(tmp_path / "a.png")


NO_PNG = "The file is not a picture, or is damaged."
NO_TEXT = "The picture carries no settings: there are none in its texts or its EXIF data."
BOMB = chunk(b"zTXt", b"parameters\0\0" + zlib.compress(b"a" * (1 << 22)))
BAD_FILES = {
    "empty": (b"", NO_PNG),
    "text": (b"a cat\nSteps: 20", NO_PNG),
    "JPEG": (jpeg(), NO_TEXT),
    "settings of nobody": (with_exif("JPEG", b"ASCII\0\0\0\x83\x76\xff"), NO_TEXT),
    "header only": (SIGNATURE, "The file is not a whole PNG picture."),
    "damaged": (
        to_png(PIXELS, REQUEST).replace(b"IDAT", b"IDAT\0", 1),
        "The file is not a whole PNG picture.",
    ),
    "no pixels": (
        to_png(PIXELS, REQUEST)[: 8 + 25] + chunk(b"IEND", b""),
        "The file is not a whole PNG picture.",
    ),
    "pieces": (png_with(chunk(b"tEXt", b"a\0") * MAX_CHUNKS), "The PNG is in more than 65536 pie"),
    "compressed bomb": (png_with(BOMB), "The file is not a whole PNG picture."),
    "plain": (png_with(), NO_TEXT),
    "foreign text": (png_with(chunk(b"tEXt", b"parameters\0a cat")), "The text holds no picture s"),
    "pixels": (png_with(width=60_000, height=60_000), "The picture has far too many pixels."),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_without_a_request_is_refused_in_one_sentence(case):
    data, sentence = BAD_FILES[case]
    with pytest.raises(RequestError) as caught:
        read_png(data)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_a_file_that_is_too_large_is_refused_unless_it_was_drawn_here(monkeypatch):
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 100)
    data = to_png(PIXELS, REQUEST)
    assert read_png(data) == REQUEST
    with pytest.raises(RequestError, match=r"^The file is larger than"):
        read_png(BytesIO(data))


def test_a_missing_file_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(RequestError, match=r"^The file cannot be read \(No such file .*\)\.$"):
        read_png(tmp_path / "none.png")


def test_a_truncated_png_is_refused_wherever_it_ends():
    data = to_png(PIXELS, REQUEST)
    for end in range(len(SIGNATURE), len(data) - 8, 7):
        with pytest.raises(RequestError, match=r"^The file is not a whole PNG picture\.$"):
            read_png(data[:end])


def test_reading_a_request_decodes_no_pixels(monkeypatch):
    def load(image):
        raise AssertionError("pixels were decoded")

    data = to_png(PIXELS, REQUEST)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    assert read_png(data) == REQUEST


# --- for showing and for taking away ------------------------------------------------------------


def test_a_webp_shows_the_picture_in_fewer_bytes_and_says_nothing_about_it():
    smooth = np.asarray(Image.fromarray(PIXELS).resize((240, 160), Image.Resampling.BICUBIC))
    data = to_webp(smooth, 90)
    with Image.open(BytesIO(data)) as image:
        assert image.format == "WEBP" and KEY not in image.info
        shown = np.asarray(image.convert("RGB"))
    assert np.abs(shown.astype(int) - smooth).mean() < 8
    assert len(to_webp(smooth, 70)) < len(data) < len(to_png(smooth, REQUEST))
    with Image.open(BytesIO(to_webp(PIXELS, None))) as image:
        assert np.array_equal(image.convert("RGB"), PIXELS)


def test_a_zip_brings_every_file_back_byte_for_byte():
    files = {"1-a-cat.png": to_png(PIXELS, REQUEST), "2-猫.png": to_png(255 - PIXELS, REQUEST)}
    with zipfile.ZipFile(BytesIO(to_zip(files))) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == files


@pytest.mark.parametrize(
    "width, height, times, band",
    [(64, 64, 4, 26), (512, 512, 1, 51), (256, 512, 1, 51), (100, 40, 3, 19)],
)
def test_a_label_stands_below_its_picture_which_is_enlarged_if_it_is_narrow(
    width, height, times, band
):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    for text in ("20", "DPM++ 2M SDE", "seed " * 99):
        [labelled] = with_labels([pixels], [text])
        assert labelled.shape == (height * times + band, width * times, 3)
        assert np.array_equal(labelled[: height * times], enlarged(pixels, 256))
        below = labelled[height * times :]
        assert (below < 128).any() and (below[0] == BLANK).all()


def letters(labelled: np.ndarray, width: int) -> tuple[int, int, int]:
    """Where the label of a picture begins and ends, and how high it is, in pixels."""
    ink = labelled[width:, :, 0] < 200
    rows, columns = np.nonzero(ink.any(axis=1))[0], np.nonzero(ink.any(axis=0))[0]
    return columns[0], columns[-1], rows[-1] - rows[0] + 1


def test_labels_stand_in_the_middle_and_are_as_small_as_the_longest_needs():
    pixels = np.zeros((256, 256, 3), np.uint8)
    (alone,) = with_labels([pixels], ["H"])
    short, nothing, long = with_labels([pixels, None, pixels], ["H", "", "H" * 30])
    assert nothing is None
    assert abs(sum(letters(short, 256)[:2]) / 2 - 127.5) <= 1
    assert letters(short, 256)[2] == letters(long, 256)[2] < letters(alone, 256)[2]
    assert make_grid([short, None, long]).shape == (256 + 26, 3 * 256, 3)


def test_a_label_takes_no_longer_however_long_it_is(monkeypatch):
    measured, getlength = [], ImageFont.FreeTypeFont.getlength
    monkeypatch.setattr(
        ImageFont.FreeTypeFont,
        "getlength",
        lambda font, text: (measured.append(len(text)), getlength(font, text))[1],
    )
    with_labels([np.zeros((64, 64, 3), np.uint8)] * 8, ["negative " * 444] * 8)
    assert len(measured) < 4000 and max(measured) <= 256 + 1


def test_a_label_that_no_letters_are_small_enough_for_ends_in_an_ellipsis():
    pixels = np.zeros((256, 256, 3), np.uint8)
    cut, whole = (with_labels([pixels], [text])[0] for text in ("H" * 99, "H" * 40))
    begin, end, _ = letters(cut, 256)
    assert begin >= 0 and end <= 255
    last = cut[256:, end - 5 : end + 1, 0] < 200  # dots on the line, and nothing above
    assert last[-14:].any() and not last[:13].any()
    assert (whole[256:269] < 200).any()


# --- grids --------------------------------------------------------------------------------------


def picture(value: int) -> np.ndarray:
    return np.full((4, 6, 3), value, np.uint8)


@pytest.mark.parametrize(
    "count, rows, cols", [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 1, 4), (5, 2, 4), (8, 2, 4)]
)
def test_a_grid_has_two_rows_of_four_and_fewer_pictures_take_less(count, rows, cols):
    grid = make_grid([picture(i) for i in range(count)])
    assert grid.shape == (4 * rows, 6 * cols, 3) and grid.dtype == np.uint8
    places = grid[::4, ::6, 0].ravel()
    assert places.tolist() == [*range(count), *[BLANK] * (rows * cols - count)]


def test_pictures_are_whole_in_a_grid():
    pictures = [PIXELS, PIXELS[::-1], None, PIXELS[:, ::-1], 255 - PIXELS]
    grid = make_grid(pictures)
    for i, pixels in enumerate(pictures):
        top, left = 16 * (i // 4), 24 * (i % 4)
        expected = np.full_like(PIXELS, BLANK) if pixels is None else pixels
        np.testing.assert_array_equal(grid[top : top + 16, left : left + 24], expected)


def test_a_picture_that_is_not_there_leaves_its_place_blank():
    grid = make_grid([None, picture(1), None])
    assert grid[0, ::6, 0].tolist() == [BLANK, 1, BLANK]


def test_between_the_pictures_of_a_grid_there_may_be_a_gap():
    grid = make_grid([picture(i) for i in range(6)], gap=3)
    assert grid.shape == (4 * 2 + 3, 6 * 4 + 3 * 3, 3)
    assert grid[0, 5, 0] == 0 and (grid[:, 6:9] == BLANK).all() and (grid[4:7] == BLANK).all()
    assert grid[7, 9, 0] == 5


def test_a_picture_is_enlarged_smoothly_and_a_large_one_stays_as_it_is():
    step = np.zeros((4, 8, 3), np.uint8)
    step[:, 4:] = 200
    larger = enlarged(step, 60)
    assert larger.shape == (32, 64, 3)
    assert len(np.unique(larger[16, 24:40, 0])) > 4, "colours run into each other"
    assert abs(int(larger[16, 2, 0])) < 10 and abs(int(larger[16, 61, 0]) - 200) < 10
    assert np.array_equal(enlarged(step, 8), step)


@pytest.mark.parametrize("pictures", [[], [None], [picture(0)] * 9, [picture(0), PIXELS]])
def test_what_makes_no_grid_is_refused(pictures):
    with pytest.raises(ValueError, match="1 to 8 pictures of one size"):
        make_grid(pictures)


def test_pictures_of_several_sizes_are_framed_for_a_grid():
    wide, high = np.zeros((2, 6, 3), np.uint8), np.zeros((5, 2, 3), np.uint8)
    first, none, second = framed([wide, None, high])
    assert none is None and first.shape == second.shape == (5, 6, 3)
    assert (first[1:3] == 0).all() and (np.delete(first, (1, 2), 0) == BLANK).all()
    assert (second[:, 2:4] == 0).all() and (np.delete(second, (2, 3), 1) == BLANK).all()


def test_a_picture_says_what_it_began_with_as_a1111_does():
    plain = make_request(["a cat"], strength=0.6)
    assert "Denoising strength: 0.6" in format_parameters(plain)
    began = make_request(["a cat"], init_image="a" * 64, mask="b" * 64)
    text = format_parameters(began)
    assert "Denoising strength: 0.75" in text and "Mask blur: 4" in text
    assert parse_parameters(text) == began
