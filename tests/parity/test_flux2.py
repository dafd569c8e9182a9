"""FLUX.2 klein: pictures against PyTorch's, files, and what is refused."""

import functools
import importlib

import jax
import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.report import count_compilations
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.flux2_klein import Flux2Klein
from sd_tpu.pictures.inputs import Input, edited_pixels
from sd_tpu.request import Request
from sd_tpu.runtime.programs import ImageEncoder
from sd_tpu.runtime.slots import signed
from sd_tpu.sampling.samplers import FLOW_SAMPLERS
from sd_tpu.serving.engine import Engine
from sd_tpu.settings import RequestError
from tests.support import pictures
from tests.support.flux2 import make_pipeline
from tests.support.pictures import HOLE, MASK, PHOTO, SIDE, START, assert_alike, pictures_of

PROMPTS = ["a cat", "a red fox (with [brackets] and 1:1.5) and Häuser, 猫, 🦊"]
ASKED = dict(prompts=PROMPTS, seed=3, steps=4, guidance=3.0)
drawn = functools.partial(pictures.drawn, asked=ASKED)
# By width and height: square, of no multiples of eight, and others.
SIZES = (64, 64), (101, 75), (72, 66), (128, 65)


def photo(width: int, height: int) -> np.ndarray:
    """Random colours in squares of nine pixels."""
    squares = np.random.default_rng(width).integers(
        0, 256, (height // 9 + 1, width // 9 + 1, 3), np.uint8
    )
    return squares.repeat(9, 0).repeat(9, 1)[:height, :width]


PHOTOS = {size: photo(*size) for size in SIZES}
REFERENCES = {size: Input.of_pixels(pixels) for size, pixels in PHOTOS.items()}
SEEN = {each.name: each for each in REFERENCES.values()}
edited = functools.partial(pictures.drawn, given=SEEN, asked={**ASKED, "prompts": PROMPTS[:1]})


def named(*sizes) -> str:
    """Return the names of reference pictures of these sizes, as a setting."""
    return " ".join(REFERENCES[size].name for size in sizes)


@pytest.fixture(scope="module", params=[True, False], ids=["distilled", "base"])
def loaded(request, tmp_path_factory):
    """(the PyTorch pipeline, an engine with the same model) of each kind in turn."""
    folder = tmp_path_factory.mktemp("klein")
    reference = make_pipeline(folder / "words", distilled=request.param)
    reference.save_pretrained(folder / "model")
    engine = Engine.open(folder / "model", devices=1, size=(SIDE, SIDE))
    yield reference, engine
    engine.close()


def theirs(reference, engine, monkeypatch, index=0, size=(SIDE, SIDE), **values) -> np.ndarray:
    """PyTorch's picture of the same noise: uint8 [H, W, 3]."""
    module = importlib.import_module(type(reference).__module__)
    h, w, channels = engine.checkpoint.model.latent_shape(*size)
    key = jax.random.PRNGKey(ASKED["seed"] + index)
    noise = jax.random.normal(key, (1, channels, h, w))
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.tensor(np.array(noise)))
    reference.set_progress_bar_config(disable=True)
    images = reference(
        **{
            "prompt": PROMPTS[index],
            "guidance_scale": ASKED["guidance"],
            "height": size[0],
            "width": size[1],
            "num_inference_steps": ASKED["steps"],
            "output_type": "np",
            **values,
        }
    ).images
    return np.round(images[0] * 255).astype(int)


@pytest.mark.slow("compiles each kind")
def test_two_prompts_of_different_lengths_are_drawn_as_by_pytorch(loaded, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine)
    for index, picture in enumerate(ours):
        assert_alike(picture, theirs(reference, engine, monkeypatch, index))
    assert not np.array_equal(*ours)


