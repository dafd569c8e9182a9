"""The Flax networks' faces against PyTorch's networks, and their trees in Flax's names."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.core import freeze
from flax.serialization import to_bytes
from flax.traverse_util import flatten_dict, unflatten_dict

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.pipelines.models import (
    FlaxAutoencoderKL,
    FlaxCLIPTextModel,
    FlaxControlNetModel,
    FlaxUNet2DConditionModel,
)
from sd_tpu.pipelines.stable_diffusion import FlaxStableDiffusionPipeline

CLASSES = dict(unet=FlaxUNet2DConditionModel, vae=FlaxAutoencoderKL, text_encoder=FlaxCLIPTextModel)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def differ(ours, theirs) -> float:
    theirs = theirs.detach().numpy()
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.fixture(scope="module")
def parts(checkpoints) -> dict:
    """(model, params) of each network of SD 1; the networks themselves are those of the pipelines,
    which are compared in either layout."""
    return {
        name: tuple(network.from_pretrained(checkpoints["sd1"], subfolder=name))
        for name, network in CLASSES.items()
    }


def test_the_unet_takes_and_gives_nchw(parts, torch_pipelines):
    unet, params = parts["unet"]
    x, text = numbers(2, 4, 8, 8), numbers(2, 77, 32, seed=1)
    reference = torch_pipelines["sd1"].unet
    for times in (torch.tensor([3, 801]), torch.tensor(500)):
        theirs = reference(torch.tensor(x), times, torch.tensor(text)).sample
        apply = jax.jit(lambda params, *inputs: unet.apply({"params": params}, *inputs))
        ours = apply(freeze(params), x, times.numpy(), text)
        assert differ(ours.sample, theirs) < 1e-5
        assert ours["sample"] is ours[0] is ours.sample


def test_the_autoencoder_takes_pictures_and_gives_distributions_of_latents(parts, torch_pipelines):
    vae, params = parts["vae"]
    image, reference = numbers(2, 3, 32, 32), torch_pipelines["sd1"].vae
    theirs = reference.encode(torch.tensor(image)).latent_dist
    ours = vae.apply({"params": params}, image, deterministic=True, method=vae.encode).latent_dist
    assert differ(ours.mode(), theirs.mean.permute(0, 2, 3, 1)) < 1e-5
    assert differ(ours.std, theirs.std.permute(0, 2, 3, 1)) < 1e-5
    assert differ(ours.kl(), theirs.kl()) < 1e-5
    key = jax.random.PRNGKey(0)
    fresh = jax.random.normal(key, ours.mean.shape)
    assert np.allclose(ours.sample(key), ours.mean + ours.std * fresh)
    decoded = reference.decode(theirs.mean).sample
    for latents in (ours.mean, ours.mean.transpose(0, 3, 1, 2)):
        again = vae.apply({"params": params}, latents, method="decode")
        assert differ(again.sample, decoded) < 1e-5
    assert differ(vae.apply({"params": params}, image).sample, decoded) < 1e-5
    drawn = vae.apply({"params": params}, image, sample_posterior=True, rngs={"gaussian": key})
    expected = vae.apply({"params": params}, ours.sample(key), method=vae.decode)
    assert np.allclose(drawn.sample, expected.sample)


def test_latents_of_an_autoencoder_are_raw_however_its_pipeline_scales_them(parts):
    vae, params = parts["vae"]
    mean, std = [0.5, -0.5, 1.0, 0.0], [2.0, 3.0, 1.0, 0.5]
    scaled = FlaxAutoencoderKL.from_config({**vae.config, "latents_mean": mean, "latents_std": std})
    image, latents = numbers(2, 3, 32, 32), numbers(2, 4, 8, 8)
    for method, given in (("encode", image), ("decode", latents)):
        ours, plain = (
            each.apply({"params": params}, given, method=method) for each in (scaled, vae)
        )
        if method == "encode":
            ours, plain = ours.latent_dist, plain.latent_dist
            assert np.allclose(ours.logvar, plain.logvar, atol=1e-5)
            assert np.allclose(ours.mean, plain.mean, atol=1e-5)
        else:
            assert np.allclose(ours.sample, plain.sample, atol=1e-5)
    drawn = latents / vae.config.scaling_factor * np.reshape(std, (4, 1, 1)) + np.reshape(
        mean, (4, 1, 1)
    )
    expected = vae.apply({"params": params}, drawn, method="decode").sample / 2 + 0.5
    pictures = FlaxStableDiffusionPipeline._decode(
        SimpleNamespace(vae=scaled), {"vae": params}, latents
    )
    assert np.allclose(pictures, expected.clip(0, 1).transpose(0, 2, 3, 1), atol=1e-5)


def test_the_text_encoder_is_called_with_its_own_or_given_parameters(parts, torch_pipelines):
    encoder, params = parts["text_encoder"]
    ids = (
        torch_pipelines["sd1"]
        .tokenizer(
            ["a cat", "two dogs on a mat"], padding="max_length", max_length=77, return_tensors="np"
        )
        .input_ids
    )
    theirs = torch_pipelines["sd1"].text_encoder(torch.tensor(ids), output_hidden_states=True)
    ours = encoder(ids, params=params, output_hidden_states=True)
    assert differ(ours[0], theirs.last_hidden_state) < 1e-5
    assert differ(ours.pooler_output, theirs.pooler_output) < 1e-5
    assert differ(ours["hidden_states"][-2], theirs.hidden_states[-2]) < 1e-5
    assert np.array_equal(encoder(ids)[0], ours[0])
    assert len(encoder(ids, return_dict=False)) == 2


def test_layers_have_the_names_of_flax_to_read_and_to_write(parts):
    unet, params = parts["unet"]
    flat = flatten_dict(params)
    assert (
        "down_blocks_0",
        "attentions_0",
        "transformer_blocks_0",
        "attn1",
        "to_out_0",
        "kernel",
    ) in flat
    assert (
        "mid_block",
        "attentions_0",
        "transformer_blocks_0",
        "ff",
        "net_0",
        "proj",
        "bias",
    ) in flat
    assert "query" in parts["vae"][1]["encoder"]["mid_block"]["attentions_0"]
    assert "q_proj" in parts["text_encoder"][1]["text_model"]["encoder"]["layers"]["0"]["self_attn"]
    x, text = numbers(1, 4, 8, 8), numbers(1, 77, 32)
    apply = jax.jit(lambda params: unet.apply({"params": params}, x, 7, text).sample)
    flat[("conv_out", "bias")] += 1.0
    moved, before = apply(unflatten_dict(flat)), apply(params)
    assert np.allclose(moved, before + 1.0, atol=1e-5)
    del flat[("conv_out", "bias")]
    with pytest.raises(CheckpointError, match=r"1 parameters are missing: conv_out\.bias"):
        apply(unflatten_dict(flat))


def test_networks_can_be_differentiated_by_their_parameters(parts):
    unet, params = parts["unet"]
    x, text = numbers(1, 4, 8, 8), numbers(1, 77, 32)

    def loss(params):
        return (unet.apply({"params": params}, x, 7, text, train=True).sample ** 2).mean()

    gradient = jax.eval_shape(jax.grad(loss), params)
    shapes, gradients = (jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (params, gradient))
    assert gradients == shapes


def test_networks_are_made_from_a_config_alone(parts):
    made = FlaxAutoencoderKL.from_config(parts["vae"][0].config, dtype=jnp.bfloat16)
    variables = made.init(jax.random.PRNGKey(0), jnp.zeros((1, 3, 32, 32)))
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes == jax.tree.map(jnp.shape, parts["vae"][1])
    again = jax.jit(made.apply)(variables, jnp.zeros((1, 3, 32, 32)))
    assert isinstance(again, dict) and again.sample.shape == (1, 3, 32, 32)
    assert made.config.scaling_factor == made.config["scaling_factor"] == 0.18215
    half = made.to_bf16(variables["params"])
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, half)
    back = made.to_fp32(half, mask)["decoder"]["conv_in"]
    assert (back["kernel"].dtype, back["bias"].dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.slow("initializes each network")
def test_a_new_controlnet_adds_nothing_and_new_parameters_are_float32():
    model = FlaxControlNetModel(
        sample_size=8,
        block_out_channels=(32, 32),
        cross_attention_dim=32,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        attention_head_dim=4,
        conditioning_embedding_out_channels=(32,) * 4,
        dtype=jnp.bfloat16,
    )
    params = model.init_weights(jax.random.PRNGKey(0))
    apply = jax.jit(lambda p, *inputs: model.apply({"params": p}, *inputs, return_dict=False))
    inputs = numbers(1, 4, 8, 8), 7, numbers(1, 5, 32), numbers(1, 3, 64, 64)
    down, middle = apply(params, *inputs)
    assert len(down) == 4 and not any(np.any(each) for each in (*down, middle))
    assert not np.any(params["controlnet_cond_embedding"]["conv_out"]["kernel"])
    assert np.std(params["controlnet_cond_embedding"]["conv_in"]["kernel"]) > 0.1, "LeCun's"
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_a_new_text_encoder_begins_as_transformers_did():
    model = FlaxCLIPTextModel(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=100,
    )
    params = flatten_dict(model.init_weights(jax.random.PRNGKey(0)), sep=".")
    for name, leaf in params.items():
        wanted = 0.01 if name.endswith(("kernel", "embedding")) else 0
        assert np.std(leaf) == pytest.approx(wanted, rel=0.1), name


@pytest.mark.parametrize("name", CLASSES)
def test_networks_are_saved_and_read_again_also_from_flaxs_own_files(parts, name, tmp_path):
    model, params = parts[name]
    model.save_pretrained(tmp_path / "new", params=params)
    model.save_config(tmp_path / "old")
    found = type(model).from_config(str(tmp_path), subfolder="old", from_pt=True)
    assert found.config == model.config
    file = "flax_model.msgpack" if name == "text_encoder" else "diffusion_flax_model.msgpack"
    (tmp_path / "old" / file).write_bytes(to_bytes(params))
    for folder in ("new", "old"):
        again, loaded = CLASSES[name].from_pretrained(tmp_path / folder, from_pt=True)
        assert jax.tree.all(jax.tree.map(np.array_equal, loaded, params))
        assert dict(again.config) == dict(model.config)


def test_bad_files_and_unknown_keywords_are_said_in_a_sentence(parts, tmp_path):
    model, params = parts["vae"]
    model.save_config(tmp_path)
    (tmp_path / "diffusion_flax_model.msgpack").write_bytes(to_bytes(params)[:1000])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        FlaxAutoencoderKL.from_pretrained(tmp_path)
    (tmp_path / "diffusion_flax_model.msgpack").write_bytes(to_bytes({"quant_conv": params}))
    with pytest.raises(CheckpointError, match="do not fit the model"):
        FlaxAutoencoderKL.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path, params)
    with pytest.warns(UserWarning, match="FlaxAutoencoderKL has no speed: ignored"):
        FlaxAutoencoderKL.from_pretrained(tmp_path, speed=2, split_head_dim=True)
    with pytest.raises(CheckpointError, match="neither a folder here"):
        FlaxAutoencoderKL.from_pretrained("nobody/nothing", local_files_only=True)
    with pytest.raises(ValueError, match="holds no parameters"):
        model(numbers(1, 3, 32, 32))


def test_a_unet_that_fills_in_pictures_is_no_part_of_a_pipeline_that_only_draws(parts):
    drawing = {name: part for name, (part, _) in parts.items()}
    filling = FlaxUNet2DConditionModel.from_config(drawing["unet"].config, in_channels=9)
    FlaxStableDiffusionPipeline(**drawing, tokenizer=None, scheduler=None)
    with pytest.raises(CheckpointError, match="fills in pictures"):
        FlaxStableDiffusionPipeline(**{**drawing, "unet": filling}, tokenizer=None, scheduler=None)


def test_a_pipelines_default_size_is_that_of_sd_1_where_an_old_config_says_less(checkpoints):
    parts = {
        part: network.from_config(str(checkpoints["sd1"]), subfolder=part)
        for part, network in CLASSES.items()
    }
    for version, size, pixels in (
        ("0.12.0", 32, (128, 128)),
        ("0.12.0", [16, 32], (64, 128)),
        ("0.6.0", 32, (256, 256)),
    ):
        parts["unet"].config.update(_diffusers_version=version, sample_size=size)
        pipeline = FlaxStableDiffusionPipeline(tokenizer=None, scheduler=None, **parts)
        assert pipeline.default_size == pixels
    assert pipeline.unet.config.sample_size == 64
