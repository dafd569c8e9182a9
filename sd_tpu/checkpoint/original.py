"""Names in the original layouts -> names in diffusers' checkpoints.

The original repositories of Stable Diffusion (CompVis/stable-diffusion,
Stability-AI/generative-models) number the UNet's layers from end to end; diffusers numbers them by
level. Transformers of the others keep in one tensor what diffusers has in several. `[qkv]` in a
name stands for each of the three of which that is so, in this order.
"""

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from sd_tpu.checkpoint.weights import Stored

# Modules of the UNet that every one has once.
UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
VAE_RULES = (
    (r"^encoder\.down\.(\d+)\.block\.", r"encoder.down_blocks.\1.resnets."),
    (r"^encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0."),
    (r"^decoder\.up\.(\d+)\.block\.", r"decoder.up_blocks.\1.resnets."),
    (r"^decoder\.up\.(\d+)\.upsample\.", r"decoder.up_blocks.\1.upsamplers.0."),
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
    (r"^encoder\.quant_conv\.", "quant_conv."),  # in FLUX.2's
    (r"^decoder\.post_quant_conv\.", "post_quant_conv."),
)
# Of the autoencoder of Wan 2.1, which Qwen-Image's was made from, but for the decoder's levels
WAN_VAE_RULES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"\.downsamples\.", ".down_blocks."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.head\.0\.", ".norm_out."),
    (r"\.head\.2\.", ".conv_out."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
OPEN_CLIP_RULES = (
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.ln_(\d)\.", r".layer_norm\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.in_proj_(weight|bias)$", r".[qkv]_proj.\1"),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^text_projection$", "text_projection.weight"),
)


BLOCK = re.compile(r"(\w+|\w+\.\w+_blocks)\.(\d+)\.(.+)")
# Parameters of an RMS norm in Black Forest Labs' code and Krea's, of a modulation in Krea's
LEAF_NAMES = {"scale": "weight", "lin": "scale_shift_table"}


def blocks_of(names: Iterable[str]) -> int:
    """Return the most blocks of a kind that parameters of a transformer have by their names."""
    return 1 + max((int(match[2]) for name in names if (match := BLOCK.match(name))), default=-1)


