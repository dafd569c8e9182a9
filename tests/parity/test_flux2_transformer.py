"""The transformer of FLUX.2 klein against diffusers', with reference pictures and without."""

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Transformer2DModel as TorchTransformer,
)
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline

from sd_tpu.checkpoint.config import CheckpointError, Flux2TransformerConfig
from sd_tpu.models import Flux2Transformer2DModel
from sd_tpu.models.flux2_transformer import References, picture_positions
from tests.support.kinds import once
from tests.support.parity import assert_agrees, relative
from tests.support.transformer_network import Inputs, TransformerNetworkTests

PUBLISHED = dict(in_channels=128, guidance_embeds=False)


def references(rows, tokens: int) -> dict[str, References]:
    """Return the pictures [h, w, 8] of each row, filled up with noise to so many tokens."""
    rng = np.random.default_rng(1)
    latents = 9 * rng.standard_normal((len(rows), tokens, 8), np.float32)
    positions = rng.integers(0, 50, (len(rows), tokens, 4), np.int32)
    counts = np.zeros(len(rows), np.int32)
    for row, pictures in enumerate(rows):
        for number, picture in enumerate(pictures, 1):
            h, w, _ = picture.shape
            place = slice(counts[row], counts[row] + h * w)
            latents[row, place] = picture.reshape(h * w, 8)
            positions[row, place] = picture_positions(h, w, 10 * number)
            counts[row] += h * w
    return {"references": References(latents, positions, counts)}


def seen(*sizes) -> list[np.ndarray]:
    """Latents of reference pictures of these sizes."""
    rng = np.random.default_rng(2)
    return [rng.standard_normal((*size, 8), np.float32) for size in sizes]


class TestFlux2Transformer(TransformerNetworkTests):
    network, theirs, config = Flux2Transformer2DModel, TorchTransformer, Flux2TransformerConfig
    tiny = dict(
        in_channels=8,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=12,
        axes_dims_rope=[4, 4, 4, 4],
        guidance_embeds=False,
    )
    kinds = {
        "as published": dict(),
        "other sizes": dict(
            out_channels=6,
            num_layers=2,
            num_single_layers=1,
            timestep_guidance_channels=32,
            mlp_ratio=2.33,
            axes_dims_rope=[2, 6, 4, 4],
            rope_theta=100,
        ),
    }
    published = {
        "klein 4B": PUBLISHED
        | dict(
            num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680
        ),
        "klein 9B": PUBLISHED
        | dict(
            num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288
        ),
    }
    scales = dict.fromkeys(
        """x_embedder context_embedder timestep_embedder.linear_2
        to_q. to_k. add_q_proj add_k_proj""".split(),
        0.05,
    )
    sizes = [(12, 5), (1, 1)]
    many = [dict(height=32, width=16, words=512), dict(height=20, width=23, words=512)]
    shallow = dict(num_single_layers=1)
    ordered = True
    refused = [
        ("guidance_embeds", True),
        ("patch_size", 2),
        ("eps", 1e-5),
        ("axes_dims_rope", [4, 6, 6]),
        ("axes_dims_rope", [5, 3, 4, 4]),
        ("axes_dims_rope", [4, 4, 4, 6]),
        ("axes_dims_rope", "all"),
        ("attention_head_dim", 32),
        ("num_layers", 10**9),
        ("num_single_layers", -1),
        ("timestep_guidance_channels", 5),
        ("mlp_ratio", 0.0),
        ("rope_theta", 0),
    ]
    equal = [{"out_channels": None, "rope_theta": 2000}, {"out_channels": 8}]

    @classmethod
    def moved(cls, **values) -> torch.nn.Module:
        made = super().moved(**values)
        for block in made.single_transformer_blocks:
            block.attn.to_qkv_mlp_proj.weight[: 2 * made.inner_dim] *= 0.05  # queries and keys
        return made

    @classmethod
    def inputs(cls, kind, height, width, times=(961.0, 3.5), words=7) -> Inputs:
        rng = np.random.default_rng(0)
        shapes = {"x": (2, height, width, 8), "text": (2, words, 12)}
        arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        return {**arrays, "timesteps": np.array(times, np.float32)}

    @classmethod
    def of_diffusers(cls, reference, x, timesteps, text, pictures=()) -> np.ndarray:
        """Draw with the positions, and by the thousandths of timesteps, of the pipeline, after
        reference pictures [h, w, in_channels]."""
        x, timesteps, text = map(torch.tensor, (x, timesteps, text))
        tokens, ids = x.flatten(1, 2), Flux2KleinPipeline._prepare_latent_ids(x.permute(0, 3, 1, 2))
        if pictures:
            seen = [torch.tensor(each.transpose(2, 0, 1)[None]) for each in pictures]
            where = Flux2KleinPipeline._prepare_image_ids(seen).expand(len(x), -1, -1)
            packed = torch.cat([each.flatten(2).transpose(1, 2) for each in seen], dim=1)
            tokens = torch.cat([tokens, packed.expand(len(x), -1, -1)], dim=1)
            ids = torch.cat([ids, where], dim=1)
        out = reference(
            tokens,
            text,
            timesteps / 1000,
            img_ids=ids,
            txt_ids=Flux2KleinPipeline._prepare_text_ids(text),
        ).sample[:, : x.shape[1] * x.shape[2]]
        return out.unflatten(1, x.shape[1:3]).numpy()

    def test_with_reference_pictures_it_is_that_of_diffusers(self, kind, reference, ours):
        self.assert_with_reference_pictures(kind, reference, ours, 8)

    @once
    def test_with_reference_pictures_and_attention_in_chunks_it_is_too(self, kind, reference, ours):
        self.assert_with_reference_pictures(kind, reference, ours, 32)

    def assert_with_reference_pictures(self, kind, reference, ours, height: int) -> None:
        given = self.inputs(kind, height, 16)
        rows = seen((5, 3)), seen((2, 7), (8, 6), (1, 1))
        found = ours(given | references(rows, 128))
        for row, pictures in enumerate(rows):
            assert_agrees(
                f"Flux2Transformer2DModel, {kind}, {height}x16, {len(pictures)} reference pictures",
                found[row],
                self.of_diffusers(reference, **given, pictures=pictures)[row],
            )

    @once
    def test_rows_without_reference_pictures_are_as_in_programs_without_them(self, given, ours):
        before, found = ours(given), ours(given | references([seen((5, 3)), []], 32))
        assert relative(found[1], before[1]) < 1e-6
        assert relative(found[0], before[0]) > 1e-3

    @once
    def test_what_reference_pictures_are_filled_up_with_does_not_matter(self, given, ours):
        filled = references([seen((5, 3)), seen((4, 4))], 32)["references"]
        before = ours(given | {"references": filled})
        latents, positions = filled.latents.copy(), filled.positions.copy()
        latents[:, 16:], positions[:, 16:] = -3, 7
        other = References(latents, positions, filled.counts)
        assert np.array_equal(ours(given | {"references": other}), before)
        latents[:, 3] += 0.5
        after = ours(given | {"references": References(latents, filled.positions, filled.counts)})
        assert relative(after, before) > 1e-4

    def test_a_config_that_is_silent_about_guidance_is_that_of_dev(self):
        silent = {name: value for name, value in self.tiny.items() if name != "guidance_embeds"}
        with pytest.raises(CheckpointError, match=r"FLUX\.2 \[dev\]"):
            self.config.from_dict(silent)
