"""The scheduler: all policy of serving, without JAX, threads or a clock.

`submit` and `cancel` say what is wanted, `schedule` returns what a worker should do next, `update`
takes in the results, and `events` returns what the makers of jobs should know. Pictures wait in
queues of their clients, are placed in slots, and are drawn there in turns:

- A free slot goes to the address with the fewest, and there to the client with the fewest; no
  client gets more of a batch's slots than are left free after it, and no address more than three
  times as many, so there is always one for whoever comes next from elsewhere.
- In each plan a replica draws for the client whose turn it is (`AddressShares`), and for others as
  far as that costs nothing because the groups stepped together have room.
- While some replicas decode, the rest wait. So a picture waits with its last row for others that it
  can be decoded with, as long as that delays it less than the others, by MOST_WAITED at most.
- What a picture needs, weights on its replica, a compiled batch and encoders of its pictures, is
  prepared in the background; what was used least recently makes room. Where nothing can go, a
  replica takes in no others from SWITCH_SECONDS on, until it is empty enough.
- Prompts are encoded by all replicas together, as pictures are drawn first. What is made of them is
  kept, so that a prompt that is there already takes no text encoders. Where those cannot stay
  beside what draws, they encode all that waits before they go, as far as it can be kept; and what
  draws stays while pictures wait for it whose prompts are encoded, for SWITCH_SECONDS at least
  from when each replica was first given other weights again.
- A training has the lowest turn. A step is taken where nothing can be drawn, or at a TRAINING_SHARE
  of the time where nothing that is wanted has waited for one: no picture waits for two. It leaves
  the replicas as soon as a picture needs the room.
"""

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sd_tpu.request import RequestError
from sd_tpu.sentence import Sentence
from sd_tpu.serving.fairness import Account, AddressShares
from sd_tpu.serving.job import (
    COMPILING,
    LOADING,
    WAITING,
    Cancelled,
    Done,
    Event,
    Failed,
    ImageReady,
    Progress,
    Queued,
)
from sd_tpu.serving.latency import LatencyModel, in_turns, lanes_left, rows_left
from sd_tpu.serving.memory import Item, KeptPrompts, Memory
from sd_tpu.serving.plan import (
    Batch,
    Encoder,
    Plan,
    Program,
    Prompt,
    Report,
    TextEncoder,
    Ticket,
    Training,
    Weights,
)

PREVIEW_ROW = 2  # the first after which a picture is worth looking at
ADDRESS_SLOTS = 3  # that an address may have for each that is left free, of a batch
MAX_BATCHES = 32  # compiled at a time: programs take memory of the host, which nobody counts
MAX_SPARE = 16  # encoders that no picture needs
# Bytes of encoded prompts that are kept; one takes 0.2 MB for SD 1.4, 16 for FLUX.2 klein.
KEPT_BYTES = 512 * 2**20
SWITCH_SECONDS = 5.0  # that a replica keeps to its weights while others wait for room there
MOST_WAITED = 0.5  # times what a picture takes alone, until it is decoded with others
TRAINING_SHARE = 0.1  # of the time, at most, while anything is drawn

_AnyEncoder = Encoder | TextEncoder
_QueueKey = tuple[Account, Batch, Weights, tuple[_AnyEncoder, ...], Weights]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds on waiting pictures: in all, by client, and by address.

    Addresses are bounded as browsers can give themselves any number of names.
    """

    jobs: int = 400
    pictures: int = 3200
    client_jobs: int = 100
    client_pictures: int = 800
    address_jobs: int = 200
    address_pictures: int = 1600


class Busy(RequestError):
    """Too much is asked for already; `retry_after` says in how many seconds to try again."""

    def __init__(self, template: str, retry_after: float):
        """Format the message as a Sentence does."""
        super().__init__(template)
        self.retry_after = max(1, math.ceil(retry_after))


class _Picture:
    """A picture that is wanted and not drawn yet."""

    def __init__(self, ticket: Ticket, number: int, now: float):
        self.ticket, self.number, self.since = ticket, number, now
        self.left = len(ticket.kinds)
        self.slot: Any = None  # and replica: numbers, None while it waits
        self.replica: Any = None
        self.entered = False  # its first plan puts it into its slot on the replica
        self.wanted = True
        self.has_waited_for_training = False
        self.drawn_at = -math.inf
        self._rows, self._lanes = rows_left(ticket.kinds), lanes_left(ticket.kinds)

    @property
    def done(self) -> int:
        """The rows that it has taken."""
        return len(self.ticket.kinds) - self.left

    @property
    def encoders(self) -> tuple[_AnyEncoder, ...]:
        """The encoders that it needs until it is in its slot."""
        return () if self.entered else (*self.ticket.encoders, self.ticket.prompt.encoder)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that it still needs."""
        return (self.ticket.batch, *self.encoders)

    @property
    def kinds_left(self) -> np.ndarray:
        return self.ticket.kinds[self.done :]

    @property
    def at_once(self) -> int:
        """The rows after which somebody should see it first, else all that are left."""
        unseen = self.ticket.previews and self.done < PREVIEW_ROW
        return min(self.left, PREVIEW_ROW - self.done) if unseen else self.left

    def alone(self, model: LatencyModel) -> float:
        return model.of(self.ticket.batch).alone(self._rows[self.left])

    def in_crowd(self, model: LatencyModel) -> float:
        return model.of(self.ticket.batch).in_crowd(self._lanes[self.left])

    def lanes(self, rows: int) -> int:
        """Return the evaluations that its next rows take."""
        return self._lanes[self.left] - self._lanes[self.left - rows]


class _Job:
    """State of a job until it ends."""

    def __init__(self, number: int, ticket: Ticket, pictures: dict[int, _Picture], steps: int):
        self.number, self.account = number, ticket.account
        self.client, self.address = ticket.client, ticket.address
        self.pictures, self.steps = pictures, steps
        self.unfinished = set(pictures)
        self.begun: Any = None  # when; None before its first plan
        self.reported: tuple[int, str] | None = None  # position and reason of the last Queued event

    def waiting(self) -> list[_Picture]:
        return [self.pictures[index] for index in sorted(self.unfinished)]

    def step(self) -> int:
        """Return how many of its steps a job has taken, over all pictures that are still wanted."""
        wanted = [p for p in self.pictures.values() if p.wanted] or self.pictures.values()
        rows = sum(len(picture.ticket.kinds) for picture in wanted)
        return self.steps * (rows - sum(picture.left for picture in wanted)) // rows


class _ProgramState:
    """Since when a program is compiled, and whether it is there."""

    def __init__(self, now: float):
        self.since, self.ready = now, False


