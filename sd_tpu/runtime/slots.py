"""The slots, and what is done to one device's share of them: encode, advance, decode.

A slot holds one image on its way. Slots agree on nothing but the model's architecture and the image
size: each has its own sampler table, step, guidance and random key, all of them data. Every array
leads with the slot axis.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped, UInt8, UInt32

from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.model import Model
from sd_tpu.models.factors import Scaled
from sd_tpu.models.platform import only_if
from sd_tpu.sampling.samplers import COLUMNS, HISTORY, Table, with_forecasts

MAX_ROWS = 1024  # of a sampler table: the 1000 training timesteps and PLMS's extra evaluation
NEGATIVE, POSITIVE = 0, 1  # order of the two texts of a slot
# Pictures that are encoded before an image enters: the start, its kept part, and the references,
# which are numbered, and whose encodings are together among the image's inputs under this name.
START_PICTURE, MASKED_PICTURE, REFERENCE_PICTURE = "start", "masked", "reference"
# The settings of a picture that `SlotInputs.of` takes, by their names.
SLOT_SETTINGS = (
    "guidance",
    "guidance_start",
    "guidance_stop",
    "cache_interval",
    "guidance_rescale",
    "control_scale",
    "control_start",
    "control_stop",
)
PictureSize = tuple[str, int, int]  # a picture's name without its number, height and width
IDLE, ALONE, GUIDED, FORECAST = range(4)  # kinds of rows, by what they evaluate
MOVING = ("latents", "history", "clean", "evaluated", "row")  # fields of `Slots` that rows change


@no_type_check  # JAX makes trees of it that hold other things than arrays
@flax.struct.dataclass
class Slots:
    """Images on their way; S slots, latents [h, w, C], table rows as `samplers.COLUMNS`."""

    latents: Float[Array, "S h w C"]
    history: Float[Array, "S H h w C"]  # newest first
    clean: Float[Array, "S h w C"]  # the last step's estimate of the finished latents
    cond: PyTree[Shaped[Array, "S ..."]]  # the family's conditions of both texts
    guidance: Float[Array, " S"]
    rescale: Float[Array, " S"]  # share of guided outputs rescaled to their prompt's deviation
    rows: Float[Array, "S R columns"]
    kinds: Int32[Array, "S R"]  # kind of each row, IDLE from `end` on
    row: Int32[Array, " S"]  # the next row
    end: Int32[Array, " S"]  # rows of this image; row == end is an idle slot
    key: UInt32[Array, "S 2"]
    init_latents: Float[Array, "S h w C"]  # clean latents of the start picture, with a mask
    noise: Float[Array, "S h w C"]  # first noise, under which init_latents are kept
    keep_mask: Float[Array, "S h w 1"]  # share of init_latents that every row keeps
    levels: Float[Array, "S R 2"]  # alpha and sigma after each row
    mask_channels: Float[Array, "S h w M"]  # mask's channels, if the model takes any
    strength: Float[Array, "S control"]  # of control in each row; R with a ControlNet
    evaluated: Float[Array, "S 2 h w C"]  # the last two of history that were not forecast
    adapters: PyTree[Shaped[Array, "S ..."]]  # low-rank factors, of the model's adapter_shapes


@dataclasses.dataclass(frozen=True)
class StartImage:
    """The start of an image, besides noise.

    Attributes:
        pictures: to be encoded, [H, W, 3] as `signed` takes them: START_PICTURE is the start, and
            MASKED_PICTURE the part of it that is kept, for models that take masks.
        under_noise: whether the image begins with the start picture under noise; else with noise
            alone.
        keep_mask: as in `Slots`, or 0.
        mask_channels: the mask [h, w, 1] for such models, 1 where they draw; or 0.
    """

    pictures: Mapping[str, np.ndarray]
    under_noise: bool = True
    keep_mask: np.ndarray | float = 0.0
    mask_channels: np.ndarray | float = 0.0

    @classmethod
    def of(
        cls,
        model: Model,
        latent_shape: tuple[int, int, int],
        image: np.ndarray | None,
        mask: np.ndarray | None,
        strength: float,
    ) -> "StartImage | None":
        """Return a model's start for a picture and a mask; None if there is nothing to start with.

        Args:
            model: a model that takes masks draws everything where there is none.
            latent_shape: (h, w, C).
            image: [H, W, 3] as `signed` takes it, or None.
            mask: float32 [H, W], 1 where something is drawn anew, or None for everywhere.
            strength: at 1 the masked part begins with noise alone, as in diffusers.
        """
        if image is None and not model.mask_channels:
            return None
        h, w, _ = latent_shape
        scale = model.downscale
        if mask is None:
            mask = np.ones((h * scale, w * scale), np.float32)
        drawn = _drawn_latents(mask, scale)[..., None]
        under_noise = image is not None and not (strength == 1 and (mask < 1).any())
        pictures = {} if image is None else {START_PICTURE: image}
        if not model.mask_channels:
            return cls(pictures, under_noise, keep_mask=1 - drawn)
        blank = np.zeros((h * scale, w * scale, 3), np.float32)
        masked = blank if image is None else signed(image) * (mask < 0.5)[..., None]
        return cls(
            {**(pictures if under_noise else {}), MASKED_PICTURE: masked},
            under_noise,
            mask_channels=(drawn >= 0.5).astype(np.float32),
        )


def signed(image: Shaped[np.ndarray, "H W 3"]) -> Float[np.ndarray, "H W 3"]:
    """Return a picture as autoencoders take it, float32 in [-1, 1]; it may be uint8 before."""
    return 2 * (image.astype(np.float32) / 255) - 1 if image.dtype == np.uint8 else image


def _drawn_latents(mask: Float[np.ndarray, "H W"], scale: int) -> Float[np.ndarray, "h w"]:
    """Return how much of each latent is drawn anew: as in diffusers, its first pixel in the mask.

    A mask so fine that all of those are black counts by its lightest pixels.
    """
    first = mask[::scale, ::scale]
    if first.any():
        return first
    height, width = mask.shape
    return mask.reshape(height // scale, scale, width // scale, scale).max(axis=(1, 3))


@no_type_check  # JAX makes trees of it that hold other things than arrays
@flax.struct.dataclass
class SlotInputs:
    """Inputs of an image that enters a slot, in NumPy's arrays; or, stacked, of all that enter.

    The first latents are start + spread * noise: pure noise from a seed (start 0), given latents
    (spread 0), or a picture under noise. In the last case `start` is the factor of its latents
    until `encoded` puts these in, and the noise too where it is not the key's. `pictures` holds all
    that is to be encoded.
    """

    inputs: PyTree  # as the family's `prompt_inputs` returns them; with what is made of the texts
    guidance: Float[Any, "*S"]
    rescale: Float[Any, "*S"]
    rows: Float[Any, "*S R columns"]
    kinds: Int32[Any, "*S R"]  # from `row_kinds`
    end: Int32[Any, "*S"]  # rows that the image has
    key: UInt32[Any, "*S 2"]
    start: Float[Any, "..."]  # [*S, h, w, C], or the number 0
    spread: Float[Any, "*S"]
    init_latents: Float[Any, "..."]  # as in `Slots`, or 0
    keep_mask: Float[Any, "..."]  # as in `Slots`, or 0
    mask_channels: Float[Any, "..."]  # as in `Slots`, or 0
    strength: Float[Any, "*S control"]  # from `control_strength`
    levels: Float[Any, "*S R 2"]
    fresh: Bool[Any, "*S"]  # False leaves the slot alone
    pictures: dict[str, Shaped[Any, "H W 3"]] | None = None
    noise: Float[Any, "h w C"] | None = None  # over a start picture
    # The picture's LoRAs by those layers in the model's adapter_shapes to which they bring factors
    adapters: Mapping[str, Sequence[Scaled]] | None = None

    @classmethod
    def of(
        cls,
        table: Table,
        inputs: PyTree,
        *,
        guidance: float,
        key: np.ndarray,
        latents: np.ndarray | None = None,
        start_image: StartImage | None = None,
        references: Sequence[np.ndarray] = (),
        guidance_start: float = 0.0,
        guidance_stop: float = 1.0,
        cache_interval: int = 1,
        guidance_rescale: float = 0.0,
        control_scale: float = 0.0,
        control_start: float = 0.0,
        control_stop: float = 1.0,
    ) -> Self:
        """Return the inputs of one image, with arrays of their own length.

        Args:
            table: of R rows.
            inputs: as the family's `prompt_inputs` returns them.
            guidance: the scale.
            key: [2] u32, of all noise.
            latents: [h, w, C], first latents of unit variance in place of the key's noise.
            start_image: the start of the image, besides noise.
            references: reference pictures, each uint8 [H, W, 3].
            guidance_start: `start` of `row_kinds`.
            guidance_stop: `stop` of `row_kinds`.
            cache_interval: `interval` of `row_kinds`.
            guidance_rescale: the `rescale` of `_guided`.
            control_scale: `scale` of `control_strength`; it and the next two only matter to models
                with a ControlNet.
            control_start: `start` of `control_strength`.
            control_stop: `stop` of `control_strength`.

        Raises:
            ValueError: the table is longer than MAX_ROWS.
        """
        if len(table.rows) > MAX_ROWS:
            raise ValueError(
                f"These steps take {len(table.rows)} evaluations of the model; at "
                f"most {MAX_ROWS} are possible."
            )
        scale, sigma = np.float32(guidance), table.init_noise_sigma
        start, spread = (0, sigma) if latents is None else (latents * sigma, 0)
        start_image = start_image or StartImage({}, under_noise=False)
        pictures = {
            **start_image.pictures,
            **{_reference(number): image for number, image in enumerate(references)},
        }
        if start_image.under_noise:
            start, spread = table.levels[0]
        noise = np.float32(latents) if start_image.under_noise and latents is not None else None
        kinds = row_kinds(
            table, float(scale), start=guidance_start, stop=guidance_stop, interval=cache_interval
        )
        table = with_forecasts(table, kinds == FORECAST)
        return cls(
            inputs=inputs,
            guidance=scale,
            rescale=np.float32(guidance_rescale),
            rows=table.rows.astype(np.float32),
            kinds=kinds,
            end=np.int32(len(kinds)),
            key=np.asarray(key),
            start=np.float32(start),
            spread=np.float32(spread),
            init_latents=np.float32(0),
            levels=np.vstack([table.levels[1:], [1, 0]], dtype="f4"),
            keep_mask=start_image.keep_mask,
            mask_channels=start_image.mask_channels,
            fresh=np.True_,
            strength=control_strength(
                len(kinds), control_scale, start=control_start, stop=control_stop
            ),
            pictures=pictures or None,
            noise=noise,
        )

    def with_texts(self, texts: Mapping[str, Any]) -> Self:
        """Return the inputs with what was made of the texts, by the names of their conditions."""
        return dataclasses.replace(self, inputs={**self.inputs, **texts})

    @property
    def picture_sizes(self) -> set[PictureSize]:
        """Kinds and sizes of the pictures that are to be encoded."""
        return {
            (kind_of_picture(name), *picture.shape[:2])
            for name, picture in (self.pictures or {}).items()
        }

    def encoded(self, latents: Mapping[str, np.ndarray]) -> Self:
        """Return the inputs with pictures replaced by their latents [h, w, C] or tokens.

        Args:
            latents: by the name of the picture; of reference pictures all or none.
        """
        left = {
            name: picture for name, picture in (self.pictures or {}).items() if name not in latents
        }
        slot_inputs = dataclasses.replace(self, pictures=left or None)
        if START_PICTURE in latents:
            slot_inputs = dataclasses.replace(
                slot_inputs,
                start=self.start * latents[START_PICTURE],
                init_latents=latents[START_PICTURE],
            )
            if self.noise is not None:
                slot_inputs = dataclasses.replace(
                    slot_inputs,
                    start=slot_inputs.start + self.spread * self.noise,
                    spread=np.float32(0),
                    noise=None,
                )
        if MASKED_PICTURE in latents:
            slot_inputs = dataclasses.replace(
                slot_inputs,
                mask_channels=np.concatenate(
                    [self.mask_channels, latents[MASKED_PICTURE]], axis=-1
                ),
            )
        numbers = range(sum(kind_of_picture(name) == REFERENCE_PICTURE for name in latents))
        if numbers:
            tokens = np.concatenate([latents[_reference(number)] for number in numbers])
            slot_inputs = dataclasses.replace(
                slot_inputs, inputs={**self.inputs, REFERENCE_PICTURE: tokens}
            )
        return slot_inputs


def _reference(number: int) -> str:
    """Return the name of the reference picture of this number."""
    return f"{REFERENCE_PICTURE} {number}"


def kind_of_picture(name: str) -> str:
    """Return a picture's name without its number."""
    return name.partition(" ")[0]


