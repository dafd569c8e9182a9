"""LoRA, LoHa and LoKr against diffusers' and PEFT's fused weights."""

import copy
import json
import re
import time
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from sd_tpu.checkpoint import adapters, weights
from sd_tpu.runtime.weights import merge
from tests.support.factors import difference_by_numpy
from tests.support.refusals import refusal
from tests.support.tiny import make_pipeline, original_unet

TEXT = re.compile(r"(q_proj|k_proj|v_proj|out_proj|fc1|fc2)$")


# Two levels tell as much as three about names, and diffusers fuses them in half the time.
LESS = {
    "sdxl": dict(
        block_out_channels=(32, 64),
        attention_head_dim=(1, 2),
        transformer_layers_per_block=(1, 2),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
}


class Pipelines(dict[str, diffusers.DiffusionPipeline]):
    """PyTorch's pipelines by layout, made when they are asked for."""

    def __missing__(self, layout: str) -> diffusers.DiffusionPipeline:
        return self.setdefault(layout, make_pipeline(layout, **LESS.get(layout, {})))


@pytest.fixture(scope="module")
def pipelines() -> Pipelines:
    return Pipelines()


def networks(pipeline) -> dict[str, torch.nn.Module]:
    return {
        name: getattr(pipeline, name)
        for name in ("unet", "text_encoder", "text_encoder_2")
        if getattr(pipeline, name, None) is not None
    }


def shapes_of(models: dict[str, torch.nn.Module]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return shapes by name, as `weights.shapes` does for our networks."""
    return {
        part: {
            weights.modern(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()
        }
        for part, model in models.items()
    }


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {
        weights.modern(f"{name}.").removesuffix("."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
    }


def factors(layer: torch.nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (down, up)."""
    outputs, *inputs = layer.weight.shape
    return torch.randn(rank, *inputs), torch.randn(outputs, rank, *[1] * len(inputs[1:]))


def in_pytorchs_order(weight: jax.Array) -> np.ndarray:
    return np.moveaxis(np.asarray(weight), (-1, -2), (0, 1))


def merged(weight: jax.Array, delta: adapters.Delta, strength: float) -> jax.Array:
    """A weight in our order of axes with what is added to it, as the devices merge it."""
    params = {"unet": {"layer": {"kernel": weight[None]}}}
    found = merge(params, {"unet": {"layer.weight": [(delta, strength)]}})
    return found["unet"]["layer"]["kernel"][0]


def assert_fused(file: Path, before: dict, after: dict, strength: float = 1.0, changed=None):
    """Weights with what we read are those that were fused, and no other was changed.

    They are merged by a program of ours for one layer of each kind, and by NumPy for others: there
    is a program for each shape.
    """
    deltas = adapters.read_lora(file, shapes_of(before))
    count, tried = 0, set()
    for part, model in before.items():
        fused = {weights.modern(n): t for n, t in after[part].state_dict().items()}
        for name, tensor in model.state_dict().items():
            name = weights.modern(name)
            delta = deltas.get(part, {}).get(name)
            ours = tensor = tensor.detach().numpy()
            if delta is not None:
                kernel, count = np.moveaxis(ours, (0, 1), (-1, -2)), count + 1
                kind = type(delta), kernel.ndim
                whole = kernel + strength * difference_by_numpy(delta)
                if kind not in tried:
                    whole = merged(jnp.asarray(kernel), delta, strength)
                    tried.add(kind)
                ours = in_pytorchs_order(whole)
                assert np.abs(ours - tensor).max() > 1e-3
            np.testing.assert_allclose(
                ours, fused[name].detach().numpy(), rtol=1e-5, atol=1e-4, err_msg=f"{part} {name}"
            )
    assert count == changed if changed else count > 10


def fused_by_diffusers(pipeline, file: Path, strength: float = 1.0):
    copied = type(pipeline)(
        **{
            name: copy.deepcopy(part) if isinstance(part, torch.nn.Module) else part
            for name, part in pipeline.components.items()
        }
    )
    copied.load_lora_weights(str(file.parent), weight_name=file.name)
    copied.fuse_lora(lora_scale=strength)
    copied.unload_lora_weights()
    return networks(copied)


# --- LoRA against diffusers ---------------------------------------------------------------------


def kohya_names(layout: str, pipeline, original: bool) -> dict[tuple[str, str], str]:
    """(component, module) -> the name that kohya's trainer gives it."""
    names, unet = {}, pipeline.unet.config
    attends = [kind.startswith("Cross") for kind in unet.down_block_types]
    for part, model in networks(pipeline).items():
        for module in layers_of(model):
            if part == "unet":
                spelling = (
                    original_unet(f"{module}.weight", len(attends), unet.layers_per_block, attends)
                    if original
                    else f"{module}.weight"
                )
                spelling, prefix = spelling.removesuffix(".weight"), "lora_unet_"
            else:
                spelling = module
                prefix = {"text_encoder_2": "lora_te2_"}.get(
                    part, "lora_te1_" if layout == "sdxl" else "lora_te_"
                )
            names[part, module] = prefix + spelling.replace(".", "_")
    return names


@pytest.mark.parametrize(
    "layout, original", [("sd1", False), ("sd2", False), ("sdxl", False), ("sdxl", True)]
)
@pytest.mark.slow("fuses LoRAs into SDXL's networks")
def test_kohyas_files_give_the_weights_that_diffusers_fuses(pipelines, tmp_path, layout, original):
    torch.manual_seed(2)
    pipeline, tensors = pipelines[layout], {}
    names = kohya_names(layout, pipeline, original)
    for number, ((part, module), name) in enumerate(names.items()):
        layer = layers_of(getattr(pipeline, part))[module]
        # diffusers knows SDXL's embedding of sizes by its original name only.
        unknown = module.startswith("add_embedding") and not original
        if unknown or (part != "unet" and not TEXT.search(module)):
            continue
        down, up = factors(layer, rank=1 + number % 2)
        # One alpha for all: of several, diffusers applies the most frequent to layers whose keys
        # it has renamed.
        tensors |= {
            f"{name}.lora_down.weight": down,
            f"{name}.lora_up.weight": up,
            f"{name}.alpha": torch.tensor(3.0),
        }
    save_file(tensors, tmp_path / "my lora.safetensors")
    after = fused_by_diffusers(pipeline, tmp_path / "my lora.safetensors", 0.7)
    assert_fused(
        tmp_path / "my lora.safetensors", networks(pipeline), after, 0.7, changed=len(tensors) // 3
    )


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("layout", ["sd1", "sd2", "sdxl"])
@pytest.mark.slow("fuses LoRAs into SDXL's networks")
def test_diffusers_own_files_give_the_weights_that_diffusers_fuses(
    pipelines, tmp_path, layout, metadata
):
    torch.manual_seed(3)
    tensors, configs = {}, {}
    for part, model in networks(pipelines[layout]).items():
        targets = ["to_q", "to_out.0", "conv1", "proj_in"] if part == "unet" else ["q_proj", "fc1"]
        config = peft.LoraConfig(
            r=4,
            lora_alpha=6 if metadata else 4,
            target_modules=targets,
            init_lora_weights=False,
            use_rslora=metadata and part == "unet",
            alpha_pattern={"proj_in": 2} if metadata else {},
        )
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        tensors[part] = {
            name.removeprefix("base_model.model."): tensor
            for name, tensor in peft.get_peft_model_state_dict(adapted).items()
        }
        configs[part] = config.to_dict() if metadata else None
    name = "lora.safetensors"
    type(pipelines[layout]).save_lora_weights(
        tmp_path,
        weight_name=name,
        **{f"{part}_lora_layers": value for part, value in tensors.items()},
        **{f"{part}_lora_adapter_metadata": value for part, value in configs.items()},
    )
    after = fused_by_diffusers(pipelines[layout], tmp_path / name)
    assert_fused(
        tmp_path / name,
        networks(pipelines[layout]),
        after,
        changed=sum(map(len, tensors.values())) // 2,
    )


@pytest.mark.parametrize(
    "renames",
    [
        (
            (".to_q.lora_A.", ".processor.to_q_lora.down."),
            (".to_q.lora_B.", ".processor.to_q_lora.up."),
            (".to_out.0.lora_A.", ".processor.to_out_lora.down."),
            (".to_out.0.lora_B.", ".processor.to_out_lora.up."),
            (".q_proj.lora_A.", ".to_q_lora.down."),
            (".q_proj.lora_B.", ".to_q_lora.up."),
            (".out_proj.lora_A.", ".to_out_lora.down."),
            (".out_proj.lora_B.", ".to_out_lora.up."),
        ),
        (
            (".to_q.lora_A.", ".to_q.lora.down."),
            (".to_q.lora_B.", ".to_q.lora.up."),
            (".to_out.0.lora_A.", ".to_out.0.lora.down."),
            (".to_out.0.lora_B.", ".to_out.0.lora.up."),
            ("_proj.lora_A.", "_proj.lora_linear_layer.down."),
            ("_proj.lora_B.", "_proj.lora_linear_layer.up."),
        ),
    ],
)
def test_diffusers_older_names_are_understood(pipelines, tmp_path, renames):
    torch.manual_seed(4)
    tensors = {}
    for part, model in networks(pipelines["sd1"]).items():
        for module, layer in layers_of(model).items():
            if module.endswith(("to_q", "to_out.0", "q_proj", "out_proj")):
                down, up = factors(layer, 2)
                for old, tensor in (("lora_A", down), ("lora_B", up)):
                    name = f"{part}.{module}.{old}.weight"
                    for before, after in renames:
                        name = name.replace(before, after)
                    tensors[name] = tensor
    save_file(tensors, tmp_path / "old.safetensors")
    after = fused_by_diffusers(pipelines["sd1"], tmp_path / "old.safetensors")
    assert_fused(
        tmp_path / "old.safetensors", networks(pipelines["sd1"]), after, changed=len(tensors) // 2
    )


# --- PEFT's merged weights ----------------------------------------------------------------------

TARGETS = ["to_q", "to_v", "net.2", "conv1", "conv_shortcut", "proj_in"]
CONFIGS = {
    "lora": peft.LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False),
    "loha": peft.LoHaConfig(r=4, alpha=2, target_modules=TARGETS, init_weights=False),
    "loha, conv": peft.LoHaConfig(
        r=4, alpha=2, target_modules=TARGETS, init_weights=False, use_effective_conv2d=True
    ),
    "lokr": peft.LoKrConfig(r=2, alpha=3, target_modules=TARGETS, init_weights=False),
    "lokr, conv": peft.LoKrConfig(
        r=2,
        alpha=3,
        target_modules=TARGETS,
        init_weights=False,
        use_effective_conv2d=True,
        decompose_both=True,
        decompose_factor=4,
    ),
    "lokr, whole": peft.LoKrConfig(r=64, alpha=64, target_modules=TARGETS, init_weights=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_pefts_adapters_give_the_weights_that_peft_merges(pipelines, tmp_path, kind, dtype):
    """Also under kohya's names, as LyCORIS writes them with the alpha of each layer."""
    torch.manual_seed(5)
    unet = pipelines["sd1"].unet
    adapted = peft.get_peft_model(copy.deepcopy(unet), CONFIGS[kind])
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if re.search("lora_|hada_|lokr_", name):
                parameter.copy_(0.3 * torch.randn_like(parameter).to(dtype))
    tensors = {
        name: tensor.to(dtype) for name, tensor in peft.get_peft_model_state_dict(adapted).items()
    }
    unloaded = adapted.merge_and_unload()
    files = [tmp_path / "peft.safetensors"] if kind in ("lora", "lokr, whole") else []
    if files:
        save_file(tensors, files[0])
    if kind != "lora":
        alpha = torch.tensor(float(CONFIGS[kind].alpha))
        lycoris = {}
        for name, value in tensors.items():
            module, factor = name.removeprefix("base_model.model.").rsplit(".", 1)
            lycoris[f"lora_unet_{module.replace('.', '_')}.{factor}"] = value
        lycoris |= {f"{name.split('.')[0]}.alpha": alpha.clone() for name in lycoris}
        save_file(lycoris, tmp_path / "lycoris.safetensors")
        files.append(tmp_path / "lycoris.safetensors")
    for file in files:
        assert_fused(file, {"unet": unet}, {"unet": unloaded})


def test_a_middle_factor_is_a_convolution_between_the_others(pipelines, tmp_path):
    torch.manual_seed(6)
    module = "down_blocks.0.resnets.0.conv1"
    name, layer = f"lora_unet_{module.replace('.', '_')}", layers_of(pipelines["sd1"].unet)[module]
    down, mid = torch.randn(3, layer.in_channels, 1, 1), torch.randn(5, 3, 3, 3)
    up = torch.randn(layer.out_channels, 5, 1, 1)
    save_file(
        {
            f"{name}.lora_down.weight": down,
            f"{name}.lora_mid.weight": mid,
            f"{name}.lora_up.weight": up,
        },
        tmp_path / "mid.safetensors",
    )
    deltas = adapters.read_lora(tmp_path / "mid.safetensors", shapes_of(networks(pipelines["sd1"])))
    delta = deltas["unet"][f"{module}.weight"]
    kernel = torch.tensor(in_pytorchs_order(adapters.difference(delta)))
    image = torch.randn(1, layer.in_channels, 6, 6)
    conv = torch.nn.functional.conv2d
    torch.testing.assert_close(
        conv(image, kernel), conv(conv(conv(image, down), mid), up), rtol=1e-4, atol=1e-3
    )


def test_taking_a_lora_of_no_strength_leaves_the_bytes(pipelines, tmp_path):
    name = "lora_unet_mid_block_attentions_0_proj_out"
    layer = layers_of(pipelines["sd1"].unet)["mid_block.attentions.0.proj_out"]
    down, up = factors(layer, 4)
    save_file(
        {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}, tmp_path / "a.safetensors"
    )
    deltas = adapters.read_lora(tmp_path / "a.safetensors", shapes_of(networks(pipelines["sd1"])))
    (delta,) = deltas["unet"].values()
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 64, 64)), jnp.bfloat16)
    assert merged(weight, delta, 0.0).dtype == jnp.bfloat16
    assert jnp.array_equal(merged(weight, delta, 0.0), weight)
    assert not jnp.array_equal(merged(weight, delta, 1.0), weight)


