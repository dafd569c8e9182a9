"""The networks against PyTorch's, layer by layer and whole, at random weights.

Weights travel by way of a safetensors file, so the names are tested as well. Each comparison
prints its relative error: `pytest -rP tests/parity/test_models.py | grep parity`.
"""

from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models import attention as torch_attention
from diffusers.models import attention_processor, downsampling, embeddings, resnet, upsampling
from flax import nnx
from safetensors.torch import save_file
from transformers import CLIPTextConfig
from transformers import CLIPTextModel as TorchTextModel
from transformers import CLIPTextModelWithProjection as TorchTextModelWithProjection

from sd_tpu.checkpoint import weights
from sd_tpu.checkpoint.config import (
    ControlNetConfig,
    ProjectedTextEncoderConfig,
    TextEncoderConfig,
    TinyVAEConfig,
    UNetConfig,
    VAEConfig,
)
from sd_tpu.models import (
    AutoencoderKL,
    AutoencoderTiny,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    ControlNetModel,
    UNet2DConditionModel,
    convolution,
    layers,
    unet,
)
from sd_tpu.models import platform as platforms
from tests.support.parity import assert_agrees, compiled, relative
from tests.support.published import PUBLISHED, controlnet_of


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    """The module with every parameter moved, the ones and zeros of norms and biases too."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def ported(tmp_path):
    """Ours with the weights of a PyTorch module: `ported(reference, build, dtype)`."""

    def port(reference: torch.nn.Module, build, dtype=jnp.float32) -> nnx.Module:
        file = tmp_path / "weights.safetensors"
        save_file({k: v.contiguous() for k, v in reference.state_dict().items()}, file)
        graph, expected = weights.abstract(partial(build, dtype=dtype))
        return nnx.merge(graph, weights.load([file], expected, dtype))

    return port


def nhwc(x: torch.Tensor) -> np.ndarray:
    return x.permute(0, 2, 3, 1).numpy()


# --- layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "channels, size, kernel, padding, strides",
    [
        (8, (8, 7), 3, 1, 1),
        (8, (8, 7), 1, 0, 1),
        (8, (8, 7), 3, 0, 1),
        (8, (8, 7), 3, 1, 2),
        (320, (32, 16), 3, 1, 1),
    ],
)
def test_a_convolution_is_that_of_pytorch(ported, channels, size, kernel, padding, strides):
    reference = randomized(torch.nn.Conv2d(channels, channels + 8, kernel, strides, padding))
    ours = ported(
        reference,
        partial(layers.conv, channels, channels + 8, kernel, strides=strides, padding=padding),
    )
    x = torch.randn(2, channels, *size)
    assert_agrees(f"Conv, {channels} channels", ours(nhwc(x)), nhwc(reference(x)))


@pytest.mark.parametrize("shape", [(2, 24, 5, 7), (2, 24, 9)], ids=["pixels", "tokens"])
def test_group_norm_is_that_of_pytorch(ported, shape):
    reference = randomized(torch.nn.GroupNorm(4, 24, eps=1e-3))
    ours = ported(reference, partial(layers.GroupNorm, 24, 4, 1e-3))
    x = 3 + 0.1 * torch.randn(shape)
    assert_agrees(
        "GroupNorm",
        np.moveaxis(np.asarray(ours(np.moveaxis(x.numpy(), 1, -1))), -1, 1),
        reference(x),
    )


def test_layer_norm_is_that_of_pytorch(ported):
    reference = randomized(torch.nn.LayerNorm(24, eps=1e-3))
    ours = ported(reference, partial(layers.LayerNorm, 24, 1e-3))
    x = 3 + 0.1 * torch.randn(2, 5, 24)
    assert_agrees("LayerNorm", ours(x.numpy()), reference(x))


@pytest.mark.parametrize("outputs", [16, 24], ids=["same width", "shortcut"])
@pytest.mark.parametrize("time_channels", [None, 20], ids=["no time", "time"])
def test_a_resnet_block_is_that_of_diffusers(ported, time_channels, outputs):
    reference = randomized(
        resnet.ResnetBlock2D(
            in_channels=16, out_channels=outputs, temb_channels=time_channels, groups=4, eps=1e-3
        )
    )
    ours = ported(
        reference,
        partial(layers.ResnetBlock, 16, outputs, groups=4, eps=1e-3, time_channels=time_channels),
    )
    x, time = torch.randn(2, 16, 6, 10), torch.randn(2, 20) if time_channels else None
    assert_agrees(
        f"ResnetBlock, {'time, ' if time_channels else ''}16 to {outputs} channels",
        compiled(
            layers.ResnetBlock.__call__, ours, nhwc(x), None if time is None else time.numpy()
        ),
        nhwc(reference(x, time)),
    )


@pytest.mark.parametrize("context_channels", [None, 12], ids=["self", "cross"])
@pytest.mark.parametrize("upcast", [False, True], ids=["", "upcast"])
def test_attention_is_that_of_diffusers(ported, context_channels, upcast):
    reference = randomized(
        attention_processor.Attention(
            24, context_channels, heads=3, dim_head=8, upcast_attention=upcast
        )
    )
    ours = ported(reference, partial(layers.Attention, 24, context_channels or 24, 3))
    x = torch.randn(2, 10, 24)
    context = None if context_channels is None else torch.randn(2, 7, 12)
    assert_agrees(
        f"Attention, {'cross' if context_channels else 'self'}",
        ours(x.numpy(), None if context is None else context.numpy()),
        reference(x, context),
    )


def test_attention_with_a_group_norm_is_that_of_the_autoencoder(ported):
    reference = randomized(
        attention_processor.Attention(
            24,
            heads=1,
            dim_head=24,
            bias=True,
            norm_num_groups=4,
            eps=1e-3,
            residual_connection=True,
            _from_deprecated_attn_block=True,
        )
    )
    ours = ported(reference, partial(layers.Attention, 24, 24, 1, bias=True, groups=4, eps=1e-3))
    x = torch.randn(2, 24, 4, 6)
    tokens = nhwc(x).reshape(2, 24, 24)
    assert_agrees(
        "Attention, group norm and residual", ours(tokens).reshape(2, 4, 6, 24), nhwc(reference(x))
    )


@pytest.mark.parametrize("linear", [False, True], ids=["conv", "linear"])
def test_a_spatial_transformer_is_that_of_diffusers(ported, linear):
    reference = randomized(
        diffusers.Transformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=16,
            norm_num_groups=4,
            cross_attention_dim=12,
            use_linear_projection=linear,
        )
    )
    config = UNetConfig(norm_num_groups=4, cross_attention_dim=12, use_linear_projection=linear)
    ours = ported(reference, partial(unet.Transformer2DModel, config, 16, 2))
    x, text = 0.01 * torch.randn(2, 16, 4, 6), torch.randn(2, 7, 12)  # small: eps counts

    def transformed(model, x, text):
        return model(x, unet.Context(text))

    inputs = ours, nhwc(x), text.numpy()
    assert_agrees(
        f"Transformer2DModel, {'linear' if linear else '1x1 convolution'} projections",
        compiled(transformed, *inputs),
        nhwc(reference(x, encoder_hidden_states=text).sample),
    )
    traced = str(jax.make_jaxpr(partial(transformed, ours))(*inputs[1:]))
    assert "conv_general_dilated" not in traced, "a product is faster"


def test_the_feed_forward_layer_is_that_of_diffusers(ported):
    reference = randomized(torch_attention.FeedForward(16, activation_fn="geglu"))
    ours = ported(reference, partial(unet.FeedForward, 16))
    x = 3 * torch.randn(2, 5, 16)
    assert_agrees("FeedForward (GEGLU)", ours(x.numpy()), reference(x))


@pytest.mark.parametrize("padding", [0, 1])
def test_downsampling_is_that_of_diffusers(ported, padding):
    reference = randomized(downsampling.Downsample2D(8, use_conv=True, padding=padding, name="op"))
    ours = ported(reference, partial(layers.Downsample, 8, padding))
    x = torch.randn(2, 8, 6, 10)
    assert_agrees(f"Downsample, padding {padding}", ours(nhwc(x)), nhwc(reference(x)))


@pytest.mark.parametrize(("platform", "convolutions", "products"), [("cpu", 0, 9), ("tpu", 1, 0)])
def test_upsampling_is_that_of_diffusers_in_whatever_way(
    ported, monkeypatch, platform, convolutions, products
):
    monkeypatch.setattr(convolution, "platform", lambda: platform)
    reference = randomized(upsampling.Upsample2D(8, use_conv=True))
    ours = ported(reference, partial(layers.Upsample, 8))
    x = torch.randn(2, 8, 5, 7)
    assert_agrees(f"Upsample, {platform}", ours(nhwc(x)), nhwc(reference(x)))
    traced = str(jax.make_jaxpr(ours)(nhwc(x)))
    assert traced.count("conv_general_dilated[") == convolutions
    assert traced.count("dot_general[") == products


@pytest.mark.parametrize("flip", [False, True], ids=["sin first", "cos first"])
@pytest.mark.parametrize("shift", [0, 1])
def test_timesteps_are_encoded_as_in_diffusers(flip, shift):
    times = torch.tensor([0.0, 0.25, 17.5, 999.0])
    ours = unet.timestep_encoding(jnp.asarray(times.numpy()), 32, flip, shift)
    assert_agrees(
        f"timestep encoding, {'cos' if flip else 'sin'} first, shift {shift}",
        ours,
        embeddings.Timesteps(32, flip, shift)(times),
    )


def test_the_timestep_embedding_is_that_of_diffusers(ported):
    reference = randomized(embeddings.TimestepEmbedding(16, 64))
    ours = ported(reference, partial(unet.TimestepEmbedding, 16, 64))
    x = torch.randn(3, 16)
    assert_agrees("TimestepEmbedding", ours(x.numpy()), reference(x))


# --- norms and softmax in float32 ---------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_bear_a_mean_far_from_zero(norm, dtype):
    """In float32 no variance in one pass would (cancellation), in bfloat16 no bfloat16 sums."""
    mean, step = (4096.0, 1.0) if dtype == "float32" else (256.0, 2.0)
    x = mean + step * np.random.default_rng(0).integers(-4, 5, (2, 64, 16))
    make = dict(group=partial(layers.GroupNorm, 16, 1, 1e-5), layer=partial(layers.LayerNorm, 16))
    module = make[norm](dtype=dtype, rngs=nnx.Rngs(0))
    axes = (1, 2) if norm == "group" else (2,)
    expected = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    ours = module(jnp.asarray(x, dtype))
    assert ours.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(ours, np.float64), expected, atol=1e-4 if dtype == "float32" else 2**-7
    )


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_bear_numbers_that_are_all_the_same_or_all_but_one(norm, dtype):
    make = dict(group=partial(layers.GroupNorm, 30, 1, 1e-5), layer=partial(layers.LayerNorm, 30))
    module = make[norm](dtype=dtype, rngs=nnx.Rngs(0))
    values = jnp.arange(256, 512, 2, dtype)  # E[x^2] - E[x]^2 comes out below 0 for some
    same = jnp.broadcast_to(values[:, None, None], (values.size, 7, 30))
    np.testing.assert_allclose(np.asarray(module(same), np.float64), 0, atol=0.05)
    apart = np.asarray(module(same.at[:, 3, 5].add(2)), np.float64)[:, 3, 5]  # bfloat16's next
    exact = np.sqrt((210 if norm == "group" else 30) - 1)
    assert (apart >= exact / 2).all() and (apart <= 1.05 * exact).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelu_is_exact_in_every_precision(dtype):
    x = jnp.linspace(-9, 9, 4001, dtype=dtype)
    exact = torch.nn.functional.gelu(torch.from_numpy(np.asarray(x, np.float64)))
    error = np.abs(np.asarray(layers.gelu(x), np.float64) - exact.numpy())
    assert (error <= 1e-6 + (0 if dtype == "float32" else 2**-8) * np.abs(exact.numpy())).all()


# --- text encoder -------------------------------------------------------------------------------

TINY_TEXT = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=77,
    bos_token_id=0,
    eos_token_id=1,
)


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_the_text_encoder_is_that_of_transformers(ported, activation):
    config = dict(TINY_TEXT, hidden_act=activation)
    reference = randomized(TorchTextModel(CLIPTextConfig(**config)))
    ours = ported(reference, partial(CLIPTextModel, TextEncoderConfig.from_dict(config)))
    ids = torch.randint(0, 99, (2, 77))
    assert_agrees(
        f"CLIPTextModel, {activation}",
        compiled(CLIPTextModel.__call__, ours, ids.numpy()),
        reference(ids).last_hidden_state,
    )


@pytest.mark.parametrize("eos", [2, 97], ids=["end by the highest id", "end by its id"])
def test_hidden_layers_and_the_pooled_text_are_those_of_transformers(ported, eos):
    config = dict(TINY_TEXT, hidden_act="gelu", projection_dim=24, eos_token_id=eos)
    reference = randomized(TorchTextModelWithProjection(CLIPTextConfig(**config)))
    ours = ported(
        reference,
        partial(CLIPTextModelWithProjection, ProjectedTextEncoderConfig.from_dict(config)),
    )
    ids = torch.randint(3, 90, (3, 77))
    ids[:, 60:] = 98
    ids[torch.arange(3), torch.tensor([4, 31, 59])] = 97
    ids[1, 70] = 97
    theirs = reference(ids, output_hidden_states=True)
    found = compiled(lambda model, ids: [model(ids, skip) for skip in range(3)], ours, ids.numpy())
    for skip, (hidden, pooled) in enumerate(found):
        # with every layer transformers' own last one is normed, which diffusers does not take
        if skip:
            assert_agrees(
                f"CLIPTextModelWithProjection, {skip} layers left out",
                hidden,
                theirs.hidden_states[-1 - skip],
            )
        assert_agrees("CLIPTextModelWithProjection, pooled", pooled, theirs.text_embeds)


def test_the_penultimate_layer_is_that_of_transformers(ported):
    reference = randomized(TorchTextModel(CLIPTextConfig(**TINY_TEXT)))
    ours = ported(reference, partial(CLIPTextModel, TextEncoderConfig.from_dict(TINY_TEXT)))
    ids = torch.randint(0, 99, (2, 77))
    assert_agrees(
        "CLIPTextModel, penultimate layer",
        compiled(CLIPTextModel.hidden_state, ours, ids.numpy()),
        reference(ids, output_hidden_states=True).hidden_states[-2],
    )


def test_later_tokens_do_not_change_earlier_embeddings(ported):
    model = ported(
        randomized(TorchTextModel(CLIPTextConfig(**TINY_TEXT))),
        partial(CLIPTextModel, TextEncoderConfig.from_dict(TINY_TEXT)),
    )
    ids = np.arange(20)
    other = np.where(ids < 12, ids, 7)
    ours, changed = compiled(CLIPTextModel.__call__, model, np.stack([ids, other]))
    np.testing.assert_array_equal(ours[:12], changed[:12])
    assert (np.abs(ours - changed).max(-1)[12:] > 1e-3).all()


# --- UNet ---------------------------------------------------------------------------------------

ATTEND, PLAIN = "CrossAttn{}Block2D", "{}Block2D"


def unet_config(channels, blocks, **values) -> dict:
    """A tiny UNet's config; `blocks` are templates of the levels, outermost first."""
    return dict(
        block_out_channels=channels,
        down_block_types=tuple(b.format("Down") for b in blocks),
        up_block_types=tuple(b.format("Up") for b in reversed(blocks)),
        cross_attention_dim=12,
        norm_num_groups=4,
        sample_size=8,
        **values,
    )