def stack_slot_inputs(
    model: Model,
    count: int,
    latent_shape: tuple[int, int, int],
    entering: Mapping[int, SlotInputs | None],
) -> SlotInputs:
    """Stack inputs of the slots with these numbers for `encode_slots`; their texts are encoded.

    None vacates a slot. The other slots are left alone.
    """

    def zeros(*shape, dtype=np.float32):
        return np.zeros((count, *shape), dtype)

    stacked = SlotInputs(
        inputs=jax.tree.map(lambda x: zeros(*x.shape, dtype=x.dtype), model.entry_shapes),
        guidance=zeros(),
        rescale=zeros(),
        rows=zeros(MAX_ROWS, len(COLUMNS)),
        kinds=zeros(MAX_ROWS, dtype=np.int32),
        end=zeros(dtype=np.int32),
        key=zeros(2, dtype=np.uint32),
        start=zeros(*latent_shape),
        spread=zeros(),
        init_latents=zeros(*latent_shape),
        keep_mask=zeros(*latent_shape[:2], 1),
        mask_channels=zeros(*latent_shape[:2], model.mask_channels),
        levels=zeros(MAX_ROWS, 2),
        strength=zeros(MAX_ROWS * model.uses_controlnet),
        fresh=zeros(dtype=bool),
    )
    for i, slot_inputs in entering.items():
        stacked.fresh[i] = True
        if slot_inputs is not None:
            padding = (0, MAX_ROWS - slot_inputs.end)  # zeros are IDLE
            slot_inputs = dataclasses.replace(
                slot_inputs,
                inputs=jax.tree.map(
                    _filled_up,
                    {name: slot_inputs.inputs[name] for name in model.entry_shapes},
                    model.entry_shapes,
                ),
                rows=np.pad(slot_inputs.rows, (padding, (0, 0))),
                levels=np.pad(slot_inputs.levels, (padding, (0, 0))),
                strength=np.pad(slot_inputs.strength, padding)
                if model.uses_controlnet
                else stacked.strength[i],
                kinds=np.pad(slot_inputs.kinds, padding),
                adapters=None,
            )
            jax.tree.map(
                lambda into, one, i=i: operator.setitem(into, i, one), stacked, slot_inputs
            )
    return stacked


