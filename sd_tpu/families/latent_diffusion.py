"""Latent diffusion (Rombach et al. 2021, arXiv:2112.10752) by a UNet, the base of its families."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt8

from sd_tpu.checkpoint.config import (
    CheckpointError,
    SafetyCheckerConfig,
    TinyVAEConfig,
    UNetConfig,
    VAEConfig,
)
from sd_tpu.checkpoint.ip_adapter import IPAdapterConfig
from sd_tpu.checkpoint.weights import Params, architecture
from sd_tpu.families.clip_model import ClipModel
from sd_tpu.families.latent_model import Arrays, Parts
from sd_tpu.models import StableDiffusionSafetyChecker, UNet2DConditionModel
from sd_tpu.models.platform import only_if
from sd_tpu.models.unet import guidance_encoding

CHECKER = "safety_checker"  # a component that not all checkpoints have, and not all want
# The components that a ControlNet and an IP-Adapter are of the parameters that they draw with.
CONTROL, REFERENCE = "controlnet", "ip_adapter"
# Channels that a UNet takes beside the latents' four, and what it does with them.
OTHER_INPUTS = {5: "draws with a depth map", 8: "edits pictures, as InstructPix2Pix does"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentDiffusion(ClipModel):
    """The UNet and the autoencoder of a family, without their parameters.

    Its conditions are the text embeddings, "text", and whatever else the UNet takes, by the names
    that `UNet2DConditionModel` has for it.

    Where a ControlNet steers it, inputs hold the control picture as "control", uint8 [H, W, 3],
    and conditions what the ControlNet makes of it, [1, h, w, F].

    With an IP-Adapter, inputs hold the tokens that it makes of a reference picture as "reference",
    [2, T, d], and its "reference_scale", f32 [1], and conditions what the UNet takes under these
    names.
    """

    unet: nnx.GraphDef
    unet_config: UNetConfig
    safety_checker: nnx.GraphDef | None = None
    controlnet: nnx.GraphDef | None = None  # whose parameters are the component CONTROL
    control_size: tuple[int, int] = (0, 0)  # height and width of control pictures
    ip_adapter: nnx.GraphDef | None = None  # whose parameters are the component REFERENCE
    ip_adapter_config: IPAdapterConfig | None = None

    denoiser: ClassVar = "unet"

    @classmethod
    def build(
        cls, configs: Mapping[str, Any], dtype, *, token_downsampling: int = 1, previewer: str = ""
    ) -> tuple[Any, Params]:
        """Build the networks and the shapes of their parameters, as `LatentModel.build`.

        Args:
            configs: as there.
            dtype: of the parameters.
            token_downsampling: as the UNet takes it; 1 is exact.
            previewer: "", "vae", or "preview_vae" for a tiny autoencoder among the configs.

        Raises:
            ValueError: the downsampling is no whole number from 1.
            CheckpointError: a part is not supported, or they do not fit one another.
        """
        unet = UNetConfig.from_dict(configs["unet"])
        parts, fields = cls.text_encoders(configs, unet, dtype)
        autoencoders, vae = cls.autoencoders(configs, dtype)
        _check_channels(unet, vae)
        parts["unet"] = architecture(
            UNet2DConditionModel, unet, dtype=dtype, token_downsampling=token_downsampling
        )
        parts |= autoencoders
        if CHECKER in configs:
            checker = SafetyCheckerConfig.from_dict(configs[CHECKER])
            parts[CHECKER] = architecture(StableDiffusionSafetyChecker, checker, dtype=dtype)
        return cls.joined(
            parts,
            **fields,
            unet_config=unet,
            vae_config=vae,
            dtype=jnp.dtype(dtype),
            token_downsampling=token_downsampling,
            previewer=previewer,
        )

    @classmethod
    def text_encoders(
        cls, configs: Mapping[str, Any], unet: UNetConfig, dtype
    ) -> tuple[Parts, dict[str, Any]]:
        """Build the text encoders for `build`; each family's own.

        Args:
            configs: as `build` takes them.
            unet: the UNet's config.
            dtype: of the parameters.

        Returns:
            Them by component, and the family's own fields.

        Raises:
            CheckpointError: one is not supported, or they do not fit the UNet.
        """
        raise NotImplementedError

    @property
    def model_index(self) -> dict[str, Any]:
        """model_index.json, but for the scheduler."""
        index = super().model_index
        if not self.mask_channels:
            return index
        # diffusers asks of such checkpoints whether they are older than 0.6.
        return {
            **index,
            "_diffusers_version": "0.42.0",
            "_class_name": index["_class_name"].replace("Pipeline", "InpaintPipeline"),
        }

    # --- sizes and networks ---------------------------------------------------------------------

    @property
    def mask_channels(self) -> int:
        """Channels that the UNet takes after the latents': 5 in inpainting checkpoints, else 0."""
        return self.unet_config.in_channels - self.vae_config.latent_channels

    @property
    def size_unit(self) -> int:
        """Pixels of which the sides of pictures are multiples."""
        # The UNet halves the latents at every level but the last and must return to their size.
        return self.downscale * 2 ** (len(self.unet_config.block_out_channels) - 1)

    def with_controlnet(
        self, controlnet: nnx.GraphDef, height: int, width: int
    ) -> "LatentDiffusion":
        """Return these networks with a ControlNet, for control pictures of this size."""
        return dataclasses.replace(self, controlnet=controlnet, control_size=(height, width))

    @property
    def uses_controlnet(self) -> bool:
        """Whether it has a ControlNet."""
        return self.controlnet is not None

    def with_ip_adapter(
        self, ip_adapter: nnx.GraphDef, config: IPAdapterConfig
    ) -> "LatentDiffusion":
        """Return these networks with an IP-Adapter of this config."""
        return dataclasses.replace(self, ip_adapter=ip_adapter, ip_adapter_config=config)

    # --- conditions beside the texts ------------------------------------------------------------

    @property
    def guidance_size(self) -> int | None:
        """Width of the embedding of the guidance scale that the UNet takes; None if it takes none.

        UNets of latent consistency models take one (Luo et al. 2023, arXiv:2310.04378).
        """
        return self.unet_config.time_cond_proj_dim

    def cfg_scale(self, guidance: Any) -> Any:
        """Return the scale of classifier-free guidance: 1, none, if the UNet takes the scale."""
        return 1.0 if self.guidance_size else guidance

    @property
    def added_input_shapes(self) -> Arrays:
        """Shapes of the inputs beside the texts.

        They are those of `guidance_inputs`, the control picture, and the reference picture's tokens
        with their scale.
        """
        shapes = {}
        if self.guidance_size:
            shapes["guidance"] = jax.ShapeDtypeStruct((2,), jnp.float32)
        if self.uses_controlnet:
            shapes["control"] = jax.ShapeDtypeStruct((*self.control_size, 3), jnp.uint8)
        if config := self.ip_adapter_config:
            shapes["reference"] = jax.ShapeDtypeStruct(
                (2, config.tokens, config.cross_attention_dim), self.dtype
            )
            shapes["reference_scale"] = jax.ShapeDtypeStruct((1,), jnp.float32)
        return shapes

    @property
    def added_cond_shapes(self) -> Arrays:
        """Shapes of the conditions that `encode_added_cond` returns."""
        shapes = {}
        if self.guidance_size:
            shapes["timestep_cond"] = jax.ShapeDtypeStruct((2, self.guidance_size), jnp.float32)
        if self.uses_controlnet:
            h, w = (side // self.downscale for side in self.control_size)
            features = self.unet_config.block_out_channels[0]
            shapes["control"] = jax.ShapeDtypeStruct((1, h, w, features), self.dtype)
        if config := self.ip_adapter_config:
            shapes["reference"] = [
                2 * (jax.ShapeDtypeStruct((2, config.tokens, width), self.dtype),)
                for width in config.widths
            ]
            shapes["reference_scale"] = jax.ShapeDtypeStruct((1,), jnp.float32)
        return shapes

    def guidance_inputs(self, guidance: float) -> Arrays:
        """Return the guidance as an input, where the UNet takes it."""
        return {"guidance": np.full(2, guidance, np.float32)} if self.guidance_size else {}

    def encode_added_cond(self, params: Params, inputs: Arrays) -> Arrays:
        """Encode the inputs beside the texts into conditions."""
        added = {}
        if self.guidance_size:
            # As in diffusers: in the paper's scale no guidance is 0, where people write 1.
            added["timestep_cond"] = guidance_encoding(inputs["guidance"] - 1, self.guidance_size)
        if self.uses_controlnet:
            picture = inputs["control"][None].astype(jnp.float32) / 255
            added["control"] = _merged(self.controlnet, params[CONTROL]).embed(picture)
        if self.ip_adapter_config:
            adapter = _merged(self.ip_adapter, params[REFERENCE])
            added["reference"] = adapter(inputs["reference"])
            added["reference_scale"] = inputs["reference_scale"]
        return added

    # --- on the devices -------------------------------------------------------------------------

    def denoise(
        self,
        params: Params,
        x: Float[Array, "b h w taken"],
        t: Float[Array, " b"],
        cond: Arrays,
        strength: Float[Array, " b"] | None = None,
    ) -> Float[Array, "b h w C"]:
        """Return the UNet's output."""
        control = self._control(params, x, t, cond, strength) if self.uses_controlnet else None
        return nnx.merge(self.unet, params["unet"])(x, t, cond["text"], cond, control)

    def _control(
        self, params: Params, x: jax.Array, t: jax.Array, cond: Arrays, strength: Any
    ) -> list[jax.Array]:
        """Return the ControlNet's additions to the UNet's maps, where any picture wants them."""
        scale = strength.astype(self.dtype)[:, None, None, None]

        def steer(latents: jax.Array) -> list[jax.Array]:
            network = _merged(self.controlnet, params[CONTROL])
            return [
                scale * each for each in network(latents, t, cond["text"], cond["control"], cond)
            ]

        # A mask's channels are not for it.
        return only_if(jnp.any(strength != 0), steer, x[..., : self.vae_config.latent_channels])

    @property
    def checks_safety(self) -> bool:
        """Whether `is_unsafe` can tell."""
        return self.safety_checker is not None

    def is_unsafe(self, params: Params, picture: UInt8[Array, "H W 3"]) -> Bool[Array, ""]:
        """Whether the checkpoint's safety checker flags a picture as not safe for work."""
        return _merged(self.safety_checker, params[CHECKER])(picture[None])[0]


def _merged(graph: nnx.GraphDef | None, params: Params) -> Any:
    """Return the network of a component that the model has."""
    assert graph is not None
    return nnx.merge(graph, params)


def _check_channels(unet: UNetConfig, vae: VAEConfig | TinyVAEConfig) -> None:
    channels = vae.latent_channels
    if unet.out_channels != channels or unet.in_channels not in (channels, 2 * channels + 1):
        other = OTHER_INPUTS.get(unet.in_channels)
        raise CheckpointError(
            f"The UNet takes {unet.in_channels} channels and gives {unet.out_channels}, the "
            f"autoencoder's latents have {vae.latent_channels}"
            f"{f': this model {other}' if other else ''}. Only models that draw or fill in "
            "pictures are supported: they take the latents, or the latents twice and a mask."
        )
