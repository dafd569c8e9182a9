"""LoRAs for transformers in the names of PEFT, kohya and the original code, whose layers may be
several here: against diffusers' fused weights, and against the parts of what they add up to."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sd_tpu.checkpoint import adapters, weights
from sd_tpu.checkpoint.config import CheckpointError
from tests.support import anima, flux, flux2, krea2, sd3, z_image
from tests.support.factors import difference_by_numpy

JOINT, SINGLE = "transformer_blocks.0", "single_transformer_blocks.1"
FLUX_JOINT = {
    "double_blocks.0.img_attn.qkv": [f"{JOINT}.attn.to_{part}" for part in "qkv"],
    "double_blocks.0.txt_attn.qkv": [f"{JOINT}.attn.add_{part}_proj" for part in "qkv"],
    "double_blocks.0.img_attn.proj": [f"{JOINT}.attn.to_out.0"],
    "double_blocks.0.txt_attn.proj": [f"{JOINT}.attn.to_add_out"],
}
# A model -> layers in the original names -> what they are here. Where halves are in the other
# order, they are named last.
LAYERS = {
    "SD 3": {
        "joint_blocks.0.x_block.attn.qkv": [f"{JOINT}.attn.to_{part}" for part in "qkv"],
        "joint_blocks.0.context_block.attn.qkv": [f"{JOINT}.attn.add_{p}_proj" for p in "qkv"],
        "joint_blocks.0.x_block.attn2.proj": [f"{JOINT}.attn2.to_out.0"],
        "joint_blocks.1.x_block.mlp.fc1": ["transformer_blocks.1.ff.net.0.proj"],
        "joint_blocks.0.context_block.adaLN_modulation.1": [f"{JOINT}.norm1_context.linear"],
        "context_embedder": ["context_embedder"],
        "joint_blocks.1.context_block.adaLN_modulation.1": [
            "transformer_blocks.1.norm1_context.linear"
        ],
        "final_layer.adaLN_modulation.1": ["norm_out.linear"],
    },
    "FLUX.1": {
        **FLUX_JOINT,
        "double_blocks.0.img_mlp.0": [f"{JOINT}.ff.net.0.proj"],
        "double_blocks.0.txt_mlp.2": [f"{JOINT}.ff_context.net.2"],
        "double_blocks.0.txt_mod.lin": [f"{JOINT}.norm1_context.linear"],
        "single_blocks.1.linear1": [
            *(f"{SINGLE}.attn.to_{part}" for part in "qkv"),
            f"{SINGLE}.proj_mlp",
        ],
        "single_blocks.1.linear2": [f"{SINGLE}.proj_out"],
        "single_blocks.1.modulation.lin": [f"{SINGLE}.norm.linear"],
        "time_in.in_layer": ["time_text_embed.timestep_embedder.linear_1"],
        "guidance_in.out_layer": ["time_text_embed.guidance_embedder.linear_2"],
        "img_in": ["x_embedder"],
        "final_layer.linear": ["proj_out"],
        "final_layer.adaLN_modulation.1": ["norm_out.linear"],
    },
    "FLUX.2 klein": {
        **FLUX_JOINT,
        "double_blocks.0.img_mlp.0": [f"{JOINT}.ff.linear_in"],
        "double_blocks.0.txt_mlp.2": [f"{JOINT}.ff_context.linear_out"],
        "single_blocks.1.linear1": [f"{SINGLE}.attn.to_qkv_mlp_proj"],
        "single_blocks.1.linear2": [f"{SINGLE}.attn.to_out"],
        "txt_in": ["context_embedder"],
        "time_in.in_layer": ["time_guidance_embed.timestep_embedder.linear_1"],
        "final_layer.linear": ["proj_out"],
        "single_stream_modulation.lin": ["single_stream_modulation.linear"],
        "final_layer.adaLN_modulation.1": ["norm_out.linear"],
    },
    "Z-Image": {
        "layers.1.attention.qkv": [f"layers.1.attention.to_{part}" for part in "qkv"],
        "layers.1.attention.out": ["layers.1.attention.to_out.0"],
        "noise_refiner.0.attention.qkv": [f"noise_refiner.0.attention.to_{p}" for p in "qkv"],
        "layers.0.feed_forward.w1": ["layers.0.feed_forward.w1"],
        "x_embedder": ["all_x_embedder.2-1"],
        "final_layer.linear": ["all_final_layer.2-1.linear"],
        "cap_embedder.1": ["cap_embedder.1"],
    },
    "Anima": {
        "blocks.0.self_attn.q_proj": [f"{JOINT}.attn1.to_q"],
        "blocks.0.self_attn.output_proj": [f"{JOINT}.attn1.to_out.0"],
        "blocks.1.cross_attn.k_proj": ["transformer_blocks.1.attn2.to_k"],
        "blocks.1.mlp.layer1": ["transformer_blocks.1.ff.net.0.proj"],
        "blocks.0.adaln_modulation_cross_attn.2": [f"{JOINT}.norm2.linear_2"],
        "x_embedder.proj.1": ["patch_embed.proj"],
        "t_embedder.1.linear_2": ["time_embed.t_embedder.linear_2"],
        "final_layer.linear": ["proj_out"],
        "final_layer.adaln_modulation.1": ["norm_out.linear_1"],
    },
    "Krea 2": {
        "blocks.0.attn.wq": [f"{JOINT}.attn.to_q"],
        "blocks.1.attn.gate": ["transformer_blocks.1.attn.to_gate"],
        "blocks.0.attn.wo": [f"{JOINT}.attn.to_out.0"],
        "blocks.0.mlp.gate": [f"{JOINT}.ff.gate"],
        "txtfusion.layerwise_blocks.0.attn.wk": ["text_fusion.layerwise_blocks.0.attn.to_k"],
        "txtfusion.refiner_blocks.0.mlp.down": ["text_fusion.refiner_blocks.0.ff.down"],
        "txtfusion.projector": ["text_fusion.projector"],
        "first": ["img_in"],
        "last.linear": ["final_layer.linear"],
        "tmlp.2": ["time_embed.linear_2"],
        "tproj.1": ["time_mod_proj"],
        "txtmlp.3": ["txt_in.linear_2"],
    },
}
SWAPPED = ("final_layer.adaLN_modulation.1", "joint_blocks.1.context_block.adaLN_modulation.1")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("words")
    return {
        "SD 3": sd3.make_pipeline(folder / "sd3", "SD 3.5 medium", t5=False),
        "FLUX.1": flux.make_pipeline(folder / "flux", dev=True),
        "FLUX.2 klein": flux2.make_pipeline(folder / "klein", distilled=True),
        "Z-Image": z_image.make_pipeline(folder / "z"),
        "Anima": anima.make_pipeline(folder / "anima"),
        "Krea 2": krea2.make_pipeline(folder / "krea2"),
    }


def shapes_of(pipeline) -> dict[str, dict[str, tuple[int, ...]]]:
    state = pipeline.transformer.state_dict()
    return {"transformer": {name: tuple(tensor.shape) for name, tensor in state.items()}}


def differences(file: Path, pipeline) -> dict[str, np.ndarray]:
    """Differences that the file adds to weights, in PyTorch's order of axes."""
    deltas = adapters.read_lora(file, shapes_of(pipeline))
    assert deltas.keys() == {"transformer"}
    ranks = {
        name: delta.left.shape[1] if isinstance(delta, adapters.LowRank) else None
        for name, delta in deltas["transformer"].items()
    }
    assert adapters.changed_by_lora(file, shapes_of(pipeline)) == {"transformer": ranks}
    return {
        name: np.moveaxis(difference_by_numpy(delta), (-1, -2), (0, 1))
        for name, delta in deltas["transformer"].items()
    }


