"""Transformers of PyTorch's in the names of their original code; the package's way reversed."""

import re

import torch

_JOINT = {
    "attn.to_q": "img_attn.qkv",
    "attn.add_q_proj": "txt_attn.qkv",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
}
_FLUX_ENDS = {
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
# By model: its joint blocks' modules, those of its single blocks, and the others.
FLUX = (
    {
        **_JOINT,
        "norm1.linear": "img_mod.lin",
        "norm1_context.linear": "txt_mod.lin",
        "ff.net.0.proj": "img_mlp.0",
        "ff.net.2": "img_mlp.2",
        "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
    },
    {
        "attn.norm_q": "norm.query_norm",
        "attn.norm_k": "norm.key_norm",
        "norm.linear": "modulation.lin",
        "attn.to_q": "linear1",
        "proj_out": "linear2",
    },
    {
        **_FLUX_ENDS,
        "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    },
)
FLUX2 = (
    {
        **_JOINT,
        "ff.linear_in": "img_mlp.0",
        "ff.linear_out": "img_mlp.2",
        "ff_context.linear_in": "txt_mlp.0",
        "ff_context.linear_out": "txt_mlp.2",
    },
    {
        "attn.norm_q": "norm.query_norm",
        "attn.norm_k": "norm.key_norm",
        "attn.to_qkv_mlp_proj": "linear1",
        "attn.to_out": "linear2",
    },
    {
        **_FLUX_ENDS,
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
    },
)


def original_flux(state: dict[str, torch.Tensor], model=FLUX) -> dict[str, torch.Tensor]:
    """Return tensors of FLUX.1's transformer, or of FLUX.2's, as Black Forest Labs name them."""
    joint, single, others = model
    result = {}
    for name, tensor in state.items():
        if re.search(r"\.(to_[kv]|add_[kv]_proj|proj_mlp)\.", name):
            continue
        if "norm_out" in name:
            tensor = tensor.roll(len(tensor) // 2, 0)
        elif ".to_q." in name or ".add_q_proj." in name:
            parts = [re.sub(r"(to|add)_q", rf"\1_{part}", name) for part in "qkv"]
            if name.startswith("single"):
                parts.append(name.replace("attn.to_q", "proj_mlp"))
            tensor = torch.cat([state[part] for part in parts])
        module, leaf = name.rsplit(".", 1)
        if block := re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", module):
            kind, names = ("single", single) if block[1] else ("double", joint)
            module = f"{kind}_blocks.{block[2]}.{names[block[3]]}"
        else:
            module = others[module]
        result[f"{module}.{'scale' if module.endswith('_norm') else leaf}"] = tensor.contiguous()
    return result


def original_z_image(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of Z-Image's transformer as its own code names them."""
    result = {}
    for name, tensor in state.items():
        if re.search(r"\.to_[kv]\.", name):
            continue
        if ".to_q." in name:
            parts = [state[name.replace("to_q", f"to_{part}")] for part in "qkv"]
            name, tensor = name.replace("to_q", "qkv"), torch.cat(parts)
        for ours, theirs in (
            ("all_x_embedder.2-1", "x_embedder"),
            ("all_final_layer.2-1", "final_layer"),
            (".to_out.0.", ".out."),
            (".norm_q.", ".q_norm."),
            (".norm_k.", ".k_norm."),
        ):
            name = name.replace(ours, theirs)
        result[name] = tensor.contiguous()
    return result


ANIMA = {
    **{
        f"norm{number}.linear_": f"adaln_modulation_{layer}."
        for number, layer in enumerate(("self_attn", "cross_attn", "mlp"), 1)
    },
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    "norm_q.": "q_norm.",
    "norm_k.": "k_norm.",
    "to_q.": "q_proj.",
    "to_k.": "k_proj.",
    "to_v.": "v_proj.",
    "to_out.0.": "output_proj.",
    "ff.net.0.proj.": "mlp.layer1.",
    "ff.net.2.": "mlp.layer2.",
    "transformer_blocks.": "blocks.",
    "patch_embed.proj.": "x_embedder.proj.1.",
    "time_embed.t_embedder.": "t_embedder.1.",
    "time_embed.norm.": "t_embedding_norm.",
    "norm_out.linear_": "final_layer.adaln_modulation.",
    "proj_out.": "final_layer.linear.",
}


def original_anima(
    transformer: dict[str, torch.Tensor], conditioner: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors of Anima's transformer and of its conditioner as NVIDIA's code names them,
    with buffers among them."""
    result = {f"llm_adapter.{name}": tensor for name, tensor in conditioner.items()}
    for name, tensor in transformer.items():
        for ours, theirs in ANIMA.items():
            name = name.replace(ours, theirs)
        result[name] = tensor.contiguous()
    return {
        **result,
        "accum_iteration": torch.ones(1),
        "pos_embedder.seq": torch.ones(4),
        "blocks.0.self_attn.q_norm._extra_state": torch.ones(1),
        "llm_adapter.rotary_emb.inv_freq": torch.ones(8),
    }


KREA2 = {
    r"^img_in\.": "first.",
    r"^time_embed\.linear_1\.": "tmlp.0.",
    r"^time_embed\.linear_2\.": "tmlp.2.",
    r"^time_mod_proj\.": "tproj.1.",
    r"^txt_in\.norm\.weight": "txtmlp.0.scale",
    r"^txt_in\.linear_1\.": "txtmlp.1.",
    r"^txt_in\.linear_2\.": "txtmlp.3.",
    r"^text_fusion\.": "txtfusion.",
    r"^transformer_blocks\.": "blocks.",
    r"^final_layer\.scale_shift_table": "last.modulation.lin",
    r"^final_layer\.norm\.weight": "last.norm.scale",
    r"^final_layer\.": "last.",
    r"\.scale_shift_table": ".mod.lin",
    r"\.norm1\.weight": ".prenorm.scale",
    r"\.norm2\.weight": ".postnorm.scale",
    r"\.norm_([qk])\.weight": r".qknorm.\1norm.scale",
    r"\.to_out\.0\.": ".wo.",
    r"\.to_gate\.": ".gate.",
    r"\.to_([qkv])\.": r".w\1.",
    r"\.ff\.": ".mlp.",
}


def original_krea2(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of Krea 2's transformer as its own code names them."""
    result = {}
    for name, tensor in state.items():
        for ours, theirs in KREA2.items():
            name = re.sub(ours, theirs, name)
        result[name] = (tensor.flatten() if name.endswith(".mod.lin") else tensor).contiguous()
    return result


WAN = {
    "norm1.": "residual.0.",
    "conv1.": "residual.2.",
    "norm2.": "residual.3.",
    "conv2.": "residual.6.",
    "conv_shortcut.": "shortcut.",
    "conv_in.": "conv1.",
    "norm_out.": "head.0.",
    "conv_out.": "head.2.",
    "mid_block.resnets.0.": "middle.0.",
    "mid_block.attentions.0.": "middle.1.",
    "mid_block.resnets.1.": "middle.2.",
    "down_blocks.": "downsamples.",
}


def original_wan_vae(state: dict[str, torch.Tensor], blocks: int) -> dict[str, torch.Tensor]:
    """Return tensors of Qwen-Image's autoencoder, of so many residual blocks a level on the way
    down, as Wan's code names them."""
    result = {}
    for name, tensor in state.items():
        name = re.sub("^quant_conv", "conv1", re.sub("^post_quant_conv", "conv2", name))
        if not name.startswith("conv"):
            for ours, theirs in WAN.items():
                name = name.replace(ours, theirs)
        if match := re.match(r"(decoder\.up)_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.(.+)", name):
            layer = int(match[4]) + (blocks + 1) * (match[3] == "upsamplers")
            name = f"{match[1]}samples.{int(match[2]) * (blocks + 2) + layer}.{match[5]}"
        result[name] = tensor.contiguous()
    return result
