"""Layers that networks share. Images are NHWC.

`dtype` is that of the parameters and of the arithmetic around them; statistics of norms and the
softmax of attention are always float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sd_tpu.checkpoint.division import MODEL
from sd_tpu.checkpoint.weights import Params, ShapesOnly
from sd_tpu.models.attention import attention
from sd_tpu.models.convolution import convolve, convolve_enlarged
from sd_tpu.models.platform import row_major
from sd_tpu.models.products import dot_general, kept, matmul

Weight = nnx.Param | jax.Array


def _normalized(x: jax.Array, mean_of, eps: float, scale: Weight, bias: Weight) -> jax.Array:
    """x to mean 0 and variance 1 by float32 statistics, scaled and shifted, in the dtype of x.

    A bfloat16 x is read once less, by E[x^2] - E[x]^2. That is off by about 2^-24 of E[x]^2, less
    than the rounding of x to 2^-9 has done to it unless nearly all of x is the same. For that the
    variance is taken for no less than can be told from 0 (decision 0003).
    """
    wide = x.astype(jnp.float32)
    mean = mean_of(wide)
    if x.dtype == jnp.bfloat16:
        square = jnp.square(mean)
        variance = jnp.maximum(mean_of(jnp.square(wide)) - square, 2**-22 * square)
    else:
        variance = mean_of(jnp.square(wide - mean))
    return ((wide - mean) * (lax.rsqrt(variance + eps) * scale) + bias).astype(x.dtype)


class GroupNorm(nnx.Module):
    """Group normalization (Wu and He 2018, arXiv:1803.08494) with float32 statistics.

    Sums run over pixels first and over the channels of a group last: the large reduction then
    keeps the channels in the vector lanes, which is several times faster than the usual reshape.
    """

    def __init__(self, channels: int, groups: int, eps: float, *, dtype, rngs: nnx.Rngs):
        self.groups, self.eps = groups, eps
        self.scale = nnx.Param(jnp.ones(channels, dtype))
        self.bias = nnx.Param(jnp.zeros(channels, dtype))

    def _group_mean(self, x: jax.Array) -> jax.Array:
        """[B, ..., C] -> [B, 1..., C]: the mean over pixels and over each channel's group."""
        pixels = jnp.mean(x, axis=range(1, x.ndim - 1), keepdims=True)
        groups = pixels.reshape(*pixels.shape[:-1], self.groups, -1)
        return jnp.broadcast_to(groups.mean(-1, keepdims=True), groups.shape).reshape(pixels.shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize x [B, ..., C] over its pixels and groups of channels; keeps its dtype."""
        return _normalized(x, self._group_mean, self.eps, self.scale, self.bias)


class LayerNorm(nnx.Module):
    """Layer normalization (Ba et al. 2016, arXiv:1607.06450) with float32 statistics."""

    def __init__(self, features: int, eps: float = 1e-5, *, dtype, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize x [..., C] over its last axis; keeps its dtype."""
        return layer_norm(x, self.eps, self.scale, self.bias)


def layer_norm(x: jax.Array, eps: float, scale: Weight, bias: Weight) -> jax.Array:
    """Normalize x [..., C] over its last axis by float32 statistics; keeps its dtype.

    Scale and bias are of any shape that broadcasts to that of x.
    """
    return _normalized(x, partial(jnp.mean, axis=-1, keepdims=True), eps, scale, bias)


def rms_norm(x: jax.Array, eps: float, scale: Weight) -> jax.Array:
    """Normalize x [..., C] by its float32 root mean square along the last axis; keeps its dtype.

    The scale is of any shape that broadcasts to that of x.
    """
    wide = x.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * (lax.rsqrt(square + eps) * scale)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Normalization by the root mean square (Zhang and Sennrich 2019, arXiv:1910.07467), which is
    float32."""

    def __init__(self, features: int, eps: float = 1e-6, *, dtype, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, dtype))

    @property
    def multiplier(self) -> jax.Array:
        """Factors of normed channels [C]."""
        return self.scale[...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize x [..., C] over its last axis; keeps its dtype."""
        return rms_norm(x, self.eps, self.multiplier)


class ZeroCentredRMSNorm(RMSNorm):
    """RMS norm whose parameters, float32 in any network, are what is added to 1."""

    def __init__(self, features: int, eps: float = 1e-6, *, dtype, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = nnx.Param(jnp.zeros(features, jnp.float32))

    @property
    def multiplier(self) -> jax.Array:
        """Factors of normed channels [C]."""
        return 1 + self.scale[...]


def _kernel_init(rngs: nnx.Rngs) -> nnx.Initializer:
    """Return LeCun's initializer, as in Flax, or zeros where only shapes are wanted.

    Tracing the drawing of so many random numbers takes as long as building all else of a module.
    """
    if isinstance(rngs, ShapesOnly):
        return nnx.initializers.zeros_init()
    return nnx.initializers.lecun_normal()


class Linear(nnx.Linear):
    """A dense layer in one dtype, whose kernel may be int8 with a scale for each output, and its
    inputs as well.

    In a program over a mesh, a chip may have a share of the columns, whose outputs it computes; or
    of the rows, for a share of the inputs, where the chips add up what they computed.
    """

    kernel_scale: nnx.Param | None
    by_picture = False  # whether it takes pictures apart, by the first axis of its inputs
    rounds_tokens = False  # whether it multiplies its inputs as int8

    def to_int8(self, *, tokens: bool = False) -> None:
        """Take a kernel of int8 and, with `tokens`, round inputs as well; an abstract layer alone,
        as nothing is computed."""
        self.rounds_tokens = tokens
        shape = self.in_features, self.out_features
        self.kernel = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.int8))
        self.kernel_scale = nnx.Param(jax.ShapeDtypeStruct(shape[1:], jnp.float32))

    @kept
    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        """[..., inputs] -> [..., outputs]."""
        if self.kernel_scale is None and not self._has_rows_elsewhere:
            return super().__call__(inputs, out_sharding)
        y = self._added_up(self._product(inputs.astype(self.dtype)).astype(self.dtype))
        return y if self.bias is None else y + self.bias[...]

    @kept
    def wide(self, x: jax.Array) -> jax.Array:
        """Multiply x [..., inputs] by the kernel -> [..., outputs], whose sums stay float32."""
        return self._added_up(self._product(x))

    def share_of(self, count: int) -> int:
        """Return how many of `count` equal parts of the outputs are computed on this chip."""
        return count * self.kernel[...].shape[1] // self.out_features

    @property
    def _has_rows_elsewhere(self) -> bool:
        return self.kernel[...].shape[0] < self.in_features

    def _product(self, x: jax.Array) -> jax.Array:
        kernel, product = self.kernel[...], partial(jnp.matmul, preferred_element_type=jnp.float32)
        if self.kernel_scale is None:
            return product(x, kernel)
        if self.rounds_tokens:
            multiples, steps = _rounded(x)
            y = jnp.matmul(multiples, kernel, preferred_element_type=jnp.int32) * steps
        else:
            y = product(x, kernel.astype(x.dtype))
        return y * self.kernel_scale[...]

    def _added_up(self, y: jax.Array) -> jax.Array:
        return lax.psum(y, MODEL) if self._has_rows_elsewhere else y