# --- what is refused ----------------------------------------------------------------------------

MODULE = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"


def spoilt(change, tmp_path: Path) -> Path:
    """A small LoRA after a change of its tensors."""
    tensors = {
        f"{MODULE}.lora_down.weight": torch.ones(2, 64),
        f"{MODULE}.lora_up.weight": torch.ones(64, 2),
        f"{MODULE}.alpha": torch.tensor(1.0),
    }
    change(tensors)
    save_file(tensors, tmp_path / "spoilt (1) ünï.safetensors")
    return tmp_path / "spoilt (1) ünï.safetensors"


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda t: t.update({f"{MODULE}.dora_scale": torch.ones(64)}), "is a DoRA"),
        (lambda t: t.update({f"{MODULE}.oft_blocks": torch.ones(64)}), "not understood"),
        (lambda t: t.update({f"{MODULE}.diff": torch.ones(64)}), "not understood"),
        (lambda t: t.pop(f"{MODULE}.lora_up.weight"), "1 of its 1 layers differ"),
        (lambda t: t.update({f"{MODULE}.lora_up.weight": torch.ones(64, 3)}), "layers differ"),
        (lambda t: t.update({f"{MODULE}.lora_up.weight": torch.ones(2, 64)}), "layers differ"),
        (lambda t: t.update({f"{MODULE}.lora_down.weight": torch.ones(2, 63)}), "other models"),
        (
            lambda t: t.update({f"{MODULE}.lora_down.weight": torch.ones(2, 768)}),
            "for Stable Diffusion 1 ",
        ),
        (
            lambda t: t.update({f"{MODULE}.lora_down.weight": torch.ones(2, 1024)}),
            "for Stable Diffusion 2 ",
        ),
        (lambda t: t.update({f"{MODULE}.lora_down.weight": torch.ones(2, 2048)}), "for SDXL "),
        (lambda t: t.update({f"{MODULE}.lora_down.weight": torch.ones(0, 64)}), "layers differ"),
        (lambda t: t.update({f"{MODULE}.lora_down.weight": torch.tensor(1.0)}), "layers differ"),
        (lambda t: t.update({f"{MODULE}.alpha": torch.tensor(float("nan"))}), "no finite number"),
        (
            lambda t: t.update(
                {f"{MODULE}.lora_down.weight": torch.full((2, 64), float("inf")).half()}
            ),
            f"damaged: {MODULE}.lora_down.weight holds what is no finite number",
        ),
        (
            lambda t: t.update({f"{MODULE}.lora_up.weight": torch.ones(64, 2, dtype=torch.int8)}),
            "I8",
        ),
        (
            lambda t: t.update(
                {
                    "lora_te2_text_projection.lora_down.weight": torch.ones(2, 4),
                    "lora_te2_text_projection.lora_up.weight": torch.ones(4, 2),
                }
            ),
            "for SDXL ",
        ),
        (
            lambda t: t.update(
                {
                    "lora_unet_double_blocks_0_img_attn.lora_down.weight": torch.ones(2, 4),
                    "lora_unet_double_blocks_0_img_attn.lora_up.weight": torch.ones(4, 2),
                }
            ),
            "for FLUX ",
        ),
        (lambda t: t.clear(), "holds no tensors"),
        (
            lambda t: [t.pop(f"{MODULE}.lora_{way}.weight") for way in ("up", "down")],
            "holds no tensors of a LoRA",
        ),
        (
            lambda t: t.update({f"{MODULE}.lora_A.weight": torch.ones(2, 64)}),
            "mean the same, which should be there once",
        ),
        (
            lambda t: t.update(
                {
                    f"unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_k.{way}": (
                        torch.ones(shape)
                    )
                    for way, shape in (("lora_A.weight", (2, 64)), ("lora_B.weight", (64, 2)))
                }
            ),
            f"{MODULE} and unet.mid_block",
        ),
    ],
)
def test_a_lora_that_does_not_fit_is_one_sentence(pipelines, tmp_path, change, told):
    file = spoilt(change, tmp_path)
    assert told in refusal(adapters.read_lora, file, shapes_of(networks(pipelines["sd1"])))


