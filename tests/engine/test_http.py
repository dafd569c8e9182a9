"""The APIs of A1111 and OpenAI, as the users of their own clients call them."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from io import BytesIO

import httpx
import numpy as np
import openai
import pytest
import webuiapi
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

from sd_tpu.http import API_PATHS, create_api
from sd_tpu.http.a1111 import _model_called
from sd_tpu.http.access import Access
from sd_tpu.http.gate import Gate, Names
from sd_tpu.pictures.images import read_png
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from sd_tpu.serving.scheduler import Limits
from sd_tpu.settings import LARGER_STRENGTH
from sd_tpu.styles import Styles
from tests.support.networks import make_adapter, make_controlnet, make_encoder
from tests.support.serving import PATIENCE, served, until

PHOTO = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
HOLE = np.zeros((40, 48), np.uint8)
HOLE[12:28, 20:30] = 255
MANY = 50  # more than a server has threads for handlers
NO_LIMITS = httpx.Limits(max_connections=None)


@pytest.fixture(scope="module")
def address(page_engine) -> Iterator[str]:
    """Where the APIs are served to this machine."""
    assert page_engine.ready.wait(300)
    with served(create_api(page_engine, Access())) as address:
        yield address


@pytest.fixture(scope="module")
def a1111(address) -> webuiapi.WebUIApi:
    """A program of A1111's users."""
    return webuiapi.WebUIApi(baseurl=f"{address}/sdapi/v1", sampler="Euler", steps=2)


