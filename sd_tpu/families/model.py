"""The protocol of a model that slots and programs rely on, whatever its family."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, UInt8

from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.text import DEFAULTS, Count, PromptOptions
from sd_tpu.sampling.schedule import Schedule

Shapes = PyTree[jax.ShapeDtypeStruct]


@runtime_checkable
class Model(Protocol):
    """An architecture: its networks without their parameters, and how they fit together.

    Two checkpoints of one architecture have equal models, and one compiled program serves both. A
    slot has two texts, the negative prompt and the prompt; `cond`, the conditions that the networks
    take, is a tree of arrays that only the family can read. Each array leads with the texts, or
    with 1 for both.
    """

    def __hash__(self) -> int:
        """Hash what makes it equal to others."""

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the arithmetic, and of parameters except for parts that need float32."""

    @property
    def previewer(self) -> str:
        """The component of its parameters that draws previews; "" if none does."""

    @property
    def downscale(self) -> int:
        """Pixels of a picture along one side for each latent along that side."""

    @property
    def size_unit(self) -> int:
        """Pixels of which the sides of pictures are multiples."""

    @property
    def input_shapes(self) -> dict[str, Shapes]:
        """Shapes of a picture's inputs: those of its texts, and those beside them."""

    @property
    def text_input_shapes(self) -> dict[str, Shapes]:
        """Shapes of the inputs that `encode_text` takes, by name."""

    @property
    def text_cond_shapes(self) -> dict[str, Shapes]:
        """Shapes of the arrays that `encode_text` returns, by name."""

    @property
    def entry_shapes(self) -> dict[str, Shapes]:
        """Shapes of the inputs of a slot: what is made of its texts, and the inputs beside them."""

    @property
    def cond_shapes(self) -> dict[str, Shapes]:
        """Shapes of a slot's cond."""

    @property
    def shape_key(self) -> tuple[str, ...]:
        """Key that tells its programs from those for inputs of the usual shapes."""

    @property
    def text_widths(self) -> Mapping[str, int]:
        """The hidden size of each text encoder, by component."""

    @property
    def mask_channels(self) -> int:
        """Channels that a UNet takes beside the latents': 0, or 1 + C.

        They are a mask and the latents of the kept part of a picture.
        """

    @property
    def uses_controlnet(self) -> bool:
        """Whether it takes a control picture; slots say how strongly in each row."""

    @property
    def max_references(self) -> int:
        """Reference pictures that it takes by itself.

        A model that takes any has the methods `reference_inputs` and `encode_reference` too.
        """

    @property
    def checks_safety(self) -> bool:
        """Whether it flags pictures that are not safe for work."""

    @property
    def autoencoder(self) -> str:
        """The component of its parameters that `encode` and `decode` use."""

    @property
    def adapter_shapes(self) -> Shapes:
        """Shapes of the low-rank factors that each slot brings; none if LoRAs are merged."""

    def adapter_divisions(self, divisions: Params) -> PyTree:
        """Return how these factors are divided over the chips of a replica, as parameters are."""

    def adapted(self, params: Params, factors: PyTree) -> Params:
        """Return the parameters for `denoise` with factors beside, of as many pictures as it
        takes."""

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (h, w, C) of a picture's latents; raises ValueError for an impossible size."""

    def schedule_of(self, schedule: Schedule, height: int, width: int, steps: int) -> Schedule:
        """Return the schedule of a picture of this size in so many steps."""

    def count(self, tokenizers: Mapping[str, Any], prompt: str, options: PromptOptions) -> Count:
        """Count a prompt's tokens, and find the part of it that is cut.

        Raises:
            PromptError: it cannot be drawn.
            CheckpointError: an embedding that it names cannot be used.
        """

    def prompt_inputs(
        self,
        tokenizers: Mapping[str, Any],
        prompt: str,
        negative_prompt: str = "",
        *,
        options: PromptOptions = DEFAULTS,
        height: int,
        width: int,
        **settings: Any,
    ) -> PyTree:
        """Return the inputs by name, on the host, in NumPy's arrays.

        Args:
            tokenizers: the checkpoint's, by folder.
            prompt: what is wanted.
            negative_prompt: what is not.
            options: what both may say.
            height: of the picture, in pixels.
            width: of the picture, in pixels.
            settings: guidance, which some networks are told, and the text encoders' layer that is
                taken, the last being 1 (`clip_skip`).

        Raises:
            PromptError: a prompt that cannot be drawn.
            CheckpointError: an embedding that a prompt names cannot be used.
        """

    def cfg_scale(self, guidance: float) -> float:
        """Return the scale of classifier-free guidance: 1, none, if networks take the scale."""

    def for_inputs(self, inputs: PyTree) -> "Model":
        """Return these networks for inputs of these shapes.

        A long prompt has longer inputs, and programs of its own.
        """

    def text_parts(self) -> frozenset[str]:
        """Return the components of parameters that `encode_text` takes, and nothing else does."""

    def encode_text(self, params: Params, inputs: Any) -> dict[str, Any]:
        """Encode the texts of one slot: the part of its cond that is of them alone."""

    def encode_prompt(self, params: Params, inputs: Any) -> dict[str, Any]:
        """Encode all inputs of one slot into its cond."""

    def encode_added_cond(self, params: Params, inputs: Any) -> dict[str, Any]:
        """Encode the inputs beside the texts: the rest of the cond of one slot."""

    def denoise(
        self,
        params: Params,
        x: Float[Array, "b h w taken"],
        t: Float[Array, " b"],
        cond: PyTree,
        strength: Float[Array, " b"] | None = None,
    ) -> Array:
        """Return the networks' outputs [b, h, w, C] f32.

        Args:
            params: by component.
            x: latents of unit variance, with the mask's channels after them.
            t: timesteps of training, fractions allowed.
            cond: of one text each, b of them in place of the two.
            strength: of each one's control, for models with a ControlNet.
        """

    def encode(self, params: Params, image: Float[Array, "H W 3"]) -> Float[Array, "h w C"]:
        """Return the likeliest latents of a picture in [-1, 1]."""

    def decode(self, params: Params, latent: Float[Array, "h w C"]) -> Float[Array, "H W 3"]:
        """Return the picture of clean latents, about [-1, 1]."""

    def preview(self, params: Params, latent: Float[Array, "h w C"]) -> Float[Array, "H W 3"]:
        """Return the previewer's picture of latents that need not be finished, about [-1, 1]."""

    def is_unsafe(self, params: Params, picture: UInt8[Array, "H W 3"]) -> Bool[Array, ""]:
        """Whether a picture is flagged as not safe for work; of models that check."""