def test_an_alpha_by_itself_is_passed_over(pipelines, tmp_path):
    file = spoilt(lambda t: t.update({"unet.a.to_k.alpha": torch.tensor(1.0)}), tmp_path)
    (delta,) = adapters.read_lora(file, shapes_of(networks(pipelines["sd1"])))["unet"].values()
    assert delta.scale == 0.5


@pytest.mark.parametrize("alpha", [1.0, 1])  # diffusers' own conversion to kohya's names has an int
def test_a_lora_that_fits_is_not_refused(pipelines, tmp_path, alpha):
    file = spoilt(lambda t: t.update({f"{MODULE}.alpha": torch.tensor(alpha)}), tmp_path)
    deltas = adapters.read_lora(file, shapes_of(networks(pipelines["sd1"])))
    assert list(deltas) == ["unet"] and len(deltas["unet"]) == 1
    (delta,) = deltas["unet"].values()
    assert delta.scale == 0.5 and delta.scale.dtype == np.float32


def test_dora_in_pefts_metadata_is_refused(pipelines, tmp_path):
    file = spoilt(lambda tensors: None, tmp_path)
    save_file(
        load_file(file),
        file,
        metadata={"lora_adapter_metadata": json.dumps({"unet.use_dora": True})},
    )
    assert "is a DoRA" in refusal(adapters.read_lora, file, {})
    save_file(load_file(file), file, metadata={"lora_adapter_metadata": "{"})
    assert "damaged" in refusal(adapters.read_lora, file, {})


