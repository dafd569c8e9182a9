"""Single files of FLUX.1 in the original layout, against diffusers' folders and its own reading of
them."""

import shutil
from pathlib import Path

import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from safetensors.torch import save_file

from sd_tpu.checkpoint import original, single_file, weights
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from tests.support.flux import make_pipeline
from tests.support.originals import original_flux
from tests.support.single_files import (
    assert_configs_are_of,
    original_autoencoder,
    read_from,
    refusal,
    refusal_of,
    spoilt,
    without,
)

TRANSFORMER, VAE = "model.diffusion_model.", "vae."
CLIP, T5 = "text_encoders.clip_l.transformer.", "text_encoders.t5xxl.transformer."
KINDS = ("schnell", "dev")
# As no file tells: heads of 128 channels.
SIZES = dict(attention_head_dim=128, num_attention_heads=2, axes_dims_rope=(16, 56, 56))


def write_original(pipeline: diffusers.FluxPipeline, file: Path, vae: str = VAE) -> Path:
    """The pipeline as a single file, with the other things that published files hold."""
    tensors = {
        TRANSFORMER + name: tensor
        for name, tensor in original_flux(pipeline.transformer.state_dict()).items()
    }
    parts = original_autoencoder(pipeline.vae)
    tensors |= {vae + name: tensor for name, tensor in parts.items()}
    for name, tensor in pipeline.text_encoder.state_dict().items():
        tensors[CLIP + weights.modern(name)] = tensor
    for name, tensor in pipeline.text_encoder_2.state_dict().items():
        tensors[T5 + name] = tensor.clone()
    tensors[f"{CLIP}text_projection.weight"] = torch.eye(64)
    for prefix in (CLIP, T5):
        tensors[prefix.replace("transformer.", "logit_scale")] = torch.tensor(4.6)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict[str, diffusers.FluxPipeline]:
    folder = tmp_path_factory.mktemp("words")
    return {kind: make_pipeline(folder / kind, dev=kind == "dev", **SIZES) for kind in KINDS}


@pytest.fixture(scope="module")
def files(pipelines, tmp_path_factory) -> dict[str, Path]:
    """A single file of each kind, with T5's tokenizer beside it."""
    folder = tmp_path_factory.mktemp("single")
    for kind, pipeline in pipelines.items():
        pipeline.tokenizer_2.save_pretrained(folder / f"tiny {kind}" / "tokenizer_2")
    return {
        kind: write_original(pipeline, folder / f"tiny {kind}.safetensors")
        for kind, pipeline in pipelines.items()
    }


@pytest.fixture
def file(files, tmp_path) -> Path:
    """A copy of the file of schnell, to be spoilt."""
    shutil.copytree(files["schnell"].with_suffix(""), tmp_path / "model")
    return shutil.copy(files["schnell"], tmp_path / "model.safetensors")


def test_every_parameter_of_a_file_is_that_of_the_folder(files, pipelines, kind, tmp_path):
    pipelines[kind].save_pretrained(tmp_path)
    (folder, expected), (file, params) = map(Checkpoint.from_pretrained, (tmp_path, files[kind]))
    assert file.model == folder.model  # by which programs are compiled
    assert file.default_size[0] == 1024
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    schedules = [
        each.model.schedule_of(each.schedule, 512, 512, 4).shift for each in (file, folder)
    ]
    assert schedules[0] == schedules[1]
    inputs = [each.prompt_inputs("a cat", guidance=3.0) for each in (file, folder)]
    jax.tree.map(np.testing.assert_array_equal, *inputs)


def test_configs_are_inferred_as_diffusers_wrote_them(files, pipelines, kind):
    single = single_file.read(files[kind])
    assert single.class_name == "FluxPipeline"
    assert_configs_are_of(single, pipelines[kind], "sample_size", "transformer.out_channels")
    transformer = single.configs["transformer"]
    assert transformer["out_channels"] == transformer["in_channels"]  # for which null stands
    assert bool(single.configs["scheduler"].get("use_dynamic_shifting")) == (kind == "dev")


