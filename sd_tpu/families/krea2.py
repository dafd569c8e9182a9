"""Krea 2 (Krea 2026), distilled (Turbo) and base (Raw): a transformer trained by flow matching, and
the language model of Qwen3-VL, of which it fuses the states of twelve layers."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.checkpoint.config import (
    CheckpointError,
    Krea2TransformerConfig,
    PipelineConfig,
    Qwen3VLTextConfig,
    TinyVAEConfig,
    VAEConfig,
)
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families.latent_model import Arrays, Parts, check_channels
from sd_tpu.families.qwen_model import QwenModel
from sd_tpu.families.qwen_tokenizer import END, START, THINKS, Template
from sd_tpu.models import Krea2Transformer2DModel, Qwen3Model
from sd_tpu.sampling.schedule import FlowSchedule, Schedule

DISTILLED_SHIFT = math.exp(1.15)  # of its sigmas, for pictures of any size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Krea2(QwenModel):
    """The networks without their parameters: a `sd_tpu.families.model.Model`.

    Conditions are the states [2, T, 12 D] of twelve of the language model's layers as "text", and
    the lengths.
    """

    transformer: nnx.GraphDef
    text_encoder: nnx.GraphDef
    transformer_config: Krea2TransformerConfig
    distilled: bool  # into few steps, whose sigmas are shifted alike for all sizes

    trained: ClassVar = 128
    buckets: ClassVar = (128, 512)
    taken: ClassVar = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
    template: ClassVar = Template(
        f"{START}system\nDescribe the image by detailing the color, shape, size, texture, "
        f"quantity, text, spatial relationships of the objects and background:{END}\n"
        f"{THINKS.before}",
        THINKS.after,
        dropped=34,
        keeps_end=True,
    )
    whole: ClassVar = False
    pipelines: ClassVar = ("Krea2Pipeline",)
    index: ClassVar = {
        "_class_name": "Krea2Pipeline",
        "text_encoder": ["transformers", "Qwen3VLModel"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "Krea2Transformer2DModel"],
    }
    decoders: ClassVar = ()

    @staticmethod
    def defaults(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the published numbers of the distilled model or of the other."""
        distilled = configs["model_index"].get("is_distilled")
        own = {"steps": 8, "guidance": 0.0} if distilled else {"steps": 28, "guidance": 4.5}
        return {**own, "larger_strength": 0.25}

    @classmethod
    def networks(
        cls, configs: Mapping[str, Any], vae: VAEConfig | TinyVAEConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoder and the transformer, as `LatentModel.networks`."""
        transformer = Krea2TransformerConfig.from_dict(configs["transformer"])
        text = Qwen3VLTextConfig.from_dict(configs["text_encoder"])
        index = PipelineConfig.from_dict(configs["model_index"])
        if index.text_encoder_select_layers not in (None, cls.taken):
            raise CheckpointError(
                f"text_encoder_select_layers={list(index.text_encoder_select_layers)} is not "
                f"supported; expected {list(cls.taken)}."
            )
        cls.check_states(text, transformer.num_text_layers * transformer.text_hidden_dim)
        channels = transformer.in_channels // 4
        check_channels(channels, channels, vae)
        parts = {
            "text_encoder": architecture(Qwen3Model, text, layers=cls.taken[-1], dtype=dtype),
            "transformer": architecture(Krea2Transformer2DModel, transformer, dtype=dtype),
        }
        return parts, dict(transformer_config=transformer, distilled=bool(index.is_distilled))

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns."""
        width = self.transformer_config.num_text_layers * self.transformer_config.text_hidden_dim
        return {
            "text": jax.ShapeDtypeStruct((2, self.length, width), self.dtype),
            "lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
        }

    def cfg_scale(self, guidance: float) -> float:
        """Return the scale of classifier-free guidance: one more than people write, as in
        Z-Image."""
        return 1 + guidance

    def schedule_of(self, schedule: Schedule, height: int, width: int, steps: int) -> Schedule:
        """Return the schedule with the shift for a picture of this size, unless it is distilled."""
        if not (isinstance(schedule, FlowSchedule) and schedule.config.use_dynamic_shifting):
            return schedule
        if self.distilled:
            return dataclasses.replace(schedule, shift=DISTILLED_SHIFT)
        return schedule.for_tokens(height * width // self.size_unit**2)

    # --- on the devices -------------------------------------------------------------------------

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode both texts; what describes the task is read, and not passed on.

        In diffusers padding is before the end of a turn, and masked. Here it is after it.
        """
        encoder = nnx.merge(self.text_encoder, params["text_encoder"])
        dropped = self.template.dropped
        states = encoder.states(inputs["ids"], self.taken)
        text = jnp.concatenate([each[:, dropped:] for each in states], axis=-1)
        return {"text": text, "lengths": jnp.maximum(inputs["lengths"] - dropped, 0)}

    def evaluate(self, network: Any, x: jax.Array, t: jax.Array, cond: Arrays) -> jax.Array:
        """Return the transformer's output, the velocity."""
        return network(x, t / 1000, cond["text"], cond["lengths"])
