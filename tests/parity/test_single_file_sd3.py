"""Single files of Stable Diffusion 3 in the original layout, against diffusers' folders and its own
reading of them."""

import json
import re
import shutil
from pathlib import Path

import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModelWithProjection

from sd_tpu.checkpoint import layouts, single_file, weights
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from tests.support import sd3
from tests.support.single_files import (
    assert_configs_are_of,
    original_autoencoder,
    read_from,
    refusal,
    refusal_of,
    rewritten,
    spoilt,
    without,
)
from tests.support.tiny import text_encoder

TRANSFORMER, VAE = "model.diffusion_model.", "first_stage_model."
CLIPS = {"text_encoder": "text_encoders.clip_l.", "text_encoder_2": "text_encoders.clip_g."}
T5 = "text_encoders.t5xxl.transformer."
ALL = {
    "transformer": (TRANSFORMER,),
    "autoencoder": (VAE,),
    "CLIP text encoders": tuple(CLIPS.values()),
}
# As no file tells: heads of 64 channels, and pictures of 1024x1024. The width of pooled texts is
# that of the first encoder and the second's projection.
SIZES = dict(
    sample_size=256,
    attention_head_dim=64,
    num_attention_heads=2,
    caption_projection_dim=128,
    pooled_projection_dim=64 + 48,
    pos_embed_max_size=128,
)


# --- what the original repository calls things ----------------------------------------------------


def original_transformer(state: dict, last: int) -> dict:
    """The transformer's tensors as Stability names them; the package's way reversed."""
    result = {}
    for name, tensor in state.items():
        if f"transformer_blocks.{last}.norm1_context" in name or "norm_out" in name:
            scale, shift = tensor.chunk(2)
            tensor = torch.cat([shift, scale])
        fused = {".to_q.": ".to_{}.", ".add_q_proj.": ".add_{}_proj."}
        if mark := next((mark for mark in fused if mark in name), None):
            three = [state[name.replace(mark, fused[mark].format(part))] for part in "qkv"]
            tensor = torch.cat(three)
        elif re.search(r"\.(to_[kv]|add_[kv]_proj)\.", name):
            continue
        result[_original(name)] = tensor.contiguous()
    return result


def _original(name: str) -> str:
    block = "context_block" if re.search("add|context", name) else "x_block"
    for ours, theirs in (
        ("pos_embed.pos_embed", "pos_embed"),
        ("pos_embed.proj", "x_embedder.proj"),
        ("time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.0"),
        ("time_text_embed.timestep_embedder.linear_2", "t_embedder.mlp.2"),
        ("time_text_embed.text_embedder.linear_1", "y_embedder.mlp.0"),
        ("time_text_embed.text_embedder.linear_2", "y_embedder.mlp.2"),
        ("norm_out.linear", "final_layer.adaLN_modulation.1"),
        ("proj_out", "final_layer.linear"),
        ("norm1_context.linear", "adaLN_modulation.1"),
        ("norm1.linear", "adaLN_modulation.1"),
        ("to_q", "qkv"),
        ("add_q_proj", "qkv"),
        ("norm_added_q", "ln_q"),
        ("norm_added_k", "ln_k"),
        ("norm_q", "ln_q"),
        ("norm_k", "ln_k"),
        ("to_add_out", "proj"),
        ("to_out.0", "proj"),
        ("ff_context", "mlp"),
        ("ff", "mlp"),
        ("net.0.proj", "fc1"),
        ("net.2", "fc2"),
    ):
        name = re.sub(rf"(^|\.){re.escape(ours)}\.", rf"\1{theirs}.", f"{name}.")[:-1]
    return re.sub(r"^transformer_blocks\.(\d+)", rf"joint_blocks.\1.{block}", name)