def _filled_up(x: np.ndarray | np.generic, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Fill an array up with zeros behind its own numbers, to the shape of another."""
    filled = np.zeros(like.shape, like.dtype)
    filled[tuple(map(slice, np.shape(x)))] = x
    return filled


def empty_slots(model: Model, count: int, latent_shape: tuple[int, int, int]) -> Slots:
    """Idle slots."""

    def zeros(*shape, dtype=jnp.float32):
        return jnp.zeros((count, *shape), dtype)

    return Slots(
        latents=zeros(*latent_shape),
        history=zeros(HISTORY, *latent_shape),
        clean=zeros(*latent_shape),
        cond=jax.tree.map(lambda x: zeros(*x.shape, dtype=x.dtype), model.cond_shapes),
        guidance=zeros(),
        rescale=zeros(),
        rows=zeros(MAX_ROWS, len(COLUMNS)),
        kinds=zeros(MAX_ROWS, dtype=jnp.int32),
        row=zeros(dtype=jnp.int32),
        end=zeros(dtype=jnp.int32),
        key=zeros(2, dtype=jnp.uint32),
        init_latents=zeros(*latent_shape),
        noise=zeros(*latent_shape),
        keep_mask=zeros(*latent_shape[:2], 1),
        levels=zeros(MAX_ROWS, 2),
        mask_channels=zeros(*latent_shape[:2], model.mask_channels),
        strength=zeros(MAX_ROWS * model.uses_controlnet),
        evaluated=zeros(2, *latent_shape),
        adapters=jax.tree.map(lambda x: zeros(*x.shape, dtype=x.dtype), model.adapter_shapes),
    )


def encode_texts(model: Model, params: Params, inputs: PyTree, count: Int32[Array, " 1"]) -> PyTree:
    """Encode the texts of the first `count` slots' inputs, one after the other.

    Returns their conditions, and zeros behind them.
    """

    def one(i, made):
        encoded = model.encode_text(params, jax.tree.map(lambda x: x[i], inputs))
        return jax.tree.map(lambda into, x: into.at[i].set(x.astype(into.dtype)), made, encoded)

    texts = len(jax.tree.leaves(inputs)[0])
    zeros = jax.tree.map(lambda x: jnp.zeros((texts, *x.shape), x.dtype), model.text_cond_shapes)
    return lax.fori_loop(0, count[0], one, zeros)


def place_adapters(adapters: PyTree, entering: PyTree, slot: Int32[Array, " 1"]) -> PyTree:
    """Put factors [1, ...] of one picture among those of S slots [S, ...], unless `slot` is S."""
    return jax.tree.map(lambda into, one: into.at[slot].set(one, mode="drop"), adapters, entering)


def encode_slots(model: Model, params: Params, slots: Slots, entering: SlotInputs) -> Slots:
    """Fill the fresh slots with conditions, first latents and tables; leave the others alone."""
    occupied = entering.fresh & (entering.end > 0)
    order = jnp.argsort(~occupied, stable=True)

    def one(i, cond):
        inputs = jax.tree.map(lambda x: x[order[i]], entering.inputs)
        texts = {name: inputs[name] for name in model.text_cond_shapes}
        encoded = {**texts, **model.encode_added_cond(params, inputs)}
        return jax.tree.map(
            lambda into, x: into.at[order[i]].set(x.astype(into.dtype)), cond, encoded
        )

    cond = lax.fori_loop(0, occupied.sum(), one, slots.cond)
    draw = jax.vmap(partial(gaussian, shape=slots.latents.shape[1:]))
    noise = draw(entering.key)
    latents = entering.start + _column(entering.spread, noise) * noise
    filled = Slots(
        latents=latents,
        history=jnp.zeros_like(slots.history),
        clean=latents,
        cond=cond,
        guidance=entering.guidance,
        rescale=entering.rescale,
        rows=entering.rows,
        kinds=entering.kinds,
        row=jnp.zeros_like(slots.row),
        end=entering.end,
        key=entering.key,
        init_latents=entering.init_latents,
        # Drawn anew: if the one above left the program, it would be rounded before it is scaled,
        # and pictures would not be what they are without masks.
        noise=draw(lax.optimization_barrier(entering.key)),
        keep_mask=entering.keep_mask,
        levels=entering.levels,
        mask_channels=entering.mask_channels,
        strength=entering.strength,
        evaluated=jnp.zeros_like(slots.evaluated),
        adapters={},
    )
    adapters, slots = slots.adapters, dataclasses.replace(slots, adapters={})
    return dataclasses.replace(_where(entering.fresh, filled, slots), adapters=adapters)


def advance_slots(
    model: Model,
    params: Params,
    slots: Slots,
    n: int | Int32[Array, " S"],
    group: int,
    guided: bool = True,
) -> Slots:
    """Take up to n rows in every live slot, or n [S] in each.

    The model is evaluated in groups of `lanes_of` evaluations.

    A slot that takes none stays as it is and costs nothing. A guided row takes two evaluations, one
    of each text; one without guidance takes only the prompt's, so twice as many of those share a
    group; a forecast one takes none. Slots are packed anew wherever one of them stops or its rows
    change their kind, so the number of groups that run is the least possible. A slot's result does
    not depend on which others it is grouped with.

    Args:
        model: the networks.
        params: theirs.
        slots: S of them.
        n: rows.
        group: slots that are stepped together.
        guided: whether any row may be; if not, a group has no room for second texts.
    """
    stop = jnp.minimum(slots.row + n, slots.end)

    def denoise(factors, *arguments, **control):
        return model.denoise(model.adapted(params, factors), *arguments, **control)

    def go_on(slots):
        return jnp.any(slots.row < stop)

    def take_stretch(slots):
        kinds = jnp.take_along_axis(
            slots.kinds, slots.row[:, None], axis=1, mode="fill", fill_value=IDLE
        )[:, 0]
        kinds = jnp.where(slots.row < stop, kinds, IDLE)
        length = _rows_alike(slots, kinds, stop)
        evaluate = partial(_evaluate_row, denoise, guided)
        evaluated = _in_groups(
            evaluate, slots, kinds == ALONE, kinds == GUIDED, length, group, lanes_of(group, guided)
        )
        return _forecast(evaluated, kinds == FORECAST, length)

    return lax.while_loop(go_on, take_stretch, slots)


def lanes_of(group: int, guided: bool) -> int:
    """Return how many evaluations of the model a group takes at once."""
    return 2 * group if guided else group


def _rows_alike(
    slots: Slots, kinds: Int32[Array, " S"], stop: Int32[Array, " S"]
) -> Int32[Array, ""]:
    """Return the rows until a live slot reaches row `stop` or a row of another kind.

    `kinds` are those of the slots' next rows.
    """
    ahead = jnp.arange(MAX_ROWS) - slots.row[:, None]
    left = (stop - slots.row)[:, None]
    changes = (ahead > 0) & (slots.kinds != kinds[:, None])
    return jnp.min(jnp.where(changes, ahead, left), where=left > 0, initial=MAX_ROWS)


def _in_groups(
    take_row,
    slots: Slots,
    alone: Bool[Array, " S"],
    guided: Bool[Array, " S"],
    n,
    group: int,
    width: int,
) -> Slots:
    """Take n rows in the slots that are `alone` or `guided`, and in no others."""
    order = jnp.argsort(jnp.where(guided, 0, jnp.where(alone, 1, 2)), stable=True)
    guided_groups = -(-guided.sum() // group)
    groups = guided_groups + -(-alone.sum() // width)
    lanes = jnp.arange(width)  # of a guided group: the negative texts, then the prompts

    def run(g, slots):
        pairs = g < guided_groups
        at = jnp.where(
            pairs, g * group + lanes % group, guided.sum() + (g - guided_groups) * width + lanes
        )
        filled = at < jnp.where(pairs, guided.sum(), guided.sum() + alone.sum())
        index = jnp.where(filled, order[at], slots.row.size)
        texts = jnp.where(pairs & (lanes < group), NEGATIVE, POSITIVE)

        def of_lanes(tree, index):
            return jax.tree.map(lambda x: x.at[index].get(mode="clip"), tree)

        def take(_, part):
            where = index
            if slots.adapters:  # else those of all layers were copied at once, before the loop
                where, _ = lax.optimization_barrier((index, part.row))
            return take_row(part, of_lanes(slots.adapters, where), pairs)

        part = of_lanes(dataclasses.replace(slots, adapters={}), index)
        cond = jax.tree.map(lambda x: x[lanes, texts % x.shape[1]], part.cond)
        part = lax.fori_loop(0, n, take, part.replace(cond=cond))
        return dataclasses.replace(
            slots,
            **{
                name: getattr(slots, name).at[index].set(getattr(part, name), mode="drop")
                for name in MOVING
            },
        )

    return lax.fori_loop(0, groups, run, slots)


def _forecast(slots: Slots, skipped: Bool[Array, " S"], n) -> Slots:
    """Take n rows in the slots that skip evaluations, and in no others."""

    def one(_, slots):
        row = _next_row(slots)
        newest = row["u"] * slots.evaluated[:, 0] + row["v"] * slots.evaluated[:, 1]
        return _where(skipped, _moved(slots, row, newest, newest), slots)

    adapters, slots = slots.adapters, dataclasses.replace(slots, adapters={})
    forecast = lax.fori_loop(0, jnp.where(skipped.any(), n, 0), one, slots)
    return dataclasses.replace(forecast, adapters=adapters)


def is_guided(guidance):
    """Whether guidance of this scale is any: up to 1 the prompt alone counts, as in diffusers."""
    return guidance > 1


def row_kinds(
    table: Table,
    guidance: float | np.float32,
    *,
    start: float = 0.0,
    stop: float = 1.0,
    interval: int = 1,
) -> Int32[np.ndarray, " R"]:
    """Return the kind of each row of a table, by the evaluations that it takes.

    Rows evaluate both texts (GUIDED), the prompt ALONE, or nothing, where the model's output is
    FORECAST.

    Guidance in an interval: Kynkaanniemi et al. 2024, https://arxiv.org/abs/2404.07724.

    Args:
        table: of R rows.
        guidance: the scale.
        start: the share of the table's steps before guidance begins.
        stop: the share of its steps after which guidance ends. As in diffusers' guiders both are
            rounded down to whole steps; all rows of a step are alike.
        interval: every so many rows, counted from the last, the model is evaluated (decision
            0040). So it is in the first two rows of all, and in those in which guidance has begun
            or ended, as nothing before them says where its outputs go.
    """
    steps, rows = table.step[-1] + 1, np.arange(len(table.step))
    inside = (table.step >= int(start * steps)) & (table.step < int(stop * steps))
    guided = is_guided(guidance) & inside
    changes = np.diff(guided, prepend=~guided[0])
    since = rows - np.maximum.accumulate(rows * changes)
    forecast = (since > 1) & ((rows[-1] - rows) % interval > 0)
    return np.where(forecast, FORECAST, np.where(guided, GUIDED, ALONE)).astype(np.int32)


def control_strength(
    rows: int, scale: float, *, start: float = 0.0, stop: float = 1.0
) -> Float[np.ndarray, " R"]:
    """Return how strongly a control picture steers each of so many rows.

    It is the scale in rows that lie whole between two shares of all of them, as in diffusers, and 0
    in the others.
    """
    row = np.arange(rows)
    inside = (row / rows >= start) & ((row + 1) / rows <= stop)
    return np.where(inside, np.float32(scale), np.float32(0))


def _evaluate_row(
    denoise: Callable, guided: bool, lanes: Slots, adapters: PyTree, pairs: Bool[Array, ""]
) -> Slots:
    """Take one row of each lane's table: an evaluation of the model and the affine update.

    A lane is a slot with the cond of one of its texts only, and the factors of its adapters beside.
    Where `pairs`, which nothing is unless `guided`, the slots are there twice, first for their
    negative prompts.
    """
    row = _next_row(lanes)
    model_input = row["c_in"] * lanes.latents
    if lanes.mask_channels.shape[-1]:
        model_input = jnp.concatenate([model_input, lanes.mask_channels], axis=-1)
    control = (
        {}
        if not lanes.strength.size
        else {
            "strength": jnp.take_along_axis(
                lanes.strength, lanes.row[:, None], axis=1, mode="clip"
            )[:, 0]
        }
    )
    with jax.named_scope("evaluation"):  # told apart so in a profile
        out = denoise(adapters, model_input, row["t"].reshape(-1), lanes.cond, **control)
    if guided:
        out = jnp.where(pairs, _guided(out, lanes.guidance, lanes.rescale), out)
    newest = row["u"] * lanes.latents + row["v"] * out
    evaluated = jnp.concatenate([newest[:, None], lanes.evaluated[:, :1]], axis=1)
    return _moved(dataclasses.replace(lanes, evaluated=evaluated), row, newest, out)


def _next_row(slots: Slots) -> dict[str, Float[Array, "S 1 1 1"]]:
    """Return the next row of each slot, by the names of `samplers.COLUMNS`."""
    rows = jnp.take_along_axis(slots.rows, slots.row[:, None, None], axis=1, mode="clip")[:, 0]
    return {name: _column(rows[:, i], slots.latents) for i, name in enumerate(COLUMNS)}


def _moved(
    slots: Slots,
    row: Mapping[str, jax.Array],
    newest: Float[Array, "S h w C"],
    out: Float[Array, "S h w C"],
) -> Slots:
    """Apply the affine updates of a row to x, to its h and to the estimate of the clean latents."""
    x = slots.latents
    history = jnp.concatenate([newest[:, None], slots.history[:, :-1]], axis=1)
    keys = jax.vmap(jax.random.fold_in)(slots.key, slots.row)
    noise = jax.vmap(partial(gaussian, shape=x.shape[1:]))(keys)
    latents = row["a"] * x + row["s"] * noise
    for k in range(HISTORY):
        latents += row[f"b{k}"] * history[:, k]
    latents = jnp.where(slots.keep_mask > 0, _kept(slots, latents), latents)
    return dataclasses.replace(
        slots,
        latents=latents,
        history=history,
        row=slots.row + 1,
        clean=row["p"] * x + row["q"] * out,
    )


def _kept(lanes: Slots, latents: Float[Array, "lanes h w C"]) -> Float[Array, "lanes h w C"]:
    """Put the latents of a start picture back in where they are kept, under as much noise.

    Lugmayr et al. 2022, arXiv:2201.09865, without its resampling.
    """
    after = jnp.take_along_axis(lanes.levels, lanes.row[:, None, None], axis=1, mode="clip")[:, 0]
    alpha, sigma = (_column(after[:, i], latents) for i in range(2))
    noised = alpha * lanes.init_latents + sigma * lanes.noise
    return lanes.keep_mask * noised + (1 - lanes.keep_mask) * latents


def _guided(
    out: Float[Array, "lanes h w C"],
    guidance: Float[Array, " lanes"],
    rescale: Float[Array, " lanes"],
) -> Float[Array, "lanes h w C"]:
    """Guide pairs without a classifier (Ho and Salimans 2022, arXiv:2207.12598), for both.

    Of what guidance gives, the share `rescale` has the standard deviation that the prompt's output
    has alone (Lin et al. 2023, arXiv:2305.08891, section 3.4): guidance raises it, and models whose
    noise schedule ends in pure noise overexpose then.
    """
    negative, positive = jnp.split(out, 2)
    scale, share = (_column(x[: len(negative)], negative) for x in (guidance, rescale))
    guided = negative + scale * (positive - negative)
    alone, raised = (jnp.std(x, axis=(1, 2, 3), keepdims=True) for x in (positive, guided))
    rescaled = share * (alone / raised) * guided + (1 - share) * guided
    return jnp.tile(jnp.where(share > 0, rescaled, guided), (2, 1, 1, 1))


def decode_slots(
    model: Model, params: Params, latents: Float[Array, "S h w C"], wanted: Bool[Array, " S"]
) -> UInt8[Array, "S H W 3"]:
    """Pictures of latents where they are wanted; black elsewhere."""
    return _where_wanted(lambda latent: _pixels(model.decode(params, latent)), latents, wanted)


def preview_slots(
    model: Model, params: Params, latents: Float[Array, "S h w C"], wanted: Bool[Array, " S"]
) -> UInt8[Array, "S half_H half_W 3"]:
    """Return previews by the model's previewer where they are wanted, at half size if even."""

    def draw(latent):
        image = jnp.clip(model.preview(params, latent), -1, 1)
        height, width, channels = image.shape
        side = math.gcd(2, height, width)
        return _pixels(
            image.reshape(height // side, side, width // side, side, channels).mean((1, 3))
        )

    return _where_wanted(draw, latents, wanted)


def check_slots(
    model: Model, params: Params, pictures: UInt8[Array, "S H W 3"], wanted: Bool[Array, " S"]
) -> Bool[Array, " S"]:
    """Whether pictures are flagged as not safe for work, where that is wanted."""
    return _where_wanted(partial(model.is_unsafe, params), pictures, wanted)


def _pixels(image: Float[Array, "H W 3"]) -> UInt8[Array, "H W 3"]:
    return jnp.round(jnp.clip(image / 2 + 0.5, 0, 1) * 255).astype(jnp.uint8)


def encode_images(
    encode: Callable[[Params, jax.Array], jax.Array],
    params: Params,
    images: Shaped[Array, "n H W 3"],
    wanted: Bool[Array, " n"],
) -> jax.Array:
    """Encode pictures where they are wanted; return zeros elsewhere."""
    return _where_wanted(partial(encode, params), images, wanted)


def _where_wanted(
    draw: Callable[[jax.Array], jax.Array], inputs: jax.Array, wanted: Bool[Array, " n"]
) -> jax.Array:
    """Draw each wanted element, one after the other; return zeros elsewhere."""
    return lax.map(lambda one: only_if(one[0], draw, one[1]), (wanted, inputs))


def gaussian(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> Float[Array, "h w C"]:
    """Draw standard normal latents (h, w, C) as (C, h, w): the order of diffusers' latents."""
    h, w, channels = shape
    return jax.random.normal(key, (channels, h, w), jnp.float32).transpose(1, 2, 0)


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _where(condition: jax.Array, new: Slots, old: Slots) -> Slots:
    return jax.tree.map(lambda a, b: jnp.where(_column(condition, b), a, b), new, old)