@pytest.mark.slow("compiles another size")
@pytest.mark.parametrize("steps", [2, 30])
def test_a_picture_that_is_not_square_is_that_of_pytorch(loaded, steps, monkeypatch):
    reference, engine = loaded
    ours = drawn(engine, height=24, width=48, prompts=PROMPTS[:1], steps=steps)
    expected = theirs(reference, engine, monkeypatch, size=(24, 48), num_inference_steps=steps)
    assert_alike(ours[0], expected)


@pytest.mark.slow("compiles a bucket of tokens, and an encoder for each size")
@pytest.mark.parametrize(
    "sizes",
    [SIZES[:1], SIZES[1:2], SIZES[:2], SIZES[1:4]],
    ids=["one", "not square", "two", "three"],
)
def test_reference_pictures_are_edited_as_by_pytorch(loaded, sizes, monkeypatch):
    reference, engine = loaded
    ours = edited(engine, reference=named(*sizes), height=24, width=40)[0]
    images = [Image.fromarray(PHOTOS[size]) for size in sizes]
    expected = theirs(reference, engine, monkeypatch, size=(24, 40), image=images)
    assert_alike(ours, expected)
    print(f"parity | {sizes} | {np.mean(np.abs(ours.astype(int) - expected) <= 2):.4%} |")
    plain = edited(engine, height=24, width=40)[0]
    assert np.mean(np.abs(plain.astype(int) - ours) <= 2) < 0.9


@pytest.mark.parametrize(
    "size", [(64, 64), (101, 75), (130, 1039), (1024, 1025), (1201, 1013), (64, 512)], ids=str
)
def test_a_reference_picture_is_prepared_as_by_diffusers(loaded, size):
    reference, engine = loaded
    pixels, processor = photo(*size), reference.image_processor
    image = processor.check_image_input(Image.fromarray(pixels))
    image = processor._resize_if_exceeds_area(image)
    unit = engine.checkpoint.model.size_unit
    width, height = (length // unit * unit for length in image.size)
    expected = processor.preprocess(image, height=height, width=width, resize_mode="crop")
    given = Input.of_pixels(pixels)
    ours = signed(edited_pixels(given.name, {given.name: given}, unit))
    assert np.array_equal(ours.transpose(2, 0, 1)[None], expected.numpy())


def test_tokens_of_reference_pictures_are_where_diffusers_has_them(loaded):
    reference, engine = loaded
    sizes = [(64, 72), (80, 64), (64, 64)]
    unit = engine.checkpoint.model.downscale
    shown = [torch.zeros(1, 1, height // unit, width // unit) for height, width in sizes]
    inputs = engine.checkpoint.model.reference_inputs(sizes)
    assert np.array_equal(
        inputs["reference_positions"], reference._prepare_image_ids(shown)[0].numpy()
    )
    assert inputs["reference_count"] == len(inputs["reference_positions"])


@pytest.mark.slow("draws three times")
def test_the_order_of_reference_pictures_matters(loaded):
    _, engine = loaded
    first, turned = (
        edited(engine, reference=named(*each))[0] for each in (SIZES[:2], SIZES[1::-1])
    )
    assert not np.array_equal(first, turned)


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ((63, 100), "63x100 pixels.*64 or more on either side"),
        ((577, 72), "577x72 pixels.*at most 8 times as long as wide"),
    ],
)
def test_a_reference_picture_that_is_too_small_or_too_long_is_refused(loaded, size, complaint):
    given = Input.of_pixels(photo(*size))
    with pytest.raises(RequestError, match=complaint) as caught:
        edited(loaded[1], given={given.name: given}, reference=given.name)
    assert caught.value.setting == "reference"


def test_more_than_ten_reference_pictures_are_refused_by_their_number(loaded):
    ten = named(*SIZES[:1] * 10)
    values = {**ASKED, "reference": ten}
    assert len(Request.check(values, loaded[1].catalog).common.references) == 10
    with pytest.raises(RequestError, match="11 pictures were given; at most 10"):
        Request.check({**values, "reference": f"{ten} {named(SIZES[0])}"}, loaded[1].catalog)


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(0, 0), (1, 256), (256, 256), (257, 512), (4096, 4096), (4097, 8192), (9000, 12288)],
)
def test_tokens_of_reference_pictures_are_counted_in_buckets(loaded, tokens, bucket):
    model = loaded[1].checkpoint.model
    inputs = {"ids": np.zeros((2, 512), np.int32)}
    if tokens:
        inputs |= model.reference_inputs([(8, 8 * tokens)])
    found = model.for_inputs(inputs)
    assert found.reference_tokens == bucket
    assert found.shape_key == ((f"{bucket} tokens of reference pictures",) if bucket else ())


