"""IP-Adapters: networks and pictures against PyTorch's, batches of their own, what is refused."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from PIL import Image
from safetensors.numpy import load_file, save_file

from benchmarks.report import count_compilations
from sd_tpu.checkpoint import folder as checkpoint_folder
from sd_tpu.checkpoint.config import CheckpointError, ProjectedVisionEncoderConfig, UNetConfig
from sd_tpu.checkpoint.ip_adapter import IPAdapterConfig, ResamplerConfig
from sd_tpu.checkpoint.weights import abstract
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.ip_adapter import IPAdapter
from sd_tpu.models import IPAdapterModel
from sd_tpu.pictures.images import parse_parameters, read_parameters
from sd_tpu.pictures.inputs import Input, reference_pixels
from sd_tpu.request import Request
from sd_tpu.runtime.mesh import make_mesh
from sd_tpu.runtime.programs import ImageEncoder, Programs
from sd_tpu.runtime.slots import SlotInputs
from sd_tpu.sampling.samplers import make_table
from sd_tpu.serving.client import open_models
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from sd_tpu.settings import RequestError
from tests.support.controlled import (
    ASKED,
    CONTROL,
    ONCE,
    drawn_with,
    make_pipeline,
    programs_of,
    within_2,
)
from tests.support.networks import ENCODER, make_adapter, make_controlnet, make_encoder
from tests.support.parity import assert_agrees
from tests.support.tiny import ONE_LEVEL

SIDE = 32
RNG = np.random.default_rng(0)
PHOTO = RNG.integers(0, 256, (9, 14, 3), np.uint8).repeat(8, 0).repeat(8, 1)
REFERENCE = Input.of_pixels(PHOTO)
GIVEN = {REFERENCE.name: REFERENCE}
drawn = partial(drawn_with, GIVEN)


@pytest.fixture(scope="module", params=[("sd1", True), ("sdxl", False)], ids=str)
def referring(request, tmp_path_factory):
    """(PyTorch's pipeline with an IP-Adapter, the checkpoint, the adapter, programs and parameters
    of the same), plain and plus."""
    layout, plus = request.param
    folder, reference = tmp_path_factory.mktemp(layout), make_pipeline(layout)
    reference.set_progress_bar_config(disable=True)
    reference.save_pretrained(folder / "model")
    make_encoder(folder / "models" / "image_encoder")
    make_adapter(reference.unet, folder / "models" / "adapter.safetensors", plus=plus)
    reference.load_ip_adapter(str(folder), subfolder="models", weight_name="adapter.safetensors")
    checkpoint, params = Checkpoint.from_pretrained(folder / "model")
    adapter = IPAdapter.open(folder / "models" / "adapter.safetensors")
    adapter.check(checkpoint.model)
    programs = Programs(
        adapter.joined(checkpoint.model, SIDE, SIDE), make_mesh(1), slots=2, height=SIDE, width=SIDE
    )
    yield reference, checkpoint, adapter, programs, {**params, "ip_adapter": adapter.load()}
    shutil.rmtree(folder)


@pytest.mark.slow("compiles with an IP-Adapter")
def test_what_the_unet_is_told_and_gives_is_that_of_diffusers(referring):
    reference, _, adapter, programs, params = referring
    image = reference_pixels(REFERENCE.name, GIVEN, ENCODER["image_size"])
    taken = reference.feature_extractor(Image.fromarray(PHOTO), return_tensors="np").pixel_values
    network = nnx.merge(adapter.graph, params["ip_adapter"])
    with torch.no_grad():
        embeds = reference.prepare_ip_adapter_image_embeds(
            Image.fromarray(PHOTO), None, "cpu", 1, True
        )
        (tokens,) = reference.unet.encoder_hid_proj(embeds)
    ours, reference_tokens = jax.jit(
        lambda image: (tokens := network.tokens(image), network(tokens))
    )(image)
    assert taken.shape == (1, 3, 28, 28) and ours.shape == tuple(tokens[:, 0].shape)
    theirs = tokens[:, 0].numpy()
    assert_agrees("IPAdapterModel", ours, theirs)

    model, unet = programs.model, reference.unet
    latents, text = (
        RNG.standard_normal(shape).astype(np.float32)
        for shape in ((2, 4, 8, 8), (2, 77, unet.config.cross_attention_dim))
    )
    reference.set_ip_adapter_scale(0.7)
    added = {}
    if unet.config.addition_embed_type:
        added = {
            "text_embeds": RNG.standard_normal((2, 96)).astype(np.float32),
            "time_ids": np.float32([[64, 64, 0, 0, 64, 64]] * 2),
        }
    with torch.no_grad():
        expected = unet(
            torch.tensor(latents),
            7,
            torch.tensor(text),
            added_cond_kwargs={
                "image_embeds": embeds,
                **{name: torch.tensor(x) for name, x in added.items()},
            },
        ).sample
    told = {
        "text": text,
        "reference": reference_tokens,
        "reference_scale": np.float32([0.7] * 2),
        **added,
    }
    x = latents.transpose(0, 2, 3, 1)
    found = jax.jit(model.denoise)(params, x, np.float32([7, 7]), told)
    expected = expected.permute(0, 2, 3, 1).numpy()
    assert_agrees("UNet2DConditionModel with reference pictures", found, expected)


@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.slow("compiles with an IP-Adapter")
def test_a_picture_that_is_drawn_after_another_is_that_of_pytorch(referring, scale):
    reference, checkpoint, adapter, programs, params = referring
    h, w, channels = programs.latent_shape
    latents = np.random.default_rng(1).standard_normal((channels, h, w)).astype(np.float32)

    def theirs(scale):
        reference.set_ip_adapter_scale(scale)
        return np.round(
            255
            * reference(
                "a cat",
                ip_adapter_image=Image.fromarray(PHOTO),
                latents=torch.tensor(latents[None]),
                negative_prompt="fog",
                num_inference_steps=6,
                guidance_scale=4.0,
                height=SIDE,
                width=SIDE,
                output_type="np",
            ).images[0]
        )

    inputs = checkpoint.prompt_inputs("a cat", "fog", height=SIDE, width=SIDE)
    slot_inputs = SlotInputs.of(
        make_table(checkpoint.sampler, checkpoint.schedule, 6, spacing=checkpoint.spacing),
        {
            **inputs,
            "reference_scale": np.float32([scale]),
            "reference": np.asarray(
                jax.jit(adapter.tokens)(params, reference_pixels(REFERENCE.name, GIVEN, 28))
            ),
        },
        guidance=4.0,
        key=np.zeros(2, np.uint32),
        latents=latents.transpose(1, 2, 0),
    )
    slots = programs.encode(params, programs.empty(), {0: slot_inputs})
    slots = programs.advance(params, slots, 100)
    ours = programs.decode(params, slots.latents, np.array([True, False]))[0]
    expected = theirs(scale)
    assert within_2(theirs(0.0), expected) < 0.99
    assert within_2(ours, expected) >= 0.995


# --- a batch ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of SD 1, a ControlNet for it, two plain adapters and one of the kind plus, in the
    layout of h94/IP-Adapter."""
    folder, made = tmp_path_factory.mktemp("reference"), make_pipeline("sd1", **ONE_LEVEL)
    made.save_pretrained(folder / "model")
    make_controlnet(made.unet).save_pretrained(folder / "lines")
    make_encoder(folder / "models" / "image_encoder")
    for seed, name in enumerate(("first", "second", "plus")):
        make_adapter(
            made.unet, folder / "models" / f"{name}.safetensors", seed=seed, plus=name == "plus"
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
        controlnets=[folder / "lines"],
        ip_adapters=[
            folder / "models" / f"{name}.safetensors" for name in ("first", "second", "plus")
        ],
    )
    yield engine
    engine.close()


