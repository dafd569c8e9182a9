"""Single files in the original layouts, against diffusers' folders and its own reading of them."""

import json
import shutil
from pathlib import Path

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_tpu import FlaxStableDiffusionPipeline
from sd_tpu.checkpoint import single_file, weights
from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families import find_family
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.request import Request
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.job import ImageReady
from tests.support.processes import peak_of_loading
from tests.support.single_files import (
    assert_configs_are_of,
    original_autoencoder,
    plain,
    refusal,
    refusal_of,
    rewritten,
    spoilt,
    without,
)
from tests.support.tiny import PIPELINES, UNETS, make_pipeline, original_unet

# --- what the original repositories call things, level by level ----------------------------------


def open_clip(state: dict, extra_block: bool) -> dict:
    """CLIP's tensors fused and named as OpenCLIP does it."""
    result = {}
    for name, tensor in state.items():
        name = weights.modern(name)
        if ".q_proj." in name:
            fused = [
                state[key]
                for part in "qkv"
                for key in state
                if weights.modern(key) == name.replace(".q_proj.", f".{part}_proj.")
            ]
            name, tensor = name.replace(".q_proj.", ".in_proj_"), torch.cat(fused)
        elif ".k_proj." in name or ".v_proj." in name:
            continue
        for ours, theirs in (
            ("text_model.encoder.layers", "transformer.resblocks"),
            ("text_model.final_layer_norm", "ln_final"),
            ("layer_norm", "ln_"),
            ("self_attn", "attn"),
            ("mlp.fc1", "mlp.c_fc"),
            ("mlp.fc2", "mlp.c_proj"),
            ("text_model.embeddings.token_embedding", "token_embedding"),
            ("text_model.embeddings.position_embedding.weight", "positional_embedding"),
        ):
            name = name.replace(ours, theirs)
        if name == "text_projection.weight":
            name, tensor = "text_projection", tensor.T
        result[name] = tensor.contiguous()
    if extra_block:
        result |= {
            name.replace("blocks.1", "blocks.2"): tensor + 1
            for name, tensor in result.items()
            if "blocks.1" in name
        }
        result["text_projection"] = torch.ones(128, 128)
    return result | {"logit_scale": torch.tensor(4.6)}


