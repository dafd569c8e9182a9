"""FLUX.1 schnell and dev (Black Forest Labs 2024): a transformer that was trained by flow matching,
a T5 whose states are the text, and a CLIP text encoder of which one vector is taken."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sd_tpu.checkpoint.config import (
    CheckpointError,
    FluxTransformerConfig,
    PooledTextEncoderConfig,
    T5Config,
    TinyVAEConfig,
    VAEConfig,
)
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families import text
from sd_tpu.families.latent_model import (
    Arrays,
    LatentModel,
    Parts,
    check_channels,
    check_last_layer,
    check_t5,
    stems,
)
from sd_tpu.families.prompt import without_loras
from sd_tpu.families.t5_tokenizer import T5Tokenizer
from sd_tpu.families.text import DEFAULTS, Count, PromptOptions
from sd_tpu.families.tokenizer import LENGTH, Tokenizer
from sd_tpu.models import CLIPTextModel, FluxTransformer2DModel, T5EncoderModel
from sd_tpu.sampling.schedule import FlowSchedule, Schedule

CLIP, T5 = "text_encoder", "text_encoder_2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flux(LatentModel):
    """The networks without their parameters: a `sd_tpu.families.model.Model`.

    It has no use for negative prompts: a slot has one text, the same for both. Inputs are its token
    ids, i32 [1, 77] for CLIP and [1, T] for T5, by component; the guidance f32 [1] as "guidance"
    where the transformer takes it; and of a picture between two prompts the ids of both, [2, ...],
    and the "share" of the way f32 []. Conditions are T5's states [1, T, D] as "text", what CLIP
    gives for the whole text [1, P] as "pooled", and the guidance.
    """

    transformer: nnx.GraphDef
    text_encoder: nnx.GraphDef
    text_encoder_2: nnx.GraphDef
    transformer_config: FluxTransformerConfig
    text_config: PooledTextEncoderConfig
    texts: int = 1  # the prompt, and the one that it is on the way to

    denoiser: ClassVar = "transformer"
    trained: ClassVar = 128
    rounded: ClassVar = ("transformer", T5)
    flow: ClassVar = True
    even_sigmas: ClassVar = True
    pipelines: ClassVar = ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline")
    components: ClassVar = stems(CLIP, T5, "transformer")
    optional: ClassVar = (T5,)  # without which `networks` refuses a checkpoint in its own words
    index: ClassVar = {
        "_class_name": "FluxPipeline",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        CLIP: ["transformers", "CLIPTextModel"],
        T5: ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
    }
    decoders: ClassVar = ("taef1",)

    @staticmethod
    def defaults(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the published numbers of dev, which is told the guidance, or of schnell; and less
        noise for what dev draws larger, as its sigmas are shifted towards noise."""
        if configs["transformer"].get("guidance_embeds"):
            return {"steps": 28, "guidance": 3.5, "larger_strength": 0.25}
        return {"steps": 4, "guidance": 0.0}

    @classmethod
    def tokenizer_classes(cls) -> dict[str, tuple[str, type]]:
        """Return the folder and the class of each text encoder's tokenizer, by component."""
        return {CLIP: ("tokenizer", Tokenizer), T5: ("tokenizer_2", T5Tokenizer)}

    @classmethod
    def networks(
        cls, configs: Mapping[str, Any], vae: VAEConfig | TinyVAEConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoders and the transformer, as `LatentModel.networks`."""
        if T5 not in configs:
            raise CheckpointError(
                "FLUX.1 draws nothing without T5, its second text encoder: take a checkpoint that "
                "holds it with its tokenizer, and start without --no-t5."
            )
        transformer = FluxTransformerConfig.from_dict(configs["transformer"])
        clip = PooledTextEncoderConfig.from_dict(configs[CLIP])
        t5 = T5Config.from_dict(configs[T5])
        check_t5(t5, transformer.joint_attention_dim)
        pooled = transformer.pooled_projection_dim
        if clip.hidden_size != pooled or clip.max_position_embeddings < LENGTH:
            raise CheckpointError(
                f"The CLIP text encoder reads {clip.max_position_embeddings} tokens and gives "
                f"{clip.hidden_size} numbers; the transformer takes {pooled}, of {LENGTH} tokens."
            )
        channels = transformer.in_channels, transformer.out_channels or transformer.in_channels
        check_channels(channels[0] // 4, channels[1] // 4, vae)
        parts = {
            CLIP: architecture(CLIPTextModel, clip, dtype=dtype),
            T5: architecture(T5EncoderModel, t5, dtype=dtype),
            "transformer": architecture(FluxTransformer2DModel, transformer, dtype=dtype),
        }
        return parts, dict(transformer_config=transformer, text_config=clip)

    # --- shapes ---------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens that T5 reads of a text, padding among them, which counts."""
        return 512 if self.transformer_config.guidance_embeds else 256

    @property
    def shape_key(self) -> tuple[str, ...]:
        """Key that tells these programs from those for one prompt."""
        return ("between prompts",) * (self.texts > 1)

    @property
    def text_input_shapes(self) -> Arrays:
        """Shapes of the inputs that `encode_text` takes."""
        shapes = {
            part: jax.ShapeDtypeStruct((self.texts, length), jnp.int32)
            for part, length in ((CLIP, LENGTH), (T5, self.tokens))
        }
        if self.texts > 1:
            shapes["share"] = jax.ShapeDtypeStruct((), jnp.float32)
        return shapes

    @property
    def text_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_text` returns."""
        config = self.transformer_config
        text = 1, self.tokens, config.joint_attention_dim
        return {
            "text": jax.ShapeDtypeStruct(text, self.dtype),
            "pooled": jax.ShapeDtypeStruct((1, config.pooled_projection_dim), self.dtype),
        }

    @property
    def added_input_shapes(self) -> Arrays:
        """Shape of the guidance, where the transformer takes it."""
        if not self.transformer_config.guidance_embeds:
            return {}
        return {"guidance": jax.ShapeDtypeStruct((1,), jnp.float32)}

    @property
    def added_cond_shapes(self) -> Arrays:
        """Shape of the guidance, which stays as it is."""
        return self.added_input_shapes

    def for_inputs(self, inputs: Arrays) -> Any:
        """Return these networks for as many texts as in the inputs."""
        return dataclasses.replace(self, texts=len(inputs[T5]))

    def cfg_scale(self, guidance: float) -> float:
        """Return 1, no classifier-free guidance: the network of dev is told the scale itself."""
        return 1.0

    def schedule_of(self, schedule: Schedule, height: int, width: int, steps: int) -> Schedule:
        """Return the schedule with the shift for a picture of this size, if it depends on it."""
        if not (isinstance(schedule, FlowSchedule) and schedule.config.use_dynamic_shifting):
            return schedule
        return schedule.for_tokens(height * width // self.size_unit**2)

    # --- on the host ----------------------------------------------------------------------------

    def count(self, tokenizers: Mapping[str, Any], prompt: str, options: PromptOptions) -> Count:
        """Count a prompt's tokens, as `Model.count`: those of T5."""
        return tokenizers["tokenizer_2"].count(without_loras(prompt), self.tokens)

    def prompt_inputs(
        self,
        tokenizers: Mapping[str, Any],
        prompt: str,
        negative_prompt: str = "",
        *,
        options: PromptOptions = DEFAULTS,
        guidance: float = 1.0,
        clip_skip: int = 1,
        to_prompt: str = "",
        share: float = 0.0,
        **_: int | float,
    ) -> Arrays:
        """Return the encoders' inputs of a prompt, which is read as it is written, and the guidance
        where the transformer takes it; raises SentenceError for another layer of CLIP's."""
        check_last_layer(clip_skip)
        inputs: Arrays = {}
        texts = [without_loras(prompt)]
        if to_prompt and share:
            texts.append(without_loras(to_prompt))
            inputs["share"] = np.float32(share)
        if self.transformer_config.guidance_embeds:
            inputs["guidance"] = np.array([guidance], np.float32)
        return {
            **inputs,
            CLIP: tokenizers["tokenizer"](texts),
            T5: tokenizers["tokenizer_2"].ids(texts, self.tokens),
        }

    # --- on the devices -------------------------------------------------------------------------

    def encode_added_cond(self, params: Params, inputs: Arrays) -> Arrays:
        """Return the guidance, where the transformer takes it."""
        return {name: inputs[name] for name in self.added_input_shapes}

    def encode_text(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode the text by both encoders; no padding is masked in T5."""
        clip = nnx.merge(self.text_encoder, params[CLIP])
        t5 = nnx.merge(self.text_encoder_2, params[T5])
        pooled = clip.pooled(inputs[CLIP], self.text_config.eos_token_id)
        return {
            "text": text.between(t5(inputs[T5]), inputs),
            "pooled": text.between(pooled, inputs),
        }

    def evaluate(self, network: Any, x: jax.Array, t: jax.Array, cond: Arrays) -> jax.Array:
        """Return the transformer's output, the velocity."""
        return network(x, t, cond["text"], cond["pooled"], cond.get("guidance"))