# --- what a file says is checked before it is used ----------------------------------------------

NAMES = [
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_q",
    "down_blocks.0.attentions.1.transformer_blocks.0.attn2.to_k",
    "up_blocks.1.resnets.0.conv1",
]
SMALL = {"unet": {f"{name}.weight": (8, 8, 3, 3) if "conv" in name else (8, 8) for name in NAMES}}


def written(tmp_path: Path, module: str, metadata: dict | str | None = None, **sizes) -> Path:
    """A file with these factors of a module, all ones, in halves."""
    tensors = {
        f"{module}.{name.replace('__', '.')}": np.ones(size, np.float16)
        for name, size in sizes.items()
    }
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    save_numpy(
        tensors,
        tmp_path / "small.safetensors",
        metadata=None if metadata is None else {"lora_adapter_metadata": text},
    )
    return tmp_path / "small.safetensors"


def scale_of(tmp_path: Path, name: str, metadata: dict) -> float:
    kernel = SMALL["unet"][f"{name}.weight"][2:]
    file = written(
        tmp_path,
        f"unet.{name}",
        metadata,
        lora_A__weight=(2, 8, *kernel),
        lora_B__weight=(8, 2, *[1] * len(kernel)),
    )
    ((delta,),) = (found.values() for found in adapters.read_lora(file, SMALL).values())
    return float(delta.scale)