@pytest.fixture(scope="module")
def client(address) -> Iterator[openai.OpenAI]:
    """A program of OpenAI's users."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client


# --- A1111 --------------------------------------------------------------------------------------


def test_half_an_emoji_is_drawn_without_it_and_said_again(address):
    answer = httpx.post(
        f"{address}/sdapi/v1/txt2img",
        timeout=PATIENCE,
        headers={"content-type": "application/json"},
        content=r'{"prompt": "a cat \ud83d", "steps": 2}',
    )
    assert answer.status_code == 200 and len(answer.json()["images"]) == 1
    assert answer.json()["parameters"]["prompt"] == "a cat \ud83d"


@pytest.mark.parametrize("name", ["enable_hr", "send_images", "include_init_images"])
def test_what_is_neither_true_nor_false_is_refused(address, name):
    answer = httpx.post(
        f"{address}/sdapi/v1/img2img"
        if name.startswith("include")
        else f"{address}/sdapi/v1/txt2img",
        json={"prompt": "a", name: "perhaps"},
    )
    assert answer.status_code in (400, 422)
    assert f"{name} should be true or false, not 'perhaps'." in answer.text


def test_webuiapi_draws_batches_whose_seeds_run_on_and_whose_files_say_how(a1111):
    result = a1111.txt2img(
        prompt="a {red|green} fox",
        negative_prompt="blur",
        seed=7,
        cfg_scale=3,
        sampler_name="Euler",
        scheduler="Karras",
        steps=3,
        width=32,
        height=32,
        batch_size=2,
        n_iter=2,
        styles=["Bright", "Ink"],
    )
    assert result.info["all_seeds"] == [7, 8, 9, 10] and len(result.images) == 4
    assert (
        result.info["all_prompts"]
        == ["ink drawing of a red fox, bright", "ink drawing of a green fox, bright"] * 2
    )
    file = BytesIO(base64.b64decode(result.json["images"][3]))
    made = read_png(file).pictures[0]
    assert (made.prompt, made.negative_prompt, made.seed, made.guidance, made.steps) == (
        "ink drawing of a green fox, bright",
        "blur, photo",
        10,
        3,
        3,
    )
    assert (made.sampler, made.spacing) == ("euler", "karras")
    in_lines = base64.encodebytes(file.getvalue()).decode()
    told = httpx.post(f"{a1111.baseurl}/png-info", json={"image": in_lines}).json()
    assert told["parameters"]["prompt"] == "ink drawing of a green fox, bright"
    told = a1111.png_info(Image.open(file))
    assert told.info.startswith(
        "ink drawing of a green fox, bright\nNegative prompt: blur, photo"
        "\nSteps: 3, Sampler: Euler, "
    )
    assert told.parameters["seed"] == 10


def test_a_picture_is_the_same_whichever_api_asked_for_it(a1111, client):
    one = a1111.txt2img(prompt="a fox", seed=3, width=32, height=32, cfg_scale=2).image
    answer = client.images.generate(
        prompt="a fox",
        size="32x32",
        extra_body={"seed": 3, "steps": 2, "sampler": "euler", "guidance": 2},
    )
    other = Image.open(BytesIO(base64.b64decode(answer.data[0].b64_json)))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (dict(steps=0), "Steps should be from 1 to 200, not 0."),
        (dict(sampler_name="magic"), "Sampler 'magic' is unknown"),
        (dict(enable_hr=True), "hr_upscaler 'Latent' is unknown; there are None, Lanczos."),
        (
            dict(enable_hr=True, hr_upscaler="Lanczos", hr_sampler_name="Heun", hr_prompt="a dog"),
            "This server does not have, with enable_hr: hr_sampler_name, hr_prompt.",
        ),
        (
            dict(enable_hr=True, hr_upscaler="Lanczos", hr_scale=0.5),
            "hr_scale should be from 1 to 8",
        ),
        (
            dict(enable_hr=True, hr_upscaler="Lanczos", hr_scale=8, width=64),
            "512x256 is too large: here",
        ),
        (
            dict(enable_hr=True, hr_upscaler="Lanczos", hr_resize_x=51),
            "51x48 is not possible: this model makes pictures whose sides are multiples of 8.",
        ),
        (
            dict(enable_hr=True, hr_upscaler="Lanczos", denoising_strength=0),
            "A strength of 0 leaves none of 200 steps to take.",
        ),
        (
            dict(enable_hr=True, hr_upscaler="Lanczos", hr_second_pass_steps=150),
            "hr_second_pass_steps should be from 0 to 140, not 150.",
        ),
        (
            dict(restore_faces=True, tiling=True),
            "This server does not have: restore_faces, tiling.",
        ),
        (dict(alwayson_scripts={"ADetailer": {"args": [True]}}), "alwayson_scripts (ADetailer)"),
        (
            dict(alwayson_scripts={"ADetailer": {"args": [True, {"ad_model": "face"}]}}),
            "(ADetailer)",
        ),
        (
            dict(override_settings={"eta_noise_seed_delta": 2}),
            "This server does not have the options: eta_noise_seed_delta.",
        ),
        (
            dict(override_settings={"CLIP_stop_at_last_layers": 0}),
            "Clip skip should be from 1 to 12, not 0.",
        ),
        (dict(override_settings={"sd_model_checkpoint": "nothing"}), "There is no model 'nothing'"),
        (dict(styles=["Oil"]), "Style 'Oil' is unknown; there are Ink, Bright."),
        (dict(batch_size=9), "batch_size should be from 1 to 8, not 9."),
        (dict(batch_size=8, n_iter=100), "800 pictures were asked for; at most 64"),
    ],
)
def test_webuiapi_is_refused_with_the_sentence_that_names_what_is_wrong(a1111, asked, sentence):
    with pytest.raises(RuntimeError) as refused:
        a1111.txt2img(**{"prompt": "a fox", "width": 32, "height": 32, **asked})
    status, text = refused.value.args
    assert status == 400 and sentence in json.loads(text)["detail"]


def test_webuiapi_skips_layers_for_a_request_or_until_it_is_told_otherwise(a1111, page_engine):
    def skips(**asked) -> int:
        result = a1111.txt2img(prompt="a fox", seed=3, width=32, height=32, **asked)
        told = a1111.png_info(result.image).parameters["clip_skip"]
        (made,) = read_png(BytesIO(base64.b64decode(result.json["images"][0]))).pictures
        assert np.array_equal(
            result.image,
            drawn_by(
                page_engine,
                width=32,
                height=32,
                seed=3,
                guidance=7.0,
                sampler="euler",
                steps=2,
                clip_skip=made.clip_skip,
            )[0],
        )
        assert told == result.info["clip_skip"] == made.clip_skip
        return made.clip_skip

    two = {"CLIP_stop_at_last_layers": 2}
    assert [skips(override_settings=two), skips()] == [2, 1]
    a1111.set_options(two)
    try:
        assert a1111.get_options()["CLIP_stop_at_last_layers"] == skips() == 2
        assert skips(override_settings={"CLIP_stop_at_last_layers": 1}) == 1
    finally:
        a1111.set_options({"CLIP_stop_at_last_layers": 1})


def test_what_sillytavern_sends_is_drawn_and_what_is_told_of_it_can_be_asked_for_again(address):
    """All that its extension for pictures says, with its own defaults but for the size."""

    def ask(route: str, **asked) -> dict:
        answer = httpx.post(f"{address}/sdapi/v1/{route}", json=asked, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return answer.json()

    (picture,) = ask(
        "txt2img",
        url="http://localhost:7860",
        auth="",
        prompt="a fox",
        negative_prompt="blurry",
        sampler_name="DDIM",
        scheduler="normal",
        steps=2,
        cfg_scale=7,
        width=32,
        height=32,
        restore_faces=False,
        enable_hr=False,
        hr_upscaler="Latent",
        hr_scale=1,
        hr_additional_modules=[],
        denoising_strength=0.7,
        hr_second_pass_steps=0,
        override_settings_restore_afterwards=True,
        clip_skip=2,
        save_images=True,
        send_images=True,
        override_settings={"CLIP_stop_at_last_layers": 2},
        do_not_save_grid=False,
        do_not_save_samples=False,
    )["images"]
    told = ask("png-info", image=picture)["parameters"]
    assert (told["clip_skip"], told["sampler_name"], told["scheduler"]) == (2, "ddim", "linspace")
    assert ask("txt2img", **told)["images"] == [picture]


@pytest.mark.parametrize(
    "asked",
    [{"step": 3}, {"mask_round": False, "seed_resize_from_h": 512, "disable_extra_networks": True}],
)
def test_what_nobody_knows_or_would_change_pictures_is_refused_by_name(address, asked):
    answer = httpx.post(f"{address}/sdapi/v1/txt2img", json={"prompt": "a", **asked})
    assert (answer.status_code, answer.json()["detail"]) == (
        400,
        f"This server does not have: {', '.join(asked)}.",
    )


IDLE = dict(
    subseed=9,
    subseed_strength=0,
    eta=0,
    s_noise=0.9,
    s_tmin=0.5,
    comments={"a": "b"},
    tiling=None,
    refiner_checkpoint="None",
    refiner_switch_at=0.8,
    script_name=None,
    script_args=["a", 1],
    infotext="",
    latent_mask=None,
    init_images=[],
    mask_blur=4,
    resize_mode=0,
    hr_upscaler="Latent",
    alwayson_scripts={
        "ADetailer": {"args": [False, False, {"ad_model": "face_yolov8n.pt"}]},
        "Dynamic Thresholding (CFG Scale Fix)": {"args": [False, True, 7]},
        "Refiner": {"args": []},
        "AnimateDiff": {"args": [{"enable": False, "model": "mm"}]},
        "Soft inpainting": None,
        "Hypertile": {},
        "adetailer": {"args": [True, False, {"ad_model": "None"}]},
        "controlnet": {"args": [{"enabled": False, "module": "openpose", "colour": 1}, None]},
    },
    override_settings={
        "sd_vae": "Automatic",
        "samples_save": True,
        "save_images_add_number": False,
        "n_rows": 3,
        "token_merging_ratio": 0,
        "eta_noise_seed_delta": 0,
        "sd_model_checkpoint": None,
        "live_previews_enable": False,
        "face_restoration_model": "CodeFormer",
        "samples_format": "png",
        "CLIP_stop_at_last_layers": None,
        "enable_emphasis": True,
    },
)


SCRIPTS = {
    "Seed": {"args": [-1, False, -1, 0, 0, 0]},
    "Sampler": {"args": [20, "Euler", "Beta"]},
    "reactor": {"args": [None, False, "0"]},
    "other": {"args": ["False"]},
    "controlnet": {"args": [{"enabled": "false", "colour": 1}]},
}
OPTIONS = {
    "img2img_background_color": "#ffffff",
    "ESRGAN_tile": 192,
    "fp8_storage": "Disable",
    "hires_fix_refiner_pass": "second pass",
    "realesrgan_enabled_models": ["R-ESRGAN 4x+"],
    "sd_vae_as_default": True,
    "sd_vae_decode_method": "Full",
    "uni_pc_order": 3,
    "disable_all_extensions": "none",
    "ad_max_models": 4,
    "control_net_unit_count": 3,
    "auto_vae_precision": True,
    "lora_preferred_name": "Alias from file",
}
OTHERS = {
    "distilled_cfg_scale": 3.5,
    "hr_distilled_cfg": 3.5,
    "hr_new": "x",
    "enable_hr": "off",
    "vae_type": "Full",
    "request_id": "a1",
    "eta": 0.5,
    "s_noise": 0.9,
}


@pytest.mark.parametrize(
    "asked",
    [
        {"alwayson_scripts": SCRIPTS},
        {"override_settings": OPTIONS},
        {"alwayson_scripts": {"ControlNet": {"args": None}}},
        OTHERS,
        {"alwayson_scripts": {"controlnet": {}}},
        {"seed": 3 + 2**33},
        IDLE,
    ],
)
def test_what_changes_nothing_is_taken_wherever_it_stands(address, page_engine, asked):
    answer = httpx.post(
        f"{address}/sdapi/v1/txt2img",
        timeout=PATIENCE,
        json={
            "prompt": "a fox",
            "seed": 3,
            "width": 32,
            "height": 32,
            "steps": 2,
            "cfg_scale": 7,
            "sampler_name": "Euler",
            **asked,
        },
    )
    assert answer.status_code == 200, answer.text
    picture = Image.open(BytesIO(base64.b64decode(answer.json()["images"][0])))
    assert np.array_equal(
        picture,
        drawn_by(page_engine, width=32, height=32, seed=3, guidance=7.0, sampler="euler", steps=2)[
            0
        ],
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"eta": 0, "sampler_name": "Euler a"},
        {"s_noise": 0.9, "sampler_name": "LCM"},
        {"seed": 1 << 64},
        {"script_name": "X/Y/Z plot", "script_args": [1]},
        {"override_settings": {"enable_emphasis": False}},
        {"override_settings": {"sd_vae": "a.pt"}},
        {"override_settings": {"eta_ancestral": 0}},
        {"eta": 1, "sampler_name": "DDIM"},
        {"eta": 0.5, "sampler_name": "Euler a"},
        {"enable_hr": True, "hr_new": "x"},
        {"alwayson_scripts": {"Cutoff": {"args": [True]}, "Refiner": {"args": [False]}}},
    ],
)
def test_what_would_change_something_is_not(address, asked):
    answer = httpx.post(f"{address}/sdapi/v1/txt2img", json={"prompt": "a", **asked})
    assert answer.status_code == 400 and "Refiner" not in answer.text


@pytest.mark.parametrize(
    ("called", "found"),
    [
        ("one", "one"),
        ("one.safetensors", "one"),
        ("one.safetensors [6ce0161689]", "one"),
        ("one [6CE0161689]", "one"),
        ("one.SAFETENSORS", "one"),
        ("in/two.safetensors [6ce0161689]", "in/two"),
        ("two", "in/two"),
        ("in\\two.ckpt", "in/two"),
        ("in_two", "in/two"),
        ("/home/me/in/two.safetensors", "in/two"),
        ("three", "three"),
        ("a/three [6ce0161689]", "a/three"),
        ("nothing", "nothing"),
        ("one [v2]", "one [v2]"),
    ],
)
def test_models_are_called_as_a1111_calls_them(called, found):
    assert _model_called(called, ["one", "in/two", "a/three", "b/three"]) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "drawn by hand",
        "\nSteps: 2, Sampler: Euler, CFG scale: 7, Seed: 3, Size: 8x8",
        "a\nSteps: 2, Sampler: Restart, Size: 8x9",
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF"])
def test_png_info_tells_the_text_of_any_picture(address, kind, text):
    exif, file, info = Image.Exif(), BytesIO(), PngInfo()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + text.encode("utf-16-be")
    info.add_text("parameters", text)
    Image.new("RGB", (8, 8)).save(
        file,
        kind,
        **{"PNG": {"pnginfo": info}, "JPEG": {"exif": exif}, "WEBP": {"exif": exif}}.get(kind, {}),
    )
    answer = httpx.post(
        f"{address}/sdapi/v1/png-info", json={"image": base64.b64encode(file.getvalue()).decode()}
    )
    text = text if kind in ("PNG", "JPEG", "WEBP") else ""
    assert answer.status_code == 200 and answer.json()["info"] == text
    assert answer.json()["items"] == ({"parameters": text} if text else {})
    if "Restart" in text:
        assert answer.json()["parameters"] == {
            "Prompt": "a",
            "Negative prompt": "",
            "Steps": "2",
            "Sampler": "Restart",
            "Size": "8x9",
            "Size-1": "8",
            "Size-2": "9",
        }


def test_a_model_may_be_called_by_its_hash_once_that_is_known(address, page_engine, monkeypatch):
    def status(name: str) -> int:
        return httpx.post(
            f"{address}/sdapi/v1/options", json={"sd_model_checkpoint": name}
        ).status_code

    monkeypatch.setattr(page_engine.catalog, "_hashes", {})
    assert status("6CE0161689") == 400
    page_engine.catalog._hashes |= {page_engine.catalog.first: "6ce0161689"}
    assert (status("6CE0161689"), status("6ce0161680"), status("")) == (200, 400, 200)


def test_what_is_no_json_is_refused(address):
    answer = httpx.post(f"{address}/sdapi/v1/txt2img", content="{")
    assert answer.status_code == 400 and "cannot be read" in answer.json()["detail"]


def test_webuiapi_lists_what_there_is_and_chooses_the_model(a1111, page_engine):
    name = page_engine.catalog.first
    assert a1111.util_get_model_names() == [name] and "Euler a" in a1111.util_get_sampler_names()
    assert "karras" in a1111.util_get_scheduler_names()
    a1111.util_set_model(name)
    assert a1111.util_get_current_model() == name
    assert a1111.get_sd_vae() == a1111.get_loras() == []
    assert a1111.get_prompt_styles() == [
        {"name": "Ink", "prompt": "ink drawing of {prompt}", "negative_prompt": "photo"},
        {"name": "Bright", "prompt": "bright", "negative_prompt": ""},
    ]
    assert a1111.get_embeddings() == {"loaded": {}, "skipped": {}}
    assert a1111.get_latent_upscale_modes() == []
    assert [each["name"] for each in a1111.get_upscalers()] == ["None", "Lanczos"]
    assert a1111.get_memory()["ram"]["total"] > 0
    options = a1111.get_options()  # all of which Open WebUI hands back, with another model
    assert a1111.set_options(options) is None
    assert (
        "There is no model"
        in a1111.set_options({**options, "sd_model_checkpoint": "other"})["detail"]
    )
    assert a1111.set_options({**options, "samples_format": "jpg"})["detail"] == (
        "Pictures are always sent as PNG here: samples_format should be png."
    )


def test_webuiapi_follows_a_request_and_interrupts_it(a1111, slow_engine):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(
            a1111.txt2img(prompt="a fox", steps=200, width=32, height=32, n_iter=2)
        )
    )
    thread.start()
    until(lambda: a1111.get_progress()["progress"] > 0)
    told = a1111.get_progress()
    assert 0 < told["progress"] < 0.5 and told["eta_relative"] > 0
    assert told["state"]["job_count"] == 2 and told["state"]["sampling_steps"] == 200
    a1111.skip()
    until(lambda: a1111.get_progress()["state"]["job_no"] == 1)
    a1111.interrupt()
    thread.join(PATIENCE)
    assert results[0].images == [] and not slow_engine.jobs()
    assert a1111.get_progress()["progress"] == 0


def drawn_by(engine, **values) -> list[np.ndarray]:
    """Return what the engine draws, with pictures in place of their names."""
    inputs = {
        name: Input.of_pixels(value)
        for name, value in values.items()
        if isinstance(value, np.ndarray)
    }
    values |= {name: each.name for name, each in inputs.items()}
    job = engine.submit(
        Request.check({"prompts": ["a fox"], **values}, engine.catalog),
        inputs={each.name: each for each in inputs.values()},
    )
    return [event.pixels for event in job.events() if isinstance(event, ImageReady)]


def test_webuiapi_begins_each_picture_of_a_batch_with_its_own(a1111, page_engine):
    photos = [PHOTO, np.ascontiguousarray(PHOTO[::-1])]
    result = a1111.img2img(
        images=[Image.fromarray(photo) for photo in photos],
        prompt="a fox",
        seed=7,
        width=32,
        height=32,
        steps=4,
        resize_mode=1,
        denoising_strength=0.5,
    )
    assert result.info["all_seeds"] == [7, 8] and result.info["denoising_strength"] == 0.5
    assert "Denoising strength: 0.5" in result.info["infotexts"][0]
    assert "init_images" not in result.parameters
    for image, photo, seed in zip(result.images, photos, [7, 8], strict=True):
        alone = drawn_by(
            page_engine,
            init_image=photo,
            strength=0.5,
            seed=seed,
            steps=4,
            sampler="euler",
            guidance=7.0,
        )
        assert np.array_equal(image, alone[0])


@pytest.mark.parametrize(
    ("asked", "size", "taken"),
    [
        (dict(hr_scale=1.95), (64, 64), 2),
        (dict(hr_resize_x=64, hr_second_pass_steps=3), (64, 64), 3),
        (dict(hr_resize_x=32, hr_resize_y=48, denoising_strength=0.75), (32, 48), 3),
    ],
)
def test_webuiapi_has_pictures_drawn_again_larger(a1111, page_engine, asked, size, taken):
    values = dict(prompt="a fox", seed=7, steps=4, width=32, height=32)
    result = a1111.txt2img(
        enable_hr=True,
        hr_upscaler=webuiapi.HiResUpscaler.Lanczos,
        **{"denoising_strength": 0.5, **asked},
        batch_size=2,
        **values,
    )
    small = a1111.txt2img(batch_size=2, **values).images
    assert result.info["all_seeds"] == [7, 8] and result.image.size == size
    for image, start, seed in zip(result.images, small, [7, 8], strict=True):
        made = read_png(BytesIO(base64.b64decode(result.json["images"][seed - 7]))).pictures[0]
        alone = drawn_by(
            page_engine,
            init_image=np.asarray(start),
            strength=made.strength,
            seed=seed,
            steps=made.steps,
            sampler="euler",
            guidance=7.0,
            width=size[0],
            height=size[1],
        )
        assert np.array_equal(image, alone[0])
        assert (made.width, made.height) == size
    resized = "Hires upscale: 2" if size == (64, 64) else "Hires resize: 32x48"
    assert (
        f"Init image: {made.init_image}, Denoising strength: {made.strength:g}, {resized}, "
        f"Hires steps: {taken}, Hires upscaler: Lanczos"
    ) in result.info["infotexts"][1]
    assert ", Size: 32x32, " in result.info["infotexts"][1]


def test_a_picture_is_drawn_larger_as_strongly_as_its_model_asks_for(
    address, page_engine, monkeypatch
):
    asked = dict(prompt="a", steps=4, width=32, height=32, enable_hr=True, hr_upscaler="Lanczos")
    strengths = []
    for changes in ({}, {"larger_strength": 0.75}):
        card = page_engine.checkpoint.card.model_copy(update=changes)
        monkeypatch.setattr(page_engine.checkpoint, "card", card)
        answer = httpx.post(f"{address}/sdapi/v1/txt2img", json=asked, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        file = BytesIO(base64.b64decode(answer.json()["images"][0]))
        strengths.append(read_png(file).pictures[0].strength)
    assert strengths == [LARGER_STRENGTH, 0.75]


@pytest.mark.parametrize(
    ("asked", "fresh"),
    [
        (dict(inpainting_fill=1), HOLE > 0),
        (dict(inpainting_mask_invert=True, inpaint_full_res_padding=4), HOLE == 0),
    ],
)
def test_webuiapi_draws_what_is_masked_alone_and_the_rest_comes_back_as_it_was(a1111, asked, fresh):
    result = a1111.img2img(
        images=[Image.fromarray(PHOTO)],
        mask_image=Image.fromarray(HOLE),
        prompt="a fox",
        width=32,
        height=32,
        mask_blur=0,
        seed=3,
        denoising_strength=0.9,
        **asked,
    )
    changed = (np.asarray(result.image) != PHOTO).any(axis=-1)
    assert not changed[~fresh].any() and changed[fresh].mean() > 0.9
    assert "Mask blur: 0" in result.info["infotexts"][0]


def test_webuiapi_draws_the_whole_picture_as_the_engine_does_if_asked_to(a1111, page_engine):
    values = dict(width=32, height=32, mask_blur=2, steps=4, seed=3)
    result = a1111.img2img(
        images=[Image.fromarray(PHOTO)],
        mask_image=Image.fromarray(HOLE),
        prompt="a fox",
        inpaint_full_res=False,
        inpainting_fill=1,
        **values,
    )
    alone = drawn_by(
        page_engine,
        init_image=PHOTO,
        mask=HOLE,
        fit="stretch",
        guidance=7.0,
        sampler="euler",
        **values,
    )
    assert np.array_equal(result.image, alone[0])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (dict(images=[]), "init_images should be a list of up to 8 pictures."),
        (dict(resize_mode=3), "resize_mode should be from 0 to 2, not 3."),
        (dict(denoising_strength=2), "Strength should be from 0 to 1, not 2."),
        (dict(denoising_strength=0), "A strength of 0 leaves none of 2 steps to take."),
        (
            dict(initial_noise_multiplier=1.1),
            "This server does not have: initial_noise_multiplier.",
        ),
        (
            dict(mask_image=Image.new("L", (9, 9), 255)),
            "The mask has 9x9 pixels and the picture 48x40",
        ),
        (dict(mask_image=Image.new("L", (48, 40))), "The mask is black everywhere"),
        (dict(images=[Image.fromarray(PHOTO)] * 2, n_iter=33), "66 pictures were asked for"),
    ],
)
def test_webuiapi_is_told_what_is_wrong_with_its_pictures(a1111, asked, sentence):
    with pytest.raises(RuntimeError) as refused:
        a1111.img2img(
            **{
                "images": [Image.fromarray(PHOTO)],
                "prompt": "a fox",
                "width": 32,
                "height": 32,
                **asked,
            }
        )
    status, text = refused.value.args
    assert status == 400 and sentence in json.loads(text)["detail"]


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ("http://192.0.2.1/a.png", "file in base64"),
        ("/etc/passwd", "file in base64"),
        (3, "base64"),
        (base64.b64encode(b"<svg/>").decode(), "Picture 1 is a drawing of lines (SVG)"),
        (base64.b64encode(b"GIF89a").decode(), "Picture 1 is"),
    ],
)
def test_nothing_but_a_picture_itself_is_taken_for_one(address, image, sentence):
    asked = {"prompt": "a", "init_images": [image]}
    answer = httpx.post(f"{address}/sdapi/v1/img2img", json=asked)
    assert answer.status_code == 400 and sentence in answer.json()["detail"]
    answer = httpx.post(f"{address}/sdapi/v1/txt2img", json=asked)
    assert answer.json()["detail"] == "This server does not have: init_images."


def with_unit(*units: webuiapi.ControlNetUnit) -> dict:
    """Return a call's arguments; the client keeps units in its default scripts otherwise."""
    return dict(controlnet_units=[*units], alwayson_scripts={})


