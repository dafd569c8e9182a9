"""The safety checker of Stable Diffusion 1 and 2: CLIP's image half, and what it compares with.

What diffusers has as StableDiffusionSafetyChecker (described by Rando et al. 2022,
arXiv:2210.04610): a picture is not safe whose embedding is nearer to that of one of some concepts
than the concept's threshold. Near to a special concept, all thresholds are a little lower.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from sd_tpu.checkpoint.config import SafetyCheckerConfig
from sd_tpu.models.layers import linear
from sd_tpu.models.vision_encoder import VisionTransformer, normalized

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
        """Return how much nearer each picture [H, W, 3] u8 is to each concept than its threshold.

        They are cosines of three digits: [B, CONCEPTS] f32.
        """
        return self.scores_of(preprocess(pictures, self.side))

    def scores_of(self, prepared: Float[Array, "b side side 3"]) -> Float[Array, "b concepts"]:
        """Return the scores of pictures from `preprocess`."""
        embedded = self.visual_projection(self.vision_model.pooled(prepared.astype(self.dtype)))
        special = jnp.round(
            _cosines(embedded, self.special_care_embeds[...])
            - self.special_care_embeds_weights[...],
            3,
        )
        lower = SPECIAL_CARE * jnp.any(special > 0, axis=-1, keepdims=True)
        return jnp.round(
            _cosines(embedded, self.concept_embeds[...]) - self.concept_embeds_weights[...] + lower,
            3,
        )


def preprocess(
    pictures: UInt8[Array, "b height width 3"], side: int
) -> Float[Array, "b side side 3"]:
    """Prepare pictures as transformers' CLIPImageProcessor does.

    The shorter side is brought to `side` by cubic interpolation, the middle cut out, the colours
    normalized.
    """
    batch, height, width, _ = pictures.shape
    scale = side / min(height, width)
    size = (int(height * scale + 1e-6), int(width * scale + 1e-6))
    x = jax.image.resize(pictures.astype(jnp.float32), (batch, *size, 3), "cubic")
    top, left = ((long - side) // 2 for long in size)
    return normalized(jnp.clip(jnp.round(x), 0, 255)[:, top : top + side, left : left + side])


def _cosines(embedded: jax.Array, concepts: jax.Array) -> jax.Array:
    """Return the cosines of each of [B, D] and each of [C, D]: [B, C] f32."""
    embedded, concepts = (x.astype(jnp.float32) for x in (embedded, concepts))
    norms = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (embedded, concepts))
    embedded, concepts = (x / norm for x, norm in zip((embedded, concepts), norms, strict=True))
    return embedded @ concepts.T
