"""Resolves requests: all that drawing a picture needs, found out once, as plain data.

A request is resolved in the process that took it. From then on only what was resolved travels, to
the engine of this process or to one on another host, and none of it is looked up again: styles and
wildcards, token ids, sampler tables, start pictures, tiles, networks, and the files of LoRAs.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from sd_tpu.families.adapters import Adapters, Cost, Strengths
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.extra_network import ExtraNetwork
from sd_tpu.families.latent_diffusion import CONTROL, REFERENCE
from sd_tpu.families.prompt import PromptError
from sd_tpu.families.text import Count
from sd_tpu.models.slerp import slerp
from sd_tpu.pictures.inputs import Canvas, Input, control_pixels, edited_pixels, reference_pixels
from sd_tpu.request import Request
from sd_tpu.runtime.slots import (
    REFERENCE_PICTURE,
    SLOT_SETTINGS,
    SlotInputs,
    StartImage,
    gaussian,
    is_guided,
)
from sd_tpu.sampling.samplers import Table, make_table, steps_taken
from sd_tpu.sentence import Sentence
from sd_tpu.serving.catalog import Catalog
from sd_tpu.serving.plan import Weights
from sd_tpu.serving.scheduler import Limits
from sd_tpu.serving.tiling import Tiling
from sd_tpu.settings import RANDOM, Picture, RequestError

MAX_REFERENCE_SIZES = 8  # of a request: an encoder is compiled for each that is new


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchKey:
    """Key of a batch: the architecture, size, texts and guidance that its pictures share."""

    architecture: str  # with the networks beside it, as in `Weights`
    height: int
    width: int
    shape_key: tuple[str, ...]
    guided: bool
    adapter_rank: int = 0  # of the factors that slots bring, as in `Cost`


@dataclasses.dataclass(frozen=True)
class Remarks:
    """Facts about a picture's prompts that whoever wrote them may want to know.

    Attributes:
        count: the prompt's tokens, and the end of it that is cut.
        cut_negative: the end of the negative prompt that is cut.
        unknown: words of the prompt that the model was never shown, if it says which it was.
    """

    count: Count
    cut_negative: str
    unknown: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedPicture:
    """A picture and all that drawing it needs.

    Attributes:
        picture: its settings, with the style applied and the networks named.
        batch: the key of its batch.
        weights: the parameters that it is drawn with.
        texts: those of the text encoders that read its prompts.
        slots: the inputs of its slot, or of a slot for each tile.
        tiling: where its tiles lie; None where it is drawn at once.
        canvas: its start picture and mask, if it has any.
        remarks: about its prompts; None of an estimate.
        adapters: LoRAs of which its slots bring factors.
    """

    picture: Picture
    batch: BatchKey
    weights: Weights
    texts: Weights
    slots: tuple[SlotInputs, ...]
    tiling: Tiling | None = None
    canvas: Canvas | None = None
    remarks: Remarks | None = None
    adapters: Strengths = ()


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedRequest:
    """A request with styles applied and networks named, and its pictures by index."""

    request: Request
    pictures: Mapping[int, ResolvedPicture]

    @property
    def steps(self) -> int:
        """Steps of the picture that takes most."""
        return max(_steps(each.picture) for each in self.pictures.values())

    @property
    def weights(self) -> frozenset[Weights]:
        """The parameters that its pictures are drawn with, and those that read its prompts."""
        return frozenset(
            weights for each in self.pictures.values() for weights in (each.weights, each.texts)
        )

    def without(self, index: int) -> Self:
        """Return the rest of it, without the picture at `index`."""
        rest = {number: each for number, each in self.pictures.items() if number != index}
        return type(self)(self.request.replaced(index, None), rest)


class Resolver:
    """Resolves requests by a server's models, and by the LoRAs and embeddings beside them."""

    def __init__(self, catalog: Catalog, adapters: Adapters):
        """Take the models and what prompts may name."""
        self._catalog, self._adapters = catalog, adapters

    def resolve(
        self, request: Request, inputs: Mapping[str, Input] = MappingProxyType({})
    ) -> ResolvedRequest:
        """Resolve a request; pictures with equal start or control pictures share the arrays.

        Args:
            request: a checked one.
            inputs: the pictures that its settings name.

        Raises:
            RequestError: a model, a network or a LoRA cannot be used, a sampler cannot take its
                steps, a prompt cannot be drawn, or an input picture is missing or cannot be used.
        """
        request = self.named(request)
        tilings = {}
        for index in request.indices():
            self._catalog.check(request.picture(index))
            tilings[index] = self._catalog.tiling(request.picture(index))
        _check_count(sum(len(tiling) if tiling else 1 for tiling in tilings.values()))
        once = _Once()
        pictures = {}
        for index, tiling in tilings.items():
            with naming_prompt(request, index):
                pictures[index] = self._resolved(request.picture(index), tiling, inputs, once)
        _check_sizes(pictures.values())
        return ResolvedRequest(request, pictures)

    def named(self, request: Request) -> Request:
        """Return the request with styles applied, and its ControlNets and IP-Adapters named."""

        def one(picture: Picture) -> Picture:
            picture = self._catalog.styled(picture)
            networks = self._catalog.networks(picture)
            return dataclasses.replace(
                picture, **{network.part: network.name for network in networks}
            )

        return Request(tuple(picture and one(picture) for picture in request.pictures))

    def remarks(self, picture: Picture) -> Remarks:
        """Return remarks about a picture's prompts; raises RequestError, or ValueError of them."""
        checkpoint = self._catalog.open(picture.model).checkpoint
        options = self._adapters.options(checkpoint.model)
        return Remarks(
            checkpoint.count(picture.prompt, options),
            checkpoint.count(picture.negative_prompt, options).lost,
            tuple(checkpoint.unknown_words(picture.prompt)),
        )

    def estimated(self, picture: Picture) -> ResolvedPicture:
        """Resolve a picture as far as its time depends on it, reading no file: of LoRAs what is
        known of them already.

        Raises:
            ValueError: it cannot be drawn, or depends on how large its reference pictures are.
        """
        if picture.uses_reference and self._catalog.edits(picture.model):
            raise ValueError("The time that reference pictures take depends on their sizes.")
        tiling = self._catalog.tiling(picture)
        if tiling:
            picture = dataclasses.replace(picture, height=tiling.size[0], width=tiling.size[1])
        checkpoint = self._catalog.open(picture.model).checkpoint
        slot, networks = self.slot_inputs(checkpoint, picture), self._catalog.networks(picture)
        weights, texts = self._weights(picture, networks, ())
        parameters = checkpoint.parameters
        rank = self._adapters.known_rank(
            picture.prompt,
            picture.negative_prompt,
            shapes=parameters.shapes,
            divisions=parameters.divisions,
        )
        key = _batch_key(checkpoint, picture, networks, weights, slot)
        return ResolvedPicture(
            picture=picture,
            batch=dataclasses.replace(key, adapter_rank=rank),
            weights=weights,
            texts=texts,
            slots=(slot,) * (len(tiling) if tiling else 1),
            tiling=tiling,
        )

    def here(self, resolved: ResolvedRequest) -> ResolvedRequest:
        """Return what another process has resolved, with the names that weights have in this one.

        Each numbers architectures in the order in which it meets them, and knows files by when
        they were written.

        Raises:
            RequestError: a model, a network or a LoRA is not here.
        """

        def one(there: ResolvedPicture) -> ResolvedPicture:
            memory = _merged_bytes(there.weights), _merged_bytes(there.texts)
            strengths = self._strengths(there.picture)  # whose files should be here too
            networks = self._catalog.networks(there.picture)
            weights, texts = self._weights(there.picture, networks, strengths, memory)
            batch = dataclasses.replace(there.batch, architecture=weights.architecture)
            return dataclasses.replace(there, weights=weights, texts=texts, batch=batch)

        pictures = {}
        for index, picture in resolved.pictures.items():
            with naming_prompt(resolved.request, index):
                pictures[index] = one(picture)
        return dataclasses.replace(resolved, pictures=pictures)

    def _resolved(
        self, whole: Picture, tiling: Tiling | None, inputs: Mapping[str, Input], once: "_Once"
    ) -> ResolvedPicture:
        checkpoint = self._catalog.open(whole.model).checkpoint
        canvas = once(
            partial(Canvas.of, whole, inputs),
            "canvas",
            whole.init_image,
            whole.mask,
            whole.fit,
            whole.mask_blur,
            whole.height,
            whole.width,
        )
        networks = self._catalog.networks(whole)
        network_inputs = _network_inputs(whole, networks, inputs, once)
        if whole.uses_reference and self._catalog.edits(whole.model):
            network_inputs |= _edited_inputs(whole, checkpoint.model, inputs, once)
        picture = whole
        if tiling:
            picture = dataclasses.replace(whole, height=tiling.size[0], width=tiling.size[1])
            slots = self._tiles(checkpoint, whole, picture, tiling, canvas, network_inputs)
        else:
            slots = (self.slot_inputs(checkpoint, picture, canvas, network_inputs),)
        strengths = self._strengths(whole)
        parameters, cost = checkpoint.parameters, Cost(0, {})
        if strengths:
            cost = self._adapters.cost(
                strengths, checkpoint.model, parameters.shapes, parameters.divisions
            )
        of_texts = sum(cost.memory.get(part, 0) for part in checkpoint.texts.shapes)
        memory = sum(cost.memory.values()) - of_texts, of_texts
        weights, texts = self._weights(whole, networks, strengths, memory)
        key = _batch_key(checkpoint, picture, networks, weights, slots[0])
        return ResolvedPicture(
            picture=whole,
            batch=dataclasses.replace(key, adapter_rank=cost.rank),
            adapters=strengths if cost.rank else (),
            weights=weights,
            texts=texts,
            slots=slots,
            tiling=tiling,
            canvas=canvas,
            remarks=once(
                partial(self.remarks, whole),
                "remarks",
                whole.model,
                whole.prompt,
                whole.negative_prompt,
            ),
        )

    def _tiles(
        self,
        checkpoint: Checkpoint,
        whole: Picture,
        tile: Picture,
        tiling: Tiling,
        canvas: Canvas | None,
        network_inputs: Mapping[str, Any],
    ) -> tuple[SlotInputs, ...]:
        """Return the inputs of the slots of all tiles, each under its part of the whole's noise."""
        assert canvas is not None  # only pictures with a start are drawn by tiles
        model = checkpoint.model
        shape = model.latent_shape(whole.height, whole.width)
        noise = np.asarray(gaussian(jnp.asarray(_key(whole.seed)), shape))
        tiles = []
        for number in range(len(tiling)):
            parts = {
                name: tiling.part(number, value) if name == "control" else value
                for name, value in network_inputs.items()
            }
            slot = self.slot_inputs(
                checkpoint,
                tile,
                Canvas(tiling.part(number, canvas.pixels)),
                parts,
                tiling.part(number, noise, model.downscale),
            )
            # Otherwise a sampler's fresh noise would be the same in all tiles.
            tiles.append(dataclasses.replace(slot, key=np.array([number, whole.seed], np.uint32)))
        return tuple(tiles)

    def slot_inputs(
        self,
        checkpoint: Checkpoint,
        picture: Picture,
        canvas: Canvas | None = None,
        network_inputs: Mapping[str, Any] = MappingProxyType({}),
        noise: np.ndarray | None = None,
    ) -> SlotInputs:
        """Return a picture as the programs take it; noise [h, w, C] replaces that of its seed.

        Raises:
            ValueError: its sampler cannot take its steps, or its prompt cannot be drawn.
        """
        settings = {name: getattr(picture, name) for name in SLOT_SETTINGS}
        model = checkpoint.model
        settings["guidance"] = model.cfg_scale(picture.guidance)
        inputs = checkpoint.prompt_inputs(
            picture.prompt,
            picture.negative_prompt,
            height=picture.height,
            width=picture.width,
            guidance=picture.guidance,
            clip_skip=picture.clip_skip,
            to_prompt=picture.to_prompt,
            share=picture.share,
            options=self._adapters.options(model),
        )
        beside = {**network_inputs}
        references = beside.pop(REFERENCE_PICTURE, ())
        latent_shape = model.latent_shape(picture.height, picture.width)
        return SlotInputs.of(
            _table(checkpoint, picture),
            {**inputs, **beside},
            **settings,
            references=references,
            latents=_between_seeds(picture, latent_shape) if noise is None else noise,
            start_image=StartImage.of(
                model,
                latent_shape,
                canvas.pixels if canvas else None,
                canvas.mask if canvas else None,
                picture.strength,
            ),
            key=_key(picture.seed),
        )

    def _strengths(self, picture: Picture) -> Strengths:
        """Return the LoRAs that a picture's prompts ask for; raises RequestError."""
        asked = self._adapters.asked(picture.prompt, picture.negative_prompt)
        if picture.to_prompt and asked != self._adapters.asked(
            picture.to_prompt, picture.negative_prompt
        ):
            raise RequestError(
                "The two prompts of a journey should name the same LoRAs at the same strengths."
            )
        return asked

    def _weights(
        self,
        picture: Picture,
        networks: Sequence[ExtraNetwork],
        strengths: Strengths,
        memory: tuple[int, int] = (0, 0),
    ) -> tuple[Weights, Weights]:
        """Return the weights that draw a picture, with networks, and its text encoders'.

        `memory` has the bytes that merged LoRAs take beside the former, and beside the latter; what
        they do not change is shared.
        """
        opened = self._catalog.open(picture.model)
        weights, texts = (
            dataclasses.replace(
                base,
                adapters=strengths,
                base=base,
                memory=merged,
                files=self._adapters.states(strengths),
            )
            if merged
            else base
            for base, merged in zip((opened.weights, opened.texts), memory, strict=True)
        )
        return reduce(self._catalog.with_network, networks, weights), texts


