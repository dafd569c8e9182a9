"""Z-Image and Z-Image-Turbo (Z-Image Team 2025, arXiv:2511.22699): a transformer for text and
picture in one stream, trained by flow matching, and a Qwen3 language model that reads the text."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from sd_tpu.checkpoint.config import (
    CheckpointError,
    FlowSchedulerConfig,
    Qwen3Config,
    TinyVAEConfig,
    VAEConfig,
    ZImageTransformerConfig,
)
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families.latent_model import Arrays, Parts, check_channels
from sd_tpu.families.qwen_model import QwenModel
from sd_tpu.families.qwen_tokenizer import THINKS
from sd_tpu.models import Qwen3Model, ZImageTransformer2DModel

TURBO_SHIFT = 3.0  # of the distilled model's sigmas; the other's are shifted by 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZImage(QwenModel):
    """The networks without their parameters: a `sd_tpu.families.model.Model`.

    Conditions are the states [2, T, D] of the language model's last layer but one as "text", and
    the lengths.
    """

    transformer: nnx.GraphDef
    text_encoder: nnx.GraphDef
    transformer_config: ZImageTransformerConfig
    text_config: Qwen3Config

    trained: ClassVar = 128
    buckets: ClassVar = (128, 512)
    template: ClassVar = THINKS
    pipelines: ClassVar = ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline")
    index: ClassVar = {
        "_class_name": "ZImagePipeline",
        "text_encoder": ["transformers", "Qwen3Model"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    decoders: ClassVar = ("taef1",)

    @staticmethod
    def defaults(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the published numbers of the distilled model or of the other."""
        turbo = FlowSchedulerConfig.from_dict(configs["scheduler"]).constant_shift <= TURBO_SHIFT
        own = {"steps": 9, "guidance": 0.0} if turbo else {"steps": 50, "guidance": 4.0}
        return {**own, "larger_strength": 0.25}

    @classmethod
    def networks(
        cls, configs: Mapping[str, Any], vae: VAEConfig | TinyVAEConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoder and the transformer, as `LatentModel.networks`."""
        transformer = ZImageTransformerConfig.from_dict(configs["transformer"])
        text = Qwen3Config.from_dict(configs["text_encoder"])
        if text.hidden_size != transformer.cap_feat_dim:
            raise CheckpointError(
                f"The text encoder gives states of {text.hidden_size}, the transformer takes "
                f"{transformer.cap_feat_dim}."
            )
        if transformer.axes_lens[0] <= cls.buckets[-1] + 1:
            raise CheckpointError(
                f"The transformer has positions for {transformer.axes_lens[0]} tokens of text and "
                f"the picture after them; it should have more than {cls.buckets[-1] + 1}."
            )
        check_channels(transformer.in_channels, transformer.in_channels, vae)
        parts = {
            "text_encoder": architecture(Qwen3Model, text, dtype=dtype),
            "transformer": architecture(ZImageTransformer2DModel, transformer, dtype=dtype),
        }
        return parts, dict(transformer_config=transformer, text_config=text)

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def max_size(self) -> tuple[int, int]:
        """Largest height and width of pictures: those that the transformer has positions for."""
        _, rows, columns = self.transformer_config.axes_lens
        return self.size_unit * rows, self.size_unit * columns

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns."""
        width = self.text_config.hidden_size
        return {
            "text": jax.ShapeDtypeStruct((2, self.length, width), self.dtype),
            "lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
        }

    def cfg_scale(self, guidance: float) -> float:
        """Return the scale of classifier-free guidance: one more than people write here.

        The prediction is prompt + guidance * (prompt - negative), so that 0 is none.
        """
        return 1 + guidance

    # --- on the devices -------------------------------------------------------------------------

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode both texts."""
        encoder = nnx.merge(self.text_encoder, params["text_encoder"])
        (states,) = encoder.states(inputs["ids"], [self.text_config.num_hidden_layers - 1])
        return {"text": states, "lengths": inputs["lengths"]}

    def evaluate(self, network: Any, x: jax.Array, t: jax.Array, cond: Arrays) -> jax.Array:
        """Return the velocity; the network's time runs the other way, and so does its output."""
        return -network(x, 1 - t / 1000, cond["text"], cond["lengths"])