UNETS = {
    "SD 1: heads a number, two layers a level": unet_config(
        (8, 16), (ATTEND, PLAIN), layers_per_block=2, attention_head_dim=2
    ),
    "SD 2: heads a list, linear projection, upcast": unet_config(
        (8, 16, 16),
        (ATTEND, ATTEND, PLAIN),
        layers_per_block=1,
        attention_head_dim=(1, 2, 4),
        use_linear_projection=True,
        upcast_attention=True,
    ),
    "attention below only, other paddings and sinusoids": unet_config(
        (8, 12),
        (PLAIN, ATTEND),
        layers_per_block=1,
        attention_head_dim=(2, 3),
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        in_channels=5,
        out_channels=3,
        norm_eps=1e-3,
    ),
    "SDXL: attention below, in stacks, and a pooled text with sizes": unet_config(
        (8, 16, 16),
        (PLAIN, ATTEND, ATTEND),
        layers_per_block=1,
        attention_head_dim=(1, 2, 4),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 1, 2),
        addition_embed_type="text_time",
        addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=10 + 6 * 6,
    ),
    "SSD-1B: stacks of their own on the way up, one resnet in the middle": unet_config(
        (8, 16, 16),
        (PLAIN, ATTEND, ATTEND),
        layers_per_block=1,
        attention_head_dim=(1, 2, 4),
        mid_block_type="UNetMidBlock2D",
        transformer_layers_per_block=[1, [1], [2]],
        reverse_transformer_layers_per_block=[[2, 3], [2, 1], 1],
    ),
    "BK-SDM: no middle, layers by level": unet_config(
        (8, 16),
        (ATTEND, ATTEND),
        layers_per_block=[1, 2],
        attention_head_dim=2,
        mid_block_type=None,
    ),
    "LCM: guidance beside the timestep": unet_config(
        (8, 16), (ATTEND, PLAIN), layers_per_block=1, attention_head_dim=2, time_cond_proj_dim=16
    ),
}