def _merged_bytes(weights: Weights) -> int:
    """Return the bytes of what LoRAs change, if any do."""
    merged = (weights, *weights.needs)
    return next((each.memory for each in merged if each.adapters and not each.network), 0)


class _Once:
    """Calls functions once for each key, and remembers what they return."""

    def __init__(self):
        self._made: dict[tuple, Any] = {}

    def __call__(self, make: Callable[[], Any], *key: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _network_inputs(
    picture: Picture, networks: Sequence[ExtraNetwork], inputs: Mapping[str, Input], once: _Once
) -> dict[str, Any]:
    """Return the inputs of ControlNets and IP-Adapters by name.

    A list of reference pictures, yet to be encoded, is there as REFERENCE_PICTURE.
    """
    found: dict[str, Any] = {}
    for network in networks:
        if network.part == CONTROL:
            found["control"] = once(
                partial(control_pixels, picture, inputs),
                CONTROL,
                picture.control_image,
                picture.detector,
                picture.fit,
                picture.height,
                picture.width,
            )
        if network.part == REFERENCE:
            side = network.config.image_encoder.image_size
            found[REFERENCE_PICTURE] = [
                once(partial(reference_pixels, name, inputs, side), REFERENCE, name, side)
                for name in picture.references
            ]
            found["reference_scale"] = np.asarray([picture.reference_scale], np.float32)
    return found


def _edited_inputs(
    picture: Picture, model: Any, inputs: Mapping[str, Input], once: _Once
) -> dict[str, Any]:
    """Return the inputs of a model that takes reference pictures itself, as `_network_inputs`."""
    unit = model.size_unit
    references = [
        once(partial(edited_pixels, name, inputs, unit), REFERENCE_PICTURE, name, unit)
        for name in picture.references
    ]
    sizes = [reference.shape[:2] for reference in references]
    return {REFERENCE_PICTURE: references, **model.reference_inputs(sizes)}


def _batch_key(
    checkpoint: Checkpoint,
    picture: Picture,
    networks: Sequence[ExtraNetwork],
    weights: Weights,
    slot: SlotInputs,
) -> BatchKey:
    model = checkpoint.model.for_inputs(slot.inputs)
    for network in networks:
        model = network.joined(model, picture.height, picture.width)
    return BatchKey(
        architecture=weights.architecture,
        height=picture.height,
        width=picture.width,
        shape_key=model.shape_key,
        guided=bool(is_guided(model.cfg_scale(picture.guidance))),
    )


def _check_sizes(pictures: Iterable[ResolvedPicture]) -> None:
    """Raise RequestError for reference pictures of too many sizes: each is compiled for."""
    sizes = {size for picture in pictures for slot in picture.slots for size in slot.picture_sizes}
    count = sum(kind == REFERENCE_PICTURE for kind, *_ in sizes)
    if count > MAX_REFERENCE_SIZES:
        raise RequestError(
            "The reference pictures of one request have at most {most} sizes; {count} were given.",
            setting="reference",
            most=MAX_REFERENCE_SIZES,
            count=count,
        )


def _check_count(count: int) -> None:
    """Raise RequestError for more tiles than may ever wait, before any work for them."""
    most = Limits.client_pictures
    if count > most:
        raise RequestError(
            "This would be drawn by {count} tiles, and at most {most} may wait: "
            "ask for fewer pictures or for smaller ones.",
            count=count,
            most=most,
        )


def _table(checkpoint: Checkpoint, picture: Picture) -> Table:
    """Return the table of the picture's sampler; raises ValueError if it cannot take its steps."""
    schedule = checkpoint.model.schedule_of(
        checkpoint.schedule, picture.height, picture.width, picture.steps
    )
    return make_table(
        picture.sampler,
        schedule,
        picture.steps,
        spacing=picture.spacing or None,
        begin=picture.steps - _steps(picture),
    )


def _key(seed: int) -> np.ndarray:
    """Return jax.random.PRNGKey of the seed, without asking a device."""
    return np.array([0, seed], np.uint32)


def _between_seeds(picture: Picture, shape: tuple[int, int, int]) -> np.ndarray | None:
    """Return the first noise [h, w, C] of a picture between two seeds; None for its own seed's."""
    if not picture.share or picture.to_seed == RANDOM:
        return None
    one, other = (
        gaussian(jnp.asarray(_key(seed)), shape) for seed in (picture.seed, picture.to_seed)
    )
    return np.asarray(slerp(one, other, jnp.float32(picture.share)))


def _steps(picture: Picture) -> int:
    """Return how many steps the picture takes: the last ones where it has a start picture."""
    return steps_taken(picture.steps, picture.strength) if picture.init_image else picture.steps


@contextlib.contextmanager
def as_request_errors(index: int | None = None) -> Iterator[None]:
    """Raise a RequestError for a ValueError, about the picture at `index` if there is one."""
    try:
        yield
    except ValueError as error:
        raise RequestError(
            "{whose}{reason}",
            setting=error.setting if isinstance(error, RequestError) else "",
            index=index,
            whose="" if index is None else Sentence("Prompt {number}: ", number=index + 1),
            reason=error.args[0],
        ) from error


@contextlib.contextmanager
def naming_prompt(request: Request, index: int) -> Iterator[None]:
    """Raise RequestErrors that name the picture, if the fault may be in one of its overrides."""
    # All pictures of a journey have a seed and a share of their own.
    overrides = request.overrides(index).keys() - {"seed", "share"}
    several = len({request.picture(each).prompt for each in request.indices()}) > 1
    try:
        yield
    except ValueError as error:
        named = overrides or (several and isinstance(error, PromptError))
        with as_request_errors(index if named else None):
            raise