def write_original(pipeline, file: Path) -> Path:
    """The pipeline as a single file, with the other things that published files hold."""
    transformer = pipeline.transformer
    last = transformer.config.num_layers - 1
    tensors = {
        TRANSFORMER + name: tensor
        for name, tensor in original_transformer(transformer.state_dict(), last).items()
    }
    parts = original_autoencoder(pipeline.vae)
    tensors |= {VAE + name: tensor for name, tensor in parts.items()}
    for part, prefix in CLIPS.items():
        for name, tensor in getattr(pipeline, part).state_dict().items():
            tensors[f"{prefix}transformer.{weights.modern(name)}"] = tensor
        tensors[f"{prefix}logit_scale"] = torch.tensor(4.6)
    # Stability's files have none. What others have here is not taken.
    del tensors["text_encoders.clip_l.transformer.text_projection.weight"]
    if pipeline.text_encoder_3:
        for name, tensor in pipeline.text_encoder_3.state_dict().items():
            tensors[T5 + name] = tensor.clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


@pytest.fixture(scope="module", params=sd3.KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict[str, diffusers.StableDiffusion3Pipeline]:
    folder = tmp_path_factory.mktemp("words")
    return {kind: tiny_pipeline(folder / kind, kind) for kind in sd3.KINDS}


def tiny_pipeline(folder: Path, kind: str) -> diffusers.StableDiffusion3Pipeline:
    """Of the sizes that a file without configs tells; with a T5."""
    pipeline = sd3.make_pipeline(folder, kind, t5=True)
    pipeline.transformer = diffusers.SD3Transformer2DModel(
        **{**sd3.TRANSFORMER, **sd3.KINDS[kind], **SIZES}
    )
    pipeline.text_encoder = text_encoder(
        CLIPTextModelWithProjection, 64, "quick_gelu", projection_dim=64
    )
    with torch.no_grad():
        for part in (pipeline.transformer, pipeline.text_encoder):
            for tensor in part.parameters():
                tensor += 0.1 * torch.randn_like(tensor)
        pipeline.transformer.pos_embed.pos_embed += 0.3 * torch.randn(1, 128)
        pipeline.text_encoder.text_projection.weight.copy_(torch.eye(64))
    return pipeline


@pytest.fixture(scope="module")
def files(pipelines, tmp_path_factory) -> dict[str, Path]:
    """A single file of each kind, alone in its folder."""
    folder = tmp_path_factory.mktemp("single")
    return {
        kind: write_original(pipeline, folder / f"tiny {kind}.safetensors")
        for kind, pipeline in pipelines.items()
    }


@pytest.fixture
def file(files, tmp_path) -> Path:
    """A copy of the SD 3 file, to be spoilt."""
    return shutil.copy(files["SD 3"], tmp_path / "model.safetensors")


def beside(file: Path, pipeline) -> Path:
    """T5's tokenizer in the folder of the file's name."""
    folder = file.with_suffix("")
    pipeline.tokenizer_3.save_pretrained(folder / "tokenizer_3")
    return folder


# --- names, shapes and configs --------------------------------------------------------------------


def test_every_parameter_of_a_file_is_that_of_the_folder(files, pipelines, kind, tmp_path):
    pipelines[kind].save_pretrained(tmp_path)
    (folder, expected), (file, params) = (
        Checkpoint.from_pretrained(tmp_path, t5=False),
        Checkpoint.from_pretrained(files[kind], t5=False),
    )
    assert file.model == folder.model  # by which programs are compiled
    assert file.default_size == folder.default_size == (1024, 1024)
    assert params.keys() == {"transformer", "vae", "text_encoder", "text_encoder_2"}
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_every_tensor_of_the_transformer_is_the_one_that_diffusers_reads(files, kind):
    tensors = {
        name: tensor for name, tensor in load_file(files[kind]).items() if TRANSFORMER in name
    }
    expected = convert_sd3_transformer_checkpoint_to_diffusers(tensors)
    ours = read_from(single_file.read(files[kind]), "transformer")
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, expected[name].numpy(), err_msg=name)


