"""The transformer of Krea 2 against diffusers'."""

import diffusers
import numpy as np
import torch

from sd_tpu.checkpoint.config import Krea2TransformerConfig
from sd_tpu.models import Krea2Transformer2DModel
from tests.support.transformer_network import Inputs, TransformerNetworkTests


class TestKrea2Transformer(TransformerNetworkTests):
    network, config = Krea2Transformer2DModel, Krea2TransformerConfig
    theirs = diffusers.Krea2Transformer2DModel
    tiny = dict(
        in_channels=16,
        num_layers=1,
        attention_head_dim=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        timestep_embed_dim=32,
        text_hidden_dim=12,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=20,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=[4, 4, 4],
    )
    kinds = {
        "as published": dict(),
        "own keys, other blocks and scales": dict(
            num_key_value_heads=4,
            text_num_key_value_heads=2,
            num_layerwise_text_blocks=2,
            num_refiner_text_blocks=0,
            axes_dims_rope=[2, 4, 6],
            rope_theta=100.0,
            norm_eps=1e-3,
        ),
    }
    published = {"Krea 2": dict()}
    scales = {
        "time_embed.linear_2": 0.1,
        **dict.fromkeys("img_in txt_in.linear_2 to_q to_k".split(), 0.3),
    }
    far = ("scale_shift_table",)
    sizes = [(6, 20), (8, 8)]
    cases = [dict(times=(0.961, 0.0035)), dict(times=(0.25, 1.0), lengths=(1, 9))]
    many = [dict(height=46, width=48, lengths=(40, 530), words=544)]
    shallow = dict()
    ordered = False
    misfits = [(dict(height=7, width=8), "7x8 latents do not divide into patches of 2")]
    refused = [
        ("axes_dims_rope", [8, 4]),
        ("axes_dims_rope", [4, 4, 8]),
        ("in_channels", 18),
        ("num_key_value_heads", 3),
        ("text_hidden_dim", 13),
        ("num_layers", 10**9),
        ("rope_theta", 0),
    ]
    equal = [{"axes_dims_rope": [4, 4, 4]}, {"axes_dims_rope": (4, 4, 4), "norm_eps": 1e-5}]

    @classmethod
    def inputs(cls, kind, height, width, times=(0.3, 0.4), lengths=(5, 8), words=9) -> Inputs:
        rng = np.random.default_rng(0)
        shapes = {"x": (2, height, width, 4), "text": (2, words, 36)}
        return {
            **{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()},
            "timesteps": np.array(times, np.float32),
            "lengths": np.array(lengths, np.int32),
        }

    @classmethod
    def of_diffusers(cls, reference, x, timesteps, text, lengths) -> np.ndarray:
        x, timesteps, text = map(torch.tensor, (x, timesteps, text))
        batch, height, width, channels = x.shape
        pipeline = diffusers.Krea2Pipeline
        packed = pipeline._pack_latents(
            _Patches, x.permute(0, 3, 1, 2).contiguous(), batch, channels, height, width
        )
        grid = height // 2, width // 2
        out = reference(
            packed,
            text.reshape(batch, text.shape[1], 3, -1),
            timesteps,
            pipeline.prepare_position_ids(text.shape[1], *grid, "cpu"),
            torch.arange(text.shape[1]) < torch.tensor(lengths)[:, None],
        ).sample
        found = pipeline._unpack_latents(_Patches, out, 8 * height, 8 * width)
        return found[:, :, 0].permute(0, 2, 3, 1).numpy()

    def test_a_row_without_text_harms_no_other(self, kind, ours):
        given = self.inputs(kind, *self.sizes[0], lengths=(1, 8))
        expected = ours(given)
        found = ours(given | {"lengths": np.array((0, 8), np.int32)})
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found[1], expected[1])

    def test_what_is_beyond_the_text_does_not_matter(self, given, ours):
        before = ours(given)
        for row, length in enumerate(given["lengths"]):
            given["text"][row, length:] = 7
        np.testing.assert_array_equal(ours(given), before)


class _Patches:
    """What a pipeline knows of patches."""

    patch_size, vae_scale_factor = 2, 8