@pytest.fixture(scope="module")
def controlled(checkpoints, torch_pipelines, tmp_path_factory) -> Iterator[tuple]:
    """(an engine with two ControlNets and an IP-Adapter, a program of A1111's users)."""
    folder = tmp_path_factory.mktemp("controlnets")
    for seed, name in enumerate(("lines", "depth")):
        make_controlnet(torch_pipelines["sd1"].unet, seed).save_pretrained(folder / name)
    make_encoder(folder / "image_encoder")
    make_adapter(torch_pipelines["sd1"].unet, folder / "eyes.safetensors")
    engine = Engine.open(
        checkpoints["sd1"],
        devices=1,
        ip_adapters=[folder / "eyes.safetensors"],
        controlnets=[folder / "lines", folder / "depth"],
    )
    assert engine.ready.wait(300)
    with served(create_api(engine, Access())) as address:
        yield engine, webuiapi.WebUIApi(baseurl=f"{address}/sdapi/v1", sampler="Euler", steps=2)
    engine.close()


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        (
            dict(
                module="none",
                model="depth [1a2b3c4d]",
                weight=0.8,
                guidance_end=0.5,
                resize_mode="Just Resize",
            ),
            dict(controlnet="depth", control_scale=0.8, control_stop=0.5, fit="stretch"),
        ),
        (dict(module="scribble_xdog", resize_mode="Crop and Resize"), dict(detector="scribble")),
    ],
)
def test_webuiapi_has_pictures_follow_another_by_units_of_controlnet(controlled, unit, values):
    engine, api = controlled
    unit = webuiapi.ControlNetUnit(image=Image.fromarray(PHOTO), **unit)
    result = api.txt2img(prompt="a fox", seed=7, width=32, height=32, **with_unit(unit))
    (alone,) = drawn_by(
        engine, control_image=PHOTO, seed=7, steps=2, sampler="euler", guidance=7.0, **values
    )
    assert np.array_equal(result.image, alone)
    assert "ControlNet 0: " in result.info["infotexts"][0]


