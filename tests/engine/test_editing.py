"""Pictures edited by reference pictures, through every door: Python, the command line, the APIs."""

import base64
from collections.abc import Iterator
from io import BytesIO

import httpx
import numpy as np
import openai
import pytest
import webuiapi
from PIL import Image

from sd_tpu.http import create_api
from sd_tpu.http.access import Access
from sd_tpu.page.layout import choices_of
from sd_tpu.pictures.images import KEY, read_png
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request
from sd_tpu.serving.client import open_models
from sd_tpu.serving.engine import Engine
from sd_tpu.settings import MAX_PROMPTS, RequestError
from tests.support.command import run
from tests.support.flux2 import few_layers, make_pipeline
from tests.support.serving import served

SIDE = 32
RNG = np.random.default_rng(0)
PHOTOS = [RNG.integers(0, 256, (*size, 3), np.uint8) for size in ((64, 72), (80, 64), (64, 64))]
NAMES = [Input.of_pixels(photo).name for photo in PHOTOS]
ASKED = dict(seed=7, steps=2)


def png(pixels: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def pixels_of(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(file)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a tiny FLUX.2 klein lies, while it is one of few layers."""
    folder = tmp_path_factory.mktemp("klein")
    with few_layers():
        make_pipeline(folder / "words", distilled=True).save_pretrained(folder / "model")
        yield folder / "model"


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with Engine.open(folder, devices=1, size=(SIDE, SIDE)) as engine:
        assert engine.ready.wait(300)
        yield engine


@pytest.fixture(scope="module")
def edited(engine) -> np.ndarray:
    """The model's picture after the first two photos."""
    (image,) = engine.draw("a fox", reference=PHOTOS[:2], **ASKED)
    return np.asarray(image)


@pytest.fixture(scope="module")
def address(engine) -> Iterator[str]:
    with served(create_api(engine, Access())) as address:
        yield address


@pytest.fixture(scope="module")
def client(address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_python_hands_in_one_reference_picture_or_a_list(engine, edited, tmp_path):
    Image.fromarray(PHOTOS[1]).save(tmp_path / "second.png")
    mixed = (png(PHOTOS[0]), tmp_path / "second.png")
    one, other, plain = engine.draw(
        [
            {"prompt": "a fox", "reference": Image.fromarray(PHOTOS[0]), "seed": 7},
            {"prompt": "a fox", "reference": mixed, "seed": 7},
            {"prompt": "a fox", "seed": 7},
        ],
        steps=2,
    )
    assert np.array_equal(other, edited)
    assert len({each.tobytes() for each in (one, other, plain)}) == 3
    assert other.settings.references == [
        Input(png(PHOTOS[0])).name,
        Input((tmp_path / "second.png").read_bytes()).name,
    ]


def test_a_file_says_after_which_pictures_it_was_drawn(engine, edited):
    asked = {"prompts": ["a fox"], "reference": " ".join(NAMES[:2]), **ASKED}
    request = Request.check(asked, engine.catalog)
    file = engine.to_png(edited, request)
    assert read_png(file).common.references == NAMES[:2] == request.common.references
    assert request.inputs() == {*NAMES[:2]}


def test_reference_pictures_are_none_at_a_strength_of_zero(engine, edited):
    none, plain = (
        np.asarray(engine.draw("a fox", **ASKED, **values)[0])
        for values in (dict(reference=PHOTOS[:2], reference_scale=0), {})
    )
    assert np.array_equal(none, plain) and not np.array_equal(none, edited)


def test_the_time_that_reference_pictures_take_is_not_guessed(engine):
    picture = Request.check({"prompts": ["a fox"], **ASKED}, engine.catalog).picture(0)
    other = Request.check(
        {"prompts": ["a fox"], "reference": NAMES[0], **ASKED}, engine.catalog
    ).picture(0)
    assert engine.seconds(picture) and engine.seconds(other) is None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (dict(reference=PHOTOS[:1] * 11), "11 pictures were given; at most 10 are accepted"),
        (dict(reference=PHOTOS[0][:60]), "72x60 pixels; this model takes those with 64 or more"),
        (dict(reference="0" * 64), "No such file"),
        (dict(reference=[PHOTOS[0], 3]), "should be a path, bytes, an array or a PIL image"),
        (dict(init_image=[PHOTOS[0]]), "Start picture should be a path"),
        (dict(reference=PHOTOS[0], ip_adapter="eyes"), "this server has none"),
    ],
)
def test_what_cannot_be_a_reference_picture_is_refused(engine, values, sentence):
    with pytest.raises((RequestError, OSError), match=sentence):
        engine.draw("a fox", **ASKED, **values)


def test_sizes_of_a_request_are_bounded_as_each_is_compiled_for(engine):
    photos = [np.zeros((64, 64 + 16 * number, 3), np.uint8) for number in range(9)]
    with pytest.raises(RequestError, match="have at most 8 sizes; 9 were given"):
        engine.draw("a fox", reference=photos, **ASKED)


@pytest.mark.slow("compiles for two devices")
def test_pictures_on_two_devices_are_those_on_one(folder, engine):
    prompts = [{"prompt": f"a fox {number}"} for number in range(4)]
    for number, each in enumerate(prompts):
        if number % 3:
            each["reference"] = PHOTOS[: number % 3]
    with Engine.open(folder, devices=2, size=(SIDE, SIDE)) as two:
        ours = two.draw(prompts, **ASKED)
    theirs = engine.draw(prompts, **ASKED)
    for one, other in zip(ours, theirs, strict=True):
        assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1


def test_each_model_of_a_server_says_how_many_it_takes(folder, checkpoints):
    catalog, _ = open_models(checkpoints["sd1"], dtype="float32", models=folder.parent)
    alone, _ = open_models(checkpoints["sd1"], dtype="float32")
    assert (catalog.takes_references, alone.takes_references) == (True, False)
    assert [catalog.max_references(model) for model in ("", folder.name)] == [0, 10]
    assert [catalog.edits(model) for model in ("", folder.name)] == [False, True]
    shown = [choices_of(each) for each in (catalog, alone)]
    assert [each["reference"] is None for each in shown] == [False, True]
    assert [each["reference_scale"] for each in shown] == [None, None]
    Request.check({"prompts": ["a"], "reference": NAMES[0], "model": folder.name}, catalog)
    with pytest.raises(RequestError, match="need an IP-Adapter with this model"):
        Request.check({"prompts": ["a"], "reference": NAMES[0]}, catalog)


def test_what_is_not_here_any_more_is_asked_for_again(engine):
    request = Request.check({"prompts": ["a"], "reference": NAMES[0]}, engine.catalog)
    with pytest.raises(RequestError, match="reference picture is not here any more"):
        engine.submit(request)


@pytest.mark.slow("compiles")
def test_the_command_line_takes_several_files_in_their_order(folder, edited, tmp_path):
    files = []
    for number, photo in enumerate(PHOTOS):
        Image.fromarray(photo).save(tmp_path / f"photo-{number}.png")
        files.append(tmp_path / f"photo-{number}.png")
    command = ["generate", "--model", folder, "--size", SIDE, "--devices", 1, "--out", tmp_path]
    command += ["--seed", 7, "--steps", 2, "--prompt", "a fox", "--prompt", "a fox"]
    command += [x for file in files[:2] for x in ("--reference", file)]
    command += ["--override", 2, "seed", 7]
    command += [x for file in files[1::-1] for x in ("--override", 2, "reference", file)]
    code, _, err = run(*command)
    assert code == 0, err
    both = [(tmp_path / f"0{number}.png").read_bytes() for number in range(2)]
    assert np.array_equal(pixels_of(both[0]), edited)
    assert not np.array_equal(pixels_of(both[1]), edited)
    with Image.open(tmp_path / "01.png") as image:
        names = [Input(file.read_bytes()).name for file in files[1::-1]]
        assert f"Reference picture: {' '.join(names)}" in image.text[KEY]
    code, _, err = run(*command, *["--reference", files[2]] * 9)
    assert code == 2 and "11 pictures were given; at most 10 are accepted" in err


@pytest.mark.parametrize("count", [1, 2])
def test_openai_edits_by_reference_pictures(client, engine, count):
    answer = client.images.edit(
        image=[png(photo) for photo in PHOTOS[:count]],
        prompt="a fox",
        size=f"{SIDE}x{SIDE}",
        extra_body=ASKED,
    )
    file = base64.b64decode(answer.data[0].b64_json)
    (alone,) = engine.draw("a fox", reference=PHOTOS[:count], **ASKED)
    assert np.array_equal(pixels_of(file), alone)
    made = read_png(file).pictures[0]
    assert made.references == [Input(png(photo)).name for photo in PHOTOS[:count]]
    assert not made.init_image


@pytest.mark.slow("draws after ten pictures")
def test_openai_hands_in_ten_pictures_and_no_more(client):
    ten = [png(PHOTOS[2])] * 10
    asked = dict(prompt="a fox", size=f"{SIDE}x{SIDE}", extra_body={"steps": 1})
    assert len(ten) > MAX_PROMPTS + 1
    made = read_png(base64.b64decode(client.images.edit(image=ten, **asked).data[0].b64_json))
    assert len(made.common.references) == 10
    with pytest.raises(openai.BadRequestError):
        client.images.edit(image=[*ten, png(PHOTOS[0])], **asked)


@pytest.mark.parametrize("start", [dict(mask=True), dict(extra_body={"strength": 0.5})])
def test_openai_draws_on_a_picture_where_there_is_a_mask_or_a_strength(client, start):
    clear = np.dstack([PHOTOS[2], np.full((64, 64), 255, np.uint8)])
    clear[16:48, 16:48, 3] = 0
    body = {**ASKED, **start.get("extra_body", {})}
    mask = {"mask": ("mask.png", png(clear), "image/png")} if "mask" in start else {}
    answer = client.images.edit(
        image=png(PHOTOS[2]), prompt="a fox", size=f"{SIDE}x{SIDE}", extra_body=body, **mask
    )
    made = read_png(base64.b64decode(answer.data[0].b64_json)).pictures[0]
    assert made.init_image == Input(png(PHOTOS[2])).name and not made.reference
    assert bool(made.mask) == bool(mask)


def test_openai_draws_anew_what_is_transparent_where_there_is_no_mask(client):
    clear = np.dstack([PHOTOS[2], np.full((64, 64), 255, np.uint8)])
    clear[16:48, 16:48, 3] = 0
    answer = client.images.edit(
        image=png(clear), prompt="a fox", size=f"{SIDE}x{SIDE}", extra_body=ASKED
    )
    made = read_png(base64.b64decode(answer.data[0].b64_json)).pictures[0]
    assert made.init_image and made.mask and not made.reference


def units_of(*values: dict) -> dict:
    image = base64.b64encode(png(PHOTOS[0])).decode()
    unit = {"module": "ip-adapter-auto", "image": image}
    return {"controlnet": {"args": [unit | each for each in values]}}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (({"weight": 1}, {"weight": 0.5}), "have one weight here"),
        (({"model": "a"}, {"model": "b"}), "have one model here"),
    ],
)
def test_units_that_differ_are_refused_and_those_of_no_weight_left_out(address, values, told):
    body = {"prompt": "a fox", "seed": 7, "steps": 2, "width": SIDE, "height": SIDE}

    def ask(*units):
        return httpx.post(
            f"{address}/sdapi/v1/txt2img",
            json={**body, "alwayson_scripts": units_of(*units)},
            timeout=60,
        ).json()

    assert told in str(ask(*values))
    assert ask({"weight": 0}, {"weight": 1})["images"] == ask({"weight": 1})["images"]


def test_webuiapi_hands_in_reference_pictures_by_units(address, edited):
    api = webuiapi.WebUIApi(baseurl=f"{address}/sdapi/v1", sampler="Euler", steps=2)
    assert "ip-adapter-auto" in api.controlnet_module_list()
    units = [
        webuiapi.ControlNetUnit(image=Image.fromarray(photo), module="ip-adapter-auto")
        for photo in PHOTOS[:2]
    ]
    result = api.txt2img(
        prompt="a fox", seed=7, width=SIDE, height=SIDE, controlnet_units=units, alwayson_scripts={}
    )
    assert np.array_equal(result.image, edited)
