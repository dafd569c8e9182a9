"""The models that a server offers and the networks beside them, with defaults and sizes.

Requests are checked by these.
"""

import dataclasses
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sd_tpu.checkpoint import single_file
from sd_tpu.checkpoint.card import ModelCard
from sd_tpu.checkpoint.config import CheckpointError, is_file, paths_within, read_json
from sd_tpu.checkpoint.folder import index_file
from sd_tpu.checkpoint.library import RESCAN_SECONDS, Library
from sd_tpu.checkpoint.weights import written
from sd_tpu.families import find_family
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.controlnet import ControlNet
from sd_tpu.families.extra_network import ExtraNetwork
from sd_tpu.families.ip_adapter import IPAdapter
from sd_tpu.pictures.inputs import MAX_PIXELS
from sd_tpu.reading import composed
from sd_tpu.request import Sizes
from sd_tpu.sampling.samplers import default_sampler, samplers_for
from sd_tpu.sentence import Sentence
from sd_tpu.serving.plan import Weights
from sd_tpu.serving.tiling import Tiling
from sd_tpu.settings import RANDOM, SETTINGS, Picture, RequestError, about, of_prompt, shortened
from sd_tpu.styles import Styles
from sd_tpu.wildcards import Wildcards

AREAS = 4  # times its own that a model draws at once, unless the server says otherwise
TILED_AREAS = 64  # times its own that it draws at most by tiles
MAX_NAMED = 10  # models in a sentence
# SDXL's, as its paper lists them (Podell et al. 2023, https://arxiv.org/abs/2307.01952), those that
# are as wide as others are high left out.
RATIOS = ((1024, 1024), (896, 1152), (832, 1216), (768, 1344), (640, 1536))


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model that has been opened; its parameters need not be anywhere."""

    checkpoint: Checkpoint
    weights: Weights  # that draw
    texts: Weights  # of its text encoders
    defaults: Picture
    written: tuple[tuple[int, int], ...]  # as `Parameters.written` was then


class Catalog:
    """The models of a server: the first one, and those in a library. They are opened when somebody
    asks for them; those of one architecture share its name."""

    def __init__(
        self,
        first: Checkpoint,
        library: Library,
        reopen: Callable[[Path], Checkpoint],
        *,
        size: tuple[int, int] | None = None,
        max_pixels: int | None = None,
        wildcards: Wildcards | None = None,
        styles: Styles | None = None,
        controlnets: Sequence[ControlNet] = (),
        ip_adapters: Sequence[IPAdapter] = (),
    ):
        """Start with the first model, which is open.

        Args:
            first: the model of requests that name none.
            library: the other models.
            reopen: opens one of them.
            size: height and width by default, for models that can draw it; None is each model's.
            max_pixels: of a picture that is drawn at once; None is AREAS times the model's own.
            wildcards: the values of prompts; None allows braces only.
            styles: templates of prompts; None is none.
            controlnets: the networks for control pictures.
            ip_adapters: the networks for reference pictures.

        Raises:
            CheckpointError: a ControlNet or an IP-Adapter does not fit the first model, and there
                are no others.
            ValueError: the first model cannot make pictures of that size.
        """
        self._library, self._reopen, self._size = library, reopen, size
        self._max_pixels, self.wildcards = max_pixels, wildcards or Wildcards()
        self.styles = styles or Styles()
        self._architectures: dict[str, Checkpoint] = {}
        self._stale: set[str] = set()
        self._hashes: dict[str, str] = {}
        self._seen: dict[str, float] = {}  # when a model's files were last looked at
        self._lock, self._hashing = threading.Lock(), defaultdict(threading.Lock)
        self.first = composed(first.card.name)
        self._first_path = first.parameters.source
        if size:
            first.model.latent_shape(*size)
        self._opened: dict[str, OpenedModel] = {}
        self._opened[self.first] = self._opened_model(self.first, first)
        # By component and name. Each component is called like the setting that names one of them.
        self._networks: dict[str, dict[str, ExtraNetwork]] = {
            ControlNet.part: _by_name(controlnets),
            IPAdapter.part: _by_name(ip_adapters),
        }
        self._numbers = {
            part: _numbered(networks.values()) for part, networks in self._networks.items()
        }
        if len(self.models()) == 1:
            for network in (*controlnets, *ip_adapters):
                network.check(first.model)

    # --- models and networks ---------------------------------------------------------------------

    def models(self) -> list[str]:
        """Return the names of all models, the first one first."""
        others = [name for name in self._library.paths() if name != self.first]
        return [self.first, *others]

    def open(self, model: str) -> OpenedModel:
        """Open the model of this name; "" is the first.

        A model whose files were written anew is opened again a few seconds later.

        Raises:
            RequestError: there is none, or its files cannot be loaded.
        """
        name = model or self.first
        self._look_at(name)
        if name not in self._opened or name in self._stale:
            with self._lock:
                if name not in self._opened or name in self._stale:
                    self._opened[name] = self._opened_model(name, self._checkpoint(name))
                    self._hashes.pop(name, None)
                    self._stale.discard(name)
        return self._opened[name]

    def _look_at(self, name: str) -> None:
        """Check, now and then, whether a model's files are those that were opened."""
        there, now = self._opened.get(name), time.monotonic()
        if there and now - self._seen.get(name, -math.inf) >= RESCAN_SECONDS:
            self._seen[name] = now
            # One that is gone may still lie on the devices.
            if there.checkpoint.parameters.written() not in ((), there.written):
                self.forget(name)

    def opened(self, model: str) -> OpenedModel:
        """Return the model of this name as it was opened, wherever its files are now."""
        return self._opened[model or self.first]

    def forget(self, model: str) -> None:
        """Open the model again when it is next asked for, as its files have turned out to be other
        than they were."""
        self._stale.add(model)

    def hash(self, model: str) -> str:
        """Return `Parameters.hash` of a model, reading a single file only once."""
        with self._hashing[model]:  # others' pictures need not wait for it
            if model not in self._hashes:
                self._hashes[model] = self.opened(model).checkpoint.parameters.hash()
            return self._hashes[model]

    def of_hash(self, digits: str) -> str:
        """Return the model of this hash if it is known, else the text itself."""
        known = {found.lower(): model for model, found in [*self._hashes.items()] if found}
        return known.get(digits.lower(), digits)

    @property
    def controlnets(self) -> list[str]:
        """Names of the ControlNets."""
        return [*self._networks[ControlNet.part]]

    @property
    def ip_adapters(self) -> list[str]:
        """Names of the IP-Adapters."""
        return [*self._networks[IPAdapter.part]]

    def networks(self, picture: Picture) -> list[ExtraNetwork]:
        """Return the networks beside the model's that the picture is drawn with.

        Raises:
            RequestError: there is none of the name that it asks for, or none for its model.
        """
        networks = []
        if picture.uses_controlnet:
            if not self.controlnets:
                raise RequestError("Control pictures need a ControlNet, and this server has none.")
            networks.append(self._network(picture, ControlNet.part))
        if picture.uses_reference and (picture.ip_adapter or not self.edits(picture.model)):
            if not self.ip_adapters:
                raise RequestError(
                    "Reference pictures need an IP-Adapter with this model, and this server has "
                    "none."
                )
            networks.append(self._network(picture, IPAdapter.part))
        return networks

    def edits(self, model: str) -> bool:
        """Whether a model takes reference pictures without an IP-Adapter; raises as `open`."""
        return bool(self.open(model).checkpoint.model.max_references)

    @property
    def takes_references(self) -> bool:
        """Whether reference pictures can be used at all: with an IP-Adapter, or with some model.

        Models are asked by their files, and none is opened.
        """
        paths = self._library.paths().values()
        return bool(
            self.ip_adapters
            or self.edits("")
            or any(
                _edits(path, written(path if path.is_file() else index_file(path)))
                for path in paths
            )
        )

    def max_references(self, model: str) -> int:
        """Return how many reference pictures a model's pictures may have; raises as `open`."""
        itself = self.open(model).checkpoint.model.max_references
        return itself or len(self.ip_adapters[:1])

    def _check_references(self, picture: Picture) -> None:
        """Raise RequestError for more reference pictures than the picture can have."""
        count, most = len(picture.references), self.max_references(picture.model)
        if picture.uses_reference and count > most:
            raise RequestError(
                "{count} reference pictures were given; this model takes at most {most}.",
                setting="reference",
                count=count,
                most=most,
            )

    def _network(self, picture: Picture, part: str) -> ExtraNetwork:
        there, named = self._networks[part], composed(getattr(picture, part))
        if named and named not in there:
            raise RequestError(
                "There is no {kind} {value}; there are {known}.",
                setting=part,
                kind=SETTINGS[part].label,
                value=shortened(named),
                known=", ".join([*there][:MAX_NAMED]),
            )
        model = self.open(picture.model).checkpoint.model
        refused = ""
        for network in [there[named]] if named else there.values():
            try:
                network.check(model)
                return network
            except CheckpointError as error:
                refused = refused or str(error)
        raise RequestError("{reason}", setting=part, reason=refused)

    def with_network(self, weights: Weights, network: ExtraNetwork) -> Weights:
        """Return the weights with those of a network beside them."""
        kind = f"{weights.architecture} with {self.kind(network)}"
        return dataclasses.replace(
            weights,
            architecture=kind,
            network=(network.part, network.name),
            base=weights,
            memory=network.memory,
        )

    def kind(self, network: ExtraNetwork) -> str:
        """Return the name that all networks of this architecture have."""
        return f"{network.kind} {self._numbers[network.part][network.name]}"

    def network_of(self, weights: Weights) -> ExtraNetwork:
        """Return the network that `with_network` put beside these weights."""
        assert weights.network is not None
        part, name = weights.network
        return self._networks[part][name]

    def sample(self, architecture: str) -> tuple[Checkpoint, Picture]:
        """Return a checkpoint of the architecture, and its defaults."""
        checkpoint = self._architectures[architecture]
        return checkpoint, _defaults(checkpoint, self._size)

    def sample_network(self, part: str, kind: str) -> ExtraNetwork:
        """Return a network of this component and architecture, as `kind` names it."""
        return next(each for each in self._networks[part].values() if self.kind(each) == kind)

    # --- `sd_tpu.request.ModelCatalog` ----------------------------------------------------------

    def defaults(self, model: str) -> Picture:
        """Return the settings of pictures that leave them open; raises RequestError as `open`."""
        return self.open(model).defaults

    def check(self, picture: Picture, index: int | None = None) -> None:
        """Raise RequestError if model, style or networks are missing, or the size is impossible.

        So are more reference pictures than the model takes.
        """
        with about("", index):
            checkpoint = self.open(picture.model).checkpoint
            self.styled(picture, index)
            self.networks(picture)
            self._check_references(picture)
        limit = self._limit(picture)
        if picture.height * picture.width > limit:
            raise RequestError(
                "A picture of {width}x{height} is too large: here pictures have at "
                "most {limit} pixels.",
                setting="width",
                index=index,
                width=picture.width,
                height=picture.height,
                limit=limit,
            )
        try:
            checkpoint.model.latent_shape(picture.height, picture.width)
        except ValueError as error:
            raise RequestError(
                "{reason}", setting="width", index=index, reason=str(error)
            ) from None

    def size_unit(self, model: str) -> int:
        """Pixels of which the sides of a model's pictures are multiples; raises as `open`."""
        return self.open(model).checkpoint.model.size_unit

    def samplers(self, model: str) -> dict[str, tuple[str, ...]]:
        """Return the spacings of each sampler that a model takes; raises as `open`."""
        taken = samplers_for(self.open(model).checkpoint.schedule)
        return {key: sampler.spacings for key, sampler in taken.items()}

    def larger_strength(self, model: str) -> float:
        """Strength at which the model's pictures are drawn larger; raises as `open`."""
        return self.open(model).checkpoint.card.larger_strength

    def _limit(self, picture: Picture) -> int:
        """Pixels that a picture like this may have, by tiles or at once."""
        at_once = self._at_once(picture)
        area = math.prod(self.open(picture.model).checkpoint.default_size)
        # Tiles have no masks, and what extends a picture has one of its own.
        by_tiles = (
            area <= at_once
            and picture.init_image
            and picture.strength < 1
            and not picture.mask
            and picture.fit != "extend"
        )
        return max(at_once, min(TILED_AREAS * area, MAX_PIXELS)) if by_tiles else at_once

    def _at_once(self, picture: Picture) -> int:
        """Pixels that a picture of its model may have to be drawn whole."""
        height, width = self.open(picture.model).checkpoint.default_size
        return self._max_pixels or AREAS * height * width

    def tiling(self, picture: Picture) -> Tiling | None:
        """Return the tiles, of the model's own size, that draw a checked picture.

        Returns None where the picture is drawn at once.
        """
        if picture.height * picture.width <= self._at_once(picture):
            return None
        checkpoint = self.open(picture.model).checkpoint
        own = zip(checkpoint.default_size, (picture.height, picture.width), strict=True)
        height, width = map(min, own)
        return Tiling.of(picture.height, picture.width, (height, width), checkpoint.model.downscale)

    def fill(self, prompts: Sequence[str], seed: int) -> list[str]:
        """Fill prompts as `Wildcards.fill`."""
        return self.wildcards.fill(prompts, seed)

    def styled(self, picture: Picture, index: int | None = None) -> Picture:
        """Return the picture as it is drawn, with its style applied and its wildcards filled.

        As in A1111, wildcards in the style take values by the picture's own seed. Raises
        RequestError as `Styles.applied` and `Wildcards.value`.
        """
        if not picture.style:
            return picture
        put = self.styles.applied(picture, index)
        if picture.to_prompt:
            other = self.styles.applied(
                dataclasses.replace(picture, prompt=picture.to_prompt), index
            )
            put = dataclasses.replace(put, to_prompt=other.prompt)
        whose = Sentence("{name}{of}", name=SETTINGS["style"].label, of=of_prompt(index))
        seed = picture.seed if picture.to_seed == RANDOM else picture.to_seed
        with about("style", index):
            return dataclasses.replace(
                put,
                prompt=self.wildcards.value(put.prompt, picture.seed, whose),
                to_prompt=self.wildcards.value(put.to_prompt, seed, whose),
            )

    def sizes(self, model: str) -> Sizes:
        """Height and width of the pictures that people choose from: the default, then the usual
        aspect ratios of about the area the model was trained on, high ones and wide ones.

        Raises:
            RequestError: as `open`.
        """
        opened = self.open(model)
        height, width = opened.checkpoint.default_size
        step = max(1, min(64, min(height, width) // 8))
        scale = (height * width) ** 0.5 / 1024
        sides = [tuple(round(side * scale / step) * step for side in ratio) for ratio in RATIOS]
        usual = [(height, width)] + [
            pair for high, wide in sides[1:] for pair in ((high, wide), (wide, high))
        ]
        sizes = [(opened.defaults.height, opened.defaults.width), *usual]
        return [size for size in dict.fromkeys(sizes) if self._possible(opened, size)]

    def _possible(self, opened: OpenedModel, size: tuple[int, int]) -> bool:
        try:
            self.check(dataclasses.replace(opened.defaults, height=size[0], width=size[1]))
        except RequestError:
            return False
        return True

    # --- opening --------------------------------------------------------------------------------

    def _checkpoint(self, name: str) -> Checkpoint:
        path = self._first_path if name == self.first else self._library.find(name)
        if path is None:
            known = self.models()
            more = "…" if len(known) > MAX_NAMED else ""
            raise RequestError(
                "There is no model {value}; there are {known}.",
                setting="model",
                value=shortened(name),
                known=", ".join(known[:MAX_NAMED]) + more,
            )
        try:
            with paths_within(path.parent):
                return self._reopen(path)
        except (CheckpointError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise RequestError(
                "The model {name} cannot be loaded: {reason}",
                setting="model",
                name=name,
                reason=reason.splitlines()[0],
            ) from error

    def _opened_model(self, name: str, checkpoint: Checkpoint) -> OpenedModel:
        before, written = self._opened.get(name), checkpoint.parameters.written()
        files = () if before is None else before.weights.files
        if before and written != before.written:
            files = written  # not from the first on: each host's own files are as old as they are
        weights = Weights(
            name=name,
            architecture=self._architecture(checkpoint),
            files=files,
            memory=checkpoint.drawing.memory,
        )
        memory = checkpoint.texts.memory
        texts = Weights(name=name, texts=True, files=files, memory=memory)
        defaults = dataclasses.replace(_defaults(checkpoint, self._size), model=name)
        return OpenedModel(checkpoint, weights, texts, defaults, written)

    def _architecture(self, checkpoint: Checkpoint) -> str:
        """Return the name that all checkpoints with an equal model have."""
        for name, other in self._architectures.items():
            if other.model == checkpoint.model:
                return name
        name = f"{type(checkpoint.model).__name__} {len(self._architectures) + 1}"
        self._architectures[name] = checkpoint
        return name


@lru_cache(maxsize=1024)
def _edits(path: Path, _: tuple[int, int] | None) -> bool:
    """Whether a checkpoint's folder or file is of a family that takes reference pictures itself."""
    try:
        index = (
            {"_class_name": single_file.read(path).class_name}
            if is_file(path)
            else read_json(index_file(path))
        )
        return bool(find_family(index).max_references)
    except CheckpointError:
        return False


def _by_name(networks: Sequence[ExtraNetwork]) -> dict[str, ExtraNetwork]:
    """Name the networks; a network with the name of an earlier one gets a number."""
    found: dict[str, ExtraNetwork] = {}
    for network in networks:
        own = name = composed(network.name)
        number = 1
        while name in found:
            number += 1
            name = f"{own} ({number})"
        found[name] = dataclasses.replace(network, name=name)
    return found


def _numbered(networks: Iterable[ExtraNetwork]) -> dict[str, int]:
    """Return the number of each network's architecture, by name; equal ones share programs."""
    numbers, architectures = {}, []
    for network in networks:
        if network.graph not in architectures:
            architectures.append(network.graph)
        numbers[network.name] = architectures.index(network.graph) + 1
    return numbers


def _defaults(checkpoint: Checkpoint, size: tuple[int, int] | None) -> Picture:
    height, width = checkpoint.default_size
    if size:
        try:
            checkpoint.model.latent_shape(*size)
            height, width = size
        except ValueError:  # what another model draws
            pass
    defaults = card_defaults(checkpoint.card, checkpoint.configs["scheduler"])
    return dataclasses.replace(defaults, height=height, width=width)


def card_defaults(card: ModelCard, scheduler_config: dict[str, Any]) -> Picture:
    """Return the settings that a model's own files ask for; the size is not among them."""
    sampler, spacing = default_sampler(scheduler_config)
    if card.sampler:
        sampler, spacing = card.sampler, card.spacing
    return Picture(steps=card.steps, guidance=card.guidance, sampler=sampler, spacing=spacing or "")
