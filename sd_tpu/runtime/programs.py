"""The three compiled programs, encode, advance and decode: `sd_tpu.runtime.slots` over all devices.

The slots are divided over the replicas. Each chip of a replica computes the same with all of the
weights, or has shares of them and exchanges sums with the others (`sd_tpu/checkpoint/division.py`).
Prompts are encoded by a program of their own, `TextEncoder`, which all sizes share. So is what a
picture begins with besides noise, by `ImageEncoder`, for those who need it; and previews are drawn
by one for models that draw them.
"""

import dataclasses
import hashlib
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, PyTree, UInt8

from sd_tpu.checkpoint.division import Division, undivided
from sd_tpu.checkpoint.weights import Params
from sd_tpu.families.model import Model
from sd_tpu.memory import return_freed_memory
from sd_tpu.models.factors import Scaled, joined
from sd_tpu.runtime.compiler import compiler_options
from sd_tpu.runtime.mesh import REPLICATED, SPLIT, replicas, replicated, split
from sd_tpu.runtime.slots import (
    GUIDED,
    MASKED_PICTURE,
    START_PICTURE,
    SlotInputs,
    Slots,
    advance_slots,
    check_slots,
    decode_slots,
    empty_slots,
    encode_images,
    encode_slots,
    encode_texts,
    kind_of_picture,
    place_adapters,
    preview_slots,
    signed,
    stack_slot_inputs,
)

# Bytes of encodings that an encoder keeps; one of 1024x1024 pixels has 2**18.
ENCODINGS_BYTES = 16 * 2**20
Key = tuple[Hashable, bytes]  # whose parameters encode a picture, and the picture's hash