def write_original(pipeline, layout: str, file: Path, **extra) -> Path:
    """The pipeline as a single file, with the other things that published files hold."""
    config = pipeline.unet.config
    levels, attends = (
        len(config.block_out_channels),
        [kind.startswith("Cross") for kind in config.down_block_types],
    )
    tensors = {
        "model.diffusion_model." + original_unet(name, levels, config.layers_per_block, attends): t
        for name, t in pipeline.unet.state_dict().items()
    }
    vae = original_autoencoder(pipeline.vae)
    tensors |= {f"first_stage_model.{name}": tensor for name, tensor in vae.items()}
    prefixes = {
        "sd1": "cond_stage_model.transformer.",
        "sd2": "cond_stage_model.model.",
        "sdxl": "conditioner.embedders.0.transformer.",
    }
    text = pipeline.text_encoder.state_dict()
    if layout == "sd2":
        text = open_clip(text, extra_block=True)
    else:
        text = {weights.modern(name): tensor for name, tensor in text.items()}
        text["text_model.embeddings.position_ids"] = torch.arange(77)[None]
        text |= {"logit_scale": torch.tensor(4.6), "text_projection.weight": torch.ones(32, 32)}
    tensors |= {prefixes[layout] + name: tensor for name, tensor in text.items()}
    if layout == "sdxl":
        second = open_clip(pipeline.text_encoder_2.state_dict(), extra_block=False)
        tensors |= {f"conditioner.embedders.1.model.{n}": t for n, t in second.items()}
    tensors |= {
        "alphas_cumprod": torch.ones(1000),
        "model_ema.decay": torch.tensor(0.9),
        "model_ema.diffusion_modelout2weight": torch.zeros(4, 32, 3, 3),
        "first_stage_model.loss.logvar": torch.tensor(0.0),
        "first_stage_model.model_ema.decay": torch.tensor(0.9),
        **extra,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


@pytest.fixture(scope="module", params=PIPELINES)
def layout(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipelines() -> dict[str, diffusers.DiffusionPipeline]:
    return {layout: make_pipeline(layout) for layout in PIPELINES}


@pytest.fixture(scope="module")
def files(pipelines, tmp_path_factory) -> dict[str, Path]:
    """A single file of each layout, alone in its folder."""
    folder = tmp_path_factory.mktemp("single")
    return {
        layout: write_original(pipeline, layout, folder / f"tiny {layout}.v1.safetensors")
        for layout, pipeline in pipelines.items()
    }


@pytest.fixture
def file(files, tmp_path) -> Path:
    """A copy of the SD 1 file, to be spoilt."""
    return shutil.copy(files["sd1"], tmp_path / "model.safetensors")


def tensors_of(single: single_file.SingleFile) -> dict[str, dict[str, np.ndarray]]:
    with weights.opened(single.path) as tensors:
        return {
            part: {name: stored.read(tensors) for name, stored in entries.items()}
            for part, entries in single.stored.items()
        }


def state_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {weights.modern(name): tensor.numpy() for name, tensor in model.state_dict().items()}


def assert_same(ours: dict, pipeline) -> None:
    for part, tensors in ours.items():
        expected = state_of(getattr(pipeline, part))
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, expected[name], err_msg=f"{part} {name}")


# --- names, shapes and configs -------------------------------------------------------------------


def test_every_tensor_of_an_original_file_is_the_one_that_diffusers_has(files, pipelines, layout):
    single = single_file.read(files[layout])
    assert set(single.stored) == {"unet", "vae", "text_encoder"} | (
        {"text_encoder_2"} if layout == "sdxl" else set()
    )
    assert_same(tensors_of(single), pipelines[layout])


def test_configs_are_inferred_as_diffusers_wrote_them(files, pipelines, layout):
    single = single_file.read(files[layout])
    assert single.class_name == PIPELINES[layout].__name__
    assert single.folder is None
    unsaid = "sample_size", "attention_head_dim", "transformer_layers_per_block"
    assert_configs_are_of(single, pipelines[layout], *unsaid)
    unet = plain(UNETS[layout])
    ours = single.configs["unet"]
    assert ours["attention_head_dim"] == unet["attention_head_dim"]
    assert ours["transformer_layers_per_block"] == unet.get("transformer_layers_per_block", 1)
    for name, value in single.configs["scheduler"].items():
        if not name.startswith("_"):
            assert value == pipelines[layout].scheduler.config[name], name


def test_diffusers_reads_the_same_from_the_file_with_the_configs_inferred(
    files, pipelines, layout, tmp_path
):
    single = single_file.read(files[layout])
    pipelines[layout].save_pretrained(tmp_path)
    for part in single.stored:
        config = {
            **json.loads((tmp_path / part / "config.json").read_text()),
            **single.configs[part],
        }
        (tmp_path / part / "config.json").write_text(json.dumps(config))
    theirs = PIPELINES[layout].from_single_file(
        str(files[layout]), config=str(tmp_path), local_files_only=True, safety_checker=None
    )
    assert_same(tensors_of(single), theirs)


@pytest.mark.parametrize("layout", PIPELINES)
def test_a_files_parameters_are_loaded_into_the_networks(files, pipelines, layout, tmp_path):
    single = single_file.read(files[layout])
    _, expected = find_family(single.configs["model_index"]).build(single.configs, jnp.bfloat16)
    for part, entries in single.stored.items():
        params = weights.load_stored(entries, expected[part], jnp.bfloat16, source=single.path)
        weights.save(params, tmp_path / "saved.safetensors")
        ours = load_file(tmp_path / "saved.safetensors")
        theirs = state_of(getattr(pipelines[layout], part))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, torch.tensor(theirs[name]).bfloat16()), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_read_as_they_are(files, pipelines, tmp_path, dtype):
    tensors = {
        n: t.to(dtype) if t.is_floating_point() else t for n, t in load_file(files["sdxl"]).items()
    }
    save_file(tensors, tmp_path / "half.safetensors")
    second = tensors_of(single_file.read(tmp_path / "half.safetensors"))["text_encoder_2"]
    name = "text_model.encoder.layers.1.self_attn.v_proj.weight"
    np.testing.assert_array_equal(
        second[name].astype(np.float32),
        pipelines["sdxl"].text_encoder_2.state_dict()[name].to(dtype).float().numpy(),
    )