def test_shift_and_scale_change_places_in_the_last_block_and_at_the_end_alone(files, kind):
    tensors = load_file(files[kind])
    ours = read_from(single_file.read(files[kind]), "transformer")
    for leaf in ("weight", "bias"):
        for name, theirs, swapped in (
            ("norm_out", "final_layer", True),
            ("transformer_blocks.1.norm1_context", "joint_blocks.1.context_block", True),
            ("transformer_blocks.0.norm1_context", "joint_blocks.0.context_block", False),
            ("transformer_blocks.1.norm1", "joint_blocks.1.x_block", False),
        ):
            stored = tensors[f"{TRANSFORMER}{theirs}.adaLN_modulation.1.{leaf}"].numpy()
            expected = np.concatenate([stored[128:], stored[:128]]) if swapped else stored
            np.testing.assert_array_equal(ours[f"{name}.linear.{leaf}"], expected, err_msg=name)


def test_configs_are_inferred_as_diffusers_wrote_them(files, pipelines, kind):
    single = single_file.read(files[kind])
    assert (single.class_name, single.folder) == ("StableDiffusion3Pipeline", None)
    assert_configs_are_of(single, pipelines[kind], "vae.sample_size")
    assert single.configs["vae"]["shift_factor"] == 0.0609
    assert single.configs["scheduler"] == {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
    }
    assert single.tokenizers == {"tokenizer": None, "tokenizer_2": "!"}


@pytest.mark.parametrize("blocks, width, positions", [(24, 1536, 192), (38, 2432, 192)])
def test_the_published_sizes_are_told(blocks, width, positions):
    """Those of SD 3 medium and of 3.5 large."""
    block = dict.fromkeys((f"joint_blocks.{n}.x_block.attn.qkv.bias" for n in range(blocks)), (3,))
    shapes = block | {
        "context_embedder.weight": (width, 4096),
        "x_embedder.proj.weight": (width, 16, 2, 2),
        "final_layer.linear.weight": (64, width),
        "y_embedder.mlp.0.weight": (width, 2048),
        "pos_embed": (1, positions**2, width),
    }
    assert single_file._sd3_config(layouts.SD3, shapes) == dict(
        _class_name="SD3Transformer2DModel",
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=blocks,
        attention_head_dim=64,
        num_attention_heads=blocks,
        joint_attention_dim=4096,
        caption_projection_dim=width,
        pooled_projection_dim=2048,
        pos_embed_max_size=positions,
        dual_attention_layers=[],
        qk_norm=None,
    )


def test_the_first_encoders_pooled_texts_are_not_projected_whatever_a_file_holds(file, pipelines):
    """As in ComfyUI, which writes files with a projection, and in diffusers."""
    name = "text_encoders.clip_l.transformer.text_projection.weight"
    rewritten(file, lambda tensors: tensors.update({name: torch.randn(32, 64)}))
    single = single_file.read(file)
    assert single.configs["text_encoder"]["projection_dim"] == 64
    read = read_from(single, "text_encoder")
    np.testing.assert_array_equal(read["text_projection.weight"], np.eye(64))
    expected = pipelines["SD 3"].text_encoder.state_dict()
    assert read.keys() == {weights.modern(name) for name in expected}


def test_a_folder_of_the_files_stem_wins_over_inference(file):
    folder = file.with_suffix("")
    for name, config in (
        ("scheduler/scheduler_config", {"_class_name": "FlowMatchEulerDiscreteScheduler"}),
        ("transformer/config", {"num_layers": 1}),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / f"{name}.json").write_text(json.dumps(config))
    configs = single_file.read(file).configs
    assert configs["transformer"] == {"num_layers": 1}
    assert configs["scheduler"].keys() == {"_class_name"}


# --- T5 -------------------------------------------------------------------------------------------


def test_t5_is_read_where_its_tokenizer_lies_beside(file, pipelines, tmp_path):
    pipeline = pipelines["SD 3"]
    pipeline.save_pretrained(tmp_path / "folder")
    beside(file, pipeline)
    folder, expected = Checkpoint.from_pretrained(tmp_path / "folder")
    checkpoint, params = Checkpoint.from_pretrained(file)
    assert checkpoint.model == folder.model and "text_encoder_3" in params
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    ours, theirs = (each.prompt_inputs("a cat", "fog") for each in (checkpoint, folder))
    np.testing.assert_array_equal(ours["text_encoder_3"], theirs["text_encoder_3"])