class Programs:
    """encode, advance and decode for one model and one image size, compiled over a mesh.

    `traces` counts how often each was traced: once, whatever changes between calls.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        slots: int,
        height: int,
        width: int,
        group: int = 1,
        guided: bool = True,
        stacked: bool = False,
        divisions: Params | None = None,
    ):
        """Prepare the programs; the first call of each compiles it.

        Args:
            model: the networks.
            mesh: the devices.
            slots: how many, rounded up to a multiple of the replicas times `group`.
            height: of the pictures, in pixels.
            width: of the pictures, in pixels.
            group: slots that a replica steps together, guided ones in one doubled batch.
            guided: whether any picture may be; if not, one picture takes half as long.
            stacked: parameters lead with an axis of replicas, as flax's `replicate` leaves them.
            divisions: of the parameters over the chips of a replica; by default they are whole.

        Raises:
            ValueError: the model cannot make pictures of this size.
        """
        self.model, self.mesh, self._guided = model, mesh, guided
        self.latent_shape = model.latent_shape(height, width)
        share = replicas(mesh) * group
        self.slots = -(-slots // share) * share
        self.traces: Counter[str] = Counter()
        self.stacked, self.divisions = stacked, divisions
        params = _specs(mesh, divisions and self._drawing(divisions), stacked=stacked)
        self.texts = TextEncoder(
            model, mesh, count=self.slots, stacked=stacked, divisions=divisions
        )
        shapes = model.adapter_shapes
        self._adapter_divisions = (
            model.adapter_divisions(divisions) if divisions else undivided(shapes)
        )
        self.adapter_shardings = shardings(mesh, self._adapter_divisions, stacked=True)
        names = [field.name for field in dataclasses.fields(Slots)]
        everywhere: dict[str, Any] = {name: split(mesh) for name in names}
        everywhere["adapters"] = self.adapter_shardings
        split_slots = Slots(**everywhere)
        specs = jax.tree.map(lambda where: where.spec, split_slots)
        self._encode = self._compile(
            "encode", encode_slots, (params, specs, SPLIT), donate=1, out=specs
        )
        self._advance = self._compile(
            "advance",
            partial(advance_slots, group=group, guided=guided),
            (params, specs, SPLIT),
            donate=1,
            out=specs,
        )
        self._place = _over_devices(
            place_adapters,
            mesh,
            (specs.adapters, specs.adapters, SPLIT),
            dtype=model.dtype,
            stacked=False,
            donate=0,
            out=specs.adapters,
        )
        self._decode = self._compile("decode", decode_slots, (params, SPLIT, SPLIT))
        self._check = self._compile("check", check_slots, (params, SPLIT, SPLIT))
        self._preview = self._compile("preview", preview_slots, (params, SPLIT, SPLIT))
        self._empty = jax.jit(
            partial(empty_slots, model, self.slots, self.latent_shape), out_shardings=split_slots
        )

    def _compile(self, name: str, function, specs, donate=(), out: Any = SPLIT):
        def traced(params, *arguments):
            self.traces[name] += 1
            return function(self.model, params, *arguments)

        return _over_devices(
            traced,
            self.mesh,
            specs,
            donate=donate,
            dtype=self.model.dtype,
            stacked=self.stacked,
            advance=name == "advance",
            out=out,
        )

    def _drawing(self, params: Params) -> Params:
        """Return the parameters without those of text encoders."""
        return {part: of for part, of in params.items() if part not in self.model.text_parts()}

    def _call(self, name: str, params: Params, *arguments) -> Any:
        before = self.traces[name]
        result = getattr(self, f"_{name}")(self._drawing(params), *arguments)
        if self.traces[name] > before:
            return_freed_memory()
        return result

    def replica(self, slot: int) -> int:
        """Return the number of the replica that a slot is on."""
        return slot // (self.slots // replicas(self.mesh))

    def empty(self) -> Slots:
        """Idle slots, divided over the replicas."""
        return self._empty()

    def encode(
        self, params: Params, slots: Slots, entering: Mapping[int, SlotInputs | None]
    ) -> Slots:
        """Put images into the slots with these numbers; None vacates one. Donates `slots`.

        Texts that are not encoded yet are encoded first, by text encoders among the parameters.
        """
        names = self.model.text_cond_shapes.keys()
        unread = {
            slot: slot_inputs
            for slot, slot_inputs in entering.items()
            if slot_inputs and not names <= slot_inputs.inputs.keys()
        }
        made = self.texts.encode(params, [each.inputs for each in unread.values()])
        read = {
            slot: slot_inputs.with_texts(texts)
            for (slot, slot_inputs), texts in zip(unread.items(), made, strict=True)
        }
        slots = self._call("encode", params, slots, self.gather({**entering, **read}))
        if not slots.adapters:
            return slots
        return dataclasses.replace(slots, adapters=self._with_adapters(slots.adapters, entering))

    def _with_adapters(self, adapters: PyTree, entering: Mapping[int, SlotInputs | None]) -> PyTree:
        """Put the factors of images into their slots, one a replica at a time; donates those that
        are there."""
        share = self.slots // replicas(self.mesh)
        queues = [
            [
                (slot % share, slot_inputs.adapters or {})
                for slot, slot_inputs in entering.items()
                if slot_inputs and self.replica(slot) == number
            ]
            for number in range(replicas(self.mesh))
        ]
        for turn in itertools.zip_longest(*queues, fillvalue=(share, {})):
            factors = {
                name: self._factors(name, [its.get(name, ()) for _, its in turn], shapes)
                for name, shapes in self.model.adapter_shapes.items()
            }
            slot = jax.device_put(np.array([slot for slot, _ in turn], np.int32), split(self.mesh))
            # Wait until these factors are in their slots: each replica has memory for those of one
            # picture beside them.
            adapters = jax.block_until_ready(self._place(adapters, factors, slot))
            del factors
        return adapters

    def _factors(
        self,
        name: str,
        loras: Sequence[Sequence[Scaled]],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, jax.Array]:
        """Return a layer's factors of one picture on each replica, zeros where it has no LoRAs."""
        each = [joined(name, its, shapes) for its in loras]
        return {
            factor: _by_replica(
                [its[factor] for its in each],
                self._adapter_divisions[name][factor],
                self.adapter_shardings[name][factor],
            )
            for factor in shapes
        }

    def gather(self, entering: Mapping[int, SlotInputs | None]) -> SlotInputs:
        """Return the arguments of the compiled `encode` for these images, by replica.

        Raises:
            ValueError: an image has guidance and the programs are compiled without.
        """
        if not self._guided and any(
            slot_inputs and GUIDED in slot_inputs.kinds for slot_inputs in entering.values()
        ):
            raise ValueError("These programs are compiled for pictures without guidance.")
        stacked = stack_slot_inputs(self.model, self.slots, self.latent_shape, entering)
        return jax.device_put(stacked, split(self.mesh))

    def advance(self, params: Params, slots: Slots, n: int | np.ndarray) -> Slots:
        """Take up to n rows in every live slot, or n [S] in each. Donates `slots`."""
        rows = jax.device_put(np.full(self.slots, n, np.int32), split(self.mesh))
        return self._call("advance", params, slots, rows)

    def decode(
        self, params: Params, latents: Float[Array, "S h w C"], wanted: Bool[np.ndarray, " S"]
    ) -> UInt8[Array, "S H W 3"]:
        """Pictures of latents, drawn where they are wanted."""
        return self._call("decode", params, latents, jax.device_put(wanted, split(self.mesh)))

    def unsafe(
        self, params: Params, pictures: Mapping[int, UInt8[np.ndarray, "H W 3"]]
    ) -> set[int]:
        """Return the slots whose pictures the model's safety checker flags as not safe for work.

        A model without a checker flags none.
        """
        if not (pictures and self.model.checks_safety):
            return set()
        shape = next(iter(pictures.values())).shape
        blank = np.zeros(shape, np.uint8)
        images = np.stack([pictures.get(slot, blank) for slot in range(self.slots)])
        wanted = np.isin(np.arange(self.slots), list(pictures))
        found = self._call("check", params, *jax.device_put((images, wanted), split(self.mesh)))
        return set(np.flatnonzero(np.asarray(found)).tolist())

    @property
    def autoencoder(self) -> str:
        """The component of the parameters that decodes."""
        return self.model.autoencoder

    @property
    def has_previewer(self) -> bool:
        """Whether the model draws previews itself."""
        return bool(self.model.previewer)

    def preview(
        self, params: Params, latents: Float[Array, "S h w C"], wanted: Bool[np.ndarray, " S"]
    ) -> UInt8[Array, "S half_H half_W 3"]:
        """Draw smaller pictures by the model's previewer, where they are wanted."""
        return self._call("preview", params, latents, jax.device_put(wanted, split(self.mesh)))