def layers(pipeline, model: str) -> dict[str, tuple[list[str], int, int]]:
    """The original layers with their parts here, and how many numbers they give and take."""
    found = {}
    for original, parts in LAYERS[model].items():
        layers = [pipeline.transformer.get_submodule(part).weight for part in parts]
        found[original] = parts, sum(map(len, layers)), layers[0].shape[1]
    return found


def expected_parts(pipeline, original: str, parts: list[str], whole: np.ndarray) -> dict:
    """The rows of a layer's difference that are each part's."""
    if original in SWAPPED:
        whole = np.roll(whole, len(whole) // 2, axis=0)
    rows = [len(pipeline.transformer.get_submodule(part).weight) for part in parts]
    split = np.split(whole, np.cumsum(rows)[:-1])
    return {f"{part}.weight": each for part, each in zip(parts, split, strict=True)}


SPELLINGS = {
    "ComfyUI's": ("diffusion_model.{}", "lora_A.weight", "lora_B.weight"),
    "the original": ("{}", "lora_A.weight", "lora_B.weight"),
    "kohya's": ("lora_unet_{}", "lora_down.weight", "lora_up.weight"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("model", LAYERS)
def test_a_layer_of_the_original_code_is_its_parts(pipelines, tmp_path, model, spelling):
    torch.manual_seed(0)
    pipeline, tensors, expected = pipelines[model], {}, {}
    pattern, down, up = SPELLINGS[spelling]
    for original, (parts, outputs, inputs) in layers(pipeline, model).items():
        a, b = torch.randn(3, inputs), torch.randn(outputs, 3)
        name, scale = pattern.format(original), 1.0
        if spelling == "kohya's":
            name, scale = name.replace(".", "_"), 2 / 3
            tensors[f"{name}.alpha"] = torch.tensor(2.0)
        tensors |= {f"{name}.{down}": a, f"{name}.{up}": b}
        expected |= expected_parts(pipeline, original, parts, scale * (b @ a).numpy())
    save_file(tensors, tmp_path / "ink.safetensors")
    found = differences(tmp_path / "ink.safetensors", pipeline)
    assert found.keys() == expected.keys()
    for name, ours in found.items():
        np.testing.assert_allclose(ours, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model.", "lora_transformer_", ""])
@pytest.mark.parametrize("model", LAYERS)
def test_diffusers_names_are_known_with_all_beginnings(pipelines, tmp_path, model, prefix):
    pipeline, tensors, expected = pipelines[model], {}, {}
    for parts, _, inputs in layers(pipeline, model).values():
        for part in parts:
            outputs = len(pipeline.transformer.get_submodule(part).weight)
            a, b = torch.randn(2, inputs), torch.randn(outputs, 2)
            name = prefix + (part.replace(".", "_") if prefix.endswith("_") else part)
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            expected[f"{part}.weight"] = (b @ a).numpy()
    save_file(tensors, tmp_path / "ink.safetensors")
    found = differences(tmp_path / "ink.safetensors", pipeline)
    assert found.keys() == expected.keys()
    for name, ours in found.items():
        np.testing.assert_allclose(ours, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def fused_by_diffusers(pipeline, file: Path) -> dict[str, torch.Tensor]:
    parts = {
        name: copy.deepcopy(part) if name == "transformer" else part
        for name, part in pipeline.components.items()
    }
    copied = type(pipeline)(**parts, **_options(pipeline))
    copied.load_lora_weights(str(file.parent), weight_name=file.name)
    copied.fuse_lora(components=["transformer"])
    copied.unload_lora_weights()
    return copied.transformer.state_dict()


def _options(pipeline) -> dict:
    if "Krea2" in type(pipeline).__name__:
        return {"text_encoder_select_layers": pipeline.text_encoder_select_layers}
    return {"is_distilled": True} if "Klein" in type(pipeline).__name__ else {}


@pytest.mark.parametrize(
    "model, spelling, unknown",
    [
        # diffusers takes a width of 3072 for granted where linear1 is split, leaves kohya's layers
        # of FLUX.1 outside of blocks out, and does not swap the halves of FLUX.2's last modulation.
        ("FLUX.1", "kohya's", ("linear1", "time_in", "guidance_in", "img_in", "final_layer")),
        ("FLUX.2 klein", "kohya's", ("final_layer.adaLN_modulation.1", "single_stream_modu")),
        ("FLUX.2 klein", "ComfyUI's", ("final_layer.adaLN_modulation.1",)),
        ("Z-Image", "ComfyUI's", ("qkv", "x_embedder", "final_layer", "out")),
        ("Krea 2", "ComfyUI's", ("nothing",)),
    ],
)
def test_the_weights_are_those_that_diffusers_fuses(pipelines, tmp_path, model, spelling, unknown):
    torch.manual_seed(1)
    pipeline, tensors = pipelines[model], {}
    pattern, down, up = SPELLINGS[spelling]
    for original, (_, outputs, inputs) in layers(pipeline, model).items():
        if any(mark in original for mark in unknown):
            continue
        name = pattern.format(original)
        if spelling == "kohya's":
            name = name.replace(".", "_")
            if not original.startswith("final_layer"):  # whose alpha diffusers drops
                tensors[f"{name}.alpha"] = torch.tensor(2.0)
        tensors |= {
            f"{name}.{down}": torch.randn(4, inputs),
            f"{name}.{up}": torch.randn(outputs, 4),
        }
    save_file(tensors, tmp_path / "ink.safetensors")
    found = differences(tmp_path / "ink.safetensors", pipeline)
    fused = fused_by_diffusers(pipeline, tmp_path / "ink.safetensors")
    before = pipeline.transformer.state_dict()
    for name, tensor in fused.items():
        changed = (tensor - before[name]).numpy()
        assert (name in found) == bool(np.abs(changed).max() > 1e-3), name
        if name in found:
            np.testing.assert_allclose(changed, found[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_kohyas_layers_of_text_encoders_are_known(pipelines, tmp_path):
    pipeline, tensors = pipelines["FLUX.1"], {}
    shapes = shapes_of(pipeline)
    expected = {
        "text_encoder": ("lora_te1", "text_model.encoder.layers.0.self_attn.q_proj"),
        "text_encoder_2": ("lora_te3", "encoder.block.1.layer.0.SelfAttention.q"),
    }
    for part, (prefix, module) in expected.items():
        state = getattr(pipeline, part).state_dict()
        shapes[part] = {weights.modern(name): tuple(each.shape) for name, each in state.items()}
        outputs, inputs = shapes[part][f"{module}.weight"]
        name = f"{prefix}_{module.replace('.', '_')}"
        tensors[f"{name}.lora_down.weight"] = torch.ones(2, inputs)
        tensors[f"{name}.lora_up.weight"] = torch.ones(outputs, 2)
    save_file(tensors, tmp_path / "ink.safetensors")
    found = adapters.changed_by_lora(tmp_path / "ink.safetensors", shapes)
    assert found == {part: {f"{module}.weight": 2} for part, (_, module) in expected.items()}


@pytest.mark.parametrize(
    "prefix", ["text_conditioner.", "diffusion_model.llm_adapter.", "lora_unet_llm_adapter_"]
)
def test_layers_of_animas_conditioner_are_none_of_its_transformer(pipelines, tmp_path, prefix):
    """Which are called the same but for the beginning."""
    pipeline, module = pipelines["Anima"], "blocks.0.self_attn.q_proj"
    shapes = shapes_of(pipeline)
    state = pipeline.text_conditioner.state_dict()
    shapes["text_conditioner"] = {name: tuple(each.shape) for name, each in state.items()}
    outputs, inputs = shapes["text_conditioner"][f"{module}.weight"]
    name = prefix + (module.replace(".", "_") if prefix.endswith("_") else module)
    tensors = {
        f"{name}.lora_down.weight": torch.ones(2, inputs),
        f"{name}.lora_up.weight": torch.ones(outputs, 2),
    }
    save_file(tensors, tmp_path / "ink.safetensors")
    found = adapters.changed_by_lora(tmp_path / "ink.safetensors", shapes)
    assert found == {"text_conditioner": {f"{module}.weight": 2}}


# --- LoHa and LoKr ------------------------------------------------------------------------------


def _loha(outputs: int, inputs: int) -> tuple[dict, np.ndarray]:
    a, b, c, d = (torch.randn(*s) for s in ((outputs, 2), (2, inputs), (outputs, 2), (2, inputs)))
    factors = {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": c, "hada_w2_b": d}
    return factors, ((a @ b) * (c @ d)).numpy()


def _lokr(outputs: int, inputs: int, rows: int) -> tuple[dict, np.ndarray]:
    left, right = torch.randn(rows, 2), torch.randn(outputs // rows, inputs // 2)
    return {"lokr_w1": left, "lokr_w2": right}, torch.kron(left, right).numpy()


@pytest.mark.parametrize("kind", [_loha, lambda *shape: _lokr(*shape, 6)])
def test_loha_and_lokr_of_a_fused_layer_are_divided_as_well(pipelines, tmp_path, kind):
    torch.manual_seed(2)
    pipeline, original = pipelines["FLUX.1"], "double_blocks.0.img_attn.qkv"
    parts, outputs, inputs = layers(pipeline, "FLUX.1")[original]
    factors, whole = kind(outputs, inputs)
    name = f"lora_unet_{original.replace('.', '_')}"
    save_file({f"{name}.{f}": t for f, t in factors.items()}, tmp_path / "ink.safetensors")
    found = differences(tmp_path / "ink.safetensors", pipeline)
    for name, expected in expected_parts(pipeline, original, parts, whole).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)


# --- what is refused ----------------------------------------------------------------------------


def refused(file: Path, pipeline) -> str:
    with pytest.raises(CheckpointError) as caught:
        adapters.read_lora(file, shapes_of(pipeline))
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
    return message


def test_a_lokr_whose_rows_cannot_be_divided_does_not_fit(pipelines, tmp_path):
    pipeline, original = pipelines["FLUX.1"], "single_blocks.1.linear1"
    _, outputs, inputs = layers(pipeline, "FLUX.1")[original]
    factors, _ = _lokr(outputs, inputs, 6)
    tensors = {f"diffusion_model.{original}.{name}": value for name, value in factors.items()}
    save_file(tensors, tmp_path / "ink.safetensors")
    assert f"such as diffusion_model.{original}." in refused(tmp_path / "ink.safetensors", pipeline)


@pytest.mark.parametrize("rows", [0, 7, 147])
def test_a_layer_of_another_width_does_not_fit(pipelines, tmp_path, rows):
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    tensors = {
        f"{name}.lora_A.weight": torch.ones(2, 48),
        f"{name}.lora_B.weight": torch.ones(rows, 2),
    }
    save_file(tensors, tmp_path / "ink.safetensors")
    message = refused(tmp_path / "ink.safetensors", pipelines["FLUX.1"])
    assert f"1 of its 1 layers differ, such as {name}. LoRAs for its family are read in" in message


def test_a_layer_and_its_part_are_not_there_at_once(pipelines, tmp_path):
    tensors = {}
    for name, outputs in (
        ("diffusion_model.double_blocks.0.img_attn.qkv", 144),
        ("transformer.transformer_blocks.0.attn.to_k", 48),
    ):
        tensors[f"{name}.lora_A.weight"] = torch.ones(2, 48)
        tensors[f"{name}.lora_B.weight"] = torch.ones(outputs, 2)
    save_file(tensors, tmp_path / "ink.safetensors")
    assert "in it mean the same" in refused(tmp_path / "ink.safetensors", pipelines["FLUX.1"])


@pytest.mark.parametrize("model", LAYERS)
def test_a_lora_of_another_family_does_not_fit(pipelines, tmp_path, model):
    other = "layers.0.attention.qkv" if model != "Z-Image" else "double_blocks.0.img_attn.qkv"
    name = f"lora_unet_{other.replace('.', '_')}"
    tensors = {
        f"{name}.lora_down.weight": torch.ones(2, 48),
        f"{name}.lora_up.weight": torch.ones(144, 2),
    }
    save_file(tensors, tmp_path / "ink.safetensors")
    assert "does not fit this model" in refused(tmp_path / "ink.safetensors", pipelines[model])