def _rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round rows of x [..., N] to multiples of a 127th of their largest: int8 like x, and what they
    are multiples of, float32 [..., 1]."""
    wide = x.astype(jnp.float32)
    steps = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 127
    multiples = jnp.rint(wide / jnp.where(steps, steps, 1)).astype(jnp.int8)
    return row_major(multiples), steps  # a TPU's products of columns take twice as long


def linear(inputs: int, outputs: int, *, bias: bool = True, dtype, rngs: nnx.Rngs) -> Linear:
    """Return a dense layer [..., inputs] -> [..., outputs] in one dtype."""
    layer = Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        dot_general=dot_general,
        kernel_init=_kernel_init(rngs),
        rngs=rngs,
    )
    layer.kernel_scale = nnx.data(None)
    return layer


def in_int8(
    graph: nnx.GraphDef, shapes: Params, *, tokens: bool = False
) -> tuple[nnx.GraphDef, Params]:
    """Return a network whose dense layers have kernels of int8, and the shapes of its parameters.

    Nothing is computed: `sd_tpu.checkpoint.weights` rounds what it reads for such shapes
    (decision 0030). With `tokens` these are rounded, too, before the large layers of blocks, which
    are those that chips divide (decision 0039).
    """
    network: Any = nnx.merge(graph, shapes)
    for path, layer in nnx.iter_modules(network):
        if isinstance(layer, Linear):
            name = ".".join(map(str, path))
            layer.to_int8(tokens=tokens and network.tensor_parallel_plan.divides(name))
    return nnx.graphdef(network), nnx.to_pure_dict(nnx.state(network, nnx.Param))


def conv(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    *,
    strides: int = 1,
    padding=None,
    bias: bool = True,
    by=convolve,
    kernel_init: nnx.Initializer | None = None,
    dtype,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """Return a convolution [B, H, W, inputs] -> [B, H', W', outputs], padded by kernel // 2.

    It is computed by `convolve`, or `by` another function with its arguments.
    """
    if padding is None:
        padding = kernel // 2
    if isinstance(padding, int):
        padding = ((padding, padding), (padding, padding))
    return nnx.Conv(
        inputs,
        outputs,
        (kernel, kernel),
        strides=strides,
        padding=padding,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        conv_general_dilated=by,
        kernel_init=kernel_init or _kernel_init(rngs),
        rngs=rngs,
    )


def pointwise(
    inputs: int, outputs: int, *, kernel_init: nnx.Initializer | None = None, dtype, rngs: nnx.Rngs
) -> nnx.Conv:
    """Return a convolution of single pixels [B, H, W, inputs] -> [B, H, W, outputs], as a product.

    Given a convolution, the TPU compiler changes the layout before and after it. It is `conv` that
    is faster where the input was joined from two parts, which a convolution reads as they are
    (decision 0005).
    """
    return nnx.Conv(
        inputs,
        outputs,
        (1, 1),
        dtype=dtype,
        param_dtype=dtype,
        conv_general_dilated=_product,
        kernel_init=kernel_init or _kernel_init(rngs),
        rngs=rngs,
    )


@kept
def _product(x: jax.Array, kernel: jax.Array, *_, **__) -> jax.Array:
    return matmul(x, kernel[0, 0])


class Downsample(nnx.Module):
    """Halves height and width. Padding 0, the autoencoder's, means a pixel below and right."""

    def __init__(self, channels: int, padding: int, *, dtype, rngs: nnx.Rngs):
        self.conv = conv(
            channels,
            channels,
            strides=2,
            padding=padding or ((0, 1), (0, 1)),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, H/2, W/2, C]."""
        return self.conv(x)


class Upsample(nnx.Module):
    """Doubles height and width by nearest neighbour, then convolves."""

    def __init__(self, channels: int, *, dtype, rngs: nnx.Rngs):
        self.conv = conv(channels, channels, by=convolve_enlarged, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, 2H, 2W, C]."""
        return self.conv(x)


