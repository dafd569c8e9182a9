"""The transformer of Z-Image against diffusers', at random weights.

Weights and config travel by way of the files that diffusers writes. Each comparison prints its
relative error: `pytest -rP tests/parity/test_z_image_transformer.py | grep parity`.
"""

import json
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_z_image import RopeEmbedder
from flax import nnx

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import CheckpointError, ZImageTransformerConfig
from sd_tpu.models import ZImageTransformer2DModel, rotary

TOLERANCE = 1e-5
WEIGHTS = "diffusion_pytorch_model.safetensors"
ROOM = 64  # tokens of text

TINY = dict(
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
KINDS = {
    "as published": TINY,
    "heads that are not normed, other scales": TINY
    | dict(qk_norm=False, rope_theta=10000.0, t_scale=500.0, norm_eps=1e-3, n_refiner_layers=1),
    "wider than a timestep's condition": TINY
    | dict(dim=320, n_heads=2, axes_dims=[64, 48, 48], n_layers=1, n_refiner_layers=1),
}
PUBLISHED = dict(
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


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(kind) -> diffusers.ZImageTransformer2DModel:
    """Diffusers' own, every parameter moved.

    Tokens that are normed are small, so that eps counts; so is what comes of the timesteps, whose
    angles of up to 1000 are rounded to float32 in one way by PyTorch and in another by JAX.
    """
    torch.manual_seed(0)
    made = diffusers.ZImageTransformer2DModel(**KINDS[kind])
    small = ["all_x_embedder", "cap_embedder.1", "pad_token", "to_q", "to_k"]
    far = ["pad_token", "adaLN_modulation.0.bias", "adaLN_modulation.1.bias"]
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            tensor += (1 if any(part in name for part in far) else 0.1) * torch.randn_like(tensor)
            if any(part in name for part in small):
                tensor *= 0.1
            if "t_embedder.mlp.2" in name:
                tensor *= 0.03
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    """Folder that diffusers writes of the network."""
    folder = tmp_path_factory.mktemp("transformer")
    reference.save_pretrained(folder)
    return folder


def opened(folder, dtype=jnp.float32):
    """Return ours as one program of a folder's weights and of the inputs."""
    config = ZImageTransformerConfig.from_dict(json.loads((folder / "config.json").read_text()))
    graph, shapes = weights.abstract(partial(ZImageTransformer2DModel, config, dtype=dtype))
    state = weights.load([folder / WEIGHTS], shapes)
    return partial(jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs)), state)


@pytest.fixture(scope="module")
def ours(folder):
    return opened(folder)


def inputs(height=8, width=8, times=(0.3, 1.0), lengths=(5, 40), room=ROOM) -> list:
    """Latents, timesteps, text and its lengths for a batch of two, channels last."""
    rng = np.random.default_rng(0)
    shapes = (2, height, width, 4), (2, room, 12)
    latents, text = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return [latents, np.array(times, np.float32), text, np.array(lengths, np.int32)]


def of_diffusers(reference, latents, timesteps, text, lengths) -> np.ndarray:
    """Draw each row by a call of its own."""
    x, timesteps, text = map(torch.tensor, (latents, timesteps, text))
    rows = [
        reference([image.permute(2, 0, 1)[:, None]], time[None], [words[:length]]).sample[0][:, 0]
        for image, time, words, length in zip(x, timesteps, text, lengths, strict=True)
    ]
    return torch.stack(rows).permute(0, 2, 3, 1).numpy()