def unet_inputs(config) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Latents, timesteps and text, and what the config asks for besides."""
    latents = torch.randn(2, config.get("in_channels", 4), 8, 16)
    added = {}
    if "addition_embed_type" in config:
        added["text_embeds"] = torch.randn(2, 10)
        added["time_ids"] = torch.tensor([[1024.0, 768, 0, 3, 1024, 1024], [64, 64, 0, 0, 64, 96]])
    if "time_cond_proj_dim" in config:
        added["timestep_cond"] = torch.randn(2, config["time_cond_proj_dim"])
    return [latents, torch.tensor([961.0, 3.5]), torch.randn(2, 7, 12)], added


def of_diffusers(reference, inputs, added) -> np.ndarray:
    added = dict(added)
    guidance = added.pop("timestep_cond", None)
    return nhwc(reference(*inputs, timestep_cond=guidance, added_cond_kwargs=added).sample)


def as_arrays(inputs, added):
    latents, *rest = inputs
    return (nhwc(latents), *(x.numpy() for x in rest), {k: x.numpy() for k, x in added.items()})


@pytest.mark.parametrize("kind", UNETS)
@pytest.mark.slow("compiles UNets of up to three levels")
def test_the_unet_is_that_of_diffusers(ported, kind):
    config = UNETS[kind]
    reference = randomized(diffusers.UNet2DConditionModel(**config))
    ours = ported(reference, partial(UNet2DConditionModel, UNetConfig.from_dict(config)))
    inputs = unet_inputs(config)
    assert_agrees(
        f"UNet2DConditionModel, {kind}",
        compiled(UNet2DConditionModel.__call__, ours, *as_arrays(*inputs)),
        of_diffusers(reference, *inputs),
    )


# A ControlNet of each kind of UNet: its blocks need not be the UNet's, but its maps are.
CONTROLNETS = {
    "SD 1: heads a number, two layers a level": {},
    "SD 2: heads a list, linear projection, upcast": dict(
        controlnet_conditioning_channel_order="bgr"
    ),
    "SDXL: attention below, in stacks, and a pooled text with sizes": {},
    "SDXL, small": dict(down_block_types=("DownBlock2D",) * 3, mid_block_type="UNetMidBlock2D"),
}


def controlnet_config(kind: str) -> dict:
    """Of a tiny ControlNet whose pictures have two pixels for each latent."""
    unet = UNETS[
        "SDXL: attention below, in stacks, and a pooled text with sizes"
        if kind == "SDXL, small"
        else kind
    ]
    return (
        controlnet_of(unet) | dict(conditioning_embedding_out_channels=(4, 6)) | (CONTROLNETS[kind])
    )


@pytest.mark.parametrize("kind", CONTROLNETS)
@pytest.mark.slow("compiles UNets of up to three levels")
def test_a_controlnet_is_that_of_diffusers(ported, kind):
    config = controlnet_config(kind)
    theirs = randomized(diffusers.ControlNetModel(**config))
    ours = ported(theirs, partial(ControlNetModel, ControlNetConfig.from_dict(config)))
    inputs, added = unet_inputs(config)
    picture = torch.rand(2, 3, 16, 32)
    expected = theirs(*inputs, picture, conditioning_scale=0.7, added_cond_kwargs=added)

    def control(model, picture, latents, times, text, added):
        return [0.7 * each for each in model(latents, times, text, model.embed(picture), added)]

    found = compiled(control, ours, nhwc(picture), *as_arrays(inputs, added))
    maps = [*expected.down_block_res_samples, expected.mid_block_res_sample]
    for number, (one, other) in enumerate(zip(found, maps, strict=True)):
        assert_agrees(f"ControlNetModel, {kind}, map {number}", one, nhwc(other))


def test_a_unet_that_a_controlnet_steers_is_that_of_diffusers(ported):
    config = unet_config((8, 16), (ATTEND, PLAIN), layers_per_block=1, attention_head_dim=2)
    reference = randomized(diffusers.UNet2DConditionModel(**config))
    ours = ported(reference, partial(UNet2DConditionModel, UNetConfig.from_dict(config)))
    inputs, added = unet_inputs(config)
    network = diffusers.ControlNetModel(
        **controlnet_of(config) | dict(conditioning_embedding_out_channels=(4, 6))
    )
    maps = randomized(network)(*inputs, torch.rand(2, 3, 16, 32))
    found = [nhwc(each) for each in (*maps.down_block_res_samples, maps.mid_block_res_sample)]
    assert_agrees(
        "UNet2DConditionModel with a ControlNet",
        compiled(UNet2DConditionModel.__call__, ours, *as_arrays(inputs, added), found),
        nhwc(
            reference(
                *inputs,
                down_block_additional_residuals=maps.down_block_res_samples,
                mid_block_additional_residual=maps.mid_block_res_sample,
            ).sample
        ),
    )


def called(values: dict):
    """A program that calls a UNet of one level with such a config, without what it takes besides
    latents, timesteps and text; the module; its parameters' shapes."""
    config = unet_config((8,), (ATTEND,), layers_per_block=1, attention_head_dim=2, **values)
    graph, state = weights.abstract(partial(UNet2DConditionModel, UNetConfig.from_dict(config)))

    def call(state, pictures):
        return nnx.merge(graph, state)(
            jnp.zeros((pictures, 8, 8, 4)), jnp.zeros(pictures), jnp.zeros((pictures, 7, 12))
        )

    return call, nnx.merge(graph, state), state