class ResnetBlock(nnx.Module):
    """Two normalized convolutions beside a residual, shifted by the time embedding if given."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        groups: int,
        eps: float,
        time_channels: int | None = None,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.norm1 = GroupNorm(inputs, groups, eps, **layer)
        self.conv1 = conv(inputs, outputs, **layer)
        if time_channels is not None:
            self.time_emb_proj = linear(time_channels, outputs, **layer)
        self.norm2 = GroupNorm(outputs, groups, eps, **layer)
        self.conv2 = conv(outputs, outputs, **layer)
        if inputs != outputs:
            self.conv_shortcut = conv(inputs, outputs, 1, **layer)

    def __call__(self, x: jax.Array, time: jax.Array | None = None) -> jax.Array:
        """x [B, H, W, inputs], time [B, time_channels] or None -> [B, H, W, outputs]."""
        h = self.conv1(nnx.silu(self.norm1(x)))
        if time is not None:
            h += self.time_emb_proj(nnx.silu(time))[:, None, None, :]
        h = self.conv2(nnx.silu(self.norm2(h)))
        return h + (self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x)


def timestep_encoding(
    timesteps: jax.Array, size: int, flip_sin_to_cos: bool = True, freq_shift: int = 0
) -> jax.Array:
    """Sinusoids of a timestep (Ho et al. 2020, arXiv:2006.11239): [B] -> [B, size] float32."""
    half = size // 2
    frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / (half - freq_shift))
    angles = timesteps.astype(jnp.float32)[:, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate((cos, sin) if flip_sin_to_cos else (sin, cos), axis=-1)


class TimestepEmbedding(nnx.Module):
    """Two dense layers on the sinusoids, to which a projected condition may be added, with SiLU or
    another activation between them."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        condition: int | None = None,
        *,
        activation: Callable[[jax.Array], jax.Array] = nnx.silu,
        bias: bool = True,
        dtype,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.linear_1 = linear(inputs, outputs, bias=bias, dtype=dtype, rngs=rngs)
        self.linear_2 = linear(outputs, outputs, bias=bias, dtype=dtype, rngs=rngs)
        if condition is not None:
            self.cond_proj = linear(condition, inputs, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array | None = None) -> jax.Array:
        """x [B, inputs], condition [B, condition] or None -> [B, outputs]."""
        if condition is not None:
            x = x + self.cond_proj(condition)
        return self.linear_2(self.activation(self.linear_1(x)))