def test_webuiapi_follows_what_a_picture_begins_with_and_lists_what_there_is(controlled):
    _, api = controlled
    unit = webuiapi.ControlNetUnit(module="canny", model="lines")  # at 64, as the client has it
    asked = dict(
        images=[Image.fromarray(PHOTO)],
        prompt="a fox",
        seed=7,
        width=32,
        height=32,
        steps=4,
        denoising_strength=0.5,
    )
    result = api.img2img(**asked, **with_unit(unit))
    unit.image = Image.fromarray(PHOTO)
    assert np.array_equal(result.image, api.img2img(**asked, **with_unit(unit)).image)
    texts = [
        api.img2img(**asked, **with_unit(each)).info["infotexts"][0]
        for each in (unit, webuiapi.ControlNetUnit(enabled=False))
    ]
    assert ["ControlNet 0: " in text for text in texts] == [True, False]
    assert api.controlnet_model_list() == ["lines", "depth", "eyes"]
    assert api.controlnet_module_list() == [
        "none",
        "canny",
        "scribble_xdog",
        "lineart_standard",
        "ip-adapter-auto",
    ]


@pytest.mark.slow("compiles with an IP-Adapter")
def test_webuiapi_has_a_picture_drawn_after_another_by_a_unit_for_ip_adapters(controlled):
    engine, api = controlled
    assert "eyes" in api.controlnet_model_list()
    unit = webuiapi.ControlNetUnit(
        image=Image.fromarray(PHOTO),
        module="ip-adapter_clip_sd15",
        model="eyes [1a2b3c4d]",
        weight=0.5,
    )
    result = api.txt2img(prompt="a fox", seed=7, width=32, height=32, **with_unit(unit))
    assert "IP-Adapter: eyes, Reference strength: 0.5" in result.info["infotexts"][0]
    (alone,) = drawn_by(
        engine, reference=PHOTO, reference_scale=0.5, seed=7, steps=2, sampler="euler", guidance=7.0
    )
    assert np.array_equal(result.image, alone)
    lines = webuiapi.ControlNetUnit(image=Image.fromarray(PHOTO), module="canny", model="lines")
    both = api.txt2img(prompt="a fox", seed=7, width=32, height=32, **with_unit(lines, unit))
    assert all(name in both.info["infotexts"][0] for name in ("ControlNet 0: ", "IP-Adapter: "))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            dict(image=Image.fromarray(PHOTO), module="ip-adapter-auto", guidance_end=0.5),
            "guidance_start, guidance_end (ip-adapter)",
        ),
        (dict(), "controlnet has no picture to follow."),
        (
            dict(image=Image.fromarray(PHOTO), model="pose"),
            "There is no ControlNet 'pose'; there are",
        ),
        (
            dict(image=Image.fromarray(PHOTO), module="openpose"),
            "controlnet has no module 'openpose'; there are none, canny",
        ),
        (dict(image=Image.fromarray(PHOTO), control_mode=2), "of controlnet: control_mode"),
        (dict(image=Image.fromarray(PHOTO), weight=3), "Control strength should be from 0 to 2"),
        (
            dict(image=Image.fromarray(PHOTO), module="canny", threshold_a=300),
            "from 0 to 255, not 300",
        ),
        (dict(image=Image.fromarray(PHOTO), resize_mode="Zoom"), "has no resize_mode 'Zoom'"),
        (dict(image=Image.fromarray(PHOTO), mask=Image.fromarray(HOLE)), "of controlnet: mask"),
    ],
)
def test_webuiapi_is_told_what_is_wrong_with_what_is_followed(controlled, asked, sentence):
    with pytest.raises(RuntimeError) as refused:
        controlled[1].txt2img(
            prompt="a fox", width=32, height=32, **with_unit(webuiapi.ControlNetUnit(**asked))
        )
    status, text = refused.value.args
    assert status == 400 and sentence in json.loads(text)["detail"]