@pytest.mark.slow("compiles with an IP-Adapter")
def test_eight_reference_pictures_and_strengths_in_one_batch_give_the_bytes_of_each_alone(engine):
    photos = [Input.of_pixels(np.roll(PHOTO, 9 * i, axis=1)) for i in range(8)]
    given = {each.name: each for each in (*photos, CONTROL)}
    samplers = ["ddim", "euler", "heun", "dpmpp_2m", "pndm", "euler_ancestral", "unipc", "ddim"]
    own = [
        {
            "reference": photos[i].name,
            "reference_scale": 0.25 * (i + 1),
            "sampler": samplers[i],
            "ip_adapter": ["first", "second"][i % 2],
            "cache_interval": 1 + i % 2,
            "guidance": [4.0, 1.0][i % 4 == 3],
        }
        for i in range(6)
    ]
    own[5] |= {"control_image": CONTROL.name, "ip_adapter": "plus"}
    own += [{"sampler": samplers[i]} for i in (6, 7)]  # two without a reference picture
    prompts = [f"{i} cats" for i in range(8)]
    together = drawn_with(given, engine, prompts=prompts, overrides=own)
    traces, compiled = programs_of(engine), count_compilations()
    assert traces == {
        "StableDiffusion 1": ONCE,
        "StableDiffusion 1 with IP-Adapter 1": ONCE,
        "StableDiffusion 1 with ControlNet 1 with IP-Adapter 2": ONCE,
    }
    for i in range(8):
        (alone,) = drawn_with(
            given, engine, prompts=[*[""] * i, prompts[i]], overrides=[*[None] * i, own[i]]
        )
        assert np.array_equal(alone, together[i]), own[i]
    assert programs_of(engine) == traces and compiled() == 0
    assert len({picture.tobytes() for picture in together}) == 8


