"""Tiny Stable Diffusion 3 pipelines of PyTorch's, random in every parameter."""

from pathlib import Path

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from sd_tpu import BUNDLED_MODEL
from sd_tpu.families.t5_tokenizer import T5Tokenizer
from tests.support.tiny import stir, text_encoder, wide_vae

TRANSFORMER = dict(
    sample_size=8,
    in_channels=16,
    out_channels=16,
    num_layers=2,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=224,
    caption_projection_dim=64,
    pooled_projection_dim=80,
    pos_embed_max_size=8,
)
KINDS = {"SD 3": dict(), "SD 3.5 medium": dict(qk_norm="rms_norm", dual_attention_layers=(0,))}


def make_pipeline(folder: Path, kind: str, *, t5: bool) -> diffusers.StableDiffusion3Pipeline:
    """Return a tiny pipeline, with a T5 or without; what T5's tokenizer is of goes to `folder`."""
    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(BUNDLED_MODEL / "tokenizer")
    parts = dict(
        transformer=diffusers.SD3Transformer2DModel(**TRANSFORMER, **KINDS[kind]),
        vae=wide_vae(1.5305, 0.0609),
        text_encoder=text_encoder(CLIPTextModelWithProjection, 64, "quick_gelu", projection_dim=32),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection, 128, "gelu", projection_dim=48),
        text_encoder_3=t5_encoder(TRANSFORMER["joint_attention_dim"]) if t5 else None,
    )
    stir(filter(None, parts.values()))
    with torch.no_grad():
        parts["transformer"].pos_embed.pos_embed += 0.3 * torch.randn(64, 64)
    return diffusers.StableDiffusion3Pipeline(
        **parts,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=t5_tokenizer(folder) if t5 else None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def t5_encoder(width: int) -> transformers.T5EncoderModel:
    """Return a T5 that gives embeddings of this width."""
    config = transformers.T5Config(
        d_model=width,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=128,
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5EncoderModel(config)


def t5_tokenizer(folder: Path) -> transformers.T5TokenizerFast:
    """Return a tokenizer of letters, with T5's special tokens, where transformers reads it from."""
    letters = [chr(code) for code in range(ord("!"), ord("~"))]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    words = Tokenizer(models.Unigram([*pieces, *((each, -2.0) for each in letters)], unk_id=2))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.add_special_tokens(["<pad>", "</s>", "<unk>"])
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    T5Tokenizer(words).save(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)