def test_webuiapi_is_told_how_many_reference_pictures_a_model_takes(controlled):
    unit = webuiapi.ControlNetUnit(image=Image.fromarray(PHOTO), module="ip-adapter-auto")
    with pytest.raises(RuntimeError) as refused:
        controlled[1].txt2img(prompt="a fox", width=32, height=32, **with_unit(unit, unit))
    sentence = "2 reference pictures were given; this model takes at most 1."
    assert json.loads(refused.value.args[1])["detail"] == sentence


# Sent by the extension and by Forge where nobody has chosen anything.
DEFAULTS = {
    "pulid_mode": "Fidelity",
    "batch_images": "",
    "batch_modifiers": [],
    "batch_image_files": [],
    "animatediff_batch": False,
    "loopback": False,
    "output_dir": "",
    "use_preview_as_input": False,
    "batch_image_dir": "",
    "batch_mask_dir": "",
    "batch_input_gallery": [],
    "mask": None,
    "batch_mask_gallery": [],
    "inpaint_crop_input_image": True,
    "control_mode": "Balanced",
}


@pytest.mark.parametrize(
    ("scripts", "sentence"),
    [
        ({"controlnet": {"args": [{}, {}]}}, "one control picture here; 2 were given"),
        (
            {"controlnet": {"args": [{"image": "a", "module": "ip-adapter_face_id_plus"}]}},
            "has no module 'ip-adapter_face_id_plus'; there are none",
        ),
        ({"controlnet": {"args": [{"enabled": "True", "colour": 1}]}}, "of controlnet: colour"),
        (
            {"controlnet": {"args": [{"enabled": "on", "image": "/etc/passwd", **DEFAULTS}]}},
            "file in base64",
        ),
        ({"controlnet": {"args": [{"enabled": "perhaps"}]}}, "enabled should be true or false"),
        ({"controlnet": {"args": [3]}}, "a list of values by name"),
        ({"ControlNet": 3}, "a list of"),
        (
            {"controlnet": {"args": []}, "ADetailer": {"args": [{"ad_model": "a"}]}},
            "alwayson_scripts (ADetailer)",
        ),
        ({"controlnet": {"args": [{"image": "/etc/passwd"}]}}, "file in base64"),
        (
            {"controlnet": {"args": [{"image": base64.b64encode(b"<svg/>").decode()}]}},
            "The control picture is a drawing of lines (SVG)",
        ),
        ({"controlnet": {"args": [{"image": "a", "colour": 1}]}}, "of controlnet: colour"),
    ],
)
def test_what_is_no_unit_of_controlnet_is_refused_in_a_sentence(address, scripts, sentence):
    answer = httpx.post(
        f"{address}/sdapi/v1/txt2img", json={"prompt": "a", "alwayson_scripts": scripts}
    )
    assert answer.status_code == 400 and sentence in answer.json()["detail"]


