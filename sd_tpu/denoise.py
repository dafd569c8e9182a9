"""The slots, and what is done to one device's share of them: encode, advance, decode.

A slot holds one image on its way. Slots agree on nothing but the image size: each has its own
sampler table, step, guidance and random key, all of them data. Every array leads with the slot
axis.
"""

from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from sd_tpu.models import UNet2DConditionModel
from sd_tpu.models.platform import platform
from sd_tpu.networks import Models
from sd_tpu.samplers import COLUMNS, HISTORY, Table
from sd_tpu.tokenizer import LENGTH
from sd_tpu.weights import Params

MAX_ROWS = 1024  # of a sampler table: the 1000 training timesteps and PLMS's extra evaluation
NEGATIVE, POSITIVE = 0, 1  # order of the two texts of a slot
IDLE, ALONE, GUIDED, ALONE_SHALLOW, GUIDED_SHALLOW = range(5)  # what a row evaluates: `row_kinds`


@flax.struct.dataclass
class Slots:
    """Images on their way; S slots, latents [h, w, C], table rows as `samplers.COLUMNS`."""

    latents: jax.Array  # [S, h, w, C] f32
    history: jax.Array  # [S, HISTORY, h, w, C] f32, newest first
    clean: jax.Array  # [S, h, w, C] f32: the last step's estimate of the finished latents
    text: jax.Array  # [S, 2, L, D]: embeddings of the negative prompt and of the prompt
    guidance: jax.Array  # [S] f32
    rows: jax.Array  # [S, MAX_ROWS, len(COLUMNS)] f32
    kinds: jax.Array  # [S, MAX_ROWS] i32: of each row, IDLE from `end` on
    row: jax.Array  # [S] i32: the next row
    end: jax.Array  # [S] i32: rows of this image; row == end is an idle slot
    key: jax.Array  # [S, 2] u32
    deep: jax.Array  # [S, 2, h, w, F]: features of each text's last whole evaluation, to reuse


@flax.struct.dataclass
class Arrivals:
    """What `encode` puts into slots. Where `fresh` is false the rest is ignored.

    The first latents are `start + spread * noise`: pure noise from a seed (start 0), latents that
    were given (spread 0), or a picture under noise.
    """

    fresh: jax.Array  # [S] bool
    ids: jax.Array  # [S, 2, L] i32: the negative prompt and the prompt
    guidance: jax.Array  # [S] f32
    rows: jax.Array  # [S, MAX_ROWS, len(COLUMNS)] f32
    kinds: jax.Array  # [S, MAX_ROWS] i32
    end: jax.Array  # [S] i32
    key: jax.Array  # [S, 2] u32
    start: jax.Array  # [S, h, w, C] f32
    spread: jax.Array  # [S] f32


def empty_slots(models: Models, count: int, latent_shape: tuple[int, int, int]) -> Slots:
    """Idle slots."""
    latents = jnp.zeros((count, *latent_shape), jnp.float32)
    return Slots(
        latents=latents,
        history=jnp.zeros((count, HISTORY, *latent_shape), jnp.float32),
        clean=latents,
        text=jnp.zeros((count, 2, LENGTH, models.text_config.hidden_size), models.dtype),
        guidance=jnp.zeros(count, jnp.float32),
        rows=jnp.zeros((count, MAX_ROWS, len(COLUMNS)), jnp.float32),
        kinds=jnp.full((count, MAX_ROWS), IDLE, jnp.int32),
        row=jnp.zeros(count, jnp.int32),
        end=jnp.zeros(count, jnp.int32),
        key=jnp.zeros((count, 2), jnp.uint32),
        deep=jnp.zeros((count, 2, *latent_shape[:2], models.unet_config.block_out_channels[0]),
                       models.dtype),
    )


def no_arrivals(count: int, latent_shape: tuple[int, int, int]) -> Arrivals:
    """What leaves all slots alone, in NumPy's arrays: fill in what enters."""
    return Arrivals(
        fresh=np.zeros(count, bool),
        ids=np.zeros((count, 2, LENGTH), np.int32),
        guidance=np.zeros(count, np.float32),
        rows=np.zeros((count, MAX_ROWS, len(COLUMNS)), np.float32),
        kinds=np.full((count, MAX_ROWS), IDLE, np.int32),
        end=np.zeros(count, np.int32),
        key=np.zeros((count, 2), np.uint32),
        start=np.zeros((count, *latent_shape), np.float32),
        spread=np.zeros(count, np.float32),
    )


