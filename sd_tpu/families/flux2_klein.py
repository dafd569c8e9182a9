"""FLUX.2 klein (Black Forest Labs 2026), distilled and base: a transformer trained by flow
matching, and a Qwen3 language model of which the states of three layers are the text."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from sd_tpu.checkpoint.config import (
    Flux2TransformerConfig,
    PipelineConfig,
    Qwen3Config,
    TinyVAEConfig,
    VAEConfig,
)
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families.latent_model import Arrays, Parts, check_channels
from sd_tpu.families.qwen_model import QwenModel
from sd_tpu.families.qwen_tokenizer import ANSWERS
from sd_tpu.models import Flux2Transformer2DModel, Qwen3Model
from sd_tpu.models.flux2_transformer import References, picture_positions
from sd_tpu.sampling.schedule import FlowSchedule, Schedule

TOKENS = 512  # of each text, padding among them, which counts
TIME = 10  # between the positions of one reference picture and of the next
# Tokens of reference pictures that programs are compiled for: powers of two, from those of 256x256
# pixels to those of 1024x1024, and multiples of the latter.
FEWEST, WHOLE = 256, 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flux2Klein(QwenModel):
    """The networks without their parameters: a `sd_tpu.families.model.Model`.

    Conditions are the states [2, 512, 3 D] of three of the language model's layers as "text".

    With reference pictures, inputs hold their tokens as "reference", f32 [R, C], their positions,
    i32 [R, 4], as "reference_positions", and how many of the R there are, i32, as
    "reference_count"; conditions are the same, led by 1 for both texts.
    """

    reference_tokens: int = 0  # R; 0 is no reference pictures

    transformer: nnx.GraphDef
    text_encoder: nnx.GraphDef
    transformer_config: Flux2TransformerConfig
    text_config: Qwen3Config
    distilled: bool  # into few steps without guidance

    trained: ClassVar = 64
    buckets: ClassVar = (TOKENS,)
    taken: ClassVar = (9, 18, 27)
    template: ClassVar = ANSWERS
    whole: ClassVar = False
    max_references: ClassVar = 10
    pipelines: ClassVar = ("Flux2KleinPipeline",)
    index: ClassVar = {
        "_class_name": "Flux2KleinPipeline",
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    decoders: ClassVar = ()  # those for it decode latents before they are patches

    @staticmethod
    def defaults(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the published numbers of the distilled model or of the other."""
        if configs["model_index"].get("is_distilled"):
            return {"steps": 4, "guidance": 1.0}
        return {"steps": 50, "guidance": 4.0}

    @classmethod
    def networks(
        cls, configs: Mapping[str, Any], vae: VAEConfig | TinyVAEConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoder and the transformer, as `LatentModel.networks`."""
        transformer = Flux2TransformerConfig.from_dict(configs["transformer"])
        text = Qwen3Config.from_dict(configs["text_encoder"])
        index = PipelineConfig.from_dict(configs["model_index"])
        cls.check_states(text, transformer.joint_attention_dim)
        check_channels(transformer.in_channels, transformer.out_channels, vae)
        parts = {
            "text_encoder": architecture(Qwen3Model, text, layers=cls.taken[-1], dtype=dtype),
            "transformer": architecture(Flux2Transformer2DModel, transformer, dtype=dtype),
        }
        return parts, dict(
            transformer_config=transformer, text_config=text, distilled=bool(index.is_distilled)
        )

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def size_unit(self) -> int:
        """Pixels of which the sides of pictures are multiples."""
        return self.downscale

    @property
    def shape_key(self) -> tuple[str, ...]:
        """Key that tells these programs from those without reference pictures."""
        tokens = self.reference_tokens
        return (*super().shape_key, *([f"{tokens} tokens of reference pictures"] if tokens else []))

    @property
    def added_input_shapes(self) -> Arrays:
        """Shapes of the inputs of reference pictures."""
        return self._reference_shapes((), jnp.float32)

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns."""
        shape = 2, TOKENS, self.transformer_config.joint_attention_dim
        return {"text": jax.ShapeDtypeStruct(shape, self.dtype)}

    @property
    def added_cond_shapes(self) -> Arrays:
        """Shapes of the conditions of reference pictures."""
        return self._reference_shapes((1,), self.dtype)

    def _reference_shapes(self, lead: tuple[int, ...], dtype: Any) -> Arrays:
        """Return the shapes of reference pictures' tokens, if there are any."""
        if not (tokens := self.reference_tokens):
            return {}
        return {
            "reference": jax.ShapeDtypeStruct((*lead, tokens, self.vae_config.channels), dtype),
            "reference_positions": jax.ShapeDtypeStruct((*lead, tokens, 4), jnp.int32),
            "reference_count": jax.ShapeDtypeStruct(lead, jnp.int32),
        }

    def for_inputs(self, inputs: Arrays) -> Any:
        """Return these networks for texts and reference pictures as large as in the inputs."""
        count = int(inputs.get("reference_count", 0))
        whole = -(-count // WHOLE) * WHOLE
        tokens = whole if count > WHOLE else max(FEWEST, 1 << (count - 1).bit_length())
        model = super().for_inputs(inputs)
        return dataclasses.replace(model, reference_tokens=tokens if count else 0)

    def reference_inputs(self, sizes: Sequence[tuple[int, int]]) -> Arrays:
        """Return the inputs for reference pictures of these sizes, but for what they show.

        Args:
            sizes: heights and widths, in pixels.
        """
        positions = [
            picture_positions(height // self.downscale, width // self.downscale, number * TIME)
            for number, (height, width) in enumerate(sizes, 1)
        ]
        joined = np.concatenate(positions)
        return {"reference_positions": joined, "reference_count": np.int32(len(joined))}

    def cfg_scale(self, guidance: float) -> float:
        """Return the scale of classifier-free guidance, which a distilled model does not take."""
        return 1.0 if self.distilled else guidance

    def schedule_of(self, schedule: Schedule, height: int, width: int, steps: int) -> Schedule:
        """Return the schedule with the shift for a picture of this size in so many steps.

        The logarithm of the shift is that of Black Forest Labs' code, from a fit to two numbers of
        steps.
        """
        if not (isinstance(schedule, FlowSchedule) and schedule.config.use_dynamic_shifting):
            return schedule
        tokens = height * width // self.downscale**2
        by_200 = 0.00016927 * tokens + 0.45666666
        by_10 = 8.73809524e-05 * tokens + 1.89833333
        slope = (by_200 - by_10) / 190
        mu = by_200 if tokens > 4300 else slope * steps + by_200 - 200 * slope
        return dataclasses.replace(schedule, shift=math.exp(mu))

    # --- on the devices -------------------------------------------------------------------------

    def encode_added_cond(self, params: Params, inputs: Arrays) -> Arrays:
        """Return the tokens of reference pictures, for both texts."""
        return {name: inputs[name][None] for name in self.added_input_shapes}

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode both texts; padding sees the text alone, and is part of it."""
        encoder = nnx.merge(self.text_encoder, params["text_encoder"])
        states = encoder.states(inputs["ids"], self.taken, inputs["lengths"])
        return {"text": jnp.concatenate(states, axis=-1)}

    def encode_reference(
        self, params: Params, image: Float[Array, "H W 3"]
    ) -> Float[Array, "tokens C"]:
        """Return the tokens of a reference picture in [-1, 1], row by row."""
        return self.encode(params, image).reshape(-1, self.vae_config.channels)

    def evaluate(self, network: Any, x: jax.Array, t: jax.Array, cond: Arrays) -> jax.Array:
        """Return the transformer's output, the velocity."""
        references = None
        if self.reference_tokens:
            references = References(
                cond["reference"], cond["reference_positions"], cond["reference_count"]
            )
        return network(x, t, cond["text"], references)