# --- OpenAI -------------------------------------------------------------------------------------


def test_openai_draws_several_pictures_as_files_that_say_how(client):
    answer = client.images.generate(
        prompt="a fox",
        n=3,
        size="32x32",
        style="Ink",
        extra_body={"seed": 7, "steps": 2, "negative_prompt": "blur"},
    )
    made = [read_png(base64.b64decode(image.b64_json)).pictures[0] for image in answer.data]
    assert [picture.seed for picture in made] == [7, 8, 9]
    assert {(picture.prompt, picture.negative_prompt) for picture in made} == {
        ("ink drawing of a fox", "blur, photo")
    } and answer.size == "32x32"


def test_openai_is_told_the_style_that_was_drawn_though_its_file_has_changed(
    client, page_engine, monkeypatch
):
    submit = page_engine.submit

    def and_forget(*args, **options):
        job = submit(*args, **options)
        monkeypatch.setattr(page_engine.catalog, "styles", Styles())
        return job

    monkeypatch.setattr(page_engine, "submit", and_forget)
    answer = client.images.generate(prompt="a fox", style="Ink", extra_body={"steps": 1})
    made = read_png(base64.b64decode(answer.data[0].b64_json)).pictures[0]
    assert made.prompt == "ink drawing of a fox"


def test_openai_gets_addresses_and_other_formats(client, address):
    answer = client.images.generate(
        prompt="a fox",
        style="vivid",
        response_format="url",
        output_format="webp",
        extra_body={"steps": 1},
    )
    assert answer.data[0].url.startswith(f"{address}/v1/images/files/")
    fetched = httpx.get(answer.data[0].url)
    assert fetched.headers["content-type"] == "image/webp"
    assert Image.open(BytesIO(fetched.content)).size == (32, 32)
    assert httpx.get(f"{address}/v1/images/files/other.png").status_code == 404