def encode_slots(models: Models, params: Params, slots: Slots, arrivals: Arrivals) -> Slots:
    """Fills the fresh slots: text embeddings, first latents, table; leaves the others alone."""
    encoder = nnx.merge(models.text_encoder, params["text_encoder"])
    occupied = arrivals.fresh & (arrivals.end > 0)
    order = jnp.argsort(~occupied, stable=True)

    def one(i, text):
        return text.at[order[i]].set(encoder(arrivals.ids[order[i]]).astype(text.dtype))

    text = lax.fori_loop(0, occupied.sum(), one, slots.text)
    noise = jax.vmap(partial(gaussian, shape=slots.latents.shape[1:]))(arrivals.key)
    latents = arrivals.start + _column(arrivals.spread, noise) * noise
    entering = Slots(
        latents=latents,
        history=jnp.zeros_like(slots.history),
        clean=latents,
        text=text,
        guidance=arrivals.guidance,
        rows=arrivals.rows,
        kinds=arrivals.kinds,
        row=jnp.zeros_like(slots.row),
        end=arrivals.end,
        key=arrivals.key,
        deep=slots.deep,  # of another image, but the first row of each text is a whole evaluation
    )
    return _where(arrivals.fresh, entering, slots)


def advance_slots(models: Models, params: Params, slots: Slots, n, group: int) -> Slots:
    """Takes up to n rows in every live slot, in groups of 2 * group evaluations of the model.

    A guided row takes two of them, one of each text; one without guidance takes only the prompt's,
    so twice as many of those share a group. Whole evaluations and shallow ones are in groups of
    their own. Slots are packed anew wherever one of them ends or its rows change their kind, so
    the number of groups that run is the least possible and idle slots cost nothing. A slot's result
    does not depend on which others it is grouped with.
    """
    unet = nnx.merge(models.unet, params["unet"])

    def go_on(state):
        slots, n = state
        return (n > 0) & jnp.any(slots.row < slots.end)

    def take_stretch(state):
        slots, n = state
        kinds = jnp.take_along_axis(slots.kinds, slots.row[:, None], axis=1, mode="fill",
                                    fill_value=IDLE)[:, 0]
        length = jnp.minimum(n, _rows_alike(slots, kinds))
        for alone, guided, shallow in ((ALONE, GUIDED, False),
                                       (ALONE_SHALLOW, GUIDED_SHALLOW, True)):
            take = partial(_take_row, unet, shallow)
            slots = _in_groups(take, slots, kinds == alone, kinds == guided, length, group)
        return slots, n - length

    return lax.while_loop(go_on, take_stretch, (slots, jnp.asarray(n, jnp.int32)))[0]


def _rows_alike(slots: Slots, kinds: jax.Array) -> jax.Array:
    """How many rows on the first live slot ends, or has a row of another kind than in `kinds` [S],
    those of the next rows."""
    ahead = jnp.arange(MAX_ROWS) - slots.row[:, None]
    left = (slots.end - slots.row)[:, None]
    changes = (ahead > 0) & (slots.kinds != kinds[:, None])
    return jnp.min(jnp.where(changes, ahead, left), where=left > 0, initial=MAX_ROWS)