class TextEncoder:
    """Encoder of prompts, up to `count` of them at once, divided over the replicas."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        count: int,
        stacked: bool = False,
        divisions: Params | None = None,
    ):
        """Prepare the encoder; `compile` or else the first call compiles it.

        Args:
            model: for texts of these shapes.
            mesh: the devices.
            count: of prompts, rounded up to a multiple of the replicas.
            stacked: as `Programs` takes it.
            divisions: as `Programs` takes them; only those of text encoders are looked at, which
                are whole where there are none.
        """
        self._model, self._mesh, self._stacked = model, mesh, stacked
        self._share = -(-count // replicas(mesh))
        self._divisions = (divisions and self._taken(divisions)) or None
        specs = _specs(mesh, self._divisions, stacked=stacked), SPLIT, SPLIT
        self._function = _over_devices(
            partial(encode_texts, model), mesh, specs, dtype=model.dtype, stacked=stacked
        )
        self._compiled: Callable = self._function

    def _taken(self, params: Params) -> Params:
        return {part: of for part, of in params.items() if part in self._model.text_parts()}

    def lower(self, params: Params) -> jax.stages.Lowered:
        """Lower the encoder for parameters of these shapes, without an axis of replicas."""
        placed = placed_shapes(
            self._mesh, self._taken(params), self._divisions, stacked=self._stacked
        )
        count = replicas(self._mesh) * self._share
        inputs, counts = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split(self._mesh)),
            (
                jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype),
                    self._model.text_input_shapes,
                ),
                jax.ShapeDtypeStruct((replicas(self._mesh),), np.int32),
            ),
        )
        return self._function.lower(placed, inputs, counts)

    def compile(self, params: Params) -> None:
        """Compile the encoder, as `lower`."""
        self._compiled = self.lower(params).compile()
        return_freed_memory()

    def encode(self, params: Params, prompts: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Encode prompts.

        Args:
            params: with those of text encoders, as `Programs` takes them.
            prompts: inputs of pictures, by name; those beside the texts are not looked at.

        Returns:
            What is made of each, by the names of conditions.
        """
        made, most = [], replicas(self._mesh) * self._share
        for first in range(0, len(prompts), most):
            made += self._encode(params, prompts[first : first + most])
        return made

    def _encode(self, params: Params, prompts: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        number, share = replicas(self._mesh), self._share
        shapes = self._model.text_input_shapes
        inputs = jax.tree.map(lambda x: np.zeros((number * share, *x.shape), x.dtype), shapes)
        # Each replica has as many as another, or one less.
        rows = [n % number * share + n // number for n in range(len(prompts))]
        for row, prompt in zip(rows, prompts, strict=True):
            jax.tree.map(
                lambda into, x, row=row: operator.setitem(into, row, x),
                inputs,
                {name: prompt[name] for name in shapes},
            )
        counts = np.array([len(prompts[first::number]) for first in range(number)], np.int32)
        where = jax.device_put((inputs, counts), split(self._mesh))
        found = jax.tree.map(np.asarray, self._compiled(self._taken(params), *where))
        # Copied: a view would keep those of all prompts in memory.
        return [jax.tree.map(lambda x, row=row: x[row].copy(), found) for row in rows]


class ImageEncoder:
    """Encoder of start and reference pictures of one size.

    `compile` or else the first call compiles it. What it made last it keeps, up to ENCODINGS_BYTES,
    so that pictures that many images share are encoded once.
    """

    def __init__(
        self,
        encode: Callable[[Params, jax.Array], jax.Array],
        mesh: Mesh,
        params: Params,
        *,
        height: int,
        width: int,
        network_dtype: Any,
        dtype: Any = np.float32,
        names: Sequence[str] = (START_PICTURE, MASKED_PICTURE),
        stacked: bool = False,
        divisions: Params | None = None,
    ):
        """Prepare the encoder.

        Args:
            encode: of parameters and a picture [H, W, 3], such as a model's.
            mesh: the devices.
            params: shapes of the parameters that it takes, without an axis of replicas.
            height: of the pictures, in pixels.
            width: of the pictures, in pixels.
            network_dtype: of the arithmetic, by which the compiler is told what is fast.
            dtype: of the pictures; those in uint8 are made float32 for it.
            names: of the pictures that it is for, without their numbers.
            stacked: as `Programs` takes it.
            divisions: as `Programs` takes them.
        """
        self._mesh, self._names, self._parts = mesh, frozenset(names), tuple(params)
        self._blank = np.zeros((height, width, 3), dtype)
        self._kept: dict[Key, np.ndarray] = {}
        specs = _specs(mesh, divisions, stacked=stacked), SPLIT, SPLIT
        function = _over_devices(
            partial(encode_images, encode), mesh, specs, dtype=network_dtype, stacked=stacked
        )
        count = replicas(mesh)
        placed = placed_shapes(mesh, params, divisions, stacked=stacked)
        images = jax.ShapeDtypeStruct((count, height, width, 3), dtype, sharding=split(mesh))
        wanted = jax.ShapeDtypeStruct((count,), bool, sharding=split(mesh))
        self._lower = partial(function.lower, placed, images, wanted)
        self._compiled: Callable | None = None

    def compile(self) -> Callable:
        """Compile the encoder if it is not compiled yet, and return the program."""
        if self._compiled is None:
            self._compiled = self._lower().compile()
            return_freed_memory()
        return self._compiled

    def encode(
        self,
        params: Params,
        entering: Mapping[int, SlotInputs | None],
        replica: Callable[[int], int],
        whose: Mapping[int, Hashable] = MappingProxyType({}),
    ) -> dict[int, Any]:
        """Encode pictures of slot inputs, and return the inputs with latents in their place.

        Arguments are those of `latents`.
        """
        return encoded(entering, self.latents(params, entering, replica, whose))

    def latents(
        self,
        params: Params,
        entering: Mapping[int, SlotInputs | None],
        replica: Callable[[int], int],
        whose: Mapping[int, Hashable] = MappingProxyType({}),
    ) -> dict[int, dict[str, np.ndarray]]:
        """Encode those pictures of slot inputs that are of the encoder's size.

        Args:
            params: as the programs take them.
            entering: slot inputs by slot.
            replica: of a slot, by whose parameters its pictures are encoded.
            whose: tells the parameters of a replica from others, between calls; by default nothing
                does, and nothing is kept.

        Returns:
            Latents or tokens by slot and by the picture's name.
        """
        keys, waiting = {}, {}
        for slot, slot_inputs in entering.items():
            pictures = (slot_inputs.pictures or {}) if slot_inputs else {}
            for name, picture in pictures.items():
                if kind_of_picture(name) not in self._names or picture.shape != self._blank.shape:
                    continue
                image = np.ascontiguousarray(picture)
                there = replica(slot)
                key = keys[slot, name] = (
                    whose.get(there, there),
                    hashlib.sha256(image.data).digest(),
                )
                if not (whose and key in self._kept):
                    waiting.setdefault(key, (there, image))
        found, latents = {**self._kept, **self._encode(params, waiting)}, defaultdict(dict)
        for (slot, name), key in keys.items():
            latents[slot][name] = found[key]
        if whose:
            self._keep({key: found[key] for key in keys.values()})
        return latents

    def _keep(self, used: Mapping[Key, np.ndarray]) -> None:
        """Keep the encodings that were used last, as far as there is room."""
        self._kept = {**{key: one for key, one in self._kept.items() if key not in used}, **used}
        excess = sum(one.nbytes for one in self._kept.values()) - ENCODINGS_BYTES
        while excess > 0:
            excess -= self._kept.pop(next(iter(self._kept))).nbytes

    def _encode(
        self, params: Params, waiting: Mapping[Key, tuple[int, np.ndarray]]
    ) -> dict[Key, np.ndarray]:
        """Encode pictures on their replicas, one a replica at a time."""
        where, found = split(self._mesh), {}
        queues = [
            [(key, image) for key, (replica, image) in waiting.items() if replica == number]
            for number in range(replicas(self._mesh))
        ]
        for turn in itertools.zip_longest(*queues, fillvalue=(None, self._blank)):
            images = np.stack(
                [image if image.dtype == self._blank.dtype else signed(image) for _, image in turn]
            )
            wanted = np.array([key is not None for key, _ in turn])
            encoded = self.compile()(
                {part: params[part] for part in self._parts},
                *jax.device_put((images, wanted), where),
            )
            # Copied: a view would keep those of all replicas in memory.
            found |= {
                key: one.copy()
                for (key, _), one in zip(turn, np.asarray(encoded), strict=True)
                if key
            }
        return found


def encoded(
    entering: Mapping[int, SlotInputs | None], latents: Mapping[int, Mapping[str, np.ndarray]]
) -> dict[int, Any]:
    """Return slot inputs with what an `ImageEncoder` made of their pictures, both by slot."""
    return {
        slot: slot_inputs.encoded(latents[slot]) if slot in latents else slot_inputs  # ty: ignore[missing-union-attribute]
        for slot, slot_inputs in entering.items()
    }


def shardings(mesh: Mesh, divisions: Params, *, stacked: bool) -> Params:
    """Return where the parameters of all replicas lie; `stacked` is as `Programs` takes it."""
    return jax.tree.map(
        lambda division: division.sharding(split(mesh) if stacked else replicated(mesh), stacked),
        divisions,
    )


def _by_replica(
    arrays: Sequence[np.ndarray], division: Division, where: NamedSharding
) -> jax.Array:
    """Put an array on each replica, all of one shape."""
    each: list[Any] = [division.in_order(one) for one in arrays]
    return jax.make_array_from_callback(
        (len(each), *arrays[0].shape),
        where,
        lambda index: each[index[0].start or 0][index[1:]][None],  # ty: ignore[not-subscriptable]
    )


def placed_shapes(mesh: Mesh, params: Params, divisions: Params | None, *, stacked: bool) -> Params:
    """Return the shapes of parameters with the places of `shardings`."""
    lead = (replicas(mesh),) * stacked
    return jax.tree.map(
        lambda of, where: jax.ShapeDtypeStruct((*lead, *of.shape), of.dtype, sharding=where),
        params,
        shardings(mesh, divisions or undivided(params), stacked=stacked),
    )


def _specs(mesh: Mesh, divisions: Params | None, *, stacked: bool) -> Any:
    """Return how `_over_devices` divides parameters."""
    if divisions is None:
        return SPLIT if stacked else REPLICATED
    return jax.tree.map(lambda where: where.spec, shardings(mesh, divisions, stacked=stacked))


def _over_devices(
    function: Callable,
    mesh: Mesh,
    specs,
    *,
    dtype,
    stacked: bool,
    donate=(),
    advance: bool = False,
    out: Any = SPLIT,
):
    """Compile a function of parameters and each replica's share of the other arguments."""

    def called(params, *arguments):
        if stacked:
            params = jax.tree.map(lambda x: x[0], params)
        return function(params, *arguments)

    # Varying-axes checking has no rule for loops whose trip count differs between replicas.
    mapped = jax.shard_map(called, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(
        mapped,
        donate_argnums=donate,
        compiler_options=compiler_options(mesh.devices.flat[0].platform, dtype, advance=advance),
    )