def test_the_oldest_text_encoders_names_are_understood(file, pipelines):
    def change(tensors):
        for name in list(tensors):
            tensors[name.replace("transformer.text_model.", "transformer.")] = tensors.pop(name)

    assert_same(
        {"text_encoder": tensors_of(single_file.read(rewritten(file, change)))["text_encoder"]},
        pipelines["sd1"],
    )


def test_what_diffusers_script_makes_of_sd_2_lacks_the_last_layer_and_has_a_buffer(
    files, pipelines, tmp_path
):
    def change(tensors):
        mark = "cond_stage_model.model."
        for unused in [
            each
            for each in tensors
            if each.startswith(mark)
            and ("resblocks.2." in each or each.endswith(("text_projection", "logit_scale")))
        ]:
            del tensors[unused]
        tensors[f"{mark}transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]

    file = rewritten(shutil.copy(files["sd2"], tmp_path / "2.safetensors"), change)
    single = single_file.read(file)
    assert single.configs["text_encoder"]["num_hidden_layers"] == 2
    assert_same({"text_encoder": tensors_of(single)["text_encoder"]}, pipelines["sd2"])


def test_sd_2_with_transformers_names_is_sd_2(files, pipelines, tmp_path):
    """Whether its text encoder has all layers, as OpenCLIP, or those that diffusers keeps."""
    text = {
        weights.modern(name): tensor
        for name, tensor in pipelines["sd2"].text_encoder.state_dict().items()
    }
    whole = text | {
        name.replace("layers.1", "layers.2"): tensor + 1
        for name, tensor in text.items()
        if "layers.1" in name
    }
    for state in (text, whole | {"text_projection.weight": torch.ones(128, 128)}):

        def change(tensors, state=state):
            for name in [each for each in tensors if each.startswith("cond_stage_model.")]:
                del tensors[name]
            tensors |= {
                f"cond_stage_model.transformer.{name}": tensor.clone()
                for name, tensor in state.items()
            }

        single = single_file.read(
            rewritten(shutil.copy(files["sd2"], tmp_path / "2.safetensors"), change)
        )
        reference = single_file.read(files["sd2"])
        assert plain(single.configs) == plain(reference.configs)
        assert single.tokenizers == {"tokenizer": "!"}
        assert_same({"text_encoder": tensors_of(single)["text_encoder"]}, pipelines["sd2"])


@pytest.mark.parametrize(
    "layout, part, old",
    [
        ("sd1", "text_encoder", "cond_stage_model.transformer."),
        ("sdxl", "text_encoder", "conditioner.embedders.0.transformer."),
        ("sdxl", "text_encoder_2", "conditioner.embedders.1.model."),
    ],
)
def test_whose_names_a_text_encoder_has_says_nothing_of_what_it_is(
    files, pipelines, tmp_path, layout, part, old
):
    """OpenAI's CLIP in OpenCLIP's names, and the other way round."""
    state = getattr(pipelines[layout], part).state_dict()
    renamed = old.replace("transformer", "model")
    if old == renamed:
        renamed = old.replace("model", "transformer")
        state = {weights.modern(name): tensor for name, tensor in state.items()}
    else:
        state = open_clip(state, extra_block=False)

    def change(tensors):
        for name in [each for each in tensors if each.startswith(old)]:
            del tensors[name]
        tensors |= {renamed + name: tensor.clone() for name, tensor in state.items()}

    single = single_file.read(
        rewritten(shutil.copy(files[layout], tmp_path / "x.safetensors"), change)
    )
    reference = single_file.read(files[layout])
    assert plain(single.configs) == plain(reference.configs)
    assert single.tokenizers == reference.tokenizers
    assert_same({part: tensors_of(single)[part]}, pipelines[layout])


@pytest.mark.parametrize(
    "layout, prefix, width",
    [
        ("sd1", "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight", 128),
        ("sd1", "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight", 1024),
        ("sd2", "cond_stage_model.model.token_embedding.weight", 768),
        ("sdxl", "conditioner.embedders.1.model.token_embedding.weight", 768),
    ],
)
def test_a_text_encoder_that_is_not_the_unets_is_refused(files, tmp_path, layout, prefix, width):
    file = rewritten(
        shutil.copy(files[layout], tmp_path / "x.safetensors"),
        lambda tensors: tensors.update({prefix: torch.ones(4, width)}),
    )
    assert f"{width} numbers a token for a UNet that takes" in refusal(file)


def test_all_of_open_clips_layers_are_one_too_many_without_its_projection_too(
    files, pipelines, tmp_path, monkeypatch
):
    def change(tensors):
        del tensors["cond_stage_model.model.text_projection"]

    monkeypatch.setattr(single_file, "OPEN_CLIP_LAYERS", 3)
    single = single_file.read(
        rewritten(shutil.copy(files["sd2"], tmp_path / "2.safetensors"), change)
    )
    assert_same({"text_encoder": tensors_of(single)["text_encoder"]}, pipelines["sd2"])


@pytest.mark.parametrize(
    "changes",
    [
        dict(
            layers_per_block=2,
            transformer_layers_per_block=(1, (2, 1), (3, 2)),
            reverse_transformer_layers_per_block=((3, 2, 1), (2, 1, 1), 1),
        ),
        dict(layers_per_block=1, transformer_layers_per_block=(1, 2, 1)),
        dict(mid_block_type="UNetMidBlock2D"),
        dict(mid_block_type=None),
    ],
)
def test_smaller_unets_are_told_by_their_blocks(pipelines, tmp_path, changes):
    pipeline = diffusers.StableDiffusionXLPipeline(**{**pipelines["sdxl"].components, "unet": None})
    torch.manual_seed(1)
    if "reverse_transformer_layers_per_block" in changes:  # the middle has the last level's last
        changes = {**changes, "mid_block_type": "UNetMidBlock2D"}
    pipeline.unet = diffusers.UNet2DConditionModel(sample_size=8, **{**UNETS["sdxl"], **changes})
    single = single_file.read(write_original(pipeline, "sdxl", tmp_path / "small.safetensors"))
    rebuilt = diffusers.UNet2DConditionModel.from_config(single.configs["unet"])
    assert {n: t.shape for n, t in rebuilt.state_dict().items()} == {
        n: t.shape for n, t in pipeline.unet.state_dict().items()
    }
    assert_same({"unet": tensors_of(single)["unet"]}, pipeline)


# --- what the file does not tell ------------------------------------------------------------------


def test_marker_keys_say_v_prediction_and_zero_snr_and_flags_say_otherwise(pipelines, tmp_path):
    file = write_original(
        pipelines["sdxl"],
        "sdxl",
        tmp_path / "noob.safetensors",
        v_pred=torch.empty(0),
        ztsnr=torch.empty(0),
    )
    scheduler = single_file.read(file).configs["scheduler"]
    assert scheduler["prediction_type"] == "v_prediction"
    assert scheduler["rescale_betas_zero_snr"] is True
    for flags, (prediction, last) in (
        ({}, ("v_prediction", 0)),
        (dict(prediction_type="epsilon", zero_snr=False), ("epsilon", 0.0047)),
    ):
        schedule = Checkpoint.open(file, **flags).schedule
        assert schedule.config.prediction_type == prediction
        assert schedule.alphas_cumprod[-1] == pytest.approx(last, abs=1e-4)


def test_sd_2_is_taken_for_velocity_at_768_and_what_fills_in_for_noise_at_512(pipelines, tmp_path):
    filling = diffusers.StableDiffusionPipeline(
        **{
            **pipelines["sd2"].components,
            "unet": diffusers.UNet2DConditionModel(sample_size=8, in_channels=9, **UNETS["sd2"]),
        }
    )
    for pipeline, prediction, size in (
        (pipelines["sd2"], "v_prediction", 768),
        (filling, "epsilon", 512),
    ):
        opened = Checkpoint.open(write_original(pipeline, "sd2", tmp_path / "2.safetensors"))
        assert opened.schedule.config.prediction_type == prediction
        assert opened.default_size == (size, size)
        assert opened.configs["vae"]["sample_size"] == size


def test_a_folder_of_the_files_stem_wins_over_inference(files, pipelines, tmp_path):
    file = shutil.copy(files["sd2"], tmp_path / "my model 2.1.safetensors")
    pipelines["sd2"].save_pretrained(tmp_path / "my model 2.1")
    for part, name, value in (
        ("scheduler/scheduler_config", "prediction_type", "sample"),
        ("unet/config", "attention_head_dim", [4, 4]),
        ("text_encoder/config", "num_hidden_layers", 1),
    ):
        config = tmp_path / "my model 2.1" / f"{part}.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), name: value}))
    (tmp_path / "my model 2.1" / "vae" / "config.json").unlink()
    single = single_file.read(file)
    assert single.folder == tmp_path / "my model 2.1"
    assert single.configs["scheduler"]["prediction_type"] == "sample"
    assert single.configs["unet"]["attention_head_dim"] == [4, 4]
    assert single.configs["vae"]["block_out_channels"] == [32, 64, 64]
    assert not any(".layers.1." in name for name in single.stored["text_encoder"])
    assert any(".layers.0." in name for name in single.stored["text_encoder"])


def test_prompts_are_filled_up_as_the_encoders_were_trained(files):
    assert single_file.read(files["sd1"]).tokenizers == {"tokenizer": None}
    assert single_file.read(files["sd2"]).tokenizers == {"tokenizer": "!"}
    assert single_file.read(files["sdxl"]).tokenizers == {"tokenizer": None, "tokenizer_2": "!"}


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, told",
    [
        ("double_blocks.0.img_attn.qkv.weight", "FLUX"),
        ("model.diffusion_model.joint_blocks.0.x_block.mlp.fc1.weight", "Stable Diffusion 3"),
        ("conditioner.embedders.0.model.ln_final.weight", "the refiner of SDXL"),
        ("lora_unet_mid_block_attentions_0_proj_in.lora_down.weight", "a LoRA, not a checkpoint"),
        ("unet.conv_in.lora_A.weight", "a LoRA, not a checkpoint"),
        ("control_model.out.0.weight", "a ControlNet"),
        ("emb_params", "a textual inversion"),
        ("down_blocks.0.resnets.0.conv1.weight", "diffusers layout"),
        ("model.diffusion_model.out.0.weight", "a UNet without a text encoder"),
        ("something", "tensors of no kind known"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_what_it_is(tmp_path, name, told):
    assert told in refusal_of(tmp_path, name)


@pytest.mark.parametrize(
    "mark, told", [("edm_mean", "Playground 2.5"), ("edm_vpred.sigma_max", "CosXL")]
)
def test_sdxls_layout_with_noise_of_another_kind_is_refused_by_name(files, tmp_path, mark, told):
    file = shutil.copy(files["sdxl"], tmp_path / "xl.safetensors")
    assert told in refusal(rewritten(file, lambda tensors: tensors.update({mark: torch.ones(1)})))


def test_a_file_without_an_autoencoder_says_so(file):
    assert "without its autoencoder" in refusal(without(file, "first_stage_model."))


@pytest.mark.parametrize(
    "name",
    [
        "model.diffusion_model.input_blocks.0.0.weight",
        "model.diffusion_model.out.2.weight",
        "first_stage_model.encoder.conv_in.weight",
        "first_stage_model.encoder.down.1.block.0.conv1.weight",
        "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight",
        "model.diffusion_model.input_blocks.1.0.in_layers.2.weight",
    ],
)
@pytest.mark.parametrize("shape", [None, (), (3,)])
def test_missing_and_misshapen_tensors_are_a_sentence_or_left_to_the_exact_check(file, name, shape):
    """Where configs can be inferred all the same, loading lists the difference."""
    spoilt(file, name, shape)
    with pytest.raises(CheckpointError):
        single = single_file.read(file)
        _, expected = find_family(single.configs["model_index"]).build(single.configs, jnp.float32)
        for part, entries in single.stored.items():
            weights.load_stored(entries, expected[part], jnp.float32, source=file)


def test_a_tensor_that_has_no_place_is_named(file):
    def change(tensors):
        tensors["model.diffusion_model.input_blocks.1.0.strange"] = torch.ones(2)

    single = single_file.read(rewritten(file, change))
    _, expected = find_family(single.configs["model_index"]).build(single.configs, jnp.float32)
    with pytest.raises(CheckpointError, match=r"\+ unexpected input_blocks\.1\.0\.strange \[2\]"):
        weights.load_stored(single.stored["unet"], expected["unet"], jnp.float32, source=file)


def test_types_that_are_not_numbers_of_a_network_are_named(file):
    def change(tensors):
        name = "model.diffusion_model.out.0.weight"
        tensors[name] = tensors[name].to(torch.int16)

    single = single_file.read(rewritten(file, change))
    _, expected = find_family(single.configs["model_index"]).build(single.configs, jnp.float32)
    with pytest.raises(CheckpointError, match=r"~ type       conv_norm_out\.weight: .* I16"):
        weights.load_stored(single.stored["unet"], expected["unet"], jnp.float32, source=file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8 + b"{}",
        b"version https://git-lfs.github.com/spec/v1\n",
        (10).to_bytes(8, "little") + b'{"a":[[[[[',
    ],
)
def test_damaged_files_are_one_sentence(tmp_path, content):
    (tmp_path / "bad\n name.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        single_file.read(tmp_path / "bad\n name.safetensors")
    with pytest.raises(CheckpointError, match="There is no file"):
        single_file.read(tmp_path / "vanished.safetensors")


def test_a_flax_pipeline_that_is_given_a_file_says_how_to_make_a_folder_of_it(file):
    with pytest.raises(CheckpointError, match="is a single file, but a folder") as refused:
        FlaxStableDiffusionPipeline.from_pretrained(file)
    exec(str(refused.value).split('python -c "')[1].split('"')[0], {})
    assert FlaxStableDiffusionPipeline.from_pretrained(f"{file.with_suffix('')}-diffusers")


def test_another_pipeline_in_the_folder_beside_is_refused(file):
    folder = file.with_suffix("")
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    with pytest.raises(
        CheckpointError,
        match=r"asks for StableDiffusionXLPipeline, but .* holds a "
        "StableDiffusionPipeline",
    ):
        Checkpoint.open(file)
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionInpaintPipeline"}')
    assert Checkpoint.open(file).model


# --- memory -------------------------------------------------------------------------------------

LOAD = """
import sys, jax, jax.numpy as jnp
from pathlib import Path
from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.single_file import _open_clip, SDXL
tree = {"text_model": {"encoder": {"layers": {i: {"self_attn": {
    f"{part}_proj": {"kernel": jax.ShapeDtypeStruct((768, 768), jnp.float32)} for part in "qkv"}}
    for i in range(20)}}}}
jax.block_until_ready(jax.device_put(jnp.zeros(8), jax.devices()[0]))
print("ready", flush=True)
sys.stdin.readline()
stored = _open_clip(weights.contents([Path(sys.argv[1])]), SDXL, {})
params = jax.block_until_ready(weights.load_stored(stored, tree, jnp.float32, source=Path("x")))
print(sum(leaf.nbytes for leaf in jax.tree.leaves(params)), flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_fused_tensors_are_loaded_in_little_more_memory_than_the_parameters(tmp_path):
    """Each third is read alone, as another process watches."""
    tensor = torch.randn(3 * 768, 768)
    save_file(
        {f"transformer.resblocks.{i}.attn.in_proj_weight": tensor.clone() for i in range(20)},
        tmp_path / "a.safetensors",
    )
    peak, parameters = peak_of_loading(LOAD, tmp_path / "a.safetensors")
    print(f"memory | fused | {peak / parameters:.2f} of the parameters")
    assert peak / parameters < 1.3


# --- pictures -----------------------------------------------------------------------------------


def test_a_file_has_the_model_of_the_folder(files, pipelines, layout, tmp_path):
    """By which programs are compiled, whatever else their configs say."""
    pipelines[layout].save_pretrained(tmp_path)
    file, folder = Checkpoint.open(files[layout]), Checkpoint.open(tmp_path)
    assert file.model == folder.model and file.default_size != folder.default_size


@pytest.mark.slow("compiles an engine of its own")
def test_a_file_draws_what_the_folder_does_with_the_same_programs(files, pipelines, tmp_path):
    pipelines["sd1"].save_pretrained(tmp_path / "folder")
    shutil.copy(files["sd1"], tmp_path / "file.safetensors")
    engine = Engine.open(tmp_path / "folder", models=tmp_path, devices=1)
    try:
        pixels = {}
        for model in ("folder", "file"):
            request = Request.check(
                {
                    "prompts": ["a cat"],
                    "steps": 3,
                    "seed": 1,
                    "model": model,
                    "height": 32,
                    "width": 32,
                },
                engine.catalog,
            )
            (event,) = [
                event
                for event in engine.submit(request, previews=False).events()
                if isinstance(event, ImageReady)
            ]
            pixels[model] = event.pixels
        assert pixels["folder"].std() > 0 and len(engine.worker._programs) == 1
        assert set(engine.programs.traces.values()) == {1}
    finally:
        engine.close()
    np.testing.assert_array_equal(pixels["file"], pixels["folder"])