def _in_groups(take_row, slots: Slots, alone: jax.Array, guided: jax.Array, n, group: int) -> Slots:
    """Takes n rows in the slots that are `alone` or `guided` [S] bool, and in no others."""
    order = jnp.argsort(jnp.where(guided, 0, jnp.where(alone, 1, 2)), stable=True)
    guided_groups = -(-guided.sum() // group)
    groups = guided_groups + -(-alone.sum() // (2 * group))
    lanes = jnp.arange(2 * group)  # of a guided group: the negative texts, then the prompts

    def run(g, slots):
        pairs = g < guided_groups
        at = jnp.where(pairs, g * group + lanes % group,
                       guided.sum() + (g - guided_groups) * 2 * group + lanes)
        filled = at < jnp.where(pairs, guided.sum(), guided.sum() + alone.sum())
        index = jnp.where(filled, order[at], slots.row.size)
        texts = jnp.where(pairs & (lanes < group), NEGATIVE, POSITIVE)
        part = jax.tree.map(lambda x: x.at[index].get(mode="clip"), slots)
        part = part.replace(text=part.text[lanes, texts], deep=part.deep[lanes, texts])
        part = lax.fori_loop(0, n, lambda _, part: take_row(part, pairs), part)
        changed = {name: getattr(slots, name).at[index].set(getattr(part, name), mode="drop")
                   for name in ("latents", "history", "clean", "row")}
        deep = slots.deep.at[index, texts].set(part.deep, mode="drop")
        return slots.replace(**changed, deep=deep)

    return lax.fori_loop(0, groups, run, slots)


def is_guided(guidance):
    """Whether guidance of this scale is any: up to 1 the prompt alone counts, as in diffusers."""
    return guidance > 1


def row_kinds(table: Table, guidance, *, start: float = 0.0, stop: float = 1.0, interval: int = 1):
    """What each row of a table evaluates, [R] i32: both texts (GUIDED) or the prompt ALONE, with
    the whole UNet or only the SHALLOW part of it.

    Guidance in an interval: Kynkaanniemi et al. 2024, https://arxiv.org/abs/2404.07724. Reuse of
    the UNet's deep features: DeepCache, Ma et al. 2023, https://arxiv.org/abs/2312.00858.

    Args:
        table: of R rows.
        guidance: the scale; may be traced.
        start: the share of the table's steps before guidance begins.
        stop: the share of its steps after which guidance ends. As in diffusers' guiders both are
            rounded down to whole steps; all rows of a step are alike.
        interval: every so many rows the UNet is evaluated as a whole. So it is in the row in which
            guidance begins, as the negative prompt has left nothing to reuse before.
    """
    steps, rows = table.step[-1] + 1, np.arange(len(table.step))
    inside = (table.step >= int(start * steps)) & (table.step < int(stop * steps))
    guided = is_guided(guidance) & inside
    begins = guided & (rows == np.argmax(inside))
    shallow = (rows % interval > 0) & ~begins
    return (ALONE + (GUIDED - ALONE) * guided + (ALONE_SHALLOW - ALONE) * shallow).astype(np.int32)


def _take_row(unet: UNet2DConditionModel, shallow: bool, lanes: Slots, pairs: jax.Array) -> Slots:
    """One row of each lane's table: an evaluation of the model and the affine update after it.

    A lane is a slot with one of its texts [L, D] only, and with that one's features [h, w, F].
    Where `pairs`, the slots are there twice, first for their negative prompts.
    """
    rows = jnp.take_along_axis(lanes.rows, lanes.row[:, None, None], axis=1, mode="clip")[:, 0]
    row = {name: _column(rows[:, i], lanes.latents) for i, name in enumerate(COLUMNS)}
    x, deep = lanes.latents, lanes.deep
    inputs = row["c_in"] * x, rows[:, COLUMNS.index("t")], lanes.text
    with jax.named_scope("shallow" if shallow else "whole"):  # told apart so in a profile
        if shallow:
            out = unet.shallow(*inputs, deep)
        else:
            out, deep = unet.whole(*inputs)
    out = jnp.where(pairs, _guided(out, lanes.guidance), out)
    newest = row["u"] * x + row["v"] * out
    history = jnp.concatenate([newest[:, None], lanes.history[:, :-1]], axis=1)
    keys = jax.vmap(jax.random.fold_in)(lanes.key, lanes.row)
    noise = jax.vmap(partial(gaussian, shape=x.shape[1:]))(keys)
    latents = row["a"] * x + row["s"] * noise
    for k in range(HISTORY):
        latents += row[f"b{k}"] * history[:, k]
    return lanes.replace(latents=latents, history=history, row=lanes.row + 1, deep=deep,
                         clean=row["p"] * x + row["q"] * out)


def _guided(out: jax.Array, guidance: jax.Array) -> jax.Array:
    """Classifier-free guidance (Ho and Salimans 2022, arXiv:2207.12598) of pairs, for both."""
    negative, positive = jnp.split(out, 2)
    scale = _column(guidance[: len(negative)], negative)
    return jnp.tile(negative + scale * (positive - negative), (2, 1, 1, 1))


def decode_slots(models: Models, params: Params, latents: jax.Array,
                 wanted: jax.Array) -> jax.Array:
    """Pictures [S, H, W, 3] uint8 of latents [S, h, w, C] where `wanted` [S]; black elsewhere."""
    vae = nnx.merge(models.vae, params["vae"])
    scale = models.vae_config.downscale
    _, h, w, _ = latents.shape
    black = jnp.zeros((h * scale, w * scale, 3), jnp.uint8)

    def draw(latent):
        image = vae.decode(latent[None])[0]
        return jnp.round(jnp.clip(image / 2 + 0.5, 0, 1) * 255).astype(jnp.uint8)

    def one(slot):
        drawn, latent = slot
        # XLA gives what is in a branch only one of a CPU's cores, except for convolutions and
        # products; for a TPU v6e it makes large convolutions slower in a loop's own body than in
        # a branch (benchmarks/RESULTS.md).
        if platform() == "cpu":
            return lax.fori_loop(0, drawn.astype(jnp.int32), lambda *_: draw(latent), black)
        return lax.cond(drawn, draw, lambda _: black, latent)

    return lax.map(one, (wanted, latents))


def padded_rows(table: Table) -> np.ndarray:
    """The table [MAX_ROWS, len(COLUMNS)] f32; raises ValueError if it is longer than that."""
    if len(table.rows) > MAX_ROWS:
        raise ValueError(f"These steps take {len(table.rows)} evaluations of the model; at most "
                         f"{MAX_ROWS} are possible.")
    rows = np.zeros((MAX_ROWS, len(COLUMNS)), np.float32)
    rows[: len(table.rows)] = table.rows
    return rows


def gaussian(key: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Standard normal latents (h, w, C), drawn as (C, h, w): the order of diffusers' latents."""
    h, w, channels = shape
    return jax.random.normal(key, (channels, h, w), jnp.float32).transpose(1, 2, 0)


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _where(condition: jax.Array, new: Slots, old: Slots) -> Slots:
    return jax.tree.map(lambda a, b: jnp.where(_column(condition, b), a, b), new, old)