def test_what_many_pictures_share_is_encoded_once_for_each_adapter_and_not_again(
    engine, monkeypatch
):
    photo, encoded, encode = Input.of_pixels(PHOTO[::-1].copy()), [], ImageEncoder._encode

    def counting(encoder: ImageEncoder, params: dict, waiting: dict) -> dict:
        encoded.extend(waiting)
        return encode(encoder, params, waiting)

    given = {photo.name: photo, REFERENCE.name: REFERENCE}
    drawn_with(
        given,
        engine,
        prompts=["a cat"] * 2,
        steps=2,
        reference=REFERENCE.name,
        overrides=[None, {"ip_adapter": "second"}],
    )  # which are brought by that
    monkeypatch.setattr(ImageEncoder, "_encode", counting)
    eight = dict(prompts=["a cat"] * 8, steps=2, reference=photo.name)
    drawn_with(given, engine, **eight)
    assert len(encoded) == 1
    drawn_with(
        given, engine, **eight, overrides=[{"reference_scale": 0.1 * i} for i in range(1, 9)]
    )
    assert len(encoded) == 1
    drawn_with(
        given,
        engine,
        **eight,
        overrides=[*[{"ip_adapter": "second"}] * 3, None, *[{"init_image": photo.name}] * 4],
    )
    assert len(encoded) == 3, "another adapter sees another thing, and latents are none"
    drawn_with(given, engine, **eight, overrides=[{"reference": REFERENCE.name}])
    assert len(encoded) <= 4


@pytest.mark.parametrize("value", [dict(reference_scale=0), dict(reference="")])
@pytest.mark.slow("compiles with an IP-Adapter")
def test_without_a_reference_picture_the_programs_are_those_of_others(engine, value):
    (plain,) = drawn_with({}, engine)
    (after,) = drawn(engine, reference=REFERENCE.name)
    before = programs_of(engine)
    (neither,) = drawn(engine, **{"reference": REFERENCE.name, **value})
    assert np.array_equal(neither, plain) and within_2(after, plain) < 0.95
    assert programs_of(engine) == before


def test_the_first_adapter_that_fits_is_taken_and_a_picture_says_which(engine):
    request = Request.check(
        {**ASKED, "reference": REFERENCE.name, "reference_scale": 0.8}, engine.catalog
    )
    job = engine.submit(request, inputs=GIVEN)
    (pixels,) = (e.pixels for e in job.events() if isinstance(e, ImageReady))
    assert job.request.common.ip_adapter == "first"
    text = read_parameters(engine.to_png(pixels, request))
    assert "IP-Adapter: first" in text and "Reference strength: 0.8" in text
    assert (
        parse_parameters(text).common
        == job.request.explicit(lambda _: engine.checkpoint.schedule).common
    )


@pytest.mark.parametrize(
    "values, given, complaint",
    [
        (
            {"reference": REFERENCE.name},
            {},
            "reference picture is not here any more; please hand it",
        ),
        (
            {"reference": REFERENCE.name, "ip_adapter": "face"},
            GIVEN,
            "no IP-Adapter 'face'; there are first, second, plus",
        ),
        ({"reference": "../a.png"}, GIVEN, "name of a picture that was handed in"),
        ({"reference_scale": 3}, GIVEN, "Reference strength should be from 0"),
        (
            {"prompts": ["a", "b"], "overrides": [None, {"reference": REFERENCE.name}]},
            {},
            "^Prompt 2: The reference picture",
        ),
    ],
)
def test_a_reference_that_cannot_be_used_is_refused_in_a_sentence(engine, values, given, complaint):
    with pytest.raises(RequestError, match=complaint):
        drawn_with(given, engine, **values)