@pytest.mark.slow("compiles two buckets")
def test_pictures_with_and_without_reference_pictures_do_not_tell_of_each_other(loaded):
    _, engine = loaded
    own = [
        {"reference": named(*sizes), "steps": 3 + index % 3, "guidance": 2.0 + index}
        for index, sizes in enumerate(
            [(), SIZES[:1], SIZES[:2], SIZES[1:2], SIZES[2:4], (), SIZES[:4], SIZES[3:4]]
        )
    ]
    prompts = [f"{word} cat" for word in "abcdefgh"]
    request = Request.check({**ASKED, "prompts": prompts, "own": own}, engine.catalog)
    together = pictures_of(engine.submit(request, inputs=SEEN))
    compiled = count_compilations()
    for index in range(8):
        alone = pictures_of(engine.submit(request.only(index), inputs=SEEN))
        assert np.array_equal(together[index], alone[0]), own[index]
    assert compiled() == 0
    assert len({picture.tobytes() for picture in together.values()}) == 8


@pytest.mark.slow("draws with a start picture too")
def test_reference_pictures_stand_beside_a_start_picture(loaded):
    _, engine = loaded
    given = {**SEEN, **{each.name: each for each in (START, HOLE)}}
    ours = edited(
        engine,
        given=given,
        reference=named(SIZES[0]),
        init_image=START.name,
        mask=HOLE.name,
        mask_blur=0,
    )[0]
    plain = edited(engine, given=given, init_image=START.name, mask=HOLE.name, mask_blur=0)[0]
    assert np.array_equal(ours[MASK == 0], PHOTO[MASK == 0]) and not np.array_equal(ours, plain)


@pytest.mark.slow("encodes once more")
def test_a_reference_picture_is_encoded_once_for_all_that_share_it(loaded, monkeypatch):
    _, engine = loaded
    new = Input.of_pixels(photo(64, 64)[::-1].copy())
    encode, encoded = ImageEncoder._encode, []
    monkeypatch.setattr(
        ImageEncoder,
        "_encode",
        lambda encoder, params, waiting: (
            encoded.extend(waiting) or encode(encoder, params, waiting)
        ),
    )
    given = {**SEEN, new.name: new}
    for prompts in (["a"] * 4, ["b"]):
        edited(engine, given=given, prompts=prompts, reference=f"{new.name} {named(SIZES[1])}")
    assert len([image for _, image in encoded]) <= 2
    one, other = (
        edited(engine, given=given, reference=name)[0] for name in (new.name, named(SIZES[0]))
    )
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(("tokens", "steps"), [(256, 4), (4096, 4), (4096, 50), (5000, 20)])
def test_the_shift_is_that_of_the_pipeline(loaded, tokens, steps):
    _, engine = loaded
    module = importlib.import_module("diffusers.pipelines.flux2.pipeline_flux2_klein")
    schedule = engine.checkpoint.model.schedule_of(engine.checkpoint.schedule, 8, 8 * tokens, steps)
    assert schedule.shift == pytest.approx(np.exp(module.compute_empirical_mu(tokens, steps)))


@pytest.mark.slow("draws twice")
def test_guidance_counts_for_the_base_model_alone(loaded):
    reference, engine = loaded
    strong, weak = drawn(engine, guidance=6.0), drawn(engine, guidance=1.0)
    same = all(map(np.array_equal, strong, weak))
    assert same == bool(reference.config.is_distilled)
    steps, guidance = (4, 1.0) if reference.config.is_distilled else (50, 4.0)
    card = engine.checkpoint.card
    assert (card.steps, card.guidance) == (steps, guidance)