@pytest.mark.parametrize(
    "values, name",
    [
        (
            dict(
                addition_embed_type="text_time",
                addition_time_embed_dim=6,
                projection_class_embeddings_input_dim=10 + 6 * 6,
            ),
            "text_embeds, time_ids",
        ),
        (dict(time_cond_proj_dim=16), "timestep_cond"),
    ],
)
def test_a_unet_without_the_conditions_that_it_takes_names_them(values, name):
    call, _, state = called(values)
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(partial(call, pictures=1), state)


@pytest.mark.parametrize(
    ("platform", "pictures", "held"),
    [("cpu", 1, False), ("tpu", 1, True), ("tpu", 2, True), ("tpu", 4, False)],
)
def test_a_tpu_lays_out_by_its_axes_what_residual_blocks_give_of_few_pictures(
    monkeypatch, platform, pictures, held
):
    monkeypatch.setattr(platforms, "platform", lambda: platform)
    call, model, state = called({})
    traced = str(jax.make_jaxpr(partial(call, pictures=pictures))(state))
    blocks = sum(
        len(block.resnets) for block in (*model.down_blocks, model.mid_block, *model.up_blocks)
    )
    assert traced.count("major_to_minor=(0, 1, 2, 3)") == blocks * held


def test_a_layout_has_a_gradient(monkeypatch):
    monkeypatch.setattr(platforms, "platform", lambda: "tpu")
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(platforms.row_major(x) ** 2)))
    assert np.array_equal(
        gradient(np.arange(24.0).reshape(1, 2, 3, 4)), 2 * np.arange(24.0).reshape(1, 2, 3, 4)
    )