def test_reference_pictures_without_an_adapter_are_refused(least):
    catalog, _ = open_models(least, dtype="float32")
    with pytest.raises(
        RequestError, match="need an IP-Adapter with this model, and this server has none"
    ):
        Request.check({**ASKED, "reference": REFERENCE.name}, catalog)


# --- what is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, sd15",
    [
        (dict(embed_dim=1024, tokens=4), 22_319_616),
        (
            dict(
                embed_dim=1280,
                tokens=16,
                resampler=ResamplerConfig(width=768, hidden=3072, heads=12, depth=4),
            ),
            49_087_488,
        ),
    ],
    ids=["plain", "plus"],
)
def test_full_size_adapters_and_their_encoder_have_as_many_parameters_as_the_published(
    config, sd15
):
    encoder = ProjectedVisionEncoderConfig(
        hidden_size=1280,
        intermediate_size=5120,
        num_hidden_layers=32,
        num_attention_heads=16,
        image_size=224,
        patch_size=14,
        projection_dim=1024,
        hidden_act="gelu",
    )
    config = IPAdapterConfig(
        **config,
        cross_attention_dim=768,
        image_encoder=encoder,
        widths=UNetConfig(cross_attention_dim=768).attending_widths,
    )
    _, shapes = abstract(partial(IPAdapterModel, config))
    count = {part: sum(leaf.size for leaf in jax.tree.leaves(of)) for part, of in shapes.items()}
    assert count.pop("image_encoder") == 632_076_800
    assert sum(count.values()) == sd15


def changed(folder: Path, into: Path, change) -> Path:
    """A copy of the adapter `first`, whose tensors are changed, beside its encoder."""
    tensors = load_file(folder / "models" / "first.safetensors")
    change(tensors)
    save_file(tensors, into / "other.safetensors")
    (into / "image_encoder").symlink_to(folder / "models" / "image_encoder")
    return into / "other.safetensors"


def narrower(tensors: dict) -> None:
    for name, tensor in tensors.items():
        if name.endswith("_ip.weight"):
            tensors[name] = tensor[:, :32].copy()
    tensors["image_proj.proj.weight"] = tensors["image_proj.proj.weight"][:128].copy()


@pytest.mark.parametrize(
    "change, complaint",
    [
        (narrower, "makes tokens of 32 numbers; for this model it should be 64"),
        (
            lambda tensors: [
                tensors.pop(f"ip_adapter.{number}.{part}.weight")
                for number in (5, 7)
                for part in ("to_k_ip", "to_v_ip")
            ],
            "is attended to by 2 layers; for this model it should be 4",
        ),
        (
            lambda tensors: tensors.update({"image_proj.norm.weight": np.ones(3, np.float32)}),
            "do not fit",
        ),
        (
            lambda tensors: tensors.update(
                {"image_proj.proj.3.weight": tensors.pop("image_proj.proj.weight")}
            ),
            "of the kind that is called full",
        ),
        (
            lambda tensors: tensors.update(
                {
                    "image_proj.perceiver_resampler.proj_in.weight": tensors.pop(
                        "image_proj.proj.weight"
                    )
                }
            ),
            "FaceID",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in [*tensors] if "ip_adapter" in name],
            "holds no IP-Adapter",
        ),
        (
            lambda tensors: tensors.update(
                {"image_proj.proj.weight": np.ones((256, 9), np.float32)}
            ),
            "takes vectors of 9 numbers; the image encoder in .* gives others",
        ),
    ],
    ids=range(7),
)
def test_what_fits_nothing_is_refused_in_a_sentence(folder, tmp_path, change, complaint):
    file = changed(folder, tmp_path, change)
    with pytest.raises(CheckpointError, match=complaint):
        adapter = IPAdapter.open(file)
        adapter.check(Checkpoint.open(folder / "model").model)
        adapter.load()


def test_of_a_long_picture_only_the_middle_is_resized():
    """A small file of it would else take all memory."""
    line = np.zeros((1, 40_000, 3), np.uint8)
    line[:, 19_990:20_010] = 255
    given = Input.of_pixels(line)
    seen = reference_pixels(given.name, {given.name: given}, 224)
    assert seen.shape == (224, 224, 3) and seen.min() == 255