def test_addresses_lead_to_pictures_where_another_application_serves_page_and_apis(page_engine):
    gate = Gate(
        PlainTextResponse("page"),
        names=Names(),
        access=Access(),
        paths=API_PATHS,
        api=create_api(page_engine, Access()),
    )
    with served(Starlette(routes=[Mount("/", gate)])) as address:
        answer = httpx.post(
            f"{address}/v1/images/generations",
            timeout=PATIENCE,
            json={"prompt": "a fox", "steps": 1, "response_format": "url"},
        )
        assert httpx.get(answer.json()["data"][0]["url"]).content.startswith(b"\x89PNG")


def test_openai_streams_partial_pictures_and_then_each_finished_one(client, slow_engine):
    events = list(
        client.images.generate(
            prompt="a fox", n=2, stream=True, partial_images=1, extra_body={"steps": 20, "seed": 1}
        )
    )
    partial = [event for event in events if event.type == "image_generation.partial_image"]
    assert [event.partial_image_index for event in partial] == [0, 0]
    finished = [event for event in events if event.type == "image_generation.completed"]
    made = [read_png(base64.b64decode(event.b64_json)).seed for event in finished]
    assert sorted(made) == [1, 2] and events[-1] == finished[-1]
    assert finished[0].usage.input_tokens == 4


def test_openai_lists_the_models(client, page_engine):
    name = page_engine.catalog.first
    assert [model.id for model in client.models.list()] == [name]
    assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="There is no model 'dall-e-9'"):
        client.models.retrieve("dall-e-9")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (dict(size="huge"), "size should be like 512x512 or auto, not 'huge'."),
        (dict(size="33x32"), "33"),
        (dict(n=9), "n should be from 1 to 8, not 9."),
        (dict(model="dall-e-9"), "There is no model 'dall-e-9'"),
        (dict(background="transparent"), "This server does not have: background."),
        (dict(extra_body={"stepps": 1}), "This server does not have: stepps."),
        (dict(extra_body={"steps": "many"}), "Steps should be a whole number, not 'many'."),
        (dict(stream=True, extra_body={"steps": 0}), "Steps should be from 1 to 200, not 0."),
    ],
)
def test_openai_is_refused_with_the_sentence_that_names_what_is_wrong(client, asked, sentence):
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(**{"prompt": "a fox", **asked})
    assert sentence in refused.value.body["message"]


def png(pixels: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


CLEAR = np.dstack([PHOTO, 255 - HOLE])  # transparent in the hole


@pytest.mark.parametrize(
    "files",
    [dict(image=png(PHOTO), mask=("mask.png", png(CLEAR), "image/png")), dict(image=[png(CLEAR)])],
)
def test_openai_edits_what_is_transparent(client, page_engine, files):
    answer = client.images.edit(
        prompt="a fox",
        n=2,
        size="32x32",
        input_fidelity="low",
        **files,
        extra_body={"seed": 7, "steps": 2, "mask_blur": 0},
    )
    drawn = [base64.b64decode(image.b64_json) for image in answer.data]
    made = [read_png(file).pictures[0] for file in drawn]
    assert [(each.seed, each.strength, each.mask_blur) for each in made] == [(7, 1, 0), (8, 1, 0)]
    start = PHOTO if "mask" in files else np.where(HOLE[..., None] > 0, np.uint8(255), PHOTO)
    alone = drawn_by(
        page_engine, init_image=start, mask=HOLE, strength=1.0, steps=2, seed=7, mask_blur=0
    )
    assert np.array_equal(Image.open(BytesIO(drawn[0])), alone[0])


def test_openai_streams_a_changed_picture(client, page_engine):
    events = list(
        client.images.edit(
            image=png(PHOTO),
            prompt="a fox",
            stream=True,
            extra_body={"seed": 1, "steps": 4, "strength": 0.5},
        )
    )
    assert [event.type for event in events] == ["image_edit.completed"]
    alone = drawn_by(page_engine, init_image=PHOTO, strength=0.5, steps=4, seed=1)
    assert np.array_equal(Image.open(BytesIO(base64.b64decode(events[0].b64_json))), alone[0])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (dict(image=b"nothing"), "The picture is in no format that is read here"),
        (dict(image=[png(PHOTO)] * 2), "image should be one picture"),
        (dict(mask=png(PHOTO)), "Nothing in the mask is transparent"),
        (dict(mask=png(CLEAR[6:20])), "The mask has 48x14 pixels and the picture 48x40"),
        (dict(n=9), "n should be from 1 to 8, not 9."),
        (dict(input_fidelity="high"), "This server does not have: input_fidelity."),
        (dict(extra_body={"strength": "much"}), "Strength should be a number, not 'much'."),
        (dict(extra_body={"init_image": "0" * 64}), "This server does not have: init_image."),
    ],
)
def test_openai_is_told_what_is_wrong_with_an_edit(client, asked, sentence):
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(**{"image": png(PHOTO), "prompt": "a fox", **asked})
    assert sentence in refused.value.body["message"]


