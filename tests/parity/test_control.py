"""ControlNets: pictures against PyTorch's pipelines, batches of their own, and what is refused."""

import dataclasses
import shutil
import unicodedata
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.report import count_compilations
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.controlnet import ControlNet
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.page import layout
from sd_tpu.pictures.images import parse_parameters, read_parameters
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import Request
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.runtime.programs import Programs
from sd_tpu.runtime.slots import SlotInputs, advance_slots, control_strength, empty_slots
from sd_tpu.sampling.samplers import make_table
from sd_tpu.serving import catalog
from sd_tpu.serving.client import open_models
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from sd_tpu.settings import CONTROL as CONTROLLED
from sd_tpu.settings import SETTINGS, Picture, RequestError
from tests.support.controlled import (
    ASKED,
    CONTROL,
    GIVEN,
    LINES,
    ONCE,
    SIDE,
    drawn_with,
    make_pipeline,
    programs_of,
    within_2,
)
from tests.support.networks import make_controlnet


def with_controlnet(made: diffusers.DiffusionPipeline) -> diffusers.DiffusionPipeline:
    """Return PyTorch's pipeline of the same parts, and a ControlNet."""
    xl = "XL" if "text_encoder_2" in made.components else ""
    kind = getattr(diffusers, f"StableDiffusion{xl}ControlNetPipeline")
    reference = kind(**made.components, controlnet=make_controlnet(made.unet))
    reference.set_progress_bar_config(disable=True)
    return reference


def theirs(reference, latents: np.ndarray, scale: float, start: float, stop: float) -> np.ndarray:
    """Return PyTorch's picture of this noise [C, h, w]."""
    return np.round(
        255
        * reference(
            ASKED["prompts"][0],
            image=Image.fromarray(LINES),
            latents=torch.tensor(latents[None]),
            negative_prompt=ASKED["negative_prompt"],
            num_inference_steps=ASKED["steps"],
            guidance_scale=ASKED["guidance"],
            controlnet_conditioning_scale=scale,
            control_guidance_start=start,
            control_guidance_end=stop,
            output_type="np",
        ).images[0]
    )


SCALES = [(1.0, 0.0, 1.0), (0.6, 0.2, 0.7)]  # with the shares at which control starts and stops


@pytest.fixture(scope="module")
def controlled(tmp_path_factory):
    """(PyTorch's pipeline with a ControlNet, the checkpoint, programs and parameters of the same)
    of SDXL."""
    folder = tmp_path_factory.mktemp("sdxl")
    reference = with_controlnet(make_pipeline("sdxl"))
    reference.save_pretrained(folder)
    checkpoint, params = Checkpoint.from_pretrained(folder)
    controlnet = ControlNet.open(folder / "controlnet")
    controlnet.check(checkpoint.model)
    programs = Programs(
        checkpoint.model.with_controlnet(controlnet.graph, SIDE, SIDE),
        make_mesh(1),
        slots=1,
        height=SIDE,
        width=SIDE,
    )
    yield reference, checkpoint, programs, {**params, "controlnet": controlnet.load()}
    shutil.rmtree(folder)


@pytest.mark.parametrize("scale, start, stop", SCALES)
@pytest.mark.slow("compiles with a ControlNet")
def test_a_picture_that_follows_another_is_that_of_pytorch(controlled, scale, start, stop):
    reference, checkpoint, programs, params = controlled
    h, w, channels = programs.latent_shape
    latents = np.random.default_rng(1).standard_normal((channels, h, w)).astype(np.float32)
    inputs = checkpoint.prompt_inputs("a cat", "fog", height=SIDE, width=SIDE)
    slot_inputs = SlotInputs.of(
        make_table(checkpoint.sampler, checkpoint.schedule, 6, spacing=checkpoint.spacing),
        {**inputs, "control": LINES},
        guidance=4.0,
        key=np.zeros(2, np.uint32),
        latents=latents.transpose(1, 2, 0),
        control_scale=scale,
        control_start=start,
        control_stop=stop,
    )
    slots = programs.encode(params, programs.empty(), {0: slot_inputs})
    slots = programs.advance(params, slots, 100)
    ours = programs.decode(params, slots.latents, np.array([True]))[0]
    expected = theirs(reference, latents, scale, start, stop)
    assert within_2(theirs(reference, latents, 0.0, start, stop), expected) < 0.99
    assert within_2(ours, expected) >= 0.995


