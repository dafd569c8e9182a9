"""Tiny Krea 2 pipelines of PyTorch's, random in every parameter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import diffusers
import torch
import transformers

from sd_tpu.families.krea2 import Krea2
from tests.support.qwen import make_config, make_tokenizer
from tests.support.tiny import stir

TEXT = 16  # channels of the language model
FEW = (1, 3)  # not twelve of 35 layers, which take most of the time of tests
# Of the template, so that there are 34 tokens before the prompt and 5 after it, as of Qwen's own
WORDS = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the object",
    "assistant",
)


@contextmanager
def few_layers() -> Iterator[None]:
    """Have states taken of the first layers, in models that are made or opened meanwhile."""
    with mock.patch.object(Krea2, "taken", FEW):
        yield


def make_pipeline(folder: Path, *, distilled: bool = False) -> diffusers.Krea2Pipeline:
    """Return a tiny pipeline; its tokenizer goes to `folder`."""
    torch.manual_seed(0)
    layers = Krea2.taken[-1] + 2  # more than are read
    text = make_config(
        TEXT,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    ).to_dict()
    positions = dict(rope_type="default", rope_theta=5e6, mrope_section=[2, 1, 1])
    parts = dict(
        transformer=diffusers.Krea2Transformer2DModel(
            num_layers=2,
            attention_head_dim=12,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            timestep_embed_dim=32,
            text_hidden_dim=TEXT,
            num_text_layers=len(Krea2.taken),
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=24,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 4, 4),
        ),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, False]
        ),
        text_encoder=transformers.Qwen3VLModel(
            transformers.Qwen3VLConfig(
                text_config={
                    name: text[name]
                    for name in (
                        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
                        *("num_attention_heads", "num_key_value_heads", "head_dim"),
                    )
                }
                | {"rope_parameters": positions},
                vision_config=dict(
                    depth=1,
                    hidden_size=16,
                    intermediate_size=16,
                    num_heads=2,
                    out_hidden_size=TEXT,
                    num_position_embeddings=4,
                    deepstack_visual_indexes=[0],
                ),
            )
        ),
    )
    stir(parts.values())
    return diffusers.Krea2Pipeline(
        **parts,
        tokenizer=make_tokenizer(folder, *WORDS),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_image_seq_len=6400
        ),
        text_encoder_select_layers=Krea2.taken,
        is_distilled=distilled,
    )