def test_guidance_is_encoded_as_in_diffusers():
    scales = torch.tensor([0.0, 0.5, 7.5])
    theirs = diffusers.StableDiffusionPipeline.get_guidance_scale_embedding(None, scales, 256)
    ours = unet.guidance_encoding(jnp.asarray(scales.numpy()), 256)
    assert relative(ours, theirs) < 1e-4  # float32 angles of up to 7500


@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_a_downsampling_that_is_no_whole_number_from_1_is_refused(value):
    with pytest.raises(ValueError, match=f"Token downsampling should be .* from 1, not {value}"):
        UNet2DConditionModel(UNetConfig(), token_downsampling=value, rngs=nnx.Rngs(0))


class _Downsampled(attention_processor.AttnProcessor):
    """diffusers' attention, told to look at every `step`-th row and column of a map."""

    def __init__(self, height: int, step: int):
        super().__init__()
        self.height, self.step = height, step

    def __call__(self, attention, hidden_states, **_):
        pixels = hidden_states.unflatten(1, (self.height, -1))[:, :: self.step, :: self.step]
        return super().__call__(attention, hidden_states, pixels.flatten(1, 2))


@pytest.mark.parametrize(
    "kind, step",
    [  # the finest map at the first level or below; with and without a remainder of its height
        ("BK-SDM: no middle, layers by level", 2),
        ("attention below only, other paddings and sinusoids", 3),
    ],
)
@pytest.mark.slow("compiles UNets of up to three levels")
def test_fewer_tokens_are_looked_at_where_the_map_is_finest_and_nowhere_else(ported, kind, step):
    config = UNETS[kind]
    reference = randomized(diffusers.UNet2DConditionModel(**config))
    ours = ported(
        reference,
        partial(UNet2DConditionModel, UNetConfig.from_dict(config), token_downsampling=step),
    )
    inputs = unet_inputs(config)
    exact = of_diffusers(reference, *inputs)
    finest = config["down_block_types"].index("CrossAttnDownBlock2D")
    for block in (reference.down_blocks[finest], reference.up_blocks[-1 - finest]):
        for transformer in block.attentions:
            for layer in transformer.transformer_blocks:
                layer.attn1.set_processor(_Downsampled(8 >> finest, step))
    theirs = of_diffusers(reference, *inputs)
    assert relative(theirs, exact) > 1e-3
    assert_agrees(
        f"UNet2DConditionModel, every {step} tokens, {kind}",
        compiled(UNet2DConditionModel.__call__, ours, *as_arrays(*inputs)),
        theirs,
    )


