"""The transformer of Cosmos-Predict2, as Anima has it, against diffusers'."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_cosmos import CosmosRotaryPosEmbed

from sd_tpu.checkpoint.config import CheckpointError, CosmosTransformerConfig
from sd_tpu.models import CosmosTransformer3DModel
from sd_tpu.models.rotary import grid_rotation
from tests.support import anima
from tests.support.transformer_network import Inputs, TransformerNetworkTests


class TestCosmosTransformer(TransformerNetworkTests):
    network, config = CosmosTransformer3DModel, CosmosTransformerConfig
    theirs = diffusers.CosmosTransformer3DModel
    tiny = dict(
        in_channels=4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=24,
        num_layers=2,
        text_embed_dim=12,
        adaln_lora_dim=8,
        max_size=[4, 24, 20],
        rope_scale=[1.0, 4.0, 4.0],
        extra_pos_embed_type=None,
    )
    kinds = {
        "as published": dict(),
        "no mask, other channels, heads and scales": dict(
            concat_padding_mask=False,
            out_channels=6,
            attention_head_dim=20,
            rope_scale=[2.0, 1.0, 3.0],
            num_layers=1,
        ),
    }
    published = {"Anima": anima.PUBLISHED}
    scales = {
        **dict.fromkeys("time_embed.t_embedder.linear_2 linear_2".split(), 0.3),
        **dict.fromkeys("patch_embed attn1.to_q attn1.to_k attn2.to_q attn2.to_k".split(), 0.1),
    }
    sizes = [(6, 20), (8, 8), (16, 8), (2, 2)]
    cases = [{"times": (0.961, 0.0035)}, {"times": (0.25, 1.0)}]
    many = [dict(height=46, width=48, words=40), dict(height=46, width=48, words=600)]
    shallow = dict(num_layers=1, max_size=[4, 64, 64])
    ordered = False
    misfits = [
        (dict(height=7, width=8), "7x8 latents do not divide into patches of 2"),
        (dict(height=26, width=8), "positions for 24x24"),
        (dict(height=8, width=26), "positions for 24x24"),
    ]
    refused = [
        ("patch_size", [1, 4, 4]),
        ("extra_pos_embed_type", "learnable"),
        ("mlp_ratio", 2.0),
        ("use_crossattn_projection", True),
        ("controlnet_block_every_n", 7),
        ("img_context_dim_in", 1024),
        ("attention_head_dim", 23),
        ("max_size", [4, 24]),
        ("rope_scale", [1.0, 0.0, 1.0]),
        ("num_layers", 10**9),
    ]
    equal = [{"max_size": [4, 24, 20]}, {"max_size": (4, 24, 20), "mlp_ratio": 4.0}]

    @classmethod
    def inputs(cls, kind, height, width, times=(0.3, 0.4), words=9) -> Inputs:
        rng = np.random.default_rng(0)
        shapes = {"x": (2, height, width, 4), "text": (2, words, 12)}
        return {
            **{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()},
            "timesteps": np.array(times, np.float32),
        }

    @classmethod
    def of_diffusers(cls, reference, x, timesteps, text) -> np.ndarray:
        x, timesteps, text = map(torch.tensor, (x, timesteps, text))
        found = reference(
            x.permute(0, 3, 1, 2)[:, :, None],
            timesteps,
            text,
            padding_mask=torch.zeros(1, 1, *x.shape[1:3]),
        ).sample
        return found[:, :, 0].permute(0, 2, 3, 1).numpy()

    def test_a_config_that_says_nothing_of_learned_positions_has_them(self):
        values = {name: value for name, value in self.tiny.items() if "extra" not in name}
        with pytest.raises(CheckpointError, match="extra_pos_embed_type='learnable'"):
            CosmosTransformerConfig.from_dict(values)


@pytest.mark.parametrize("scale", [(1.0, 4.0, 4.0), (2.0, 1.0, 3.0)])
def test_rotations_are_those_of_diffusers(scale):
    config = CosmosTransformerConfig.from_dict(
        {"attention_head_dim": 128, "rope_scale": [*scale], "extra_pos_embed_type": None}
    )
    rows, columns = 128, 96
    theirs = CosmosRotaryPosEmbed(128, rope_scale=scale)(
        torch.zeros(1, 1, 1, 2 * rows, 2 * columns)
    )
    ours = grid_rotation((1, rows, columns), config.axes, config.thetas)
    for table, expected in zip(ours, theirs, strict=True):
        expected = expected.reshape(rows * columns, 2, -1).numpy()
        assert np.array_equal(expected[:, 0], expected[:, 1])
        np.testing.assert_allclose(table[0], expected[:, 0], atol=2e-5)
