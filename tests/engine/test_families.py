"""What a family says of a checkpoint and of its own arrays."""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sd_tpu.checkpoint.config import CheckpointError, read_json
from sd_tpu.families import FAMILIES, find_family
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.latent_model import vae_config


def read(folder):
    """The family of a checkpoint and its configs."""
    family = find_family(read_json(folder / "model_index.json"))
    return family, {part: read_json(folder / part / "config.json") for part in family.components}


@pytest.mark.parametrize(
    "name, what",
    [
        ("StableDiffusionXLImg2ImgPipeline", "is the refiner of SDXL"),
        ("FluxKontextPipeline", r"is FLUX\.1 Kontext"),
        ("FluxKontextInpaintPipeline", r"is FLUX\.1 Kontext"),
        ("FluxFillPipeline", r"is FLUX\.1 Fill"),
        ("FluxPriorReduxPipeline", r"is FLUX\.1 Redux"),
        ("FluxControlPipeline", r"is FLUX\.1 that takes control pictures"),
        ("FluxControlNetImg2ImgPipeline", r"is FLUX\.1 with a ControlNet"),
        ("Flux2Pipeline", r"is FLUX\.2 \[dev\]"),
        ("Flux2KleinKVPipeline", "is another kind of FLUX"),
        ("StableDiffusionInstructPix2PixPipeline", "is a model that edits pictures"),
        ("KandinskyPipeline", "is for KandinskyPipeline"),
        (None, "is for no pipeline that it names"),
    ],
)
def test_a_checkpoint_of_no_family_is_refused_by_what_it_is_with_those_that_are_supported(
    name, what
):
    with pytest.raises(CheckpointError, match=what) as refused:
        find_family({"_class_name": name})
    assert name is None or name in str(refused.value)
    assert str(refused.value).endswith(
        "those for StableDiffusionPipeline, StableDiffusionXLPipeline, StableDiffusion3Pipeline, "
        "ZImagePipeline, FluxPipeline, Flux2KleinPipeline, AnimaModularPipeline and Krea2Pipeline "
        "are supported."
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_finds_the_checkpoints_of_its_pipelines(family):
    parts = {"text_encoder": ["transformers", "CLIPTextModel"]}
    assert [find_family({"_class_name": name, **parts}) for name in family.pipelines] == (
        [family] * len(family.pipelines)
    )


@pytest.mark.parametrize(
    "name, offset",
    [
        ("StableDiffusionPipeline", 1),
        ("StableDiffusionInpaintPipeline", 1),
        ("StableDiffusionControlNetPipeline", 0),
        ("FlaxStableDiffusionPipeline", 0),
        ("LatentConsistencyModelPipeline", 0),
        ("LatentConsistencyModelImg2ImgPipeline", 0),
        ("StableDiffusionPAGPipeline", 1),
    ],
)
def test_steps_are_offset_as_diffusers_pipelines_do_it(name, offset, checkpoints, tmp_path):
    shutil.copytree(checkpoints["sd1"], tmp_path, dirs_exist_ok=True)
    for file, changes in (
        ("model_index.json", {"_class_name": name}),
        ("scheduler/scheduler_config.json", {"steps_offset": 0}),
    ):
        (tmp_path / file).write_text(json.dumps(read_json(tmp_path / file) | changes))
    assert Checkpoint.open(tmp_path).schedule.config.steps_offset == offset


def test_an_autoencoder_whose_class_is_null_is_the_usual_one(checkpoints):
    config = read_json(checkpoints["sd1"] / "vae" / "config.json")
    assert vae_config({**config, "_class_name": None}) == vae_config(config)


def changed(folder, **files):
    """Writes values over those of a part's config."""
    for part, values in files.items():
        file = folder / part / f"{'scheduler_' * (part == 'scheduler')}config.json"
        file.write_text(json.dumps(read_json(file) | values))


@pytest.mark.parametrize(
    "name, version, size, pixels",
    [
        ("StableDiffusionPipeline", "0.8.1", 32, (256, 256)),
        ("StableDiffusionInpaintPipeline", "0.6.0.dev0", 32, (256, 256)),
        ("FlaxStableDiffusionPipeline", "0.4.0", 32, (256, 256)),
        ("StableDiffusionPipeline", "0.9.0", 32, (128, 128)),
        ("StableDiffusionPipeline", "0.18.0", 32, (128, 128)),
        ("StableDiffusionPipeline", "0.6.0", 96, (384, 384)),
        ("StableDiffusionPipeline", "0.6.0", [16, 32], (64, 128)),
        ("StableDiffusionControlNetPipeline", "0.6.0", 32, (128, 128)),
    ],
)
def test_a_size_that_old_files_have_wrong_is_mended_as_by_diffusers(
    name, version, size, pixels, checkpoints, tmp_path
):
    shutil.copytree(checkpoints["sd1"], tmp_path, dirs_exist_ok=True)
    changed(tmp_path, unet={"_diffusers_version": version, "sample_size": size})
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps(read_json(index) | {"_class_name": name}))
    assert Checkpoint.open(tmp_path).default_size == pixels


def test_a_pndm_that_fills_in_skips_its_runge_kutta_steps_whatever_its_file_says(
    checkpoints, tmp_path
):
    shutil.copytree(checkpoints["sd1"], tmp_path, dirs_exist_ok=True)
    changed(tmp_path, scheduler={"skip_prk_steps": False})
    with pytest.raises(CheckpointError, match="skip_prk_steps"):
        Checkpoint.open(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(
        json.dumps(read_json(index) | {"_class_name": "StableDiffusionInpaintPipeline"})
    )
    assert Checkpoint.open(tmp_path).sampler == "pndm"


def test_checkpoints_of_one_architecture_have_equal_models_and_others_do_not(checkpoints):
    builds = {
        layout: partial(family.build, configs)
        for layout, (family, configs) in (
            (layout, read(folder)) for layout, folder in checkpoints.items()
        )
    }
    one, again, other = builds["sd1"](jnp.float32), builds["sd1"](jnp.float32), builds["sd2"]
    assert one[0] == again[0] and hash(one[0]) == hash(again[0])
    assert one[0] != other(jnp.float32)[0]
    assert one[0] != builds["sd1"](jnp.bfloat16)[0]
    assert one[0] != builds["sd1"](jnp.float32, token_downsampling=2)[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_have_the_shapes_that_the_family_tells_of_them(loaded, checkpoints, layout, dtype):
    family, configs = read(checkpoints[layout])
    model, params = family.build(configs, dtype)
    params = jax.tree.map(lambda x: x.update(dtype=dtype), params)
    inputs = loaded[0].prompt_inputs("a cat", "a dog", height=32, width=32, guidance=2.0)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), tree)

    assert shapes(inputs) == shapes(model.input_shapes)
    cond = jax.eval_shape(model.encode_prompt, params, inputs)
    assert shapes(cond) == shapes(model.cond_shapes)
    latent_shape = model.latent_shape(32, 48)
    x = jax.ShapeDtypeStruct((2, *latent_shape), jnp.float32)
    t = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert shapes(jax.eval_shape(model.denoise, params, x, t, cond)) == shapes(x)
    picture = jax.eval_shape(model.decode, params, jax.ShapeDtypeStruct(latent_shape, jnp.float32))
    assert picture.shape == (32, 48, 3)


def test_the_negative_prompt_comes_first(loaded):
    checkpoint, _ = loaded
    inputs = checkpoint.prompt_inputs("a cat", "a dog")["text_encoder"]
    np.testing.assert_array_equal(
        inputs["ids"][:, 0], checkpoint.tokenizers["tokenizer"](["a dog", "a cat"])
    )