def test_every_tensor_of_the_transformer_is_the_one_that_diffusers_reads(tmp_path):
    """At the width that diffusers takes for granted, of a single column."""
    with torch.device("meta"):
        state = diffusers.FluxTransformer2DModel(
            num_layers=2, num_single_layers=2, guidance_embeds=True
        ).state_dict()
    numbered = {
        name: torch.arange(len(tensor)) * len(state) + float(number)
        for number, (name, tensor) in enumerate(state.items())
    }
    tensors = original_flux(numbered)
    save_file(tensors, tmp_path / "alone.safetensors")
    stored = original.FLUX.stored(weights.contents([tmp_path / "alone.safetensors"]))
    expected = convert_flux_transformer_checkpoint_to_diffusers(tensors)
    assert stored.keys() == expected.keys() == state.keys()
    with weights.opened(tmp_path / "alone.safetensors") as opened:
        for name, tensor in stored.items():
            np.testing.assert_array_equal(tensor.read(opened), expected[name], err_msg=name)


def test_an_autoencoder_may_have_the_older_prefix(pipelines, file):
    write_original(pipelines["schnell"], file, vae="first_stage_model.")
    assert Checkpoint.open(file).model.vae_config.shift_factor == 0.1159


def test_shift_and_scale_change_places_at_the_end_alone(files, pipelines, kind):
    state = pipelines[kind].transformer.state_dict()
    ours = read_from(single_file.read(files[kind]), "transformer")
    for name in ("norm_out.linear.weight", "transformer_blocks.0.norm1.linear.bias"):
        np.testing.assert_array_equal(ours[name], state[name].numpy())


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix, lacks", [(VAE, "autoencoder"), (CLIP, "CLIP text encoders"), (T5, "T5")]
)
def test_a_file_that_is_not_whole_says_what_it_lacks(file, prefix, lacks):
    message = refusal(without(file, prefix))
    assert f"holds FLUX.1 without its {lacks}, so" in message


@pytest.mark.parametrize(
    "name, model",
    [
        ("double_blocks.0.img_mod.lin.weight", "FLUX.1"),
        ("model.diffusion_model.single_stream_modulation.lin.weight", "FLUX.2 klein"),
        ("cap_pad_token", "Z-Image"),
        ("net.llm_adapter.embed.weight", "Anima"),
        ("txtfusion.projector.weight", "Krea 2"),
    ],
)
def test_a_transformer_alone_is_refused_with_where_it_may_lie(tmp_path, name, model):
    message = refusal_of(tmp_path, name)
    assert f"holds {model} without its autoencoder" in message
    assert "have the transformer lie in diffusion_models/" in message


def test_a_file_without_t5s_tokenizer_takes_its_own_which_a_tiny_t5_has_not(file):
    shutil.rmtree(file.with_suffix(""))
    with pytest.raises(CheckpointError, match=r"has 32100 tokens, and text_encoder_2 knows"):
        Checkpoint.open(file)
    with pytest.raises(CheckpointError, match=r"draws nothing without T5.*without --no-t5"):
        Checkpoint.open(file, t5=False)


@pytest.mark.parametrize(
    "name, told",
    [
        ("model.diffusion_model.distilled_guidance_layer.in_proj.bias", "Chroma"),
        ("lora_unet_double_blocks_0_img_mod_lin.lora_up.weight", "a LoRA"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_what_it_is(tmp_path, name, told):
    message = refusal_of(tmp_path, name)
    assert f"holds {told}" in message
    assert "FLUX.2 klein, Z-Image, Anima and Krea 2 in their original" in message


@pytest.mark.parametrize(
    "name",
    [
        f"{TRANSFORMER}img_in.weight",
        f"{TRANSFORMER}final_layer.adaLN_modulation.1.weight",
        f"{TRANSFORMER}double_blocks.0.img_attn.qkv.weight",
        f"{TRANSFORMER}double_blocks.0.img_attn.norm.key_norm.scale",
        f"{TRANSFORMER}single_blocks.1.linear1.weight",
        f"{TRANSFORMER}single_blocks.1.linear1.bias",
        f"{CLIP}text_model.final_layer_norm.weight",
        f"{T5}shared.weight",
    ],
)
@pytest.mark.parametrize("shape", [None, (), (3,), (0, 0)])
def test_missing_and_misshapen_tensors_are_a_sentence_or_listed(file, name, shape):
    spoilt(file, name, shape)
    with pytest.raises(CheckpointError):
        Checkpoint.from_pretrained(file)