@pytest.mark.parametrize("scale, start, stop", SCALES)
@pytest.mark.slow("compiles with a ControlNet")
def test_the_engines_picture_that_follows_another_is_that_of_pytorch(engine, scale, start, stop):
    reference = with_controlnet(make_pipeline("sd1"))
    h, w, channels = engine.checkpoint.model.latent_shape(SIDE, SIDE)
    noise = np.array(jax.random.normal(jax.random.PRNGKey(ASKED["seed"]), (channels, h, w)))
    values = dict(control_scale=scale, control_start=start, control_stop=stop)
    (ours,) = drawn(engine, control_image=CONTROL.name, **values)
    expected = theirs(reference, noise, scale, start, stop)
    assert within_2(theirs(reference, noise, 0.0, start, stop), expected) < 0.99
    assert within_2(ours, expected) >= 0.995


def test_control_is_in_the_steps_in_which_diffusers_has_it():
    for rows in (1, 6, 20, 31):
        for start, stop in ((0.0, 1.0), (0.2, 0.7), (0.29, 0.57), (0.5, 0.51)):
            theirs = [
                0.0 if i / rows < start or (i + 1) / rows > stop else np.float32(0.8)
                for i in range(rows)
            ]
            assert control_strength(rows, 0.8, start=start, stop=stop).tolist() == theirs


# --- a batch ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of SD 1, two ControlNets of one shape for it, and one of another shape."""
    folder, made = tmp_path_factory.mktemp("control"), make_pipeline("sd1")
    made.save_pretrained(folder / "model")
    make_controlnet(made.unet, 1).save_pretrained(folder / "lines")
    make_controlnet(made.unet, 2).save_pretrained(folder / "depth")
    make_controlnet(made.unet, 3, controlnet_conditioning_channel_order="bgr").save_pretrained(
        folder / "blue"
    )
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(folder):
    """An engine with these, and room for two guided pictures at a time."""
    engine = Engine.open(
        folder / "model",
        devices=1,
        group=2,
        size=(SIDE, SIDE),
        controlnets=[folder / name for name in ("lines", "depth", "blue")],
    )
    yield engine
    engine.close()


drawn = partial(drawn_with, GIVEN)


@pytest.mark.slow("compiles with a ControlNet")
def test_eight_control_pictures_strengths_and_shares_in_one_batch_give_the_bytes_of_each_alone(
    engine,
):
    pictures = [Input.of_pixels(np.roll(LINES, 5 * i, axis=0)) for i in range(8)]
    given = {each.name: each for each in pictures}
    samplers = ["ddim", "euler", "heun", "dpmpp_2m", "pndm", "euler_ancestral", "unipc", "ddim"]
    own = [
        {
            "control_image": pictures[i].name,
            "control_scale": 0.25 * (i + 1),
            "control_start": 0.1 * (i % 3),
            "control_stop": 1 - 0.1 * (i % 4),
            "controlnet": "depth" if i % 3 == 2 else "lines",
            "detector": ["", "canny"][i % 2],
            "cache_interval": 1 + i % 2,
            "guidance": [4.0, 1.0][i % 4 == 3],
            "sampler": samplers[i],
        }
        for i in range(6)
    ]
    own += [{"sampler": samplers[i]} for i in (6, 7)]  # two that follow nothing
    prompts = [f"{i} cats" for i in range(8)]
    together = drawn_with(given, engine, prompts=prompts, overrides=own)
    traces, compiled = programs_of(engine), count_compilations()
    assert traces == {"StableDiffusion 1": ONCE, "StableDiffusion 1 with ControlNet 1": ONCE}
    for i in range(8):
        (alone,) = drawn_with(
            given, engine, prompts=[*[""] * i, prompts[i]], overrides=[*[None] * i, own[i]]
        )
        assert np.array_equal(alone, together[i]), own[i]
    assert programs_of(engine) == traces and compiled() == 0
    assert len({picture.tobytes() for picture in together}) == 8