# --- both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_waits_for_any_more_is_not_drawn(address, slow_engine, stream):
    with httpx.Client(base_url=address) as http, pytest.raises(httpx.ReadTimeout):
        asked = {"prompt": "a fox", "steps": 200, "stream": stream}
        with http.stream(
            "POST", "/v1/images/generations", json=asked, timeout=httpx.Timeout(PATIENCE, read=1)
        ) as answer:
            for _ in answer.iter_bytes():
                pass
    until(lambda: not slow_engine.jobs())


def test_many_wait_without_holding_anybody_up(address, slow_engine):
    async def crowd() -> int:
        asked = {"prompt": "a", "steps": 200}
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE, limits=NO_LIMITS) as http:
            waiting = [
                asyncio.create_task(http.post("/sdapi/v1/txt2img", json=asked)) for _ in range(MANY)
            ]
            while len(slow_engine.jobs()) < MANY:
                await asyncio.sleep(0.1)
            answer = await http.get("/sdapi/v1/sd-models")
            for each in waiting:
                each.cancel()
            return answer.status_code

    assert asyncio.run(asyncio.wait_for(crowd(), 2 * PATIENCE)) == 200
    until(lambda: not slow_engine.jobs())


def test_an_address_has_its_share_of_what_may_wait_as_a_proxy_tells_it(slow_engine, monkeypatch):
    monkeypatch.setattr(slow_engine.scheduler, "limits", Limits(address_jobs=1))

    async def visit(address: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as http:

            def ask(peer: str) -> asyncio.Task:
                return asyncio.create_task(
                    http.post(
                        "/sdapi/v1/txt2img",
                        json={"prompt": "a", "steps": 200},
                        headers={"x-forwarded-for": peer},
                    )
                )

            waiting = []
            for number, peer in enumerate(("192.0.2.1", "192.0.2.2"), 1):
                waiting.append(ask(peer))
                while len(slow_engine.jobs()) < number:
                    await asyncio.sleep(0.05)
            refused = await ask("192.0.2.1")
            for each in waiting:
                each.cancel()
            return refused

    with served(create_api(slow_engine, Access(public=True))) as address:
        refused = asyncio.run(asyncio.wait_for(visit(address), PATIENCE))
    assert refused.status_code == 429 and "from your network" in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) >= 1
    until(lambda: not slow_engine.jobs())


def test_a_key_opens_both_apis_and_nothing_else_does(page_engine):
    with served(create_api(page_engine, Access(keys=("first", "second")))) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="second", max_retries=0) as client:
            assert client.models.list().data
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="third", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="asks for an API key"),
        ):
            client.models.list()
        a1111 = webuiapi.WebUIApi(baseurl=f"{address}/sdapi/v1", username="any", password="first")
        assert a1111.get_samplers()
        assert httpx.get(f"{address}/sdapi/v1/samplers").status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"x-forwarded-for": "192.0.2.1"}, 403),  # a proxy on this machine, for somebody else
        ({"host": "somebody.example"}, 403),
    ],
)
def test_without_a_key_this_machine_is_served_and_nobody_else(address, headers, status):
    assert httpx.get(f"{address}/v1/models", headers=headers).status_code == status


def test_without_a_key_everybody_is_served_if_that_is_asked_for(page_engine):
    with served(create_api(page_engine, Access(public=True))) as address:
        headers = {"x-forwarded-for": "192.0.2.1"}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200


def test_openapi_tells_every_setting_with_its_bounds(address):
    schemas = httpx.get(f"{address}/openapi.json").json()["components"]["schemas"]
    steps = schemas["Txt2Img"]["properties"]["steps"]
    assert (steps["minimum"], steps["maximum"], steps["type"]) == (1, 200, "integer")
    assert "Steps" in steps["description"] and "cfg_scale" in schemas["Txt2Img"]["properties"]
    assert "guidance" in schemas["Generation"]["properties"]
    assert httpx.get(f"{address}/docs").status_code == 200


def test_figures_for_prometheus_count_what_is_drawn_and_say_nothing_of_it(
    address, client, page_engine
):
    def figures() -> dict[str, float]:
        text = httpx.get(f"{address}/metrics").text
        assert "secret" not in text
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if not line.startswith("#")
        }

    before = figures()
    client.images.generate(prompt="a secret", n=2, extra_body={"steps": 3, "sampler": "euler"})
    after = figures()
    grown = {name: after[name] - before[name] for name in before}
    assert grown["sd_tpu_pictures_total"] == 2 and grown["sd_tpu_rows_total"] == 6
    assert grown['sd_tpu_jobs_ended_total{how="done"}'] == 1
    assert grown['sd_tpu_seconds_total{kind="advance"}'] > 0
    for kind in ("compile", "encode"):
        assert after[f'sd_tpu_seconds_total{{kind="{kind}"}}'] > 0
    assert after["sd_tpu_jobs"] == after["sd_tpu_slots_occupied"] == 0
    assert after["process_resident_memory_bytes"] > 0


def test_the_server_says_whether_it_draws(address, page_engine, monkeypatch):
    assert httpx.get(f"{address}/readyz").status_code == 200
    monkeypatch.setattr(page_engine, "_draining", True)
    assert httpx.get(f"{address}/readyz").status_code == 503
    assert httpx.get(f"{address}/healthz").status_code == 200


def test_what_is_not_done_when_the_server_ends_is_told_to_come_back(
    address, slow_engine, monkeypatch
):
    monkeypatch.setattr(slow_engine, "_draining", False)  # so again when this test is over
    answers = []

    def ask(path: str, **asked) -> None:
        answers.append(
            httpx.post(f"{address}{path}", json={"prompt": "a cat", **asked}, timeout=60)
        )

    threads = [
        threading.Thread(target=ask, args=["/sdapi/v1/txt2img"], kwargs={"steps": 200}),
        threading.Thread(
            target=ask,
            args=["/v1/images/generations"],
            kwargs={"steps": 200, "stream": True, "partial_images": 1},
        ),
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while len(slow_engine.jobs()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not slow_engine.drain(0.1)
    for thread in threads:
        thread.join(30)
    plain, stream = sorted(answers, key=lambda answer: answer.headers["content-type"])
    assert plain.status_code == 503 and plain.headers["retry-after"]
    assert "please ask again" in plain.json()["detail"]
    assert "event: error" in stream.text and "please ask again" in stream.text
    assert not slow_engine.jobs()