def test_an_image_encoder_that_is_named_is_one(folder, tmp_path):
    file = folder / "models" / "first.safetensors"
    with pytest.raises(CheckpointError, match=r"nowhere holds no image encoder"):
        IPAdapter.open(file, image_encoder=tmp_path / "nowhere")
    whole = tmp_path / "clip"
    make_encoder(whole)
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    with pytest.raises(CheckpointError, match="a whole CLIP"):
        IPAdapter.open(file, image_encoder=whole)
    (whole / "config.json").write_text(json.dumps(config))
    (whole / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        IPAdapter.open(file, image_encoder=whole)


def test_what_is_no_adapter_is_refused_in_a_sentence(folder, tmp_path):
    for name, complaint in (
        ("nothing", "There is no IP-Adapter 'nothing': name a .safetensors"),
        (folder / "models", "There is no IP-Adapter"),
        ("~/a/b/c.safetensors", "There is no IP-Adapter"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            IPAdapter.open(name)
    file = tmp_path / "adapter.safetensors"
    whole = (folder / "models" / "first.safetensors").read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        IPAdapter.open(file)
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match="needs its image encoder: lay the folder"):
        IPAdapter.open(file)
    assert IPAdapter.open(file, image_encoder=folder / "models" / "image_encoder").load()
    pickle = file.with_suffix(".bin")
    pickle.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"pickles \(\.bin, \.pt\) can run code"):
        IPAdapter.open(pickle)


def test_an_adapter_of_very_many_layers_is_refused_before_it_is_built(tmp_path):
    layers = {
        f"image_proj.layers.{number}.0.to_q.weight": np.ones(1, np.float16) for number in range(300)
    }
    save_file(
        layers | {"ip_adapter.1.to_k_ip.weight": np.ones((4, 4), np.float16)},
        tmp_path / "many.safetensors",
    )
    with pytest.raises(CheckpointError, match="it has 301 layers; at most 256 are supported"):
        IPAdapter.open(tmp_path / "many.safetensors")


def test_an_encoder_that_does_not_fit_is_passed_over_for_that_of_most_adapters(folder, tmp_path):
    (tmp_path / "models").symlink_to(folder / "models")
    make_encoder(tmp_path / "sdxl_models" / "image_encoder", projection_dim=40)
    file = shutil.copy(folder / "models" / "first.safetensors", tmp_path / "sdxl_models")
    assert IPAdapter.open(file).encoder == tmp_path / "models" / "image_encoder"


@pytest.mark.parametrize(
    "place, used",
    [
        ("models/first", "models"),
        ("sdxl_models/first", "models"),
        ("sdxl_models/large", "sdxl_models"),
    ],
)
def test_the_hub_is_asked_for_the_weights_of_the_encoder_that_is_used_alone(
    folder, tmp_path, monkeypatch, place, used
):
    hub, here, asked = tmp_path / "hub", tmp_path / "here", []
    shutil.copytree(folder / "models", hub / "models")
    make_encoder(hub / "sdxl_models" / "image_encoder", projection_dim=40)
    shutil.copy(hub / "models" / "first.safetensors", hub / "sdxl_models")
    make_adapter(
        make_pipeline("sd1").unet,
        hub / "sdxl_models" / "large.safetensors",
        encoder=dict(projection_dim=40),
    )

    def download(repository: str, allow_patterns: list[str]) -> str:
        for file in (file for pattern in allow_patterns for file in hub.glob(pattern)):
            asked.append(file.relative_to(hub).as_posix())
            (here / asked[-1]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, here / asked[-1])
        return str(here)

    monkeypatch.setattr(checkpoint_folder, "snapshot_download", download)
    adapter = IPAdapter.open(f"h94/IP-Adapter/{place}.safetensors")
    assert adapter.encoder == here / used / "image_encoder"
    assert sorted(file for file in asked if file.endswith(".safetensors")) == sorted(
        [f"{place}.safetensors", f"{used}/image_encoder/model.safetensors"]
    )
    asked.clear()
    IPAdapter.open(
        "h94/IP-Adapter/models/first.safetensors", image_encoder=folder / "models" / "image_encoder"
    )
    assert "models/image_encoder/model.safetensors" not in asked
