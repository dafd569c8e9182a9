"""The part of an engine that page, APIs and command line use, wherever its devices are.

All that needs no device is here: the models, and remarks about prompts and finished pictures. An
`Engine` draws in this process; other clients may have it done elsewhere.
"""

import abc
import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypedDict, Unpack

import numpy as np

from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.checkpoint.division import CHIPS
from sd_tpu.checkpoint.library import Library
from sd_tpu.doctor import Device, Diagnosis, diagnose
from sd_tpu.families.adapters import Adapters
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.controlnet import ControlNet
from sd_tpu.families.decoder import TinyDecoder
from sd_tpu.families.ip_adapter import IPAdapter
from sd_tpu.families.text import Count, PromptOptions
from sd_tpu.pictures.drawn import DrawnImage
from sd_tpu.pictures.images import format_parameters, with_text
from sd_tpu.pictures.inputs import Input
from sd_tpu.reading import expanded
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence
from sd_tpu.serving.arguments import Prompts, Settings, read_arguments
from sd_tpu.serving.catalog import Catalog
from sd_tpu.serving.job import (
    Cancelled,
    Done,
    DrawingError,
    Event,
    Failed,
    ImageReady,
    Job,
    Progress,
    Queued,
)
from sd_tpu.serving.plan import Weights
from sd_tpu.serving.resolve import ResolvedRequest, Resolver, as_request_errors
from sd_tpu.serving.scheduler import Limits
from sd_tpu.serving.tally import Tally
from sd_tpu.settings import Picture, RequestError
from sd_tpu.styles import Styles
from sd_tpu.wildcards import Wildcards

StreamEvent = Queued | Progress | DrawnImage | Done  # what `EngineClient.stream` yields
ABANDONED_SECONDS = 30.0  # after which the job of a client ends whose events nobody takes


