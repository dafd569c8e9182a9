"""Names in the original layouts of Stable Diffusion -> names in diffusers' checkpoints.

The original repositories (CompVis/stable-diffusion, Stability-AI/generative-models) number the
UNet's layers from end to end; diffusers numbers them by level. `[qkv]` in a name stands for each of
the three that the original layout keeps in one tensor, in this order.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Self

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
SD3_RULES = (
    (r"^pos_embed$", "pos_embed.pos_embed"),
    (r"^x_embedder\.", "pos_embed."),
    (r"^t_embedder\.mlp\.", "time_text_embed.timestep_embedder.mlp."),
    (r"^y_embedder\.mlp\.", "time_text_embed.text_embedder.mlp."),
    (r"_embedder\.mlp\.0\.", "_embedder.linear_1."),
    (r"_embedder\.mlp\.2\.", "_embedder.linear_2."),
    (r"^joint_blocks\.", "transformer_blocks."),
    (r"\.x_block\.adaLN_modulation\.1\.", ".norm1.linear."),
    (r"\.x_block\.(attn2?)\.qkv\.", r".\1.to_[qkv]."),
    (r"\.x_block\.(attn2?)\.ln_([qk])\.", r".\1.norm_\2."),
    (r"\.x_block\.(attn2?)\.proj\.", r".\1.to_out.0."),
    (r"\.x_block\.mlp\.", ".ff.mlp."),
    (r"\.context_block\.adaLN_modulation\.1\.", ".norm1_context.linear."),
    (r"\.context_block\.attn\.qkv\.", ".attn.add_[qkv]_proj."),
    (r"\.context_block\.attn\.ln_([qk])\.", r".attn.norm_added_\1."),
    (r"\.context_block\.attn\.proj\.", ".attn.to_add_out."),
    (r"\.context_block\.mlp\.", ".ff_context.mlp."),
    (r"\.(ff|ff_context)\.mlp\.fc1\.", r".\1.net.0.proj."),
    (r"\.(ff|ff_context)\.mlp\.fc2\.", r".\1.net.2."),
    (r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear."),
    (r"^final_layer\.linear\.", "proj_out."),
)


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


def open_clip_name(name: str) -> str:
    """Return a parameter of OpenCLIP's text encoder in the names of transformers' CLIPTextModel."""
    return _by_rules(OPEN_CLIP_RULES, name)


def sd3_name(name: str) -> str:
    """Return a parameter of Stable Diffusion 3's transformer in diffusers' names."""
    return _by_rules(SD3_RULES, name)


def _by_rules(rules: Sequence[tuple[str, str]], name: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
