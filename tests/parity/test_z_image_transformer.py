"""The transformer of Z-Image against diffusers', and how pairs of channels turn."""

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_z_image import RopeEmbedder

from sd_tpu.checkpoint.config import ZImageTransformerConfig
from sd_tpu.models import ZImageTransformer2DModel, rotary
from tests.support.parity import assert_agrees
from tests.support.transformer_network import Inputs, TransformerNetworkTests


class TestZImageTransformer(TransformerNetworkTests):
    network, config = ZImageTransformer2DModel, ZImageTransformerConfig
    theirs = diffusers.ZImageTransformer2DModel
    tiny = dict(
        all_patch_size=[2],
        all_f_patch_size=[1],
        in_channels=4,
        dim=48,
        n_layers=2,
        n_refiner_layers=2,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=12,
        axes_dims=[4, 6, 6],
        axes_lens=[80, 12, 10],
    )
    kinds = {
        "as published": dict(),
        "heads that are not normed, other scales": dict(
            qk_norm=False, rope_theta=10000.0, t_scale=500.0, norm_eps=1e-3, n_refiner_layers=1
        ),
        "wider than a timestep's condition": dict(
            dim=320, n_heads=2, axes_dims=[64, 48, 48], n_layers=1, n_refiner_layers=1
        ),
    }
    published = {
        "Z-Image": dict(
            all_patch_size=[2],
            all_f_patch_size=[1],
            in_channels=16,
            dim=3840,
            n_layers=30,
            n_refiner_layers=2,
            n_heads=30,
            n_kv_heads=30,
            norm_eps=1e-5,
            qk_norm=True,
            cap_feat_dim=2560,
            rope_theta=256.0,
            t_scale=1000.0,
            axes_dims=[32, 48, 48],
            axes_lens=[1536, 512, 512],
        )
    }
    scales = {
        "t_embedder.mlp.2": 0.03,
        **dict.fromkeys("all_x_embedder cap_embedder.1 pad_token to_q to_k".split(), 0.1),
    }
    far = ("pad_token", "adaLN_modulation.0.bias", "adaLN_modulation.1.bias")
    sizes = [(6, 20), (16, 8), (2, 2)]
    cases = [
        dict(times=(0.3, 1.0)),
        dict(times=(0.0, 0.3), lengths=(64, 32)),
        dict(times=(1.0, 0.7), lengths=(33, 1)),
    ]
    many = [dict(height=46, width=48, lengths=(40, 530), words=544)]
    shallow = dict(n_layers=1, n_refiner_layers=1, axes_lens=[800, 32, 32])
    ordered = True
    least_change, least_gradient = 1e-4, 1e-9
    misfits = [
        (dict(height=7, width=8, words=64), "7x8 latents do not divide into patches of 2"),
        (dict(height=8, width=8, words=40), "multiple of 32"),
        (dict(height=26, width=8, words=64), "positions for 24x20"),
        (dict(height=8, width=22, words=64), "positions for 24x20"),
        (dict(height=8, width=8, words=96), "positions for 78"),
    ]
    refused = [
        ("all_patch_size", [2, 4]),
        ("all_f_patch_size", [2]),
        ("siglip_feat_dim", 1152),
        ("axes_dims", [8, 8]),
        ("axes_dims", [4, 6, 8]),
        ("axes_dims", [5, 5, 6]),
        ("axes_dims", "all"),
        ("axes_lens", [80, 12]),
        ("n_layers", 10**9),
        ("rope_theta", 0),
    ]
    equal = [{"axes_lens": [80, 12, 10]}, {"axes_lens": (80, 12, 10), "siglip_feat_dim": None}]

    @classmethod
    def inputs(cls, kind, height, width, times=(0.3, 0.4), lengths=(5, 40), words=64) -> Inputs:
        rng = np.random.default_rng(0)
        shapes = {"x": (2, height, width, 4), "text": (2, words, 12)}
        return {
            **{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()},
            "timesteps": np.array(times, np.float32),
            "lengths": np.array(lengths, np.int32),
        }

    @classmethod
    def of_diffusers(cls, reference, x, timesteps, text, lengths) -> np.ndarray:
        """Draw each row by a call of its own."""
        x, timesteps, text = map(torch.tensor, (x, timesteps, text))
        rows = [
            reference([image.permute(2, 0, 1)[:, None]], time[None], [words[:length]]).sample[0][
                :, 0
            ]
            for image, time, words, length in zip(x, timesteps, text, lengths, strict=True)
        ]
        return torch.stack(rows).permute(0, 2, 3, 1).numpy()

    def test_a_row_without_text_harms_no_other(self, kind, reference, ours):
        found = ours(self.inputs(kind, *self.sizes[0], lengths=(0, 40)))
        assert np.isfinite(found).all()
        given = self.inputs(kind, *self.sizes[0], lengths=(1, 40))
        _, theirs = self.of_diffusers(reference, **given)
        assert_agrees("beside a row without text", found[1], theirs)

    def test_a_row_without_text_harms_none_of_many_tokens(self, for_many):
        given = self.inputs("as published", **self.many[0] | {"lengths": (0, 530)})
        assert np.isfinite(for_many[1](given)).all()

    def test_what_is_beyond_the_text_does_not_matter(self, given, ours):
        before = ours(given)
        for row, length in enumerate(given["lengths"]):
            given["text"][row, length:] = np.nan
        np.testing.assert_array_equal(ours(given), before)

    def test_texts_of_other_lengths_take_the_same_program(self, given, ours):
        ours(given)
        programs = ours.func._cache_size()
        ours(given | {"lengths": np.array((64, 1), np.int32)})
        assert ours.func._cache_size() == programs


@pytest.mark.parametrize("theta", [256.0, 10000.0, 1e6])
def test_rotations_are_those_of_diffusers(theta):
    sizes, lengths = [32, 48, 48], [1024, 512, 512]
    rng = np.random.default_rng(0)
    positions = np.stack([rng.integers(0, length, (2, 500)) for length in lengths], axis=-1)
    positions[0, 0] = [length - 1 for length in lengths]
    theirs = RopeEmbedder(theta, sizes, lengths)(torch.tensor(positions).reshape(-1, 3)).numpy()
    ours = rotary.rotation(jnp.asarray(positions), sizes, theta)
    differences = np.abs(np.asarray(ours.cos + 1j * ours.sin).reshape(theirs.shape) - theirs)
    # Of angles of up to 1000 float32 keeps steps of 6e-5; few are rounded to another one.
    assert differences.max() < 1e-4
    assert (differences > 3e-7).mean() < 1e-3