class _BatchState(_ProgramState):
    """A batch's slots, and whether its programs are there and have been used."""

    def __init__(self, batch: Batch, replicas: int, now: float):
        super().__init__(now)
        self.batch, self.served = batch, False
        self.slots: list[_Picture | None] = [None] * batch.slots
        self._share = batch.slots // replicas

    def pictures(self) -> list[_Picture]:
        return [picture for picture in self.slots if picture]

    def has_room_for(self, account: Account) -> bool:
        """Whether an account may have another slot, so that others find one."""
        others = [picture.ticket.account for picture in self.pictures()]
        free = len(self.slots) - len(others)
        near = sum(other.address == account.address for other in others)
        return others.count(account) < free and near < ADDRESS_SLOTS * free

    def free(self, replica: int) -> list[int]:
        """Return the free slots on a replica."""
        return [
            slot
            for slot in range(replica * self._share, (replica + 1) * self._share)
            if self.slots[slot] is None
        ]


@dataclasses.dataclass
class _Moves:
    """The items that a plan prepares and gives up."""

    release: list[Program] = dataclasses.field(default_factory=list)
    suspend: list[Training] = dataclasses.field(default_factory=list)
    drop: list[tuple[int, Weights]] = dataclasses.field(default_factory=list)
    load: list[tuple[int, Weights]] = dataclasses.field(default_factory=list)
    compile: list[Program] = dataclasses.field(default_factory=list)
    forget: list[Prompt] = dataclasses.field(default_factory=list)
    encode: list[Prompt] = dataclasses.field(default_factory=list)

    def as_tuples(self) -> dict[str, Any]:
        return {field.name: tuple(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class _Reservation:
    """A replica that takes in no pictures but those that need what one picture needs, or none but
    that picture where it needs text encoders."""

    picture: _Picture
    item: Item  # for which there is no room

    def admits(self, other: _Picture) -> bool:
        mine, theirs = self.picture.ticket, other.ticket
        if _is_texts(self.item):  # others with the same weights would keep these there
            return other is self.picture
        return (mine.batch, mine.weights) == (theirs.batch, theirs.weights)


class Scheduler:
    """Policy for the `replicas` that one worker owns; called by one thread at a time.

    `now` is in seconds, of any clock that does not go back.
    """

    def __init__(
        self,
        replicas: int,
        model: LatencyModel,
        *,
        limits: Limits = Limits(),
        memory: int | None = None,
        kept: int = KEPT_BYTES,
    ):
        """Begin with nothing on the replicas.

        Args:
            replicas: how many.
            model: of latencies.
            limits: on what waits.
            memory: bounds what lies on each chip, in bytes.
            kept: bounds what is kept of prompts, in bytes of the host.
        """
        self.limits, self._replicas, self._model = limits, range(replicas), model
        self._memory = Memory(replicas, memory)
        self._shares = AddressShares()
        self._jobs: dict[int, _Job] = {}
        self._waiting: dict[_QueueKey, deque[_Picture]] = {}
        self._batch_states: dict[Batch, _BatchState] = {}
        self._encoder_states: dict[_AnyEncoder, _ProgramState] = {}  # last used, last
        self._kept = KeptPrompts(kept)
        self._lost: list[Prompt] = []  # that the worker may keep and nobody knows of
        # Results of `_next_read`, `_unread_weights` and `_awaiting`, computed once for each plan.
        self._next: list[_Picture] | None = None
        self._unread_now: set[Weights] | None = None
        self._awaited: dict[Weights, list[_Picture]] | None = None
        self._is_short = False  # whether a picture has found no room for what it needs
        self._loading: set[tuple[int, Weights]] = set()
        self._switched_at = [-math.inf] * replicas  # when a replica was last given other weights
        # When each was first given other weights since all of them were reserved.
        self._first_switched_at: dict[int, float] = {}
        self._reserved: dict[int, _Reservation] = {}  # by replica
        self._training: Training | None = None
        self._step_seconds = self._drawn_seconds = 0.0  # of its last step, and since then
        self._plan = Plan()
        self._evaluations = 0  # of the replica with most to do in the plan
        self._numbers = itertools.count()
        self._events: list[tuple[int, Event]] = []

    # --- jobs -----------------------------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket], now: float, *, steps: int) -> None:
        """Add a job of one client, whose pictures wait from now on.

        Args:
            tickets: of the same job and client.
            now: the time.
            steps: those of the picture that takes most, along which progress is counted.

        Raises:
            Busy: too much waits already.
            RequestError: the replicas can never hold what a picture needs.
        """
        number, account = tickets[0].job, tickets[0].account
        self.check_room(tickets)
        pictures = {ticket.index: _Picture(ticket, next(self._numbers), now) for ticket in tickets}
        if not any(job.account == account for job in self._jobs.values()):
            self._shares.join(account)
        for picture in pictures.values():
            picture.has_waited_for_training = self._plan.train is not None
        self._jobs[number] = _Job(number, tickets[0], pictures, steps)
        for ticket, picture in zip(tickets, pictures.values(), strict=True):
            self._waiting.setdefault(_queue_key(ticket), deque()).append(picture)
        self._emit_positions(now)

    def check_room(self, tickets: Sequence[Ticket]) -> None:
        """Raise Busy or RequestError as `submit` would now."""
        client, address, jobs = tickets[0].client, tickets[0].address, list(self._jobs.values())
        mine = [job for job in jobs if job.client == client]
        near = [job for job in jobs if job.address == address] if address else []
        for asked, most_jobs, most_pictures, sentence in (
            (
                jobs,
                self.limits.jobs,
                self.limits.pictures,
                Sentence("Too many people are waiting; please try again in a minute."),
            ),
            (
                mine,
                self.limits.client_jobs,
                self.limits.client_pictures,
                Sentence(
                    "Too many of your pictures are waiting; please try again when some are done."
                ),
            ),
            (
                near,
                self.limits.address_jobs,
                self.limits.address_pictures,
                Sentence("Too much is asked for from your network; please try again in a minute."),
            ),
        ):
            pictures = sum(len(job.unfinished) for job in asked)
            if len(asked) >= most_jobs or pictures + len(tickets) > most_pictures:
                raise Busy(sentence, self._seconds_of(asked) / max(1, len(asked)))
        for ticket in tickets:
            parts = ticket.weights, ticket.prompt.weights  # which need not be there together
            if not all(self._memory.fits(ticket.batch, part) for part in parts):
                raise RequestError("This model and size need more memory than the devices have.")

    def cancel(self, number: int, now: float, index: int | None = None) -> None:
        """Give up a job, or only its picture at `index`; finished pictures stay."""
        job = self._jobs.get(number)
        if job is None:
            return
        for picture in [job.pictures[p] for p in job.unfinished if index in (None, p)]:
            picture.wanted = False
            if picture.slot is None:
                self._unqueue(picture)
                self._finish(picture, now)
        self._emit_positions(now)

    def train(self, training: Training) -> None:
        """Train beside what is drawn, until `end_training`; there is no other training by then.

        Raises:
            RequestError: the replicas can never hold what it needs.
        """
        if not self.fits(training):
            raise RequestError("Teaching this model needs more memory than the devices have.")
        self._training = training

    def fits(self, *items: Item) -> bool:
        """Whether the replicas could hold these together, with what they need."""
        return self._memory.fits(*items)

    @property
    def is_training(self) -> bool:
        """Whether a training has begun and not ended."""
        return self._training is not None

    def end_training(self) -> None:
        """End the training, if there is one, and forget what it has on the replicas."""
        for replica in self._replicas:
            if self._training:
                self._memory.remove(replica, self._training)
        self._training = None

    def events(self) -> list[tuple[int, Event]]:
        """Return the events since the last call, each with the number of its job."""
        events, self._events = self._events, []
        return events

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be drawn, or to be trained."""
        return not (self._jobs or self._training)

    @property
    def occupied(self) -> int:
        """How many slots have a picture on its way."""
        return sum(len(state.pictures()) for state in self._batch_states.values())

    @property
    def waiting(self) -> int:
        """How many pictures have no slot yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def batches(self) -> set[Batch]:
        """Batches that are compiled or that a picture needs."""
        return {*self._batch_states, *(batch for _, batch, *_ in self._waiting)}

    @property
    def rows(self) -> int:
        """How many rows are left of all pictures that are wanted."""
        return sum(picture.left for picture in self._unfinished())

    @property
    def held(self) -> frozenset[Weights]:
        """The weights that lie on a replica, or are on their way there."""
        return frozenset(
            item
            for replica in self._replicas
            for item in self._memory.on(replica)
            if isinstance(item, Weights)
        )

    def jobs(self) -> list[int]:
        """Return the numbers of the jobs that are not over."""
        return list(self._jobs)

    # --- plans and reports ----------------------------------------------------------------------

    def prepare(self, *programs: Program, now: float) -> Plan:
        """Return a plan that compiles programs before anybody has asked for them."""
        for program in programs:
            self._open(program, now)
        return Plan(compile=programs)

    def hold(self, replica: int, weights: Weights) -> None:
        """Record that a replica has weights that were loaded there without a plan."""
        self._memory.use(replica, weights)

    def schedule(self, now: float) -> Plan:
        """Return what to do next; `update` must have its report before the next call."""
        for picture in self._placed():
            if not picture.wanted:
                self._vacate(picture)
                self._finish(picture, now)
        moves = _Moves(forget=self._lost)
        self._lost, self._is_short = [], False
        self._next = self._unread_now = self._awaited = None
        self._place_all(moves, now)
        self._forget_encoders(moves)
        self._place_training(moves)
        self._encode_ahead(moves)
        self._plan = self._draw(moves, now)
        self._emit_positions(now)
        return self._plan

    def update(self, report: Report, now: float) -> None:
        """Record the results of the last plan, and of work that ended in the background."""
        for program, compiled in report.compiled.items():
            self._model.record_compiled(program, compiled)
            state = self._state(program) or self._open(program, now)
            state.ready = True
        for (replica, weights), seconds in report.loaded.items():
            self._loading.discard((replica, weights))
            self._memory.use(replica, weights)
            self._model.record_loaded(weights, seconds)
        self._charge_encoded(report.encode_seconds)
        if report.unread:
            self._fail_unread(report.unread)
        if self._plan.batch and report.error:
            self._fail(
                self._batch_states[self._plan.batch].pictures(),
                Sentence("Making the pictures failed: {reason}", reason=report.error),
            )
        elif self._plan.batch and not report.unread:
            self._record_drawn(self._batch_states[self._plan.batch], report, now)
        elif self._plan.train and report.train_seconds is not None:
            self._step_seconds, self._drawn_seconds = report.train_seconds, 0.0
        elif self._plan.train and self._plan.train == self._training:
            self.end_training()  # what is left to be written needs no turns
        for what, reason in report.failed.items():  # their jobs may have been drawn as well
            self._discard(what, reason)
        self._plan = Plan()

    def abandon(self, message: Sentence) -> None:
        """End all jobs and the training after a fault, and forget what waits and is in slots.

        What is on the replicas stays, and what was to be prepared is asked for anew.
        """
        for number in self.jobs():
            self._emit(number, Failed(message))
        self._fail_training(message)
        self._shares, self._plan = AddressShares(), Plan()
        for account in (self._jobs, self._waiting, self._reserved):
            account.clear()
        self._lost += self._kept.clear()
        for replica, weights in self._loading:
            self._memory.remove(replica, weights)
        self._loading.clear()
        for batch, state in list(self._batch_states.items()):
            state.slots = [None] * batch.slots
            if not state.ready:
                self._evict(0, batch, _Moves())
        self._encoder_states = {
            encoder: state for encoder, state in self._encoder_states.items() if state.ready
        }

    def _seconds_of(self, jobs: Iterable[_Job]) -> float:
        """Return the seconds that jobs still take, on all replicas together."""
        return sum(
            picture.in_crowd(self._model) for job in jobs for picture in job.waiting()
        ) / len(self._replicas)

    # --- placing pictures in slots --------------------------------------------------------------

    def _place_all(self, moves: _Moves, now: float) -> None:
        self._reserved = {
            replica: reservation
            for replica, reservation in self._reserved.items()
            if self._still_reserved(reservation)
        }
        open_queues = {key: queue for key, queue in self._waiting.items() if self._is_open(key)}
        while open_queues:
            for key in self._by_turn(open_queues):
                if self._place(open_queues[key][0], moves, now):
                    open_queues[key].popleft()
                    if not open_queues[key]:
                        del open_queues[key], self._waiting[key]
                    break  # now it is another's turn
                del open_queues[key]

    def _by_turn(self, queues: Mapping[_QueueKey, deque[_Picture]]) -> list[_QueueKey]:
        """Return the queues in the order in which their first pictures get the next slot."""
        accounts = [picture.ticket.account for picture in self._placed()]
        near, mine = Counter(account.address for account in accounts), Counter(accounts)

        def turn(key: _QueueKey) -> tuple:
            (account, *_), (of_address, of_client) = key, self._shares.used(key[0])
            return (
                near[account.address],
                of_address,
                mine[account],
                of_client,
                queues[key][0].number,
            )

        return sorted(queues, key=turn)

    def _is_open(self, key: _QueueKey) -> bool:
        """Whether a slot is free for a queue's pictures, and none of their programs on its way."""
        _, batch, _, encoders, _ = key
        state = self._batch_states.get(batch)
        return state is None or (
            state.ready and None in state.slots and not self._is_compiling(encoders)
        )

    def _is_compiling(self, programs: Iterable[Program]) -> bool:
        return any((state := self._state(each)) and not state.ready for each in programs)

    def _place(self, picture: _Picture, moves: _Moves, now: float) -> bool:
        """Give the picture a slot on a replica that holds its weights or can.

        Returns whether it has one.
        """
        ticket = picture.ticket
        state = self._batch_states.get(ticket.batch)
        # Programs are compiled one after the other: turns are taken until then.
        compiling = self._is_compiling((*self._batch_states, *self._encoder_states))
        if state is None:
            if (
                not compiling
                and self._has_room_for_batch(picture, moves)
                and self._make_room(self._replicas, picture, ticket.batch, moves, now)
            ):
                self._compile(ticket.batch, moves, now)
            return False
        if not state.ready or not state.has_room_for(ticket.account):
            return False
        if not self._is_prepared(picture):
            for encoder in () if compiling else picture.encoders:
                if encoder not in self._encoder_states:
                    self._compile(encoder, moves, now)
            return False
        if not self._can_read(picture, moves, now):
            return False
        replica = self._best_replica(state, picture)
        if replica is None:
            self._reserve(self._replicas, picture, ticket.weights, now)
            return False
        if missing := self._missing(replica, ticket.weights):
            if not self._make_room([replica], picture, ticket.weights, moves, now):
                return False
            moves.load += missing
            self._loading.update(missing)
            self._switched_at[replica] = now
            self._first_switched_at.setdefault(replica, now)
        for item in (ticket.batch, ticket.weights):
            self._memory.use(replica, item)
        picture.replica, picture.slot = replica, state.free(replica)[0]
        state.slots[picture.slot] = picture
        state.served = True
        for encoder in picture.encoders:
            self._encoder_states[encoder] = self._encoder_states.pop(encoder)
        return True

    def _best_replica(self, state: _BatchState, picture: _Picture) -> int | None:
        """Return the replica that would draw it first; None if there is no room for it."""
        placed = Counter(other.replica for other in self._placed())
        seconds = picture.in_crowd(self._model)

        def ready_after(replica: int) -> tuple[float, int, int, int]:
            missing = self._missing(replica, picture.ticket.weights)
            load = sum(self._model.load_seconds(weights) for _, weights in missing)
            return load + seconds * placed[replica], len(missing), placed[replica], replica

        free = [
            replica
            for replica in self._replicas
            if state.free(replica)
            and self._admits(replica, picture)
            and (
                self._memory.holds(replica, picture.ticket.weights)
                or self._room(replica, picture, picture.ticket.weights) is not None
            )
        ]
        return min(free, key=ready_after, default=None)

    def _missing(self, replica: int, weights: Weights) -> list[tuple[int, Weights]]:
        """Return the weights to load onto a replica for it to have these, in this order."""
        return [
            (replica, each)
            for each in (*weights.needs, weights)
            if not self._memory.holds(replica, each)
        ]

    def _admits(self, replica: int, picture: _Picture) -> bool:
        reserved = self._reserved.get(replica)
        return reserved is None or reserved.admits(picture)

    def _reserve(self, replicas: Iterable[int], picture: _Picture, item: Item, now: float) -> None:
        """Keep other pictures away from replicas without room, so that there will be some.

        A batch and text encoders reserve all replicas, whichever are given, and take them over from
        pictures that came later; other weights, if no replica has them, reserve the one with least
        to do.
        """
        if isinstance(item, Batch) or _is_texts(item):
            begun = max([picture.since, *self._first_switched_at.values()])
            if now - begun >= SWITCH_SECONDS and all(
                picture.number <= other.picture.number for other in self._reserved.values()
            ):
                self._reserved = dict.fromkeys(self._replicas, _Reservation(picture, item))
                self._first_switched_at.clear()
            return
        free = [
            replica
            for replica in replicas
            if (replica not in self._reserved or self._comes_first(replica, picture))
            and now - max(picture.since, self._switched_at[replica]) >= SWITCH_SECONDS
        ]
        if (
            free
            and not any(self._memory.holds(replica, item) for replica in self._replicas)
            and (item not in [other.picture.ticket.weights for other in self._reserved.values()])
        ):
            left = Counter()
            for other in self._placed():
                left[other.replica] += other.left
            self._reserved[min(free, key=left.__getitem__)] = _Reservation(picture, item)

    def _still_reserved(self, reservation: _Reservation) -> bool:
        """Whether a reservation goes on.

        One for weights ends when the batch leaves: it could not come back otherwise, as that needs
        room where others have reservations as well. One for text encoders ends when they have
        encoded the prompt.
        """
        picture = reservation.picture
        everywhere = [*self._reserved.values()].count(reservation) == len(self._replicas)
        return (
            picture.wanted
            and picture.slot is None
            and not (_is_texts(reservation.item) and picture.ticket.prompt in self._kept)
            and (everywhere or picture.ticket.batch in self._batch_states)
        )

    def _room(self, replica: int, picture: _Picture | None, item: Item) -> list[Item] | None:
        """Return the items that can go from a replica so that the item fits there.

        Without a picture it is a training, for which a batch that nobody has used yet goes only
        while there are no jobs, and one that was used last only where both never fit.
        """
        placed = self._placed()

        def needed(replica: int, other: Item) -> bool:
            if isinstance(other, Training):
                return False
            if isinstance(other, Batch):
                return self._needs_batch(other, replica, picture)
            if (replica, other) in self._loading:
                return True
            if other.texts:
                return self._needs_texts(other, picture)
            return any((p.replica, p.ticket.weights) == (replica, other) for p in placed) or (
                _is_texts(item) and self._awaits_turn(replica, other, picture)
            )

        gone = self._memory.room_for(replica, item, needed)
        self._is_short |= gone is None and picture is not None
        return gone

    def _needs_batch(self, batch: Batch, replica: int, picture: _Picture | None) -> bool:
        """Whether a batch has to stay when a picture, or a training, needs room."""
        state = self._batch_states[batch]
        comes_first = self._comes_first(replica, picture) if picture else not self._jobs
        awaited = any(batch == key[1] for key in self._waiting)
        return bool(
            not state.ready
            or (picture is None and batch in self._kept_beside_training())
            or state.pictures()
            or (picture and batch == picture.ticket.batch)
            or (awaited and not (state.served or comes_first))
        )

    def _comes_first(self, replica: int, picture: _Picture | None) -> bool:
        """Whether the replica is reserved for what the picture needs."""
        reserved = self._reserved.get(replica)
        return reserved is not None and reserved.picture is picture

    def _has_room_for_batch(self, picture: _Picture, moves: _Moves) -> bool:
        """Whether another batch may be compiled; of MAX_BATCHES the least used one goes."""
        if len(self._batch_states) < MAX_BATCHES:
            return True
        idle = [
            item
            for item in self._memory.on(0)
            if isinstance(item, Batch) and not self._needs_batch(item, 0, picture)
        ]
        if idle:
            self._evict(0, idle[0], moves)
        return bool(idle)

    def _make_room(
        self, replicas: Iterable[int], picture: _Picture, item: Item, moves: _Moves, now: float
    ) -> bool:
        """Evict items that are not needed until the item fits on these replicas, and record it.

        Returns whether that was possible.
        """
        replicas = list(replicas)
        gone: dict[int, Any] = {d: self._room(d, picture, item) for d in replicas}
        if None in gone.values() or not all(self._admits(d, picture) for d in replicas):
            self._reserve(replicas, picture, item, now)
            return False
        for replica, others in gone.items():
            for other in others:
                self._evict(replica, other, moves)
            self._memory.use(replica, item)
        return True

    def _evict(self, replica: int, item: Item, moves: _Moves) -> None:
        if isinstance(item, Weights):
            for where in self._replicas if item.texts else (replica,):
                if self._memory.holds(where, item):
                    self._memory.remove(where, item)
                    moves.drop.append((where, item))
        elif isinstance(item, Training):
            for everywhere in self._replicas:
                self._memory.remove(everywhere, item)
            if item not in moves.suspend:
                moves.suspend.append(item)
        elif item in self._batch_states:
            for everywhere in self._replicas:
                self._memory.remove(everywhere, item)
            del self._batch_states[item]
            moves.release.append(item)

    def _forget_encoders(self, moves: _Moves) -> None:
        """Give up encoders beyond MAX_SPARE that no picture needs, the least recently used first.

        They take no memory of replicas between two calls.
        """
        if len(self._encoder_states) <= MAX_SPARE:
            return
        needed = {encoder for picture in self._unfinished() for encoder in picture.encoders}
        spare = [
            encoder
            for encoder, state in self._encoder_states.items()
            if state.ready and encoder not in needed
        ]
        for encoder in spare[:-MAX_SPARE]:
            del self._encoder_states[encoder]
            moves.release.append(encoder)

    def _compile(self, program: Program, moves: _Moves, now: float) -> None:
        self._open(program, now)
        moves.compile.append(program)

    def _open(self, program: Program, now: float) -> _ProgramState:
        if not isinstance(program, Batch):
            return self._encoder_states.setdefault(program, _ProgramState(now))
        state = self._batch_states[program] = _BatchState(program, len(self._replicas), now)
        for replica in self._replicas:
            self._memory.use(replica, program)
        return state

    def _state(self, program: Program) -> _ProgramState | None:
        if not isinstance(program, Batch):
            return self._encoder_states.get(program)
        return self._batch_states.get(program)

    # --- prompts --------------------------------------------------------------------------------

    def _can_read(self, picture: _Picture, moves: _Moves, now: float) -> bool:
        """Whether a picture's prompt is encoded or can be by this plan; else bring the encoders."""
        prompt = picture.ticket.prompt
        if prompt in self._kept or self._reads(prompt.weights):
            return True
        missing = [
            each for replica in self._replicas for each in self._missing(replica, prompt.weights)
        ]
        if missing and self._make_room(self._replicas, picture, prompt.weights, moves, now):
            moves.load += missing
            self._loading.update(missing)
        return False

    def _reads(self, texts: Weights) -> bool:
        """Whether all replicas have these text encoders."""
        return all(
            self._memory.holds(replica, texts) and (replica, texts) not in self._loading
            for replica in self._replicas
        )

    def _read(self, prompt: Prompt, moves: _Moves) -> None:
        """Have a prompt encoded by this plan, if it is not yet, and what is made of it kept."""
        is_new = prompt not in self._kept
        self._kept.use(prompt)
        if is_new:
            moves.encode.append(prompt)
            for replica in self._replicas:
                self._memory.use(replica, prompt.weights)
            self._trim_kept(moves)

    def _trim_kept(self, moves: _Moves) -> None:
        """Forget prompts that were used least recently, beyond the bound on what is kept."""

        def needed() -> set[Prompt]:
            pictures = (*self._next_read(), *self._placed())
            return {picture.ticket.prompt for picture in pictures if not picture.entered}

        moves.forget += self._kept.trim(needed)

    def _encode_ahead(self, moves: _Moves) -> None:
        """Encode prompts where room is short, so that text encoders can go.

        Elsewhere that is done when a picture is drawn first, and so keeps nobody waiting.
        """
        self._trim_kept(moves)
        for prompt in self._unread() if self._is_short else ():
            if self._reads(prompt.weights) and len(moves.encode) < prompt.encoder.count:
                self._read(prompt, moves)

    def _next_read(self) -> list[_Picture]:
        """Return the pictures that come next, as many as prompts can be kept of.

        They are those in slots that are not drawn yet, whatever their prompts take; then the first
        of each queue, in their turns, the second of each ...
        """
        if self._next is None:
            self._next = [picture for picture in self._placed() if not picture.entered]
            prompts = {picture.ticket.prompt for picture in self._next}
            room = self._kept.limit - sum(prompt.memory for prompt in prompts)
            queues = [self._waiting[key] for key in self._by_turn(self._waiting)]
            rounds = itertools.chain.from_iterable(itertools.zip_longest(*queues))
            for picture in filter(None, rounds):
                prompt = picture.ticket.prompt
                room -= 0 if prompt in prompts else prompt.memory
                if room < 0 and prompts:
                    break
                prompts.add(prompt)
                self._next.append(picture)
        return self._next

    def _unread(self) -> list[Prompt]:
        """Return the prompts to encode before their text encoders go, in the order of turns."""
        prompts = dict.fromkeys(picture.ticket.prompt for picture in self._next_read())
        return [
            prompt
            for prompt in prompts
            if prompt not in self._kept and (state := self._state(prompt.encoder)) and state.ready
        ]

    def _needs_texts(self, texts: Weights, picture: _Picture | None) -> bool:
        """Whether text encoders have to stay when a picture, or a training, needs room."""
        if texts in self._unread_weights():
            return True
        unread = [picture.ticket.prompt] if picture else []
        unread += [other.ticket.prompt for other in self._placed() if not other.entered]
        return any(prompt.weights == texts and prompt not in self._kept for prompt in unread)

    def _unread_weights(self) -> set[Weights]:
        """Return the text encoders of the prompts to encode, found once a plan."""
        if self._unread_now is None:
            self._unread_now = {prompt.weights for prompt in self._unread()}
        return self._unread_now

    def _awaits_turn(self, replica: int, weights: Weights, picture: _Picture | None) -> bool:
        """Whether pictures wait for weights whose prompts are encoded, and no others come first."""
        return not self._comes_first(replica, picture) and any(
            other.slot is None for other in self._awaiting().get(weights, ())
        )

    def _awaiting(self) -> dict[Weights, list[_Picture]]:
        """Return the pictures that come next whose prompts are encoded, by what draws them.

        They are found once a plan. Those behind a picture of their queue that text
        encoders have to come for wait for these themselves, and are left out.
        """
        if self._awaited is None:
            self._awaited, coming = {}, {*self._next_read()}
            for (_, _, weights, _, texts), queue in self._waiting.items():
                reads, awaiting = self._reads(texts), self._awaited.setdefault(weights, [])
                for picture in itertools.takewhile(coming.__contains__, queue):
                    if picture.ticket.prompt in self._kept:
                        awaiting.append(picture)
                    elif not reads:
                        break
        return self._awaited

    def _charge_encoded(self, seconds: float) -> None:
        """Charge the accounts whose prompts the plan has encoded."""
        read = {*self._plan.encode}
        whose = Counter(p.ticket.account for p in self._unfinished() if p.ticket.prompt in read)
        self._drawn_seconds += seconds
        self._shares.charge(
            {account: seconds * of / whose.total() for account, of in whose.items()}
        )

    def _fail_unread(self, unread: Mapping[Prompt, str]) -> None:
        """Fail the jobs whose prompts the plan could not encode, each for its reason."""
        for prompt in unread:
            self._kept.remove(prompt)
        for reason in dict.fromkeys(unread.values()):
            self._fail(
                [
                    p
                    for p in self._unfinished()
                    if not p.entered and unread.get(p.ticket.prompt) == reason
                ],
                Sentence("Making the pictures failed: {reason}", reason=reason),
            )

    # --- training -------------------------------------------------------------------------------

    def _place_training(self, moves: _Moves) -> None:
        """Put the training on the replicas, if nobody waits for room and all in use can stay."""
        training = self._training
        if training is None or self._memory.holds(0, training):
            return
        if any(map(self._is_open, self._waiting)):
            return
        gone = [self._room(replica, None, training) for replica in self._replicas]
        if None in gone:
            return
        for replica, others in enumerate(gone):
            for other in others or ():
                self._evict(replica, other, moves)
            missing = [
                each
                for weights in (training.weights, training.texts)
                for each in self._missing(replica, weights)
            ]
            moves.load += missing
            self._loading.update(missing)
            self._memory.use(replica, training)

    def _kept_beside_training(self) -> set[Batch]:
        """Return the batches used last, which the next picture is likely to need, if they fit."""
        used = (
            next(
                (item for item in reversed(self._memory.on(replica)) if isinstance(item, Batch)),
                None,
            )
            for replica in self._replicas
        )
        last = {batch for batch in used if batch}
        return last if self._training and self._memory.fits(self._training, *last) else set()

    def _trains_next(self, training: Training, able: Sequence[_Picture]) -> bool:
        """Whether the training takes a step now, with pictures that could be drawn instead."""
        coming = {weights for _, weights in self._loading}
        if not self._memory.holds(0, training) or coming & {*training.needs}:
            return False
        share = TRAINING_SHARE / (1 - TRAINING_SHARE)
        return not able or (
            self._step_seconds <= share * self._drawn_seconds
            and not any(picture.has_waited_for_training for picture in self._unfinished())
        )

    def _train(self, training: Training, moves: _Moves) -> Plan:
        for replica in self._replicas:
            self._memory.use(replica, training)
        for picture in self._unfinished():
            picture.has_waited_for_training = True
        return Plan(**moves.as_tuples(), train=training)

    def _fail_training(self, message: Sentence) -> None:
        if self._training:
            self._emit(self._training.number, Failed(message))
            self.end_training()

    # --- turns on the replicas -------------------------------------------------------------------

    def _in_turn(self, pictures: Iterable[_Picture]) -> list[_Picture]:
        """Return the pictures in the order of turns: by client, then by the time of waiting."""
        pictures = list(pictures)
        shortest: dict[Account, float] = {}
        for picture in pictures:
            account, seconds = picture.ticket.account, picture.alone(self._model)
            shortest[account] = min(seconds, shortest.get(account, math.inf))
        turns = self._shares.turns(shortest)
        return sorted(
            pictures,
            key=lambda picture: (turns[picture.ticket.account], picture.drawn_at, picture.number),
        )

    def _draw(self, moves: _Moves, now: float) -> Plan:
        """Plan rows for the batch whose turn it is, on every replica with some of its pictures."""
        able = [
            picture
            for picture in self._placed()
            if (picture.replica, picture.ticket.weights) not in self._loading
        ]
        if self._training and self._trains_next(self._training, able):
            return self._train(self._training, moves)
        if not able:
            return Plan(**moves.as_tuples())
        waiting = self._waiting_to_end(able, now)
        able = [picture for picture in able if picture not in waiting]
        state = self._batch_states[self._in_turn(able)[0].ticket.batch]
        drawn = [
            self._drawn_on_replica(state.batch, pictures)
            for replica in self._replicas
            if (pictures := [p for p in state.pictures() if p.replica == replica and p in able])
        ]
        everywhere = [picture for pictures in drawn for picture in pictures]
        least = min(picture.at_once for picture in everywhere)
        awaited = any(picture.ticket.batch == state.batch for picture in waiting)
        apart = len(drawn) > 1 and least < max(picture.left for picture in everywhere)
        if least > 1 and (awaited or apart):
            least -= any(picture.left == least for picture in everywhere)  # who may end together
        rows, evaluations = self._model.of(state.batch).next_rows(
            [np.stack([picture.kinds_left[:least] for picture in pictures]) for pictures in drawn]
        )
        self._evaluations = evaluations
        finish = [picture.slot for picture in everywhere if picture.left == rows]
        for picture in everywhere:
            job = self._jobs[picture.ticket.job]
            job.begun, job.reported = now if job.begun is None else job.begun, None
            if not picture.entered:
                self._read(picture.ticket.prompt, moves)
        return Plan(
            **moves.as_tuples(),
            batch=state.batch,
            weights={pictures[0].replica: pictures[0].ticket.weights for pictures in drawn},
            enter={p.slot: p.ticket for p in everywhere if not p.entered},
            rows={picture.slot: rows for picture in everywhere},
            finish=tuple(finish),
            preview=tuple(p.slot for p in everywhere if self._previewed(p, rows)),
        )

    def _ends(self, picture: _Picture) -> bool:
        """Whether a picture's next row is its last, while other replicas may be at work."""
        return picture.entered and picture.left == 1 and len(self._replicas) > 1

    def _waiting_to_end(self, able: list[_Picture], now: float) -> list[_Picture]:
        """Return the pictures with one row left that wait for others to be decoded with.

        While some replicas decode, the rest wait. So a batch's pictures end when they have waited,
        in sum, as long as those on the rest would, or one of them for MOST_WAITED (decision 0035).
        """
        waiting = []
        for batch in dict.fromkeys(picture.ticket.batch for picture in able if self._ends(picture)):
            latency, pictures = self._model.of(batch), [p for p in able if p.ticket.batch == batch]
            waited = {p: now - p.drawn_at for p in pictures if self._ends(p)}
            decoding = {picture.replica for picture in waited}
            resting = sum(picture.replica not in decoding for picture in pictures)
            seconds = latency.decode_seconds * _most_on_a_replica(waited) * resting
            if sum(waited.values()) < seconds and all(
                so_long < MOST_WAITED * latency.of_picture(picture.ticket.kinds)
                for picture, so_long in waited.items()
            ):
                waiting += waited
        return waiting

    def _drawn_on_replica(self, batch: Batch, pictures: list[_Picture]) -> list[_Picture]:
        """Return those of a replica's pictures that take rows now.

        These are all that end and have the same weights, else all of the client whose turn it is,
        and others of these weights if they cost nothing.
        """
        first, *others = sorted(self._in_turn(pictures), key=lambda p: not self._ends(p))
        others = [picture for picture in others if picture.ticket.weights == first.ticket.weights]
        if self._ends(first):
            drawn = [first, *filter(self._ends, others)]
        else:
            drawn = [first, *(p for p in others if p.ticket.account == first.ticket.account)]
        evaluations = self._model.of(batch).evaluations

        def cost(of: list[_Picture]) -> int:
            return evaluations(np.stack([picture.kinds_left[:1] for picture in of]))

        for picture in others:
            if picture not in drawn and cost([*drawn, picture]) == cost(drawn):
                drawn.append(picture)
        return drawn

    def _previewed(self, picture: _Picture, rows: int) -> bool:
        """Whether a picture is shown after so many rows more."""
        return (
            PREVIEW_ROW <= picture.done + rows < len(picture.ticket.kinds)
            and picture.wanted
            and picture.ticket.previews
        )

    # --- reports --------------------------------------------------------------------------------

    def _record_drawn(self, state: _BatchState, report: Report, now: float) -> None:
        plan, latency = self._plan, self._model.of(state.batch)
        pictures: dict[int, Any] = {slot: state.slots[slot] for slot in plan.rows}
        decoded = _most_on_a_replica(pictures[slot] for slot in plan.finish)
        latency.record_rows(self._evaluations, report.advance_seconds)
        if decoded:
            latency.decode_seconds = report.decode_seconds / decoded
        seconds = report.advance_seconds + report.decode_seconds + report.preview_seconds
        self._charge(pictures.values(), seconds)
        self._drawn_seconds += seconds
        for slot, picture in pictures.items():
            picture.left -= plan.rows[slot]
            picture.entered, picture.drawn_at = True, now
        for slot in plan.finish:
            picture = pictures[slot]
            self._emit(
                picture.ticket.job,
                ImageReady(
                    picture.ticket.index, report.pictures[slot], unsafe=slot in report.unsafe
                ),
            )
            self._vacate(picture)
            self._finish(picture, now)
        self._emit_progress([p for p in pictures.values() if p.left and p.wanted], report)

    def _charge(self, pictures: Iterable[_Picture], seconds: float) -> None:
        lanes: Counter[Account] = Counter()
        for picture in pictures:
            # Forecasts alone count as one evaluation: decoding is among the seconds.
            lanes[picture.ticket.account] += max(1, picture.lanes(self._plan.rows[picture.slot]))
        total = sum(lanes.values())
        self._shares.charge({account: seconds * of / total for account, of in lanes.items()})

    def _emit_progress(self, pictures: list[_Picture], report: Report) -> None:
        for number in dict.fromkeys(picture.ticket.job for picture in pictures):
            job = self._jobs[number]
            previews = {
                p.ticket.index: report.previews[p.slot]
                for p in pictures
                if p.ticket.job == number and p.slot in report.previews
            }
            self._emit(number, Progress(job.step(), job.steps, previews, self._seconds_left(job)))

    def _discard(self, what: Program | tuple[int, Weights] | Training, reason: str) -> None:
        """Fail the jobs and the training that need an item which could not be prepared."""
        if isinstance(what, Training):
            if what == self._training:
                self._fail_training(Sentence("Teaching failed: {reason}", reason=reason))
            return
        if isinstance(what, Program):
            message = Sentence("Compiling failed: {reason}", reason=reason)
            lost = [p for p in self._unfinished() if what in p.programs]
            if not isinstance(what, Batch):
                self._encoder_states.pop(what, None)
            else:
                self._batch_states.pop(what, None)
                for replica in self._replicas:
                    self._memory.remove(replica, what)
        else:
            self._loading.discard(what)
            self._memory.remove(*what)
            message = Sentence("Loading the model failed: {reason}", reason=reason)
            lost = [
                p
                for p in self._unfinished()
                if what[1] in self._to_load(p) and p.replica in (None, what[0])
            ]
            if self._training and what[1] in self._training.needs:
                self._fail_training(message)
        self._fail(lost, message)

    def _to_load(self, picture: _Picture) -> set[Weights]:
        """Return the weights that a picture still needs, wherever they are."""
        drawing, prompt = picture.ticket.weights, picture.ticket.prompt
        is_read = picture.entered or prompt in self._kept  # which may forget it after it entered
        texts = () if is_read else (*prompt.weights.needs, prompt.weights)
        return {*drawing.needs, drawing, *texts}

    def _fail(self, pictures: Iterable[_Picture], message: Sentence) -> None:
        for job in [self._jobs[n] for n in sorted({picture.ticket.job for picture in pictures})]:
            for picture in job.waiting():
                picture.wanted = False  # nor is room kept for it
                if picture.slot is None:
                    self._unqueue(picture)
                else:
                    self._vacate(picture)
            self._end(job, Failed(message))

    # --- events ---------------------------------------------------------------------------------

    def _emit(self, number: int, event: Event) -> None:
        self._events.append((number, event))

    def _emit_positions(self, now: float) -> None:
        """Emit positions in the queue, where they or the reason for waiting have changed.

        A job that has begun gets one as well, if all that is left of it waits for a compilation.
        The first jobs of all addresses come before anybody's second, and the same holds for the
        clients of an address.
        """
        waiting = [job for job in self._jobs.values() if job.begun is None]
        near = _in_rounds(waiting, lambda job: job.account)
        order = _in_rounds(near, lambda job: job.account.address)
        positions = {job.number: position for position, job in enumerate(order, start=1)}
        positions |= {
            job.number: 1
            for job in self._jobs.values()
            if job.begun is not None and self._stalled(job)
        }
        changed = {}
        for number, position in positions.items():
            queued = position, self._reason(self._jobs[number])
            if self._jobs[number].reported != queued:
                changed[number] = self._jobs[number].reported = queued
        if changed:
            waits = self._waits(changed, now)
            for number, queued in changed.items():
                self._emit(number, Queued(*queued, waits[number]))

    def _reason(self, job: _Job) -> str:
        first = job.waiting()[0]
        if not self._is_prepared(first):
            return COMPILING
        coming = {weights for replica, weights in self._loading if first.replica in (None, replica)}
        waits = {first.ticket.weights} if first.replica is not None else self._to_load(first)
        return LOADING if coming & waits else WAITING

    def _stalled(self, job: _Job) -> bool:
        return not any(map(self._is_prepared, job.waiting()))

    def _is_prepared(self, picture: _Picture) -> bool:
        """Whether the programs are there that a picture still needs."""
        return all((state := self._state(each)) and state.ready for each in picture.programs)

    def _waits(self, numbers: Iterable[int], now: float) -> dict[int, float | None]:
        """Return how long these jobs wait for their turn, where that is known.

        They wait for the earlier jobs of their clients, which share the replicas with others.
        """
        wanted: dict[Account, float] = {}
        before: dict[int, float] = {}
        for job in self._jobs.values():
            before[job.number] = wanted.get(job.account, 0.0)
            wanted[job.account] = before[job.number] + self._seconds_of([job])
        waits = {}
        for number in numbers:
            job = self._jobs[number]
            others = {account: of for account, of in wanted.items() if account != job.account}
            ready = self._seconds_until_ready(job.waiting()[0], now)
            waits[number] = (
                None if ready is None else ready + in_turns(before[number], job.account, others)
            )
        return waits

    def _seconds_until_ready(self, picture: _Picture, now: float) -> float | None:
        """Return the seconds until a picture's programs are there and a replica has its weights.

        Programs that come before them count as well. Returns None if it is not known.
        """
        loading = min(
            sum(
                self._model.load_seconds(weights)
                for weights in self._to_load(picture)
                if not self._memory.holds(replica, weights)
            )
            for replica in self._replicas
        )
        if self._is_prepared(picture):
            return loading
        begun = {
            program: now - state.since
            for program, state in (*self._batch_states.items(), *self._encoder_states.items())
            if not state.ready
        }
        firsts = [picture, *(queue[0] for queue in self._waiting.values())]
        cold = {
            program
            for other in firsts
            if other.number <= picture.number
            for program in other.programs
            if self._state(program) is None
        }
        if cold.isdisjoint(picture.programs):
            cold = set()  # what is on its way is all that it waits for
        for program in begun.keys() | cold:
            seconds = self._model.compile_seconds(type(program))
            if seconds is None:
                return None
            loading += max(0.0, seconds - begun.get(program, 0.0))
        return loading

    def _seconds_left(self, job: _Job) -> float | None:
        """Return how long a job that has begun still takes, or None if that is not known.

        Its pictures in slots come first, beside those of others, then the ones that wait.
        """
        model = self._model
        if not all(map(self._is_prepared, job.waiting())):
            return None
        placed = [(p, p.ticket.account, p.in_crowd(model)) for p in self._placed()]
        queueing = {account for (account, *_), queue in self._waiting.items() if queue}
        last = 0.0
        for picture, _, mine in (each for each in placed if each[0].ticket.job == job.number):
            own, others = 0.0, dict[Account, float]()
            for _, account, theirs in (e for e in placed if e[0].replica == picture.replica):
                if account == job.account:
                    own += min(theirs, mine)
                else:
                    more = math.inf if account in queueing else theirs
                    others[account] = others.get(account, 0.0) + more
            last = max(last, in_turns(max(own, picture.alone(model)), job.account, others))
        waiting = sum(p.in_crowd(model) for p in job.waiting() if p.slot is None)
        forever = {
            other.account: math.inf
            for other in self._jobs.values()
            if other is not job and other.account != job.account
        }
        return last + in_turns(waiting, job.account, forever) / len(self._replicas)

    # --- bookkeeping ----------------------------------------------------------------------------

    def _placed(self) -> list[_Picture]:
        return [picture for state in self._batch_states.values() for picture in state.pictures()]

    def _unfinished(self) -> list[_Picture]:
        return [picture for job in self._jobs.values() for picture in job.waiting()]

    def _vacate(self, picture: _Picture) -> None:
        self._batch_states[picture.ticket.batch].slots[picture.slot] = None

    def _unqueue(self, picture: _Picture) -> None:
        key = _queue_key(picture.ticket)
        self._waiting[key].remove(picture)
        if not self._waiting[key]:
            del self._waiting[key]

    def _finish(self, picture: _Picture, now: float) -> None:
        """Record that nothing more is done for a picture, and end its job after the last."""
        job = self._jobs[picture.ticket.job]
        job.unfinished.discard(picture.ticket.index)
        if job.unfinished:
            return
        wanted = any(picture.wanted for picture in job.pictures.values())
        self._end(job, Done(now - job.begun) if wanted else Cancelled())

    def _end(self, job: _Job, event: Event) -> None:
        self._emit(job.number, event)
        del self._jobs[job.number]
        if not any(other.account == job.account for other in self._jobs.values()):
            self._shares.leave(job.account)


def _queue_key(ticket: Ticket) -> _QueueKey:
    encoders = *ticket.encoders, ticket.prompt.encoder
    return ticket.account, ticket.batch, ticket.weights, encoders, ticket.prompt.weights


def _is_texts(item: Item) -> bool:
    """Whether an item is text encoders."""
    return isinstance(item, Weights) and item.texts


def _in_rounds(jobs: Iterable[_Job], whose: Callable[[_Job], Hashable]) -> list[_Job]:
    """Order jobs in rounds: the first of everybody by their numbers, then everybody's second ..."""
    rounds: Counter[Hashable] = Counter()
    ranked = []
    for job in jobs:
        rounds[whose(job)] += 1
        ranked.append((rounds[whose(job)], job.number, job))
    return [job for *_, job in sorted(ranked)]


def _most_on_a_replica(pictures: Iterable[_Picture]) -> int:
    """Return how many of them are on the replica that has most."""
    return max(Counter(picture.replica for picture in pictures).values(), default=0)
