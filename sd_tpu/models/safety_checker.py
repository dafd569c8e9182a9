"""The safety checker of Stable Diffusion 1 and 2: CLIP's image half, and what it compares with.

What diffusers has as StableDiffusionSafetyChecker (described by Rando et al. 2022,
arXiv:2210.04610): a picture is not safe whose embedding is nearer to that of one of some concepts
than the concept's threshold. Near to a special concept, all thresholds are a little lower.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from sd_tpu.checkpoint.config import SafetyCheckerConfig, VisionEncoderConfig
from sd_tpu.models.layers import LayerNorm, conv, linear
from sd_tpu.models.text_encoder import Encoder

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training pictures in [0, 1], by colour
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
SPECIAL_CARE = 0.01  # by which thresholds are lower near to a special concept
CONCEPTS, SPECIAL = 17, 3


class StableDiffusionSafetyChecker(nnx.Module):
    """Whether pictures are not safe for work."""

    def __init__(self, config: SafetyCheckerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.side, self.dtype = config.vision_config.image_size, dtype
        width, size = config.vision_config.hidden_size, config.projection_dim
        self.vision_model = VisionTransformer(config.vision_config, dtype=dtype, rngs=rngs)
        self.visual_projection = linear(width, size, bias=False, dtype=dtype, rngs=rngs)
        self.concept_embeds = nnx.Param(jnp.ones((CONCEPTS, size), dtype))
        self.special_care_embeds = nnx.Param(jnp.ones((SPECIAL, size), dtype))
        # The thresholds: in bfloat16 they would be off by more than many of them are apart.
        self.concept_embeds_weights = nnx.Param(jnp.ones(CONCEPTS, jnp.float32))
        self.special_care_embeds_weights = nnx.Param(jnp.ones(SPECIAL, jnp.float32))

    def __call__(self, pictures: UInt8[Array, "b height width 3"]) -> Bool[Array, " b"]:
        """pictures [B, H, W, 3] u8 -> [B], whether each is not safe for work."""
        return jnp.any(self.scores(pictures) > 0, axis=-1)

    def scores(self, pictures: UInt8[Array, "b height width 3"]) -> Float[Array, "b concepts"]:
        """How much nearer each picture [H, W, 3] u8 is to each concept than its threshold, as
        cosines: [B, CONCEPTS] f32."""
        x = preprocess(pictures, self.side).astype(self.dtype)
        found = self.visual_projection(self.vision_model(x))
        special = (_cosines(found, self.special_care_embeds[...])
                   - self.special_care_embeds_weights[...])
        lower = SPECIAL_CARE * jnp.any(special > 0, axis=-1, keepdims=True)
        return (_cosines(found, self.concept_embeds[...])
                - self.concept_embeds_weights[...] + lower)


class VisionTransformer(nnx.Module):
    """The image half of CLIP (Radford et al. 2021, arXiv:2103.00020): patches and one class token
    through encoder layers, between two norms."""

    def __init__(self, config: VisionEncoderConfig, *, dtype, rngs: nnx.Rngs):
        layer = dict(dtype=dtype, rngs=rngs)
        size, eps = config.hidden_size, config.layer_norm_eps
        self.embeddings = PatchEmbeddings(config, **layer)
        self.pre_layrnorm = LayerNorm(size, eps, **layer)  # spelled so in every checkpoint
        self.encoder = Encoder(config, causal=False, **layer)
        self.post_layernorm = LayerNorm(size, eps, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Pictures as `preprocess` makes them -> the class token at the end, [B, hidden_size]."""
        return self.post_layernorm(self.encoder(self.pre_layrnorm(self.embeddings(x)))[-1][:, 0])


class PatchEmbeddings(nnx.Module):
    """A class token and linear maps of patches, with learned positions added."""

    def __init__(self, config: VisionEncoderConfig, *, dtype, rngs: nnx.Rngs):
        size, patch = config.hidden_size, config.patch_size
        self.class_embedding = nnx.Param(jnp.ones(size, dtype))
        self.patch_embedding = conv(3, size, patch, strides=patch, padding=0, bias=False,
                                    dtype=dtype, rngs=rngs)
        self.position_embedding = nnx.Embed(1 + (config.image_size // patch) ** 2, size,
                                            dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, side, side, 3] -> [B, 1 + patches, hidden_size]."""
        patches = self.patch_embedding(x)
        patches = patches.reshape(len(x), -1, patches.shape[-1])
        first = jnp.broadcast_to(self.class_embedding[...], (len(x), 1, patches.shape[-1]))
        return jnp.concatenate([first, patches], axis=1) + self.position_embedding.embedding[...]


def preprocess(pictures: UInt8[Array, "b height width 3"],
               side: int) -> Float[Array, "b side side 3"]:
    """What transformers' CLIPImageProcessor makes of pictures: the shorter side is brought to
    `side` by cubic interpolation, the middle cut out, the colours normalized."""
    batch, height, width, _ = pictures.shape
    scale = side / min(height, width)
    size = (int(height * scale + 1e-6), int(width * scale + 1e-6))
    x = jax.image.resize(pictures.astype(jnp.float32), (batch, *size, 3), "cubic")
    top, left = ((long - side) // 2 for long in size)
    x = jnp.clip(jnp.round(x), 0, 255)[:, top:top + side, left:left + side] / 255
    return (x - jnp.array(MEAN)) / jnp.array(DEVIATION)


def _cosines(found: jax.Array, concepts: jax.Array) -> jax.Array:
    """Of each of [B, D] and each of [C, D]: [B, C] f32."""
    found, concepts = (x.astype(jnp.float32) for x in (found, concepts))
    norms = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (found, concepts))
    found, concepts = (x / norm for x, norm in zip((found, concepts), norms, strict=True))
    return found @ concepts.T