def test_t5_is_left_out_where_nobody_wants_it(file, pipelines):
    beside(file, pipelines["SD 3"])
    assert Checkpoint.open(file).tokenizers.keys() == {"tokenizer", "tokenizer_2", "tokenizer_3"}
    assert Checkpoint.open(file, t5=False).model.text_encoder_3 is None
    without(file, T5)
    checkpoint = Checkpoint.open(file)
    assert checkpoint.model.text_encoder_3 is None
    assert checkpoint.tokenizers.keys() == {"tokenizer", "tokenizer_2"}


def test_t5_in_other_numbers_is_refused_only_where_it_would_be_read(file, pipelines):
    name = f"{T5}encoder.block.0.layer.0.SelfAttention.q.weight"
    rewritten(file, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    beside(file, pipelines["SD 3"])
    message = refusal(file)
    assert "holds T5 in I8, supported are F64, F32, F16, BF16" in message
    assert message.endswith("or leave T5 out with --no-t5.")
    assert Checkpoint.open(file, t5=False).model.text_encoder_3 is None


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lacks", [["CLIP text encoders"], ["autoencoder"], ["autoencoder", "CLIP text encoders"]]
)
def test_a_file_that_is_not_whole_says_what_it_lacks(file, lacks):
    message = refusal(without(file, *(prefix for part in lacks for prefix in ALL[part])))
    assert f"holds Stable Diffusion 3 without its {' and its '.join(lacks)}, so" in message
    assert "Take a file that holds them too, or a folder in the diffusers layout." in message


def test_one_text_encoder_of_two_is_not_enough(file):
    assert "without its CLIP text encoders" in refusal(without(file, CLIPS["text_encoder_2"]))


@pytest.mark.parametrize(
    "name, told",
    [
        (
            "joint_blocks.0.x_block.mlp.fc1.weight",
            "the transformer of Stable Diffusion 3 without autoencoder and text encoders",
        ),
        ("diffusion_model.joint_blocks.0.x_block.mlp.fc1.lora_A.weight", "a LoRA"),
        ("text_encoders.clip_g.logit_scale", "text encoders without a UNet or a transformer"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_what_it_is(tmp_path, name, told):
    message = refusal_of(tmp_path, name)
    assert told in message and "Stable Diffusion 1, 2 and 3, SDXL, FLUX.1" in message


@pytest.mark.parametrize("width, takes", [(768, 4096), (128, 96)])
def test_a_text_encoder_that_is_not_the_transformers_is_refused(file, width, takes):
    name = "text_encoders.clip_g.transformer.text_model.embeddings.token_embedding.weight"
    changes = {
        name: torch.ones(4, width),
        f"{TRANSFORMER}context_embedder.weight": torch.ones(128, takes),
    }
    rewritten(file, lambda tensors: tensors.update(changes))
    told = f"texts of 64 and {width} numbers a token for a transformer that takes {takes}"
    assert told in refusal(file)


@pytest.mark.parametrize(
    "name",
    [
        f"{TRANSFORMER}pos_embed",
        f"{TRANSFORMER}x_embedder.proj.weight",
        f"{TRANSFORMER}final_layer.linear.weight",
        f"{TRANSFORMER}final_layer.adaLN_modulation.1.weight",
        f"{TRANSFORMER}joint_blocks.0.x_block.attn.qkv.weight",
        f"{TRANSFORMER}joint_blocks.1.context_block.adaLN_modulation.1.bias",
        "text_encoders.clip_l.transformer.text_model.final_layer_norm.weight",
        "text_encoders.clip_l.transformer.text_model.embeddings.token_embedding.weight",
        "text_encoders.clip_g.transformer.text_projection.weight",
        f"{T5}shared.weight",
        f"{T5}encoder.block.0.layer.0.SelfAttention.q.weight",
        f"{T5}encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ],
)
@pytest.mark.parametrize("shape", [None, (), (3,), (0, 0)])
def test_missing_and_misshapen_tensors_are_a_sentence_or_listed(file, pipelines, name, shape):
    beside(spoilt(file, name, shape), pipelines["SD 3"])
    with pytest.raises(CheckpointError):
        Checkpoint.from_pretrained(file)