# --- autoencoder --------------------------------------------------------------------------------


def torch_vae(channels, layers_per_block) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=channels,
        layers_per_block=layers_per_block,
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        scaling_factor=0.2,
    )


@pytest.mark.parametrize(
    "channels, depth, mean, std",
    [((8, 16), 2, None, None), ((8, 8, 16), 1, [0.5, -1.0, 0.0, 2.0], [0.5, 1.0, 2.0, 3.0])],
    ids=["as they are", "whitened"],
)
def test_the_autoencoder_is_that_of_diffusers(ported, channels, depth, mean, std):
    """Where latents were whitened, with their mean and deviation as diffusers' SDXL has them."""
    reference = randomized(torch_vae(channels, depth))
    config = {**reference.config, "latents_mean": mean, "latents_std": std}
    ours = ported(reference, partial(AutoencoderKL, VAEConfig.from_dict(config)))
    mean, std = (
        torch.tensor(values).view(1, 4, 1, 1) if values else otherwise
        for values, otherwise in ((mean, 0), (std, 1))
    )
    images, latents = torch.randn(2, 3, 16, 32), torch.randn(2, 4, 2, 3)
    theirs = reference.encode(images).latent_dist
    found, logvar = compiled(AutoencoderKL.encode, ours, nhwc(images))
    name = f"AutoencoderKL, {len(channels)} levels"
    assert_agrees(f"{name}, encode, mean", found, nhwc((theirs.mean - mean) * 0.2 / std))
    assert_agrees(f"{name}, encode, deviation", jnp.exp(logvar / 2), nhwc(theirs.std * 0.2 / std))
    assert_agrees(
        f"{name}, decode",
        compiled(AutoencoderKL.decode, ours, nhwc(latents)),
        nhwc(reference.decode(latents * std / 0.2 + mean).sample),
    )