def pack(latents: jax.Array) -> jax.Array:
    """Pack latents in patches of two by two: [B, h, w, C] -> [B, h/2, w/2, 4 C], each channel's
    four in a row."""
    batch, height, width, channels = latents.shape
    apart = latents.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return apart.transpose(0, 1, 3, 5, 2, 4).reshape(batch, height // 2, width // 2, -1)


def unpack(patches: jax.Array) -> jax.Array:
    """Undo `pack`: [B, h, w, 4 C] -> [B, 2 h, 2 w, C]."""
    batch, height, width, _ = patches.shape
    apart = patches.reshape(batch, height, width, -1, 2, 2).transpose(0, 1, 4, 2, 5, 3)
    return apart.reshape(batch, 2 * height, 2 * width, -1)


class ImagePrompt(NamedTuple):
    """Keys and values beside the context, with a softmax of their own, and their scale.

    Ye et al. 2023, arXiv:2308.06721: decoupled cross-attention.
    """

    keys: jax.Array  # [B, T, channels]
    values: jax.Array  # of the same tokens
    scale: jax.Array  # [B]


class Attention(nnx.Module):
    """Multi-head attention of tokens to a context, or to themselves.

    With `groups` it is the autoencoder's form: a group norm first and a residual around it.
    """

    def __init__(
        self,
        channels: int,
        context_channels: int,
        heads: int,
        *,
        bias: bool = False,
        groups: int | None = None,
        eps: float = 1e-6,
        dtype,
        rngs: nnx.Rngs,
    ):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.heads = heads
        if groups is not None:
            self.group_norm = GroupNorm(channels, groups, eps, **layer)
        self.to_q = linear(channels, channels, bias=bias, **layer)
        self.to_k = linear(context_channels, channels, bias=bias, **layer)
        self.to_v = linear(context_channels, channels, bias=bias, **layer)
        self.to_out = nnx.List([linear(channels, channels, **layer)])

    def __call__(
        self,
        x: jax.Array,
        context: jax.Array | None = None,
        image_prompt: ImagePrompt | None = None,
    ) -> jax.Array:
        """x [B, N, channels], context [B, M, context_channels] (x itself if None) -> like x."""
        normed = self.group_norm(x) if hasattr(self, "group_norm") else x
        context = normed if context is None else context
        q, k, v = self.to_q(normed), self.to_k(context), self.to_v(context)
        attended = attention(q, k, v, self.heads)
        if image_prompt is not None:
            scale = image_prompt.scale[:, None, None].astype(q.dtype)
            attended += scale * attention(q, image_prompt.keys, image_prompt.values, self.heads)
        out = self.to_out[0](attended)
        return x + out if hasattr(self, "group_norm") else out


def gelu(x: jax.Array) -> jax.Array:
    """Exact (Hendrycks and Gimpel 2016, arXiv:1606.08415), as PyTorch writes it.

    `jax.nn.gelu` takes erfc, which keeps more digits where the result is all but 0. With it a
    transformer takes 11% more cycles on a v5e (decision 0004).
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + lax.erf(wide * 0.5**0.5))).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Take the tanh form of GELU in float32; keeps the dtype of x."""
    return nnx.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def swiglu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """Scale x by the float32 SiLU of a gate like it (Shazeer 2020, arXiv:2002.05202)."""
    return nnx.silu(gate.astype(jnp.float32)).astype(gate.dtype) * x


ACTIVATIONS = {"gelu": gelu, "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x)}