@pytest.mark.parametrize(
    "patterns",
    [
        {"to_q": 6},
        {"attn1.to_q": 6, "to_k": 2},
        {"to_q": 6, "attn1.to_q": 2},
        {NAMES[1]: 6},
        {},
        {"^mid_block.*to_q": 6},
        {r".*\.attn2\.to_k": 6},
        {"^to_q": 6},
        {"o_q": 6},
        {".*o_q$": 6},
        {r"transformer_blocks\.0\.attn1\.to_q": 6, ".*": 2},
        {f"^{NAMES[2]}$": 6},
        {"conv": 6},
        {"to_q|to_k": 6},
        {r"mid_block|down_blocks\.\d+\.attn.*": 6},
        {"attn[12].to_q": 6},
        {r"^(?:mid_block|up_blocks\.\d)\..*(to_[qk]|conv\d?)$": 6},
        {"to_[^q]": 6, "to_.": 2},
        {".*block.*s.*r.*0.*": 6},
        {"(to_q)": 6},
        {"^conv1|conv1$": 6},
        {r"\w+to_k": 6},
        {r"attn1.+q|.*?resnets\.[0-9]+.conv1": 6},
        {"to_|": 6, "(to_|)q": 2},
        {"transformer_blocks": 6},
        {r"resnets.0.conv1?1?": 6},
        {"x*y?to_k": 6},
        {"t+o*_(q|k|)k": 6},
    ],
)
def test_patterns_in_pefts_metadata_are_those_that_peft_matches(tmp_path, patterns):
    for name in NAMES:
        key = get_pattern_key(patterns, name)
        assert (
            scale_of(tmp_path, name, {"unet.lora_alpha": 4, "unet.alpha_pattern": patterns})
            == patterns.get(key, 4) / 2
        )


