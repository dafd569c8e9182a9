"""The base of all families: an autoencoder's latents, and texts that CLIP reads."""

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from sd_tpu.checkpoint.config import CheckpointError, Config, TinyVAEConfig, VAEConfig
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families import text
from sd_tpu.families.t5_tokenizer import T5Tokenizer
from sd_tpu.families.text import PromptOptions
from sd_tpu.families.tokenizer import Tokenizer
from sd_tpu.models import AutoencoderKL, AutoencoderTiny

Arrays = dict[str, Any]  # of NumPy on the host, of JAX on the devices; or their shapes
Parts = dict[str, tuple[nnx.GraphDef, Params]]  # by component

AUTOENCODERS: dict[type[Config], type[nnx.Module]] = {
    VAEConfig: AutoencoderKL,
    TinyVAEConfig: AutoencoderTiny,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentModel:
    """The autoencoder and the CLIP text encoders of a family, without their parameters."""

    vae: nnx.GraphDef
    vae_config: VAEConfig | TinyVAEConfig
    dtype: jnp.dtype
    token_downsampling: int = 1  # of the denoiser's keys and values; 1 is exact
    chunks: int = 1  # of 77 tokens that each text has
    texts: int = 2  # the negative prompt and the prompt, and a third that this is on the way to
    preview_vae: nnx.GraphDef | None = None  # a tiny autoencoder beside that of the pictures
    previewer: str = ""  # the component whose decoder draws previews, if any does

    autoencoder: ClassVar = "vae"
    denoiser: ClassVar[str]  # the component that takes noise out of latents
    encoders: ClassVar[dict[str, str]]  # the folder of the tokenizer of each CLIP text encoder
    t5_tokenizers: ClassVar[dict[str, str]] = {}  # likewise of its T5 encoders
    optional: ClassVar[tuple[str, ...]] = ()  # components that a checkpoint may leave out
    decoders: ClassVar[tuple[str, ...]]  # names of tiny decoders of its latents
    index: ClassVar[dict[str, Any]]  # model_index.json, but for what a checkpoint may choose
    defaults: ClassVar[dict[str, Any]] = {}  # what a model card says that says nothing else

    @staticmethod
    def mended(configs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's configs as the constructor of its diffusers pipeline mends them."""
        return dict(configs)

    @classmethod
    def tokenizers(cls, parts: Container[str], read: Callable[[str, type], Any]) -> dict[str, Any]:
        """Read the tokenizers of the encoders that are among the parts, by folder.

        Args:
            parts: names of components.
            read: (folder, class of tokenizers) -> tokenizer.
        """
        kinds = ((Tokenizer, cls.encoders), (T5Tokenizer, cls.t5_tokenizers))
        return {
            folder: read(folder, kind)
            for kind, folders in kinds
            for part, folder in folders.items()
            if part in parts
        }

    @staticmethod
    def autoencoders(
        configs: Mapping[str, Any], dtype, *, upcasts: bool
    ) -> tuple[Parts, VAEConfig | TinyVAEConfig]:
        """Build the autoencoder, and a tiny one for previews if there is one.

        Args:
            configs: the contents of a checkpoint's config.json files, by folder.
            dtype: of the parameters.
            upcasts: the autoencoder is float32 where its config has force_upcast.

        Returns:
            Them by component, and the config of the first.

        Raises:
            CheckpointError: one is not supported.
        """
        vae = vae_config(configs["vae"])
        wide = upcasts and isinstance(vae, VAEConfig) and vae.force_upcast
        if isinstance(vae, VAEConfig):
            vae = vae.model_copy(update={"force_upcast": wide})
        kind = AUTOENCODERS[type(vae)]
        parts = {"vae": architecture(kind, vae, dtype=jnp.float32 if wide else dtype)}
        if "preview_vae" in configs:
            tiny = TinyVAEConfig.from_dict(configs["preview_vae"])
            parts["preview_vae"] = architecture(AutoencoderTiny, tiny, dtype=dtype)
        return parts, vae

    @classmethod
    def joined(cls, parts: Parts, **fields: Any) -> tuple[Self, Params]:
        """Return a model of these parts and fields, and the shapes of its parameters."""
        graphs: dict[str, Any] = {module: graph for module, (graph, _) in parts.items()}
        return cls(**graphs, **fields), {module: shapes for module, (_, shapes) in parts.items()}

    @property
    def model_index(self) -> dict[str, Any]:
        """model_index.json, but for the scheduler."""
        return {**self.index, "vae": ["diffusers", AUTOENCODERS[type(self.vae_config)].__name__]}

    # --- sizes and shapes -----------------------------------------------------------------------

    @property
    def downscale(self) -> int:
        """Pixels of a picture along one side for each latent along that side."""
        return self.vae_config.downscale

    @property
    def size_unit(self) -> int:
        """Pixels of which the sides of pictures are multiples; each family's own."""
        raise NotImplementedError

    @property
    def mask_channels(self) -> int:
        """Channels that the denoiser takes after the latents'."""
        return 0

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (h, w, C) of a picture's latents; raises ValueError for an impossible size."""
        unit = self.size_unit
        if min(height, width) < unit or height % unit or width % unit:
            raise ValueError(
                f"A picture of {width}x{height} is not possible: this model makes pictures whose "
                f"sides are multiples of {unit}."
            )
        return height // self.downscale, width // self.downscale, self.vae_config.latent_channels

    # --- prompts --------------------------------------------------------------------------------

    def for_inputs(self, inputs: Arrays) -> Any:
        """Return these networks for as many texts of as many chunks as in the inputs."""
        texts, chunks, _ = inputs[next(iter(self.encoders))]["ids"].shape
        return dataclasses.replace(self, texts=texts, chunks=chunks)

    @property
    def shape_key(self) -> tuple[str, ...]:
        """Key that tells these programs from those for one prompt of one chunk."""
        long, way = [f"{self.chunks} chunks"], ["between prompts"]
        return (*long * (self.chunks > 1), *way * (self.texts > 2))

    @property
    def text_input_shapes(self) -> Arrays:
        """Shapes of the inputs that `text_inputs` returns."""
        encoders = {
            part: text.input_shapes(self.chunks, width, self.texts)
            for part, width in self.text_widths.items()
        }
        return {**encoders, "clip_skip": jax.ShapeDtypeStruct((), jnp.int32)}

    def text_inputs(
        self,
        tokenizers: Mapping[str, Tokenizer],
        texts: Sequence[str],
        options: PromptOptions,
        clip_skip: int,
        to_prompt: str,
        share: float,
    ) -> Arrays:
        """Return the encoders' inputs of a negative prompt, a prompt and a journey's second prompt.

        Args:
            tokenizers: the checkpoint's, by folder.
            texts: the negative prompt and the prompt.
            options: of prompts.
            clip_skip: the layer that embeddings are taken from, the last being 1.
            to_prompt: the prompt that this one is on the way to, or "".
            share: of the way to it.
        """
        if to_prompt and share:
            return {
                **self.text_inputs(tokenizers, [*texts, to_prompt], options, clip_skip, "", 0.0),
                "share": np.float32(share),
            }
        of = {part: tokenizers[folder] for part, folder in self.encoders.items()}
        return {
            **text.encoder_inputs(of, self.text_widths, texts, options),
            "clip_skip": np.int32(clip_skip),
        }

    def plain_text_inputs(self, *texts: np.ndarray) -> Arrays:
        """Return the encoders' inputs of ids of one chunk without emphasis.

        Args:
            texts: ids [77] i32, or [E, 77] for E encoders, of each text.
        """
        ids = np.stack(texts).reshape(len(texts), len(self.encoders), -1)
        encoders = {
            part: text.plain_inputs(ids[:, number], width)
            for number, (part, width) in enumerate(self.text_widths.items())
        }
        return {**encoders, "clip_skip": np.int32(1)}

    # --- what a family may have beside ----------------------------------------------------------

    @property
    def uses_controlnet(self) -> bool:
        """Whether it has a ControlNet."""
        return False

    @property
    def checks_safety(self) -> bool:
        """Whether `is_unsafe` can tell."""
        return False

    def is_unsafe(self, params: Params, picture: UInt8[Array, "H W 3"]) -> Bool[Array, ""]:
        """Whether a picture is flagged as not safe for work; of models that check."""
        raise NotImplementedError

    def cfg_scale(self, guidance: Any) -> Any:
        """Return the scale of classifier-free guidance: 1, none, if the networks take the scale."""
        return guidance

    # --- on the devices -------------------------------------------------------------------------

    def encode(self, params: Params, image: Float[Array, "H W 3"]) -> Float[Array, "h w C"]:
        """Return the autoencoder's likeliest latents of a picture in [-1, 1]."""
        encoded = nnx.merge(self.vae, params["vae"]).encode(image[None])
        mean = encoded if isinstance(self.vae_config, TinyVAEConfig) else encoded[0]
        return mean[0]

    def decode(self, params: Params, latent: Float[Array, "h w C"]) -> Float[Array, "H W 3"]:
        """Return the autoencoder's picture, about [-1, 1]."""
        return nnx.merge(self.vae, params["vae"]).decode(latent[None])[0]

    def preview(self, params: Params, latent: Float[Array, "h w C"]) -> Float[Array, "H W 3"]:
        """Return the previewer's picture, about [-1, 1], of latents that need not be finished."""
        decoder = nnx.merge(getattr(self, self.previewer), params[self.previewer])
        return decoder.decode(latent[None])[0]

    @property
    def text_widths(self) -> Mapping[str, int]:
        """The hidden size of each text encoder, by component; each family's own."""
        raise NotImplementedError


def vae_config(config: Mapping[str, Any]) -> VAEConfig | TinyVAEConfig:
    """Parse an autoencoder's config.json; raises CheckpointError if it is not supported."""
    name = str(config.get("_class_name") or "AutoencoderKL").removeprefix("Flax")
    for schema, network in AUTOENCODERS.items():
        if network.__name__ == name:
            found: Any = schema.from_dict(dict(config))
            return found
    supported = " and ".join(network.__name__ for network in AUTOENCODERS.values())
    raise CheckpointError(f"The autoencoder {name} is not supported; there are {supported}.")
