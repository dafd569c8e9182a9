"""Tiny Anima pipelines of PyTorch's, random in every parameter."""

from pathlib import Path
from types import SimpleNamespace

import diffusers
import torch
import transformers
from diffusers.models.transformers import transformer_cosmos
from diffusers.modular_pipelines.anima.modular_blocks_anima import AnimaAutoBlocks

from benchmarks.make_checkpoint import MODELS
from sd_tpu.families.t5_tokenizer import T5Tokenizer
from tests.support.qwen import make_config, make_tokenizer
from tests.support.tiny import stir

# The transformer takes torchvision for one thing, to bring a mask of padding to the latents' size.
if not hasattr(transformer_cosmos, "transforms"):
    transformer_cosmos.transforms = SimpleNamespace(
        InterpolationMode=SimpleNamespace(NEAREST="nearest"),
        functional=SimpleNamespace(
            resize=lambda mask, size, interpolation: torch.nn.functional.interpolate(
                mask, size, mode=interpolation
            )
        ),
    )

# The config of the published transformer, as diffusers' class takes it.
PUBLISHED = {
    name: value
    for name, value in MODELS["anima"]["transformer"].items()
    if name not in ("_class_name", "sample_size")
}
TEXT, CONDITION = 40, 32  # channels of the language model and of the conditioner


def make_pipeline(folder: Path) -> diffusers.AnimaModularPipeline:
    """Return a tiny pipeline; its tokenizers go to `folder`, Qwen's of bytes and T5's own."""
    torch.manual_seed(0)
    T5Tokenizer.from_folder(folder / "t5").save(folder / "t5")
    parts = dict(
        transformer=diffusers.CosmosTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=24,
            num_layers=2,
            text_embed_dim=CONDITION,
            adaln_lora_dim=8,
            max_size=(16, 24, 24),
            rope_scale=(1.0, 4.0, 4.0),
            extra_pos_embed_type=None,
        ),
        text_conditioner=diffusers.AnimaTextConditioner(
            source_dim=TEXT,
            target_dim=CONDITION,
            model_dim=CONDITION,
            num_layers=2,
            num_attention_heads=2,
        ),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, False]
        ),
        text_encoder=transformers.Qwen3Model(make_config(TEXT)),
    )
    stir(parts.values())
    made = AnimaAutoBlocks().init_pipeline()
    made.update_components(
        **parts,
        tokenizer=make_tokenizer(folder / "qwen"),
        t5_tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "t5"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    save = made.save_pretrained
    made.save_pretrained = lambda folder: save(str(folder), overwrite_modular_index=True)
    return made