@pytest.mark.parametrize(
    "pattern", ["[", "(?=to_q)", "(to_q", "to_q)", "[z-a]", r"(a)\1", "\\", "(a{1000}){1000}"]
)
def test_a_pattern_that_re2_does_not_know_is_refused(tmp_path, pattern):
    file = written(
        tmp_path,
        f"unet.{NAMES[0]}",
        {"unet.lora_alpha": 1, "unet.alpha_pattern": {pattern: 1}},
        lora_A__weight=(2, 8),
        lora_B__weight=(8, 2),
    )
    assert "RE2's syntax" in refusal(adapters.read_lora, file, SMALL)


@pytest.mark.parametrize(
    "pattern",
    [
        "([a-z_.0-9]+)+!",
        "(a|a)*b",
        ".*a" * 16 + "z",
        r"[\w.]*" * 16 + "[^_a-z]",
        "(" * 66 + ".*z" + ")" * 66,
        "a?" * 100 + "z",
        "(.*|.*)" * 8 + "z",
    ],
)
def test_patterns_that_come_back_take_no_time(tmp_path, pattern):
    begun = time.perf_counter()
    metadata = {"unet.lora_alpha": 4, "unet.alpha_pattern": {pattern: 6}}
    assert scale_of(tmp_path, NAMES[0], metadata) == 2
    alphas = adapters._alphas("file", metadata, "unet")
    for _ in range(100):
        adapters._declared_scale(metadata, alphas, "unet", "a." * 40 + "a" * 160)
    assert time.perf_counter() - begun < 5


def test_as_many_patterns_as_a_file_has_layers_are_read(tmp_path):
    begun, patterns = time.perf_counter(), {f"attentions.{n}.to_q": n for n in range(2000)}
    alphas = adapters._alphas("file", {"unet.alpha_pattern": patterns}, "unet")
    for n in range(0, 2000, 20):
        name = f"up_blocks.attentions.{n}.to_q.weight"
        assert adapters._declared_scale({}, alphas, "unet", name)(1) == n
    assert time.perf_counter() - begun < 5


def test_many_patterns_and_deep_metadata_are_a_sentence(tmp_path):
    factors = dict(lora_A__weight=(2, 8), lora_B__weight=(8, 2))
    many = {"unet.alpha_pattern": dict.fromkeys(map(str, range(1 << 16)), 1), "unet.lora_alpha": 1}
    file = written(tmp_path, f"unet.{NAMES[0]}", many, **factors)
    assert "too long" in refusal(adapters.read_lora, file, SMALL)
    written(tmp_path, f"unet.{NAMES[0]}", "[" * 100_000, **factors)
    assert "is no JSON" in refusal(adapters.read_lora, file, SMALL)
    for alpha in (1e300, 10**400, float("nan")):
        written(tmp_path, f"unet.{NAMES[0]}", {"unet.lora_alpha": alpha}, **factors)
        assert "is no finite number" in refusal(adapters.read_lora, file, SMALL)


N = 60_000  # whose square are 7 GB of halves


