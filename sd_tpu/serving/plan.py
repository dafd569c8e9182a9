"""Plain data between scheduler and worker: tickets, plans and reports.

Nothing here knows JAX, a thread or a clock, and everything can be pickled, so the worker may be in
another process or on another host.
"""

import dataclasses
from collections.abc import Hashable
from functools import cached_property
from typing import Any

import numpy as np

from sd_tpu.serving.fairness import Account

Key = tuple[int, int]  # of a picture: the number of its job, and its index in the request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A part of a checkpoint's parameters, with or without adapters merged into them.

    Without a name they are zeros, or whatever of the same shapes is there. Text encoders are a part
    of their own, which all replicas hold or none; the other is what draws.
    """

    name: str
    texts: bool = False  # whether they are the text encoders
    architecture: str = ""  # as in `Batch`; "" of text encoders
    adapters: tuple[tuple[str, float], ...] = ()  # names and strengths of merged adapters
    files: tuple[Hashable, ...] = ()  # tells files from others of the same names
    network: tuple[str, str] | None = None  # component and name of a network beside these
    # The weights below a network or adapters, with which all other arrays are shared.
    base: "Weights | None" = None
    # Bytes on each chip that holds these weights, beside those of the base.
    memory: int = dataclasses.field(default=0, compare=False)

    @property
    def needs(self) -> tuple["Weights", ...]:
        """Weights that stay on a replica as long as these do, each after those that it needs."""
        return (*self.base.needs, self.base) if self.base else ()

    @property
    def root(self) -> "Weights":
        """The checkpoint's own weights."""
        return self.base.root if self.base else self

    @property
    def zeros(self) -> "Weights":
        """Stand-in for these weights on a replica that draws nothing."""
        return Weights(
            name="",
            architecture=self.architecture,
            memory=self.memory,
            base=self.base and self.base.zeros,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Pictures that share compiled programs and slots: of one architecture, networks and size."""

    architecture: str
    height: int
    width: int
    shape_key: tuple[str, ...] = ()
    slots: int = 16  # over all replicas, equally many on each
    group: int = 1  # slots that a replica steps together
    guided: bool = True  # whether any of its pictures may be
    adapter_rank: int = 0  # of the low-rank factors that each of its pictures brings
    zeros: Weights | None = None  # of a replica without parameters, while others draw
    memory: int = 0  # bytes of slots and temporaries on each chip

    @property
    def needs(self) -> tuple[Weights, ...]:
        """Weights that stay on a replica as long as this batch does; all sizes share them."""
        return (*self.zeros.needs, self.zeros) if self.zeros else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """A program that encodes prompts of the same shapes, on all replicas together."""

    architecture: str  # of the checkpoint, as in `Batch`
    shapes: tuple[tuple[int, ...], ...]  # of a prompt's arrays
    count: int = 8  # of prompts that it takes at once, over all replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Texts of a picture, as text encoders take them; equal ones are encoded once."""

    encoder: TextEncoder
    weights: Weights  # of the text encoders
    digest: bytes  # of the inputs
    inputs: Any = dataclasses.field(default=None, compare=False, repr=False)
    # Bytes of what is made of them, on the host.
    memory: int = dataclasses.field(default=0, compare=False)

    def __hash__(self) -> int:
        """Hash the digest alone: each plan looks thousands up, and few differ in all but that."""
        return hash(self.digest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """A program that encodes start or reference pictures of one size."""

    kind: str  # of the networks that encode: an architecture, or that of a network beside it
    height: int
    width: int
    references: bool = False  # else start pictures, and those that a mask leaves
    part: str = ""  # the component that a network beside the model is; "" is the model itself


Program = Batch | Encoder | TextEncoder  # what is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Training of a LoRA, a step at a time, on all devices beside what is drawn there."""

    number: int
    weights: Weights  # for which it trains
    texts: Weights  # text encoders that read its captions
    memory: int = dataclasses.field(default=0, compare=False)  # bytes on each chip, beside these

    @property
    def needs(self) -> tuple[Weights, ...]:
        """Weights that stay on a replica as long as the training does."""
        return (*self.weights.needs, self.weights, *self.texts.needs, self.texts)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ticket:
    """One picture to be drawn.

    `slot_inputs` are what the programs take; the scheduler does not look at them.
    """

    job: int
    index: int
    client: str
    address: str = ""  # of the client, if known
    batch: Batch
    weights: Weights  # that draw
    prompt: Prompt
    encoders: tuple[Encoder, ...] = ()  # for its pictures, needed until it is in its slot
    kinds: np.ndarray  # [R], kinds of the table's rows, from `slots.row_kinds`
    previews: bool = True  # whether previews are made
    slot_inputs: Any = None

    @cached_property
    def account(self) -> Account:
        """Account whose turns the picture takes; a client without an address shares with none."""
        return Account(self.address or self.client, self.client)

    @property
    def key(self) -> Key:
        """Name of the picture in plans and reports."""
        return self.job, self.index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Orders for a worker, carried out in this order; background work may take many plans.

    Rows are of one batch. All pictures that a replica steps or decodes in one plan have the same
    weights.
    """

    release: tuple[Program, ...] = ()  # given up, batches with their slots
    suspend: tuple[Training, ...] = ()  # whose state leaves the devices
    drop: tuple[tuple[int, Weights], ...] = ()  # by replica
    load: tuple[tuple[int, Weights], ...] = ()  # to replicas, in the background
    compile: tuple[Program, ...] = ()  # in the background
    forget: tuple[Prompt, ...] = ()  # what was made of them
    encode: tuple[Prompt, ...] = ()  # by weights that all replicas hold; what is made is kept
    train: Training | None = None  # whose next step is taken, while nothing is drawn
    batch: Batch | None = None  # None and no training: wait for something in the background
    weights: dict[int, Weights] = dataclasses.field(default_factory=dict)  # by replica
    enter: dict[int, Ticket] = dataclasses.field(default_factory=dict)  # by slot
    rows: dict[int, int] = dataclasses.field(default_factory=dict)  # how many each slot takes
    finish: tuple[int, ...] = ()  # slots whose pictures are done then, to be decoded
    preview: tuple[int, ...] = ()  # slots whose pictures are shown as they are then


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Seconds that compiling took, and a batch's latencies on these devices, measured then."""

    seconds: float
    row_seconds: float = 0.0  # of a group: an evaluation of the model
    decode_seconds: float = 0.0  # of a picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a plan, and of earlier ones in the background."""

    encode_seconds: float = 0.0  # of all prompts
    advance_seconds: float = 0.0
    decode_seconds: float = 0.0
    preview_seconds: float = 0.0
    pictures: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # by slot: [H, W, 3]
    unsafe: frozenset[int] = frozenset()  # slots whose pictures are blurred, not safe for work
    previews: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # smaller ones
    train_seconds: float | None = None  # None where no step was left, as where none was planned
    compiled: dict[Program, Compiled] = dataclasses.field(default_factory=dict)
    loaded: dict[tuple[int, Weights], float] = dataclasses.field(default_factory=dict)  # seconds
    # Why programs could not be compiled, weights not be loaded or a training not go on.
    failed: dict[Program | tuple[int, Weights] | Training, str] = dataclasses.field(
        default_factory=dict
    )
    error: str | None = None  # why nothing was drawn: the slots of the plan's batch are lost
    # Why prompts were not encoded; with any of them nothing was drawn, and no slot is lost.
    unread: dict[Prompt, str] = dataclasses.field(default_factory=dict)