@pytest.mark.slow("reads and compiles")
def test_the_autoencoder_is_that_of_diffusers(loaded):
    reference, engine = loaded
    _, params = Checkpoint.from_pretrained(engine.checkpoint.parameters.source)
    model = engine.checkpoint.model
    assert model.downscale == 8
    picture = 2 * (PHOTO.astype(np.float32) / 255) - 1
    ours = np.asarray(model.encode(params, picture))
    with torch.no_grad():
        found = reference.vae.encode(torch.tensor(picture.transpose(2, 0, 1)[None]))
        patches = reference._patchify_latents(found.latent_dist.mode())
        statistics = reference.vae.bn
        mean, variance = (
            each.view(1, -1, 1, 1) for each in (statistics.running_mean, statistics.running_var)
        )
        expected = (patches - mean) / torch.sqrt(variance + reference.vae.config.batch_norm_eps)
    expected = expected[0].numpy().transpose(1, 2, 0)
    assert np.linalg.norm(ours - expected) <= 1e-4 * np.linalg.norm(expected)


def test_what_begins_with_a_picture_keeps_what_a_mask_says(loaded):
    _, engine = loaded
    ours = drawn(engine, init_image=START.name, mask=HOLE.name, mask_blur=0, prompts=PROMPTS[:1])[0]
    assert np.array_equal(ours[MASK == 0], PHOTO[MASK == 0])
    assert not np.array_equal(ours[MASK > 0], PHOTO[MASK > 0])


def test_slots_of_a_batch_do_not_tell_that_others_are_there(loaded):
    _, engine = loaded
    samplers = [*FLOW_SAMPLERS, *FLOW_SAMPLERS][:8]
    own = [
        {"sampler": sampler, "steps": 3 + index, "guidance": 2.0 + index}
        for index, sampler in enumerate(samplers)
    ]
    prompts = [f"{word} {PROMPTS[index % 2]}" for index, word in enumerate("abcdefgh")]
    request = Request.check({**ASKED, "prompts": prompts, "own": own}, engine.catalog)
    together, compiled = pictures_of(engine.submit(request)), count_compilations()
    for index in (0, 4, 7):
        assert np.array_equal(together[index], pictures_of(engine.submit(request.only(index)))[0])
    assert compiled() == 0


def test_ids_are_those_of_the_chat_template_without_thinking(loaded):
    reference, engine = loaded
    tokenizer = engine.checkpoint.tokenizers["tokenizer"]
    for prompt in (*PROMPTS, "", "two\nlines"):
        text = reference.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        ids = reference.tokenizer(text).input_ids
        assert tokenizer.turn(prompt, thinking=False) == ids


def test_layers_that_nothing_depends_on_are_not_read(loaded, tmp_path):
    _, engine = loaded
    checkpoint, params = Checkpoint.from_pretrained(engine.checkpoint.parameters.source)
    assert len(params["text_encoder"]["layers"]) == 27 and "norm" not in params["text_encoder"]
    with pytest.raises(CheckpointError, match="without the last layers of its text encoder"):
        checkpoint.save_pretrained(tmp_path, params)


def test_parts_that_do_not_fit_are_refused_by_what_differs(loaded):
    _, engine = loaded
    configs = engine.checkpoint.configs
    for part, change, sentence in (
        ("text_encoder", {"num_hidden_layers": 27}, "27 layers give 48 numbers.*first 27"),
        ("vae", {"latent_channels": 4}, "32 channels.*latents have 16"),
    ):
        changed = {**configs, part: {**configs[part], **change}}
        with pytest.raises(CheckpointError, match=sentence):
            Flux2Klein.build(changed, np.float32)
    with pytest.raises(CheckpointError, match="Token downsampling"):
        Flux2Klein.build(configs, np.float32, token_downsampling=2)