@pytest.mark.parametrize(
    "name, factors",
    [
        (0, dict(lokr_w1_a=(N, 1), lokr_w1_b=(1, N), lokr_w2=(1, 1))),
        (0, dict(lokr_w1=(1, 1), lokr_w2_a=(N, 1), lokr_w2_b=(1, N))),
        (2, dict(lokr_w1=(1, 1), lokr_t2=(1, 1, 3, 3), lokr_w2_a=(1, N), lokr_w2_b=(1, N))),
        (2, dict(lokr_w1=(1, 1), lokr_t2=(1, 1, 300, 300), lokr_w2_a=(1, 8), lokr_w2_b=(1, 8))),
        (0, dict(lokr_w1=(3, 3), lokr_w2=(2, 2))),
        (0, dict(lokr_w1=(0, 8), lokr_w2=(1, 1))),
        (0, dict(lokr_w1=(8, 8), lokr_w2_a=(1, 0), lokr_w2_b=(0, 1))),
        (0, dict(lokr_w1=(8, 8))),
        (0, dict(lokr_w1=(8,), lokr_w2=(1, 8))),
        (
            2,
            dict(
                lora_down__weight=(1, 8, 1, 1),
                lora_mid__weight=(N, 1, 1, 1),
                lora_up__weight=(8, N, 1, 1),
            ),
        ),
        (
            2,
            dict(
                lora_down__weight=(1, N, 1, 1),
                lora_mid__weight=(1, 1, 3, 3),
                lora_up__weight=(8, 1, 1, 1),
            ),
        ),
        (0, dict(lora_down__weight=(2, 8), lora_mid__weight=(2, 2), lora_up__weight=(8, 2))),
        (0, dict(lora_down__weight=(2, 8), lora_up__weight=(8, 2), alpha=(2,))),
        (0, dict(lora_down__weight=(2, 8), lora_up__weight=())),
        (
            2,
            dict(
                hada_w1_a=(1, 8),
                hada_w1_b=(1, N),
                hada_t1=(1, 1, 3, 3),
                hada_w2_a=(1, 8),
                hada_w2_b=(1, 8),
                hada_t2=(1, 1, 3, 3),
            ),
        ),
        (0, dict(hada_w1_a=(N, 1), hada_w1_b=(1, N), hada_w2_a=(8, 1), hada_w2_b=(1, 8))),
        (
            2,
            dict(
                lora_down__weight=(1, 8, 1, 1),
                lora_mid__weight=(N, 1, 3, 3),
                lora_up__weight=(8, N, 1, 1),
            ),
        ),
        (
            2,
            dict(
                lora_down__weight=(N, 8, 1, 1),
                lora_mid__weight=(1, N, 3, 3),
                lora_up__weight=(8, 1, 1, 1),
            ),
        ),
        (0, dict(lora_down__weight=(N, 8), lora_up__weight=(8, N))),
        (
            2,
            dict(
                hada_w1_a=(N, 8),
                hada_w1_b=(1, 8),
                hada_t1=(N, 1, 3, 3),
                hada_w2_a=(1, 8),
                hada_w2_b=(1, 8),
                hada_t2=(1, 1, 3, 3),
            ),
        ),
        (0, dict(hada_w1_a=(8, N), hada_w1_b=(N, 8), hada_w2_a=(8, 1), hada_w2_b=(1, 8))),
        (2, dict(lokr_w1=(1, 1), lokr_t2=(N, 1, 3, 3), lokr_w2_a=(N, 8), lokr_w2_b=(1, 8))),
        (0, dict(lokr_w1=(1, 1), lokr_w2_a=(8, N), lokr_w2_b=(N, 8))),
    ],
)
def test_factors_that_do_not_give_the_weight_are_refused_by_their_shapes(
    tmp_path, monkeypatch, name, factors
):
    monkeypatch.setattr(adapters, "_array", None)
    file = written(tmp_path, f"lora_unet_{NAMES[name].replace('.', '_')}", **factors)
    assert "1 of its 1 layers differ" in refusal(adapters.read_lora, file, SMALL)


def test_a_rank_that_trainers_offer_is_read_of_small_weights_as_well(tmp_path):
    file = written(tmp_path, f"unet.{NAMES[0]}", lora_A__weight=(1024, 8), lora_B__weight=(8, 1024))
    assert len(adapters.read_lora(file, SMALL)["unet"]) == 1


# --- how files call their layers ----------------------------------------------------------------

TEXT_LAYER = "text_model.encoder.layers.0.mlp.fc1"
LAYERS = SMALL | {
    part: {f"{TEXT_LAYER}.weight": (8, 8), "text_projection.weight": (8, 8)}
    for part in ("text_encoder", "text_encoder_2")
}
LAYERS["unet"] |= {
    f"{level}.resnets.{number}.conv1.weight": (8, 8, 3, 3)
    for level, number in (
        ("down_blocks.0", 0),
        ("down_blocks.0", 1),
        ("up_blocks.0", 0),
        ("up_blocks.0", 1),
    )
}


FACTORS = [
    ("lora_down", "lora_up"),
    ("lora_A", "lora_B"),
    ("lora_A.default_0", "lora_B.default_0"),
    ("lora_A.my-style", "lora_B.my-style"),
]


