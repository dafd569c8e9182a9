"""IP-Adapter (Ye et al. 2023, arXiv:2308.06721): what a UNet attends to of a reference picture,
beside its text."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from sd_tpu.checkpoint.ip_adapter import IPAdapterConfig
from sd_tpu.models.attention import attention
from sd_tpu.models.layers import LayerNorm, gelu, linear
from sd_tpu.models.vision_encoder import CLIPVisionModelWithProjection, normalized

Pairs = list[tuple[jax.Array, jax.Array]]  # keys and values of each transformer block


class IPAdapterModel(nnx.Module):
    """CLIP's look at a picture, tokens made of it, and what each attention makes of these."""

    def __init__(self, config: IPAdapterConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.dtype, self.resamples = dtype, config.resampler is not None
        assert config.image_encoder is not None
        self.image_encoder = CLIPVisionModelWithProjection(config.image_encoder, **layer)
        self.image_proj = (Resampler if self.resamples else ImageProjection)(config, **layer)
        # diffusers numbers self-attention as well.
        self.ip_adapter = nnx.Dict(
            {
                str(2 * number + 1): nnx.Dict(
                    {
                        name: linear(config.cross_attention_dim, width, bias=False, **layer)
                        for name in ("to_k_ip", "to_v_ip")
                    }
                )
                for number, width in enumerate(config.widths)
            }
        )

    def __call__(self, tokens: Float[Array, "2 t d"]) -> Pairs:
        """Return the keys and values of each transformer block for tokens [2, T, d].

        They are for the negative prompt and the prompt, [2, T, width], in the order of
        `UNetConfig.attending_widths`.
        """
        layers = (self.ip_adapter[str(2 * number + 1)] for number in range(len(self.ip_adapter)))
        return [(each["to_k_ip"](tokens), each["to_v_ip"](tokens)) for each in layers]

    def tokens(self, picture: UInt8[Array, "side side 3"]) -> Float[Array, "2 t d"]:
        """Return the tokens of no picture, as diffusers has it, and of this one."""
        x = normalized(picture).astype(self.dtype)[None]
        if self.resamples:
            both = jnp.concatenate([jnp.zeros_like(x), x])
            return self.image_proj(self.image_encoder.vision_model.hidden_state(both, skip=1))
        found = self.image_encoder(x)
        return self.image_proj(jnp.concatenate([jnp.zeros_like(found), found]))


class ImageProjection(nnx.Module):
    """Tokens of CLIP's vector for a whole picture."""

    def __init__(self, config: IPAdapterConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        width = config.cross_attention_dim
        self.tokens = config.tokens
        assert config.image_encoder is not None
        self.proj = linear(config.image_encoder.projection_dim, config.tokens * width, **layer)
        self.norm = LayerNorm(width, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, projection_dim] -> [B, T, cross_attention_dim]."""
        return self.norm(self.proj(x).reshape(len(x), self.tokens, -1))


class Resampler(nnx.Module):
    """Tokens of CLIP's vectors for the patches: learned queries attend to them, layer by layer
    (Jaegle et al. 2021, arXiv:2103.03206; Alayrac et al. 2022, arXiv:2204.14198)."""

    def __init__(self, config: IPAdapterConfig, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        sizes = config.resampler
        assert sizes is not None and config.image_encoder is not None
        width = config.cross_attention_dim
        self.tokens = config.tokens  # tells those with other numbers of them apart
        self.latents = nnx.Param(jnp.ones((1, self.tokens, sizes.width), dtype))
        self.proj_in = linear(config.image_encoder.hidden_size, sizes.width, **layer)
        # Checkpoints number the layers of PyTorch's lists; its number 2 is a GELU.
        self.layers = nnx.List(
            [
                nnx.List(
                    [
                        PerceiverAttention(sizes.width, sizes.heads, **layer),
                        nnx.Dict(
                            {
                                "0": LayerNorm(sizes.width, **layer),
                                "1": linear(sizes.width, sizes.hidden, bias=False, **layer),
                                "3": linear(sizes.hidden, sizes.width, bias=False, **layer),
                            }
                        ),
                    ]
                )
                for _ in range(sizes.depth)
            ]
        )
        self.proj_out = linear(sizes.width, width, **layer)
        self.norm_out = LayerNorm(width, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, 1 + patches, hidden_size] -> [B, T, cross_attention_dim]."""
        x = self.proj_in(x)
        latents = jnp.broadcast_to(self.latents[...], (len(x), *self.latents.shape[1:]))
        for attend, feed in self.layers:
            latents = latents + attend(latents, x)
            latents = latents + feed["3"](gelu(feed["1"](feed["0"](latents))))  # ty: ignore[not-subscriptable]
        return self.norm_out(self.proj_out(latents))


class PerceiverAttention(nnx.Module):
    """Attention of latents to a picture's tokens and to themselves, each normed first."""

    def __init__(self, width: int, heads: int, *, dtype, rngs: nnx.Rngs):
        layer: dict[str, Any] = dict(bias=False, dtype=dtype, rngs=rngs)
        inner, self.heads = heads * IPAdapterConfig.HEAD, heads
        self.norm1 = LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = LayerNorm(width, dtype=dtype, rngs=rngs)
        self.to_q = linear(width, inner, **layer)
        self.to_kv = linear(width, 2 * inner, **layer)
        self.to_out = linear(inner, width, **layer)

    def __call__(self, latents: jax.Array, x: jax.Array) -> jax.Array:
        """latents [B, T, width], x [B, N, width] -> like latents."""
        latents = self.norm2(latents)
        seen = jnp.concatenate([self.norm1(x), latents], axis=1)
        keys, values = jnp.split(self.to_kv(seen), 2, axis=-1)
        return self.to_out(attention(self.to_q(latents), keys, values, self.heads))