@pytest.mark.parametrize("blocks, scale", [((3, 3, 3, 1), 1.0), ((2, 1), 0.5)])
def test_the_tiny_autoencoder_is_that_of_diffusers(ported, blocks, scale):
    channels = (8,) * len(blocks)
    reference = randomized(
        diffusers.AutoencoderTiny(
            encoder_block_out_channels=channels,
            decoder_block_out_channels=channels,
            num_encoder_blocks=blocks[::-1],
            num_decoder_blocks=blocks,
            scaling_factor=scale,
        )
    )
    config = TinyVAEConfig.from_dict(dict(reference.config))
    ours = ported(reference, partial(AutoencoderTiny, config))
    images, latents = torch.randn(2, 3, 16, 32), 3 * torch.randn(2, 4, 3, 5)
    name = f"AutoencoderTiny, {len(blocks)} levels"
    assert_agrees(
        f"{name}, encode",
        compiled(AutoencoderTiny.encode, ours, nhwc(images)),
        nhwc(scale * reference.encode(images).latents),
    )
    decoded = compiled(AutoencoderTiny.decode, ours, nhwc(latents))
    assert decoded.shape == (2, 3 * config.downscale, 5 * config.downscale, 3)
    assert_agrees(f"{name}, decode", decoded, nhwc(reference.decode(latents / scale).sample))


# --- bfloat16 -----------------------------------------------------------------------------------


def _text_case():
    reference = TorchTextModel(CLIPTextConfig(**TINY_TEXT))
    build = partial(CLIPTextModel, TextEncoderConfig.from_dict(TINY_TEXT))
    ids = np.arange(154).reshape(2, 77) % 99
    return (
        reference,
        build,
        CLIPTextModel.__call__,
        [ids],
    ), lambda: reference(torch.tensor(ids)).last_hidden_state