class Closing(RequestError):
    """Refusal of new jobs, as the server is about to end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """How it goes, as plain data.

    Attributes:
        taking: whether what is asked for is drawn: all is compiled, and nothing about to end.
        devices: the kind of each, as its maker calls it.
        tensor_parallel: how many of them are a replica.
        dtype: of the parameters.
        jobs: requests that are not over.
        waiting: pictures without a slot.
        occupied: slots with a picture.
        rows: of tables that are left to be taken, by slot.
        held: the parameters that lie on a device.
        training: whether a model is taught.
        tally: what has been done.
    """

    taking: bool
    devices: tuple[str, ...]
    dtype: str
    tensor_parallel: int = 1
    jobs: int = 0
    waiting: int = 0
    occupied: int = 0
    rows: int = 0
    held: frozenset[Weights] = frozenset()
    training: bool = False
    tally: Tally = dataclasses.field(default_factory=Tally)


class EngineClient(abc.ABC):
    """Engine interface: has pictures made for whoever asks.

    Attributes:
        catalog: the models.
        adapters: what prompts may use beside them.
        resolver: settles what requests need of these.
        checkpoint: the first model.
        defaults: its settings.
        ready: set once pictures can be drawn, or have turned out not to.
        failure: why they cannot.
    """

    def __init__(self, catalog: Catalog, adapters: Adapters | None = None):
        """Start with the models that `open_models` opens."""
        self.catalog, self.adapters = catalog, adapters or Adapters()
        self.resolver = Resolver(self.catalog, self.adapters)
        first = catalog.open("")
        self.checkpoint, self.defaults = first.checkpoint, first.defaults
        self.weights, self.texts = first.weights, first.texts
        self.ready = threading.Event()
        self.failure: Sentence | None = None

    # --- pictures in one call ------------------------------------------------------------------

    def draw(self, prompts: Prompts, **settings: Unpack[Settings]) -> list[DrawnImage]:
        """Draw pictures and return them once all are finished.

        Picture i has the seed `seed + i`, unless it has one of its own. All that is asked for at
        once, here and by other threads, shares batches.

        >>> cat, castle = engine.draw(["a cat", "a castle"], seed=7, steps=2)
        >>> cat.settings.seed, castle.settings.seed
        (7, 8)
        >>> cat.save("cat.png")

        A dictionary in place of a prompt has settings for its picture alone, and the `Picture` that
        an image carries draws that image again:

        >>> pictures = engine.draw([{"prompt": "a cat", "steps": 3}, cat.settings], steps=2)
        >>> [picture.settings.steps for picture in pictures]
        [3, 2]
        >>> pictures[1] == cat
        True

        Start pictures and masks are PIL images, arrays, files' contents or paths:

        >>> (dog,) = engine.draw("a dog", init_image=cat, strength=0.5, steps=4)

        Args:
            prompts: one or several, each a text, a dictionary with a text and its settings, or a
                complete `Picture`. A blank text makes no picture.
            settings: for all of them, by name; what is left out is the model's default.

        Returns:
            The pictures in the order of their prompts.

        Raises:
            RequestError: what is wrong with which value, and what it should be.
            OSError: the file of a picture cannot be read.
            DrawingError: the pictures cannot be drawn for another reason.
        """
        events = self.stream(prompts, previews=False, **settings)
        return _in_order(event for event in events if isinstance(event, DrawnImage))

    def stream(
        self, prompts: Prompts, *, previews: bool = True, **settings: Unpack[Settings]
    ) -> Iterator[StreamEvent]:
        """Draw pictures and yield their events: `Queued`, `Progress` with previews, each
        picture as it is finished, and at last `Done`.

        What is asked for is checked and begun at once, not when the first event is taken. Whoever
        leaves the loop early cancels what is not drawn yet.

        >>> for event in engine.stream("a cat", steps=2):
        ...     match event:
        ...         case Progress(step, steps):
        ...             share = step / steps
        ...         case DrawnImage():
        ...             event.save(f"{event.index}.png")

        Args:
            prompts: as `draw` takes them.
            previews: whether time goes into pictures of unfinished ones.
            settings: as `draw` takes them.

        Raises:
            RequestError: as `draw`, like OSError and DrawingError.
        """
        return self._events(self._begin(prompts, settings, previews))

    async def draw_async(self, prompts: Prompts, **settings: Unpack[Settings]) -> list[DrawnImage]:
        """Draw as `draw` does, on an event loop.

        >>> async def draw_two():
        ...     return await asyncio.gather(
        ...         engine.draw_async("a cat", steps=2), engine.draw_async("a dog", steps=2)
        ...     )
        >>> cats, dogs = asyncio.run(draw_two())
        """
        events = self.stream_async(prompts, previews=False, **settings)
        return _in_order([event async for event in events if isinstance(event, DrawnImage)])

    async def stream_async(
        self, prompts: Prompts, *, previews: bool = True, **settings: Unpack[Settings]
    ) -> AsyncIterator[StreamEvent]:
        """Draw as `stream` does, on an event loop; begin with the first event that is taken."""
        job = await asyncio.to_thread(self._begin, prompts, settings, previews)
        try:
            async for event in job.events_async():
                yield await asyncio.to_thread(self._stream_event, job, event)
        finally:
            job.cancel()  # changes nothing once it is over

    def _begin(self, prompts: Prompts, settings: Settings, previews: bool) -> Job:
        request, inputs = read_arguments(
            prompts, settings, self.catalog, limit=Limits.client_pictures
        )
        return self.submit(request, previews=previews, inputs=inputs)

    def _events(self, job: Job) -> Iterator[StreamEvent]:
        try:
            for event in job.events():
                yield self._stream_event(job, event)
        finally:
            job.cancel()  # changes nothing once it is over

    def _stream_event(self, job: Job, event: Event) -> StreamEvent:
        """Convert a job's event for programs; raises DrawingError for an end that is a failure."""
        match event:
            case ImageReady(index, pixels, unsafe):
                request = self.as_drawn(job.request)
                return DrawnImage(
                    pixels,
                    request.picture(index),
                    parameters=self.parameters(request.only(index)),
                    index=index,
                    unsafe=unsafe,
                )
            case Failed(message):
                raise DrawingError(message)
            case Cancelled():
                raise DrawingError("The drawing was cancelled.")
        return event

    def __enter__(self) -> Self:
        """Enter a `with` block, which closes the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- jobs ----------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        previews: bool = True,
        client: str = "",
        address: str = "",
        inputs: Mapping[str, Input] = MappingProxyType({}),
    ) -> Job:
        """Resolve a checked request and queue it.

        The job's request holds the prompts with styles applied, and names the ControlNet and
        IP-Adapter of each picture.

        Args:
            request: a checked one.
            previews: as `queue` takes it, like client and address.
            client: the name of who asks.
            address: where the client is.
            inputs: the pictures that the request's settings name.

        Raises:
            RequestError: as `Resolver.resolve` and `queue`.
        """
        resolved = self.resolver.resolve(request, inputs)
        return self.queue(resolved, previews=previews, client=client, address=address)

    @abc.abstractmethod
    def queue(
        self,
        resolved: ResolvedRequest,
        *,
        previews: bool = True,
        client: str = "",
        address: str = "",
    ) -> Job:
        """Queue a resolved request.

        Clients share the devices fairly.

        Args:
            resolved: by this client's resolver.
            previews: whether previews are made.
            client: the name of who asks; "" is whoever runs this program. A job of a named client
                ends when nobody takes its events for ABANDONED_SECONDS.
            address: where the client is, if known. Waiting jobs are bounded by client and by
                address.

        Raises:
            Busy: too much waits already.
            Closing: the server is shutting down.
            RequestError: the devices can never hold what a picture needs.
        """

    @abc.abstractmethod
    def seconds(self, *pictures: Picture) -> float | None:
        """Return the seconds that these pictures take while no others are made.

        Returns None before anything is known, or if one of them cannot be drawn.
        """

    @abc.abstractmethod
    def status(self) -> Status:
        """Return the engine's load and what it has done."""

    @abc.abstractmethod
    def drain(self, seconds: float) -> bool:
        """Take nothing new, and wait at most `seconds` for all jobs; return whether all are done.

        Other jobs end as Interrupted.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Cancel everything and end all threads."""

    def diagnose(self) -> Diagnosis:
        """Look at the machine of this process and at the devices, as `sd_tpu.doctor` does in
        public."""
        devices = [Device(kind, "") for kind in self.status().devices]
        return dataclasses.replace(diagnose(None, hub=False, public=True), devices=devices)

    def count(self, prompt: str, model: str = "") -> Count:
        """Count a prompt's tokens for a model; raises RequestError if it cannot be drawn."""
        checkpoint = self.catalog.open(model).checkpoint
        with as_request_errors():
            return checkpoint.count(prompt, self.adapters.options(checkpoint.model))

    def to_png(
        self, pixels: np.ndarray, request: Request, *, first_size: tuple[int, int] | None = None
    ) -> bytes:
        """Return a PNG file of pixels uint8 [H, W, 3] with the `parameters` of a request."""
        return with_text(pixels, self.parameters(request, first_size=first_size))

    def parameters(self, request: Request, *, first_size: tuple[int, int] | None = None) -> str:
        """Return the text of PNG files that says which request and model made their pictures.

        It names the spacing of the steps also where that was left to the model.

        Args:
            request: of these pictures alone.
            first_size: of the picture which these are larger than, as `format_parameters` takes it.
        """
        request = self.as_drawn(request)  # that of a job is so already, and stays what was drawn
        drawn = [request.picture(index) for index in request.indices()]
        checkpoint = self.catalog.opened(request.common.model).checkpoint
        decoder = checkpoint.parameters.decoder
        return format_parameters(
            request,
            model_hash=self.catalog.hash(request.common.model),
            token_downsampling=checkpoint.model.token_downsampling,
            vae=decoder.name if decoder and decoder.pictures else "",
            weights=checkpoint.model.weights,
            first_size=first_size,
            lora_hashes=self.adapters.hashes(
                *(text for picture in drawn for text in (picture.prompt, picture.negative_prompt))
            ),
        )

    def as_drawn(self, request: Request) -> Request:
        """Resolve a request of opened models as its files record it, with nothing left open.

        Raises:
            RequestError: a model does not take what is asked for.
        """
        with as_request_errors():
            return self.resolver.named(request).explicit(
                lambda picture: self.catalog.opened(picture.model).checkpoint.schedule
            )