class Module(NamedTuple):
    """Names in diffusers of a module of an original layout.

    Attributes:
        parts: diffusers' modules, and how many rows of the original's weights each has in
            proportion; they follow one another.
        swapped: the halves of the original's rows, shift and scale, are diffusers' in the other
            order.
    """

    parts: Mapping[str, int]
    swapped: bool = False

    def split(self, tensor: Stored) -> dict[str, Stored]:
        """Return the parts of a tensor of the module, by diffusers' module.

        Raises:
            ValueError: its rows cannot be divided.
        """
        whole = 2 if self.swapped else sum(self.parts.values())
        if whole == 1:
            return dict.fromkeys(self.parts, tensor)
        if not tensor.shape or tensor.shape[0] % whole:
            raise ValueError(f"{tensor.name} has {tensor.shape} in place of {whole} equal parts")
        if self.swapped:
            return dict.fromkeys(self.parts, dataclasses.replace(tensor, swapped=True))
        unit = tensor.shape[0] // whole
        ends = [unit * rows for rows in itertools.accumulate(self.parts.values())]
        return {
            part: tensor.rows_between(end - unit * rows, end)
            for (part, rows), end in zip(self.parts.items(), ends, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class Names:
    """Modules of a transformer by their names in its original layout.

    Attributes:
        mark: a parameter in diffusers' names that no other transformer has.
        modules: those that diffusers calls otherwise, with what it calls them: `#` is the number of
            a block, `[qkv]` each of the three, and `*4` of four times as many rows as the others.
        swapped: those of them that are so, as `Module` says; `last` is the last block.
    """

    mark: str
    modules: Mapping[str, str]
    swapped: tuple[str, ...] = ()

    def module(self, original: str, blocks: int) -> Module:
        """Return what diffusers calls a module, in a transformer of so many blocks."""
        number = BLOCK.match(original)
        general = f"{number[1]}.#.{number[3]}" if number else original
        parts = {}
        known_as = self.modules.get(original) or self.modules.get(general, original)
        for part in known_as.split():
            name, _, rows = part.replace("#", number[2] if number else "#").partition("*")
            for letter in "qkv" if "[qkv]" in name else " ":
                parts[name.replace("[qkv]", letter)] = int(rows or 1)
        last = str(blocks - 1)
        return Module(parts, original in [each.replace("last", last) for each in self.swapped])

    def all_modules(self, names: Collection[str]) -> dict[str, Module]:
        """Return those of a transformer whose parameters have these names in diffusers' layout."""
        blocks = blocks_of(names)
        originals = (
            general.replace("#", str(number))
            for general in self.modules
            for number in range(blocks if "#" in general else 1)
        )
        found = {original: self.module(original, blocks) for original in originals}
        return {
            original: module
            for original, module in found.items()
            if all(f"{part}.weight" in names for part in module.parts)
        }

    def stored(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return tensors by diffusers' names, given those by their names in the original layout;
        those that cannot be divided keep them."""
        blocks = blocks_of(tensors)
        stored = {}
        for name, tensor in tensors.items():
            path, dot, leaf = name.rpartition(".")
            end = dot + LEAF_NAMES.get(leaf, leaf) if dot else ""
            try:
                parts = self.module(path or name, blocks).split(tensor)
            except ValueError:
                parts, end = {name: tensor}, ""
            stored |= {f"{part}{end}": each for part, each in parts.items()}
        return stored


_SD3_BLOCK = {
    "x_block.adaLN_modulation.1": "norm1.linear",
    **{
        f"x_block.{attention}.{theirs}": f"{attention}.{ours}"
        for attention in ("attn", "attn2")
        for theirs, ours in {
            "qkv": "to_[qkv]",
            "ln_q": "norm_q",
            "ln_k": "norm_k",
            "proj": "to_out.0",
        }.items()
    },
    "x_block.mlp.fc1": "ff.net.0.proj",
    "x_block.mlp.fc2": "ff.net.2",
    "context_block.adaLN_modulation.1": "norm1_context.linear",
    "context_block.attn.qkv": "attn.add_[qkv]_proj",
    "context_block.attn.ln_q": "attn.norm_added_q",
    "context_block.attn.ln_k": "attn.norm_added_k",
    "context_block.attn.proj": "attn.to_add_out",
    "context_block.mlp.fc1": "ff_context.net.0.proj",
    "context_block.mlp.fc2": "ff_context.net.2",
}
_END = {"final_layer.linear": "proj_out", "final_layer.adaLN_modulation.1": "norm_out.linear"}
SD3 = Names(
    "pos_embed.pos_embed",
    {
        "pos_embed": "pos_embed.pos_embed",
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        **{
            f"joint_blocks.#.{theirs}": f"transformer_blocks.#.{ours}"
            for theirs, ours in _SD3_BLOCK.items()
        },
        **_END,
    },
    ("final_layer.adaLN_modulation.1", "joint_blocks.last.context_block.adaLN_modulation.1"),
)
# Names of both FLUX.1 and FLUX.2
_FLUX = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    **_END,
    **{
        f"double_blocks.#.{theirs}": f"transformer_blocks.#.attn.{ours}"
        for theirs, ours in {
            "img_attn.qkv": "to_[qkv]",
            "img_attn.norm.query_norm": "norm_q",
            "img_attn.norm.key_norm": "norm_k",
            "img_attn.proj": "to_out.0",
            "txt_attn.qkv": "add_[qkv]_proj",
            "txt_attn.norm.query_norm": "norm_added_q",
            "txt_attn.norm.key_norm": "norm_added_k",
            "txt_attn.proj": "to_add_out",
        }.items()
    },
    "single_blocks.#.norm.query_norm": "single_transformer_blocks.#.attn.norm_q",
    "single_blocks.#.norm.key_norm": "single_transformer_blocks.#.attn.norm_k",
}
FLUX = Names(
    "single_transformer_blocks.0.proj_mlp.weight",
    {
        **_FLUX,
        **{
            f"{theirs}.{layer}_layer": f"time_text_embed.{ours}_embedder.linear_{number}"
            for theirs, ours in {
                "time_in": "timestep",
                "vector_in": "text",
                "guidance_in": "guidance",
            }.items()
            for layer, number in {"in": 1, "out": 2}.items()
        },
        **{
            f"double_blocks.#.{theirs}": f"transformer_blocks.#.{ours}"
            for theirs, ours in {
                "img_mod.lin": "norm1.linear",
                "img_mlp.0": "ff.net.0.proj",
                "img_mlp.2": "ff.net.2",
                "txt_mod.lin": "norm1_context.linear",
                "txt_mlp.0": "ff_context.net.0.proj",
                "txt_mlp.2": "ff_context.net.2",
            }.items()
        },
        "single_blocks.#.modulation.lin": "single_transformer_blocks.#.norm.linear",
        "single_blocks.#.linear1": "single_transformer_blocks.#.attn.to_[qkv] "
        "single_transformer_blocks.#.proj_mlp*4",
        "single_blocks.#.linear2": "single_transformer_blocks.#.proj_out",
    },
    ("final_layer.adaLN_modulation.1",),
)
FLUX2 = Names(
    "single_stream_modulation.linear.weight",
    {
        **_FLUX,
        "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
        **{
            f"{modulation}.lin": f"{modulation}.linear"
            for modulation in (
                "double_stream_modulation_img",
                "double_stream_modulation_txt",
                "single_stream_modulation",
            )
        },
        **{
            f"double_blocks.#.{theirs}": f"transformer_blocks.#.{ours}"
            for theirs, ours in {
                "img_mlp.0": "ff.linear_in",
                "img_mlp.2": "ff.linear_out",
                "txt_mlp.0": "ff_context.linear_in",
                "txt_mlp.2": "ff_context.linear_out",
            }.items()
        },
        "single_blocks.#.linear1": "single_transformer_blocks.#.attn.to_qkv_mlp_proj",
        "single_blocks.#.linear2": "single_transformer_blocks.#.attn.to_out",
    },
    ("final_layer.adaLN_modulation.1",),
)
Z_IMAGE = Names(
    "cap_pad_token",
    {
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
        **{
            f"{blocks}.#.attention.{theirs}": f"{blocks}.#.attention.{ours}"
            for blocks in ("layers", "noise_refiner", "context_refiner")
            for theirs, ours in {
                "qkv": "to_[qkv]",
                "out": "to_out.0",
                "q_norm": "norm_q",
                "k_norm": "norm_k",
            }.items()
        },
    },
)
_ANIMA_BLOCK = {
    **{
        f"adaln_modulation_{theirs}.{number}": f"{ours}.linear_{number}"
        for theirs, ours in {"self_attn": "norm1", "cross_attn": "norm2", "mlp": "norm3"}.items()
        for number in (1, 2)
    },
    **{
        f"{attention}.{theirs}": f"attn{number}.{ours}"
        for number, attention in enumerate(("self_attn", "cross_attn"), 1)
        for theirs, ours in {
            **{f"{letter}_proj": f"to_{letter}" for letter in "qkv"},
            **{f"{letter}_norm": f"norm_{letter}" for letter in "qk"},
            "output_proj": "to_out.0",
        }.items()
    },
    "mlp.layer1": "ff.net.0.proj",
    "mlp.layer2": "ff.net.2",
}
ANIMA = Names(
    "time_embed.t_embedder.linear_1.weight",
    {
        "x_embedder.proj.1": "patch_embed.proj",
        "t_embedder.1.linear_1": "time_embed.t_embedder.linear_1",
        "t_embedder.1.linear_2": "time_embed.t_embedder.linear_2",
        "t_embedding_norm": "time_embed.norm",
        **{
            f"blocks.#.{theirs}": f"transformer_blocks.#.{ours}"
            for theirs, ours in _ANIMA_BLOCK.items()
        },
        "final_layer.linear": "proj_out",
        "final_layer.adaln_modulation.1": "norm_out.linear_1",
        "final_layer.adaln_modulation.2": "norm_out.linear_2",
    },
)


_KREA_BLOCK = {
    "prenorm": "norm1",
    "postnorm": "norm2",
    "attn.qknorm.qnorm": "attn.norm_q",
    "attn.qknorm.knorm": "attn.norm_k",
    **{f"attn.w{letter}": f"attn.to_{letter}" for letter in "qkv"},
    "attn.wo": "attn.to_out.0",
    "attn.gate": "attn.to_gate",
    **{f"mlp.{layer}": f"ff.{layer}" for layer in ("gate", "up", "down")},
}
KREA2 = Names(
    "text_fusion.projector.weight",
    {
        "first": "img_in",
        "tmlp.0": "time_embed.linear_1",
        "tmlp.2": "time_embed.linear_2",
        "tproj.1": "time_mod_proj",
        "txtmlp.0": "txt_in.norm",
        "txtmlp.1": "txt_in.linear_1",
        "txtmlp.3": "txt_in.linear_2",
        "txtfusion.projector": "text_fusion.projector",
        "blocks.#.mod": "transformer_blocks.#",
        **{
            f"{theirs}.#.{layer}": f"{ours}.#.{known_as}"
            for theirs, ours in {
                "blocks": "transformer_blocks",
                "txtfusion.layerwise_blocks": "text_fusion.layerwise_blocks",
                "txtfusion.refiner_blocks": "text_fusion.refiner_blocks",
            }.items()
            for layer, known_as in _KREA_BLOCK.items()
        },
        "last.norm": "final_layer.norm",
        "last.linear": "final_layer.linear",
        "last.modulation": "final_layer",
    },
)


def original_modules(names: Collection[str]) -> dict[str, Module]:
    """Return the modules by their original names of a transformer whose parameters have these."""
    for transformer in (SD3, FLUX, FLUX2, Z_IMAGE, ANIMA, KREA2):
        if transformer.mark in names:
            return transformer.all_modules(names)
    return {}


@dataclasses.dataclass(frozen=True)
class Levels:
    """How the layers of a UNet are spread over its levels.

    Attributes:
        down: layers (a resnet with or without attention) of each level on the way down.
        up: layers of each level on the way up, whose first level is the coarsest.
        up_attends: whether a level on the way up has attention.
    """

    down: tuple[int, ...]
    up: tuple[int, ...]
    up_attends: tuple[bool, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Count the levels of a UNet whose parameters have these names in a checkpoint."""
        layers = defaultdict(set)
        for name in names:
            if match := re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.", name):
                way, level, kind, layer = match.groups()
                layers[way, kind, int(level)].add(int(layer))

        def counts(way: str, kind: str) -> tuple[int, ...]:
            levels = 1 + max((key[2] for key in layers if key[0] == way), default=-1)
            return tuple(len(layers[way, kind, level]) for level in range(levels))

        return cls(
            counts("down", "resnets"),
            counts("up", "resnets"),
            tuple(count > 0 for count in counts("up", "attentions")),
        )

    @classmethod
    def of_original(cls, names: Iterable[str]) -> Self:
        """Count the levels of a UNet whose parameters have these names in the original layout."""
        parts = defaultdict(set)
        for name in names:
            if match := re.match(r"(input|output)_blocks\.(\d+)\.(\d+)\.(\w+)", name):
                way, block, _, part = match.groups()
                parts[way, int(block)].add(part)
        down, up, up_attends = [0], [0], [False]
        for _, block in sorted(key for key in parts if key[0] == "input" and key[1] > 0):
            if "op" in parts["input", block]:
                down.append(0)
            else:
                down[-1] += 1
        for _, block in sorted(key for key in parts if key[0] == "output"):
            up[-1] += 1
            up_attends[-1] |= "transformer_blocks" in parts["output", block]
            if "conv" in parts["output", block]:
                up.append(0)
                up_attends.append(False)
        return cls(tuple(down), tuple(up), tuple(up_attends))

    def modules(self) -> dict[str, str]:
        """Map modules in diffusers' names to the same in original names.

        Within these modules both layouts have the same names.
        """
        table = dict(UNET_ENDS)

        def add(ours: str, original: str, attention: str) -> None:
            table.update(
                {
                    f"{ours.format('resnets')}.{name}": f"{original}.0.{old}"
                    for name, old in RESNET.items()
                }
            )
            table[ours.format("attentions")] = attention

        block = 1
        for level, layers in enumerate(self.down):
            for layer in range(layers):
                add(
                    f"down_blocks.{level}.{{}}.{layer}",
                    f"input_blocks.{block}",
                    f"input_blocks.{block}.1",
                )
                block += 1
            table[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{block}.0.op"
            block += 1
        block = 0
        for level, (layers, attends) in enumerate(zip(self.up, self.up_attends, strict=True)):
            for layer in range(layers):
                add(
                    f"up_blocks.{level}.{{}}.{layer}",
                    f"output_blocks.{block}",
                    f"output_blocks.{block}.1",
                )
                block += 1
            last = f"output_blocks.{block - 1}.{2 if attends else 1}"
            table[f"up_blocks.{level}.upsamplers.0.conv"] = f"{last}.conv"
        for resnet, original in ((0, 0), (1, 2)):
            table.update(
                {
                    f"mid_block.resnets.{resnet}.{name}": f"middle_block.{original}.{old}"
                    for name, old in RESNET.items()
                }
            )
        table["mid_block.attentions.0"] = "middle_block.1"
        return table


def renamed(name: str, modules: dict[str, str]) -> str:
    """Replace the module in a name by the table; other names stay as they are."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if module := modules.get(".".join(parts[:end])):
            return ".".join([module, *parts[end:]])
    return name


def vae_name(name: str, levels: int) -> str:
    """Return an autoencoder's parameter in diffusers' names, given its number of levels."""
    name = _by_rules(VAE_RULES, name)
    # The original numbers the levels on the way up by their resolution, the finest first.
    return re.sub(
        r"^(decoder\.up_blocks)\.(\d+)",
        lambda match: f"{match[1]}.{levels - 1 - int(match[2])}",
        name,
    )


def wan_vae_names(names: Collection[str]) -> dict[str, str]:
    """Return parameters of Wan's or Qwen-Image's autoencoder in diffusers' names, by their own.

    On the way up they are numbered from end to end: so many residual blocks a level, and what is
    between levels.
    """
    between = re.compile(r"decoder\.upsamples\.(\d+)\.resample\.")
    levels = (int(match[1]) for name in names if (match := between.match(name)))
    per_level = 1 + min(levels, default=0)

    def leveled(match: re.Match) -> str:
        level, layer = divmod(int(match[1]), per_level)
        kind = f"resnets.{layer}." if layer < per_level - 1 else "upsamplers.0."
        return f"decoder.up_blocks.{level}.{kind}"

    return {
        name: re.sub(r"^decoder\.upsamples\.(\d+)\.", leveled, _by_rules(WAN_VAE_RULES, name))
        for name in names
    }


def open_clip_name(name: str) -> str:
    """Return a parameter of OpenCLIP's text encoder in the names of transformers' CLIPTextModel."""
    return _by_rules(OPEN_CLIP_RULES, name)


def _by_rules(rules: Sequence[tuple[str, str]], name: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