@pytest.mark.parametrize("value", [dict(control_scale=0), dict(control_image="")])
def test_what_follows_nothing_is_drawn_by_the_programs_of_those_without_control(engine, value):
    (plain,) = drawn_with({}, engine)
    (follows,) = drawn(engine, **{"control_image": CONTROL.name})
    before = programs_of(engine)
    (neither,) = drawn(engine, **{"control_image": CONTROL.name, **value})
    assert np.array_equal(neither, plain) and within_2(follows, plain) < 0.95
    assert programs_of(engine) == before


def test_controlnets_of_one_shape_share_programs_and_one_of_another_has_its_own(engine):
    there = engine.catalog._networks["controlnet"]
    kinds = {
        name: engine.catalog.with_network(engine.weights, each).architecture
        for name, each in there.items()
    }
    assert kinds["lines"] == kinds["depth"] != kinds["blue"]
    request = Request.check(
        {
            **ASKED,
            "prompts": ["a"] * 4,
            "overrides": [
                None,
                *(
                    {"control_image": CONTROL.name, "controlnet": name}
                    for name in ("lines", "depth", "blue")
                ),
            ],
        },
        engine.catalog,
    )
    resolved = engine.resolver.resolve(request, GIVEN).pictures
    batches = [engine._batch(picture) for picture in resolved.values()]
    assert batches[1] == batches[2] and len({*batches}) == 3
    assert batches[1].memory > batches[0].memory
    weights = [picture.weights for picture in resolved.values()]
    assert weights[1].memory == there["lines"].memory
    assert weights[1].needs == (weights[0],), "which stays beside it, and counts once"
    zeros = weights[1].zeros
    assert zeros.memory == weights[1].memory and zeros.needs == (weights[0].zeros,)
    lines, depth = (
        drawn(engine, control_image=CONTROL.name, controlnet=name)[0] for name in ("lines", "depth")
    )
    assert within_2(lines, depth) < 0.95


def test_a_controlnet_is_found_by_either_normal_form_of_its_name(engine, monkeypatch):
    name = "수채화"
    network = dataclasses.replace(
        next(iter(engine.catalog._networks["controlnet"].values())),
        name=unicodedata.normalize("NFD", name),
    )
    monkeypatch.setitem(
        engine.catalog._networks, "controlnet", catalog._by_name([network, network])
    )
    assert engine.catalog.controlnets == [name, f"{name} (2)"]
    for form in ("NFC", "NFD"):
        asked = Picture(prompt="a", control_image="x", controlnet=unicodedata.normalize(form, name))
        assert [each.name for each in engine.catalog.networks(asked)] == [name]


def test_what_lies_on_a_device_is_shared_by_a_model_and_its_controlnets(engine):
    drawn(engine, control_image=CONTROL.name)
    held = engine.worker.weights
    base = held.of(0, engine.weights)
    other = next(
        held.of(0, name) for name in held.names(0) if name.network == ("controlnet", "lines")
    )
    kernels = [params["unet"]["conv_in"]["kernel"] for params in (base, other)]
    assert len({kernel.unsafe_buffer_pointer() for kernel in kernels}) == 1


def test_the_first_controlnet_that_fits_is_taken_and_a_picture_says_which(engine):
    request = Request.check(
        {**ASKED, "control_image": CONTROL.name, "detector": "canny", "control_stop": 0.5},
        engine.catalog,
    )
    job = engine.submit(request, inputs=GIVEN)
    (pixels,) = (e.pixels for e in job.events() if isinstance(e, ImageReady))
    assert job.request.common.controlnet == "lines"
    text = read_parameters(engine.to_png(pixels, request))
    assert (
        'ControlNet 0: "Module: canny, Model: lines, Weight: 1, Guidance Start: 0, '
        'Guidance End: 0.5"'
    ) in text
    assert (
        parse_parameters(text).common
        == job.request.explicit(lambda _: engine.checkpoint.schedule).common
    )


@pytest.mark.parametrize(
    "values, given, complaint",
    [
        (
            {"control_image": CONTROL.name},
            {},
            "control picture is not here any more; please hand it",
        ),
        (
            {"control_image": CONTROL.name, "controlnet": "pose"},
            GIVEN,
            "no ControlNet 'pose'; there are lines, depth, blue",
        ),
        ({"control_image": "../a.png"}, GIVEN, "name of a picture that was handed in"),
        ({"control_image": CONTROL.name, "detector": "hed"}, GIVEN, "Detector 'hed' is unknown"),
        ({"control_start": 0.5, "control_stop": 0.5}, GIVEN, "should start before it stops"),
        ({"control_scale": 3}, GIVEN, "Control strength should be from 0"),
        (
            {"prompts": ["a", "b"], "overrides": [None, {"control_image": CONTROL.name}]},
            {},
            "^Prompt 2: The control picture",
        ),
    ],
)
def test_what_a_picture_cannot_follow_is_refused_in_a_sentence(engine, values, given, complaint):
    with pytest.raises(RequestError, match=complaint):
        drawn_with(given, engine, **values)