class ModelOptions(TypedDict, total=False):
    """The keyword arguments of `open_models`, which says what each means, but for the dtype."""

    models: str | Path | None
    revision: str | None
    variant: str | None
    size: tuple[int, int] | None
    max_pixels: int | None
    token_downsampling: int
    decoder: str | Path | None
    decoder_for: str
    prediction_type: str | None
    zero_snr: bool | None
    lora_dir: str | Path | None
    embedding_dir: str | Path | None
    prompt_chunks: int
    wildcard_dir: str | Path | None
    styles: str | Path | None
    safety_checker: bool
    t5: bool
    weights: str | None
    text_encoders: Sequence[str | Path]
    vae: str | Path | None
    controlnets: Sequence[str | Path]
    ip_adapters: Sequence[str | Path]
    image_encoder: str | Path | None


def open_models(
    model: str | Path = BUNDLED_MODEL,
    *,
    dtype: str,
    tensor_parallel: int = 1,
    models: str | Path | None = None,
    revision: str | None = None,
    variant: str | None = None,
    size: tuple[int, int] | None = None,
    max_pixels: int | None = None,
    token_downsampling: int = 1,
    decoder: str | Path | None = None,
    decoder_for: str = "previews",
    prediction_type: str | None = None,
    zero_snr: bool | None = None,
    lora_dir: str | Path | None = None,
    embedding_dir: str | Path | None = None,
    prompt_chunks: int = PromptOptions.chunks,
    wildcard_dir: str | Path | None = None,
    styles: str | Path | None = None,
    safety_checker: bool = False,
    t5: bool = True,
    weights: str | None = None,
    text_encoders: Sequence[str | Path] = (),
    vae: str | Path | None = None,
    controlnets: Sequence[str | Path] = (),
    ip_adapters: Sequence[str | Path] = (),
    image_encoder: str | Path | None = None,
) -> tuple[Catalog, Adapters]:
    """Find the models of a server, and the LoRAs and embeddings beside them.

    No parameters are read.

    Args:
        model: folder, single file or hub id, or the name of one in `models`.
        dtype: "float32" or "bfloat16".
        tensor_parallel: as `Checkpoint.open` takes it.
        models: a folder whose checkpoints are offered as well.
        revision: branch, tag or commit on the hub.
        variant: of the weight files, such as "fp16".
        size: height and width of pictures that leave it open; by default what their model was
            trained on.
        max_pixels: of a picture that is drawn at once; by default four times those its model was
            trained on.
        token_downsampling: as `Checkpoint.open` takes it.
        decoder: folder or hub id of a tiny autoencoder for the models of one family, which its name
            says; else for those of the first model's.
        decoder_for: what it draws: "previews", or "pictures" as well, whose start pictures it then
            encodes.
        prediction_type: of this model, as `Checkpoint.open` takes it.
        zero_snr: of this model, as `Checkpoint.open` takes it.
        lora_dir: `loras` of `Adapters`.
        embedding_dir: `embeddings` of `Adapters`.
        prompt_chunks: `chunks` of `Adapters`.
        wildcard_dir: as `Wildcards` takes it.
        styles: as `Styles` takes it.
        safety_checker: have models that bring one look at what they draw, and blur pictures that
            are not safe for work.
        t5: as `Checkpoint.open` takes it.
        weights: as `Checkpoint.open` takes it, for all models that can be read so.
        text_encoders: files of the text encoders, of a model whose file holds a transformer alone.
        vae: the file of its autoencoder.
        controlnets: folders or hub ids of ControlNets that pictures may be steered by.
        ip_adapters: IP-Adapters for reference pictures, as `IPAdapter.open` takes them.
        image_encoder: the folder of what sees for them, where it is not beside them.

    Raises:
        CheckpointError: the model, a ControlNet or an IP-Adapter cannot be opened, or a folder
            cannot be read.
        ValueError: the size, the downsampling or the weights are not possible, or the decoder, the
            weights or the number of chips are for none of the models.
    """
    models, lora_dir, embedding_dir, wildcard_dir, styles, image_encoder = (
        expanded(path) if path else None
        for path in (models, lora_dir, embedding_dir, wildcard_dir, styles, image_encoder)
    )
    adapters = Adapters(lora_dir, embedding_dir, prompt_chunks)
    options: dict[str, Any] = dict(
        dtype=dtype,
        variant=variant,
        token_downsampling=token_downsampling,
        safety_checker=safety_checker,
        t5=t5,
        weights=weights,
        tensor_parallel=tensor_parallel,
    )
    if models is not None and not models.is_dir():
        raise ValueError(f"There is no folder {str(models)!r} with models.")
    library = Library(models)
    tiny = TinyDecoder.open(decoder, pictures=decoder_for == "pictures") if decoder else None
    options["decoder"] = tiny
    if image_encoder and not ip_adapters:
        raise ValueError("An image encoder sees for IP-Adapters; name one with --ip-adapter.")
    of_first: dict[str, Any] = dict(
        revision=revision,
        prediction_type=prediction_type,
        zero_snr=zero_snr,
        parts=[*text_encoders, *([vae] if vae else [])],
    )
    first = Checkpoint.open(library.find(str(model)) or model, **of_first, **options)
    if weights and not (first.model.weights or models):
        raise ValueError(
            f"--weights {weights} is for models with a transformer, such as FLUX.2 klein or "
            f"Z-Image; {first.card.name} has none."
        )
    if tensor_parallel > 1 and not (first.is_divided(tensor_parallel) or models):
        possible = [str(chips) for chips in CHIPS[1:] if first.is_divided(chips)]
        raise ValueError(
            f"{first.card.name} is not divided over {tensor_parallel} chips: "
            + (
                f"it has heads and channels for {' or '.join(possible)}."
                if possible
                else "only transformers are, such as FLUX.2 klein or Z-Image."
            )
        )
    if tiny and not (first.parameters.decoder or models):
        raise ValueError(
            f"The decoder {tiny.name} is for "
            f"{' and '.join(family.pipelines[0] for family in tiny.families)}; "
            f"{first.card.name} is another kind of model."
        )
    if tiny:
        options["decoder"] = tiny.of(type(first.model))

    def reopen(path: Path) -> Checkpoint:
        again = path == first.parameters.source
        return Checkpoint.open(path, **of_first if again else {}, **options)

    return Catalog(
        first,
        library,
        reopen,
        size=size,
        max_pixels=max_pixels,
        wildcards=Wildcards(wildcard_dir),
        styles=Styles(styles),
        controlnets=[ControlNet.open(name, dtype=dtype, variant=variant) for name in controlnets],
        ip_adapters=[
            IPAdapter.open(name, image_encoder=image_encoder, dtype=dtype, variant=variant)
            for name in ip_adapters
        ],
    ), adapters


def _in_order(pictures: Iterable[DrawnImage]) -> list[DrawnImage]:
    return sorted(pictures, key=lambda picture: picture.index)
