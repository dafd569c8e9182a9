"""Checkpoints in files of their parts, as ComfyUI keeps them, against diffusers' folders."""

import argparse
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import (
    convert_cosmos_transformer_checkpoint_to_diffusers,
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_krea2_transformer_checkpoint_to_diffusers,
    convert_wan_vae_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from safetensors.torch import load_file, save_file

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import BUNDLED_MODEL, CheckpointError
from sd_tpu.checkpoint.library import Library
from sd_tpu.checkpoint.original import wan_vae_names
from sd_tpu.cli.flags import add_model_flags, model_options
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.serving.client import open_models
from tests.support import anima, flux, flux2, krea2, refusals, z_image
from tests.support.originals import (
    FLUX2,
    original_anima,
    original_flux,
    original_krea2,
    original_wan_vae,
    original_z_image,
)
from tests.support.single_files import original_autoencoder, rewritten

WIDE = dict(attention_head_dim=128, num_attention_heads=2, axes_dims_rope=(16, 56, 56))
MODELS: dict[str, dict[str, Any]] = {
    "FLUX.1 schnell": dict(file="flux1-schnell", texts=("clip_l", "t5xxl_fp16"), vae="ae"),
    "FLUX.1 dev": dict(file="flux1-dev", texts=("clip_l", "t5xxl_fp16"), vae="ae"),
    "FLUX.2 klein": dict(file="flux-2-klein-4b", texts=("qwen_3_4b",), vae="flux2-vae"),
    "FLUX.2 klein base": dict(file="flux-2-klein-base-4b", texts=("qwen_3_4b",), vae="flux2-vae"),
    "Z-Image-Turbo": dict(file="z_image_turbo_bf16", texts=("qwen_3_4b",), vae="ae"),
    "Z-Image": dict(file="z_image_bf16", texts=("qwen_3_4b",), vae="ae"),
    "Anima": dict(file="anima_base", texts=("qwen_3_06b_base",), vae="qwen_image_vae"),
    "Krea 2": dict(file="krea2_raw_bf16", texts=("qwen3vl_4b_bf16",), vae="qwen_image_vae"),
}
PARTS = ("text_encoder", "text_encoder_2")


def made(model: str, words: Path):
    if model.startswith("FLUX.1"):
        return flux.make_pipeline(words, dev=model.endswith("dev"), **WIDE)
    if model.startswith("FLUX.2"):
        return flux2.make_pipeline(words, distilled=not model.endswith("base"))
    if model == "Anima":
        return anima.make_pipeline(words)
    if model == "Krea 2":
        return krea2.make_pipeline(words)
    return z_image.make_pipeline(words, shift=3.0 if "Turbo" in model else 6.0)


def transformer(model: str, pipeline) -> dict[str, torch.Tensor]:
    state = pipeline.transformer.state_dict()
    if model.startswith("FLUX.1"):
        return original_flux(state)
    if model.startswith("FLUX.2"):
        return original_flux(state, FLUX2)
    if model == "Anima":
        return original_anima(state, pipeline.text_conditioner.state_dict())
    if model == "Krea 2":
        return original_krea2(state)
    return original_z_image(state)


def autoencoder(pipeline) -> dict[str, torch.Tensor]:
    if isinstance(pipeline.vae, diffusers.AutoencoderKLQwenImage):
        return original_wan_vae(pipeline.vae.state_dict(), pipeline.vae.config.num_res_blocks)
    halves = {"quant": "encoder.", "post_": "decoder."}
    return {
        halves.get(name[:5], "") + name: tensor.clone()
        for name, tensor in original_autoencoder(pipeline.vae).items()
    }


def write(model: str, pipeline, folder: Path, prefix: str = "") -> Path:
    """Write the files, with T5's or Qwen's tokenizer beside that of the transformer."""
    names = MODELS[model]
    files: dict[str, dict[str, torch.Tensor]] = {
        f"diffusion_models/{names['file']}": {
            f"{prefix}{name}": tensor for name, tensor in transformer(model, pipeline).items()
        },
        f"vae/{names['vae']}": autoencoder(pipeline),
    }
    for part, stem in zip(PARTS, names["texts"], strict=False):
        encoder = getattr(pipeline, part)
        tensors = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        if stem == "clip_l":
            tensors = {weights.modern(name): tensor for name, tensor in tensors.items()}
            tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
            tensors |= {"logit_scale": torch.tensor(4.6), "text_projection.weight": torch.eye(64)}
        files[f"text_encoders/{stem}"] = tensors
    for name, tensors in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, folder / f"{name}.safetensors")
    words = folder / "diffusion_models" / names["file"]
    last = "tokenizer_2" if hasattr(pipeline, "tokenizer_2") else "tokenizer"
    getattr(pipeline, last).save_pretrained(words / last)
    return words.with_name(f"{names['file']}.safetensors")


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipeline(model, tmp_path_factory):
    return made(model, tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def file(model, pipeline, tmp_path_factory) -> Path:
    """The transformer's file of each model in turn."""
    return write(model, pipeline, tmp_path_factory.mktemp("models"))


@pytest.fixture
def copied(tmp_path_factory, tmp_path) -> Path:
    """The transformer's file of a schnell, to be spoilt."""
    pipeline = made("FLUX.1 schnell", tmp_path_factory.mktemp("words"))
    return write("FLUX.1 schnell", pipeline, tmp_path)


def test_every_parameter_is_that_of_the_folder(model, pipeline, file, tmp_path):
    pipeline.save_pretrained(tmp_path)
    (folder, expected), (ours, params) = map(Checkpoint.from_pretrained, (tmp_path, file))
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert (ours.card.steps, ours.card.guidance) == (folder.card.steps, folder.card.guidance)
    shifts = [each.model.schedule_of(each.schedule, 64, 64, 4).shift for each in (ours, folder)]
    assert shifts[0] == shifts[1]
    inputs = [each.prompt_inputs("a cat", guidance=3.0) for each in (ours, folder)]
    jax.tree.map(np.testing.assert_array_equal, *inputs)
    if model == "Anima":  # as no file tells how far its positions go, nor does Z-Image's
        for network in ("vae", "text_encoder", "text_conditioner", "vae_config"):
            assert getattr(ours.model, network) == getattr(folder.model, network)
        sizes = {"max_size": folder.model.transformer_config.max_size}
        config = ours.model.transformer_config.model_copy(update=sizes)
        assert config == folder.model.transformer_config
    elif "Z-Image" not in model:
        assert ours.model == folder.model  # by which programs are compiled


def test_the_files_of_transformers_are_those_that_diffusers_reads(model, pipeline, file):
    if model.startswith("FLUX.1"):
        return  # whose width diffusers takes for granted: tests/parity/test_single_file_flux.py
    tensors = load_file(file)
    if model == "Anima":
        convert = convert_cosmos_transformer_checkpoint_to_diffusers
        tensors = {
            name: each for name, each in tensors.items() if not name.startswith("llm_adapter.")
        }
    elif model == "Krea 2":
        convert = convert_krea2_transformer_checkpoint_to_diffusers
    elif model.startswith("FLUX.2"):
        convert = convert_flux2_transformer_checkpoint_to_diffusers
    else:
        convert = convert_z_image_transformer_checkpoint_to_diffusers
    found, state = convert(tensors), pipeline.transformer.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_names_of_an_autoencoder_are_those_that_diffusers_reads():
    with torch.device("meta"):
        state = diffusers.AutoencoderKLQwenImage().state_dict()
    tensors = original_wan_vae(state, 2)
    assert [*wan_vae_names(tensors).values()] == [*convert_wan_vae_to_diffusers(tensors)]
    assert [*wan_vae_names(tensors).values()] == [*state]


def test_names_may_begin_as_in_whole_checkpoints_and_folders_be_older(model, pipeline, tmp_path):
    file = write(model, pipeline, tmp_path, prefix="model.diffusion_model.")
    for new, old in (("diffusion_models", "unet"), ("text_encoders", "clip")):
        (tmp_path / new).rename(tmp_path / old)
    (tmp_path / "unet" / "in").mkdir()
    for each in (file.with_suffix(""), file):
        shutil.move(tmp_path / "unet" / each.name, tmp_path / "unet" / "in" / each.name)
    checkpoint = Checkpoint.open(tmp_path / "unet" / "in" / file.name)
    assert checkpoint.parameters.shapes.keys() >= {"transformer", "vae", "text_encoder"}


def test_names_of_a_transformer_alone_may_begin_as_nvidias(tmp_path, tmp_path_factory):
    file = write("Anima", made("Anima", tmp_path_factory.mktemp("words")), tmp_path, prefix="net.")
    checkpoint = Checkpoint.open(file)
    assert checkpoint.parameters.shapes.keys() >= {"transformer", "text_conditioner"}
    checkpoint.parameters.load()


def test_one_file_may_hold_all_parts(model, pipeline, file, tmp_path):
    """ComfyUI saves a whole checkpoint so."""
    prefixes = {"clip_l": "clip_l", "t5xxl_fp16": "t5xxl", "qwen_3_4b": "qwen3_4b"}
    prefixes |= {"qwen_3_06b_base": "qwen3_06b", "qwen3vl_4b_bf16": "qwen3vl_4b"}
    home, tensors = file.parents[1], load_file(file)
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    for each in home.rglob("*.safetensors"):
        begin = {"vae": "vae."}.get(each.parent.name)
        if each.stem in prefixes:
            begin = f"text_encoders.{prefixes[each.stem]}.transformer."
        if begin:
            tensors |= {f"{begin}{name}": tensor for name, tensor in load_file(each).items()}
    whole = tmp_path / file.name
    save_file(tensors, whole)
    shutil.copytree(file.with_suffix(""), whole.with_suffix(""))
    (one, params), (other, expected) = map(Checkpoint.from_pretrained, (whole, file))
    assert one.model == other.model
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def flat(file: Path, folder: Path) -> tuple[Path, list[Path]]:
    """Copies of a transformer's file and of its parts, in one folder under other names."""
    folder.mkdir()
    shutil.copytree(file.with_suffix(""), folder / file.stem)
    others = sorted(
        each for each in file.parents[1].rglob("*.safetensors") if each.parent != file.parent
    )
    parts = [
        Path(shutil.copy(each, folder / f"{number}.safetensors"))
        for number, each in enumerate(others)
    ]
    return Path(shutil.copy(file, folder / file.name)), parts


def test_parts_that_lie_elsewhere_are_named(file, tmp_path):
    copy, parts = flat(file, tmp_path / "flat")
    one, params = Checkpoint.from_pretrained(copy, parts=parts)
    other, expected = Checkpoint.from_pretrained(file)
    assert one.model == other.model
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_parts_that_are_named_have_to_be_all_and_no_more(copied, tmp_path):
    copy, parts = flat(copied, tmp_path / "flat")
    clip, t5, vae = parts  # by their folders and their names
    cases = {
        r"no file that was named is its CLIP text encoder: name one with --text-enc": [t5, vae],
        r"no file that was named is its autoencoder: name one with --vae": [clip, t5],
        r"3\.safetensors is no part of the FLUX\.1 in": [*parts, copy.with_name("3.safetensors")],
        r"are both a T5": [*parts, copy.with_name("4.safetensors")],
    }
    save_file({"a": torch.ones(1)}, copy.with_name("3.safetensors"))
    shutil.copy(t5, copy.with_name("4.safetensors"))
    for told, named in cases.items():
        with pytest.raises(CheckpointError, match=told):
            Checkpoint.open(copy, parts=named)
    with pytest.raises(CheckpointError, match="is not the transformer of FLUX, Z-Image, Anima"):
        Checkpoint.open(vae, parts=[clip])
    with pytest.raises(CheckpointError, match="is no single file"):
        Checkpoint.open(BUNDLED_MODEL, parts=[clip])


def test_the_flags_name_them(copied, tmp_path):
    copy, (clip, t5, vae) = flat(copied, tmp_path / "flat")
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    flags = ["--model", copy, "--text-encoder", clip, "--text-encoder", t5, "--vae", vae]
    args = parser.parse_args([*map(str, flags)])
    args.decoder_for = "previews"
    catalog, _ = open_models(dtype="float32", **model_options(args))
    assert catalog.open("").checkpoint.parameters.beside == (clip, t5, vae)


def test_the_library_lists_the_transformer_alone(file):
    library = Library(file.parents[1])
    assert library.paths() == {f"diffusion_models/{file.stem}": file}


# --- which files are taken, and what is refused ---------------------------------------------------


refusal = partial(refusals.refusal, Checkpoint.open)


@pytest.mark.parametrize(
    "name, what, folder",
    [
        ("vae/ae", "autoencoder", "vae"),
        ("text_encoders/clip_l", "CLIP text encoder", "text_encoders"),
        ("text_encoders/t5xxl_fp16", "T5", "text_encoders"),
    ],
)
def test_a_part_that_is_not_there_is_named_with_where_it_was_looked_for(copied, name, what, folder):
    home = copied.parents[1]
    (home / f"{name}.safetensors").unlink()
    (home / "vae" / "damaged.safetensors").write_bytes(b"no tensors")
    message = refusal(copied)
    assert f"holds the transformer of FLUX.1, and its {what} is not in {home / folder}" in message


def test_of_several_files_that_fit_the_usual_one_is_taken_or_all_are_named(copied):
    vae = copied.parents[1] / "vae"
    shutil.copy(vae / "ae.safetensors", vae / "another.safetensors")
    assert vae / "ae.safetensors" in Checkpoint.open(copied).parameters.beside
    (vae / "ae.safetensors").rename(vae / "one.safetensors")
    message = refusal(copied)
    assert "several files may be its autoencoder: another.safetensors, one.safetensors." in message
    rewritten(vae / "another.safetensors", lambda t: t.update({"bn.running_mean": torch.ones(64)}))
    assert vae / "one.safetensors" in Checkpoint.open(copied).parameters.beside


def test_a_part_in_numbers_that_are_not_read_is_passed_over_and_told(copied):
    t5 = copied.parents[1] / "text_encoders" / "t5xxl_fp16.safetensors"

    def change(tensors):
        for name in tensors:
            tensors[name] = tensors[name].to(torch.int8)

    other = shutil.copy(t5, t5.with_name("t5xxl_int8.safetensors"))
    rewritten(other, change)
    assert t5 in Checkpoint.open(copied).parameters.beside
    t5.unlink()
    assert "its T5 is not in" in refusal(copied) and "but in I8, which" in refusal(copied)


def test_without_a_tokenizer_it_is_t5s_own_which_a_tiny_t5_has_not(copied):
    shutil.rmtree(copied.with_suffix(""))
    assert "has 32100 tokens, and text_encoder_2 knows" in refusal(copied)


def test_a_part_that_is_written_anew_is_seen_and_one_that_does_not_fit_is_named(copied):
    checkpoint = Checkpoint.open(copied)
    before = checkpoint.parameters.written()
    vae = copied.parents[1] / "vae" / "ae.safetensors"
    rewritten(vae, lambda tensors: tensors.pop("decoder.norm_out.weight"))
    assert checkpoint.parameters.written() != before
    with pytest.raises(CheckpointError, match=r"ae\.safetensors do not fit.*\n.*conv_norm_out"):
        Checkpoint.from_pretrained(copied)


def test_flux_2_dev_is_refused_by_name(tmp_path):
    file = tmp_path / "diffusion_models" / "flux2_dev.safetensors"
    file.parent.mkdir()
    names = ("single_stream_modulation.lin.weight", "guidance_in.in_layer.weight")
    save_file({name: torch.ones(2, 2) for name in names}, file)
    assert "holds FLUX.2 [dev], which is not built here" in refusal(file)