# --- what is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, values, complaint",
    [
        ("sd2", {}, "takes texts of 128 numbers a token; for this model it should be 64"),
        (
            "sd1",
            dict(conditioning_embedding_out_channels=(8, 16)),
            "takes 2 pixels along a side for each latent; for this model it should be 4",
        ),
        ("sd1", dict(in_channels=9), "takes latents of 9 channels"),
        (
            "sd1",
            dict(layers_per_block=2),
            "adds to maps of 32, 32, 32, 32, .*; .* be 32, 32, 32, 64",
        ),
        (
            "sd1",
            dict(
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=144,
            ),
            "is made for another family: it is told 8, 144 numbers beside",
        ),
    ],
)
def test_a_controlnet_that_fits_no_model_is_refused_before_anything_is_compiled(
    folder, tmp_path, layout, values, complaint
):
    unet = make_pipeline(layout).unet if layout != "sd1" else None
    config = dict(diffusers.ControlNetModel.load_config(folder / "lines"))
    made = (
        diffusers.ControlNetModel.from_config({**config, **values})
        if unet is None
        else (make_controlnet(unet))
    )
    made.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=f"The ControlNet other {complaint}"):
        Engine.open(folder / "model", devices=1, controlnets=[tmp_path / "other"])


def test_a_controlnet_is_given_latents_without_the_channels_of_a_mask(folder):
    configs = Checkpoint.open(folder / "model").configs
    configs |= {"unet": configs["unet"] | {"in_channels": 9}}
    model, shapes = StableDiffusion.build(configs, jnp.float32)
    controlnet = ControlNet.open(folder / "lines")
    controlnet.check(model)
    model = model.with_controlnet(controlnet.graph, SIDE, SIDE)
    slots = jax.eval_shape(partial(empty_slots, model, 2, model.latent_shape(SIDE, SIDE)))
    after = jax.eval_shape(
        partial(advance_slots, model, n=1, group=1),
        {**shapes, "controlnet": controlnet.shapes},
        slots,
    )
    assert slots.mask_channels.shape[-1] == 5 and jax.tree.leaves(after) == jax.tree.leaves(slots)


def test_what_is_no_controlnet_is_refused_in_a_sentence(folder, tmp_path):
    with pytest.raises(CheckpointError, match="is UNet2DConditionModel; ControlNetModel is"):
        ControlNet.open(folder / "model" / "unet")
    with pytest.raises(CheckpointError, match="There is no folder"):
        ControlNet.open(tmp_path / "nothing")
    shutil.copytree(folder / "lines", tmp_path / "damaged")
    (tmp_path / "damaged" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="damaged has no safetensors weights"):
        ControlNet.open(tmp_path / "damaged")
    (tmp_path / "damaged" / "diffusion_pytorch_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        ControlNet.open(tmp_path / "damaged").load()


@pytest.fixture
def without(least) -> catalog.Catalog:
    """Catalog of a server without ControlNets."""
    return open_models(least, dtype="float32")[0]


def test_control_pictures_without_a_controlnet_are_refused_and_names_count_for_nothing(without):
    with pytest.raises(RequestError, match="need a ControlNet, and this server has none"):
        Request.check({**ASKED, "control_image": CONTROL.name}, without)
    assert Request.check({**ASKED, "controlnet": "pose"}, without)


def test_what_cannot_be_followed_here_is_not_asked_for_on_the_page(engine, without):
    here, elsewhere = map(layout.choices_of, (engine.catalog, without))
    names = [name for name, setting in SETTINGS.items() if setting.section == CONTROLLED]
    assert "control_scale" in names and all(elsewhere[name] is None for name in names)
    assert None not in [here[name] for name in names] and "depth" in here["controlnet"]
    assert here["reference"] is None