def relative(ours, theirs) -> float:
    """||ours - theirs|| / ||theirs|| of two arrays of one shape."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def assert_agrees(name: str, ours, theirs):
    error = relative(ours, theirs)
    print(f"parity | {name} | {error:.1e} |")
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("size", [(8, 8), (16, 8), (6, 20), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "times, lengths",
    [((0.3, 1.0), (5, 40)), ((0.0, 0.3), (64, 32)), ((1.0, 0.7), (33, 1))],
    ids=str,
)
def test_each_row_is_that_of_diffusers_alone(kind, reference, ours, size, times, lengths):
    given = inputs(*size, times, lengths)
    found = ours(*given)
    assert found.dtype == jnp.float32
    for row, theirs in enumerate(of_diffusers(reference, *given)):
        assert_agrees(
            f"ZImageTransformer2DModel, {kind}, {size[0]}x{size[1]}, timestep {times[row]}, "
            f"{lengths[row]} tokens",
            found[row],
            theirs,
        )


def test_many_tokens_are_those_of_diffusers(tmp_path):
    """Attention is chunked on CPUs where tokens are more than 512."""
    torch.manual_seed(0)
    theirs = diffusers.ZImageTransformer2DModel(
        **TINY | dict(n_layers=1, n_refiner_layers=1, axes_lens=[800, 32, 32])
    )
    theirs.eval().requires_grad_(False).save_pretrained(tmp_path)
    program = opened(tmp_path)
    given = inputs(46, 48, lengths=(40, 530), room=544)
    assert_agrees(
        "ZImageTransformer2DModel, 46x48, 40 and 530 tokens",
        program(*given),
        of_diffusers(theirs, *given),
    )
    assert np.isfinite(program(*inputs(46, 48, lengths=(0, 530), room=544))).all()


def test_a_row_without_text_harms_no_other(reference, ours):
    given = inputs(lengths=(0, 40))
    found = ours(*given)
    assert np.isfinite(found).all()
    _, theirs = of_diffusers(reference, *inputs(lengths=(1, 40)))
    assert_agrees("beside a row without text", found[1], theirs)


def test_what_is_beyond_the_text_does_not_matter(ours):
    given = inputs()
    before = ours(*given)
    for row, length in enumerate(given[3]):
        given[2][row, length:] = np.nan
    np.testing.assert_array_equal(ours(*given), before)


@pytest.mark.parametrize("number", range(4), ids=["latents", "timesteps", "text", "lengths"])
def test_every_input_of_a_row_matters_to_that_row_alone(ours, number):
    given = inputs(times=(0.3, 0.4))
    before = ours(*given)
    given[number] = given[number].copy()
    given[number][1] += 1 if number == 3 else 0.5
    after = ours(*given)
    assert relative(after[0], before[0]) < 1e-6
    assert relative(after[1], before[1]) > 1e-4


def test_every_part_of_the_latents_and_of_the_text_matters(ours):
    latents, timesteps, text, lengths = inputs()

    def total(latents, text):
        return jnp.sum(jnp.sin(ours(latents, timesteps, text, lengths)))

    of_latents, of_text = jax.grad(total, argnums=(0, 1))(latents, text)
    assert (np.abs(of_latents) > 1e-7).all()
    for gradient, length in zip(of_text, lengths, strict=True):
        assert (np.abs(gradient[:length]) > 1e-9).all()
        assert (gradient[length:] == 0).all()


def test_texts_of_other_lengths_take_the_same_program(folder):
    program = opened(folder)
    for lengths in [(5, 40), (64, 1)]:
        program(*inputs(lengths=lengths))
    assert program.func._cache_size() == 1


def test_in_bfloat16_it_stays_near(folder, ours):
    given = inputs()
    found = opened(folder, jnp.bfloat16)(*given)
    assert found.dtype == jnp.float32
    assert 1e-4 < relative(found, ours(*given)) < 0.1


@pytest.mark.slow("builds a network of 34 blocks, without its numbers")
def test_parameters_of_full_size_are_those_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.ZImageTransformer2DModel(**PUBLISHED).state_dict()
    config = ZImageTransformerConfig.from_dict(PUBLISHED)
    _, ours = weights.abstract(partial(ZImageTransformer2DModel, config))
    assert weights.shapes(ours) == {name: tuple(value.shape) for name, value in theirs.items()}


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


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pairs_of_channels_turn_in_float32(monkeypatch, platform, dtype):
    monkeypatch.setattr(rotary, "platform", lambda: platform)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 5, 3 * 8)), dtype)
    by = rotary.rotation(jnp.asarray(rng.integers(0, 1000, (2, 5, 2))), [2, 6], 100.0)
    pairs = np.asarray(x, np.float64).reshape(2, 5, 3, 4, 2)
    angles = np.asarray(by.cos, np.float64) + 1j * np.asarray(by.sin, np.float64)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * angles[:, :, None]
    expected = jnp.asarray(np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape), dtype)
    found = rotary.rotate_pairs(x, by, 3)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 0  # bfloat16 rounds the same in all but ties
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(expected, np.float64), atol=tolerance
    )


@pytest.mark.parametrize(
    "size, room, sentence",
    [
        ((7, 8), 64, "7x8 latents do not divide into patches of 2"),
        ((8, 8), 40, "multiple of 32"),
        ((26, 8), 64, "positions for 24x20"),
        ((8, 22), 64, "positions for 24x20"),
        ((8, 8), 96, "positions for 78"),
    ],
)
def test_inputs_without_whole_patches_or_positions_are_refused(size, room, sentence):
    def drawn():
        config = ZImageTransformerConfig.from_dict(TINY)
        model = ZImageTransformer2DModel(config, rngs=weights.ShapesOnly())
        return model(*inputs(*size, room=room))

    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(drawn)


@pytest.mark.parametrize(
    "name, value",
    [
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
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(name, value):
    with pytest.raises(CheckpointError) as caught:
        ZImageTransformerConfig.from_dict(TINY | {name: value})
    message = str(caught.value)
    assert f"{name}={value!r}" in message and "\n" not in message