@pytest.mark.parametrize(
    "number, module, part, name",
    [
        (number, *each)
        for number, each in enumerate(
            [
                (
                    "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q",
                    "unet",
                    NAMES[0],
                ),
                (
                    "model.diffusion_model.input_blocks.2.1.transformer_blocks.0.attn2.to_k",
                    "unet",
                    NAMES[1],
                ),
                ("unet.input_blocks.2.1.transformer_blocks.0.attn2.to_k", "unet", NAMES[1]),
                (f"diffusion_model.{NAMES[0]}", "unet", NAMES[0]),
                ("lycoris_" + NAMES[0].replace(".", "_"), "unet", NAMES[0]),
                ("lycoris_middle_block_1_transformer_blocks_0_attn1_to_q", "unet", NAMES[0]),
                (f"text_encoders.clip_l.transformer.{TEXT_LAYER}", "text_encoder", TEXT_LAYER),
                (f"text_encoders.clip_h.transformer.{TEXT_LAYER}", "text_encoder", TEXT_LAYER),
                (f"text_encoders.clip_g.transformer.{TEXT_LAYER}", "text_encoder_2", TEXT_LAYER),
                (
                    "text_encoders.clip_g.transformer.text_projection",
                    "text_encoder_2",
                    "text_projection",
                ),
                (f"clip_l.{TEXT_LAYER}", "text_encoder", TEXT_LAYER),
                (f"clip_g.{TEXT_LAYER}", "text_encoder_2", TEXT_LAYER),
                (f"clip_g.transformer.{TEXT_LAYER}", "text_encoder_2", TEXT_LAYER),
                (f"cond_stage_model.transformer.{TEXT_LAYER}", "text_encoder", TEXT_LAYER),
                (f"conditioner.embedders.0.transformer.{TEXT_LAYER}", "text_encoder", TEXT_LAYER),
                (f"conditioner.embedders.1.transformer.{TEXT_LAYER}", "text_encoder_2", TEXT_LAYER),
                (f"conditioner.embedders.1.model.{TEXT_LAYER}", "text_encoder_2", TEXT_LAYER),
                (
                    "conditioner.embedders.1.model.transformer.resblocks.0.mlp.c_fc",
                    "text_encoder_2",
                    TEXT_LAYER,
                ),
                (
                    "cond_stage_model.model.transformer.resblocks.0.mlp.c_fc",
                    "text_encoder",
                    TEXT_LAYER,
                ),
                *(
                    (prefix + dot + name.replace(".", dot), part, name)
                    for dot in "._"
                    for part, name, known in (
                        ("unet", NAMES[0], "unet lora_unet lycoris lycoris_unet"),
                        (
                            "text_encoder",
                            TEXT_LAYER,
                            "text_encoder lora_te lora_te1 lycoris lycoris_te lycoris_te1",
                        ),
                        ("text_encoder_2", TEXT_LAYER, "text_encoder_2 lora_te2 lycoris_te2"),
                    )
                    for prefix in known.split()
                ),
            ]
        )
    ],
)
def test_other_programs_names_of_layers_are_known(tmp_path, number, module, part, name):
    """Names of factors follow those of layers, whichever they are: each comes with one in turn."""
    down, up = FACTORS[number % len(FACTORS)]
    file = written(tmp_path, module, **{f"{down}__weight": (2, 8), f"{up}__weight": (8, 2)})
    found = adapters.read_lora(file, LAYERS)
    assert {key: [*deltas] for key, deltas in found.items()} == {part: [f"{name}.weight"]}


@pytest.mark.parametrize(
    "module",
    [
        "clip_h.text_model.encoder.layers.1.mlp.fc1",
        "lora_te_text_model_encoder_layers_1_mlp_fc1",
        "cond_stage_model.model.transformer.resblocks.1.mlp.c_fc",
    ],
)
def test_the_block_that_sd_2s_encoder_does_not_use_is_passed_over(tmp_path, module):
    factors = dict(lora_down__weight=(2, 8), lora_up__weight=(8, 2))
    assert adapters.read_lora(written(tmp_path, module, **factors), LAYERS) == {}
    file = written(tmp_path, re.sub(r"(?<=[._])1(?=[._])", "2", module), **factors)
    assert "does not fit" in refusal(adapters.read_lora, file, LAYERS)


@pytest.mark.parametrize(
    "module, told",
    [
        (
            "some_new_format.mid_block.attn2.to_k",
            "names that are not known here, such as some_new_fo",
        ),
        ("transformer.h.0.attn.c_attn", "calls 1 of its 1 layers by names that are not known"),
        ("diffusion_model.blocks.0.cross_attn.q", "for other models and does not fit"),
        ("lora_unet_other", "does not fit"),
        ("down_blocks.9.resnets.9.conv1", "does not fit"),
        (
            "diffusion_model.input_blocks.8.1.transformer_blocks.9.attn2.to_k",
            "does not fit this model",
        ),
        ("lora_unet_down_blocks_2_attentions_1_transformer_blocks_9_attn2_to_k", "does not fit"),
        (f"text_encoders.clip_g.transformer.{TEXT_LAYER}", "for SDXL and does not fit"),
        (f"lora_te2_{TEXT_LAYER.replace('.', '_')}", "for SDXL and does not fit"),
        (f"lora_te2.{TEXT_LAYER}", "for SDXL and does not fit"),
        (f"conditioner.embedders.1.transformer.{TEXT_LAYER}", "for SDXL and does not fit"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", "for FLUX and does not fit"),
    ],
)
def test_unknown_names_and_other_models_are_two_sentences(tmp_path, module, told):
    shapes = {part: LAYERS[part] for part in ("unet", "text_encoder")}
    file = written(tmp_path, module, lora_down__weight=(2, 8), lora_up__weight=(8, 2))
    message = refusal(adapters.read_lora, file, shapes)
    assert told in message and ("not known" in message) != ("does not fit" in message)