def _unet_case():
    config = unet_config(
        (8, 16),
        (PLAIN, ATTEND),
        layers_per_block=1,
        attention_head_dim=2,
        upcast_attention=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=10 + 6 * 6,
    )
    reference, inputs = diffusers.UNet2DConditionModel(**config), unet_inputs(config)
    build = partial(UNet2DConditionModel, UNetConfig.from_dict(config))
    return (
        reference,
        build,
        UNet2DConditionModel.__call__,
        as_arrays(*inputs),
    ), lambda: of_diffusers(reference, *inputs)


def _vae_case():
    reference, latents = torch_vae((8, 16), 1), torch.randn(2, 4, 4, 4)
    build = partial(AutoencoderKL, VAEConfig.from_dict(dict(reference.config)))
    return (reference, build, AutoencoderKL.decode, [nhwc(latents)]), lambda: nhwc(
        reference.decode(latents / 0.2).sample
    )


def _tiny_case():
    reference, latents = (
        diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        torch.randn(2, 4, 4, 4),
    )
    build = partial(AutoencoderTiny, TinyVAEConfig.from_dict(dict(reference.config)))
    return (reference, build, AutoencoderTiny.decode, [nhwc(latents)]), lambda: nhwc(
        reference.decode(latents).sample
    )


@pytest.mark.parametrize("case", [_text_case, _unet_case, _vae_case, _tiny_case])
def test_bfloat16_parameters_give_nearly_the_same(ported, case):
    (reference, build, method, inputs), theirs = case()
    randomized(reference)
    rough = compiled(method, ported(reference, build, jnp.bfloat16), *inputs)
    assert np.isfinite(np.asarray(rough, np.float32)).all()
    error = relative(rough, theirs())
    print(f"bfloat16 | {build.func.__name__} | {error:.1e} |")
    assert 1e-4 < error < 2e-2


# --- full size ----------------------------------------------------------------------------------

BUILDERS = dict(
    text_encoder=(
        CLIPTextModel,
        TextEncoderConfig,
        lambda config: TorchTextModel(CLIPTextConfig(**config)),
    ),
    text_encoder_2=(
        CLIPTextModelWithProjection,
        ProjectedTextEncoderConfig,
        lambda config: TorchTextModelWithProjection(CLIPTextConfig(**config)),
    ),
    unet=(UNet2DConditionModel, UNetConfig, diffusers.UNet2DConditionModel.from_config),
    vae=(AutoencoderKL, VAEConfig, diffusers.AutoencoderKL.from_config),
    decoder=(AutoencoderTiny, TinyVAEConfig, diffusers.AutoencoderTiny.from_config),
    controlnet=(ControlNetModel, ControlNetConfig, diffusers.ControlNetModel.from_config),
)


@pytest.mark.parametrize(
    "model, part, count",
    [
        ("sd14", "text_encoder", 123_060_480),
        ("sd14", "unet", 859_520_964),
        ("sd14", "vae", 83_653_863),
        ("sd21", "text_encoder", 340_387_840),
        ("sd21", "unet", 865_910_724),
        ("sdxl", "unet", 2_567_463_684),
        ("sdxl", "text_encoder_2", 694_659_840),
        ("ssd-1b", "unet", 1_331_334_404),
        ("vega", "unet", 745_225_604),
        ("lcm", "unet", 859_602_884),
        ("bk-sdm-small", "unet", 482_346_884),
        ("bk-sdm-tiny", "unet", 323_384_964),
        ("taesd", "decoder", 2_445_063),
        ("sd14-canny", "controlnet", 361_279_120),
        ("sdxl-canny", "controlnet", 1_251_014_160),
    ],
)
@pytest.mark.slow("traces full-size networks")
def test_full_size_models_have_the_published_parameters(model, part, count):
    config = PUBLISHED[model][part]
    module, read, torch_module = BUILDERS[part]
    with torch.device("meta"):
        theirs = {
            name.removeprefix("text_model."): tuple(tensor.shape)
            for name, tensor in torch_module(config).state_dict().items()
            if not name.endswith("position_ids")
        }
    before = sum(x.nbytes for x in jax.live_arrays())
    _, params = weights.abstract(partial(module, read.from_dict(config), dtype=jnp.bfloat16))
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 1024
    assert {type(leaf) for leaf in jax.tree.leaves(params)} == {jax.ShapeDtypeStruct}
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
    ours = weights.shapes(params)
    assert {name.removeprefix("text_model."): shape for name, shape in ours.items()} == theirs
