"""The scheduler: all policy of serving, without JAX, threads or a clock.

`submit` and `cancel` say what is wanted, `schedule` returns what a worker should do next, `update`
takes in the results, and `events` returns what the makers of jobs should know. Pictures wait in
queues of their clients, are placed in slots, and are drawn there in turns:

- A free slot goes to the address with the fewest, and there to the client with the fewest; no
  client gets more of a batch's slots than are left free after it, and no address more than three
  times as many, so there is always one for whoever comes next from elsewhere.
- In each plan a device draws for the client whose turn it is (`AddressShares`), and for others as
  far as that costs nothing because the groups stepped together have room.
- What a picture needs, weights on its device and a compiled batch, is prepared in the background;
  what was used least recently makes room. Where nothing can go, a device takes in no others from
  SWITCH_SECONDS on, until it is empty enough.
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
from sd_tpu.serving.memory import Item, Memory
from sd_tpu.serving.plan import Batch, Plan, Report, Ticket, Weights

PREVIEW_ROW = 2  # the first after which a picture is worth looking at
ADDRESS_SLOTS = 3  # that an address may have for each that is left free, of a batch
MAX_BATCHES = 32  # compiled at a time: programs take memory of the host, which nobody counts
SWITCH_SECONDS = 5.0  # that a device keeps to its weights while others wait for room there

_QueueKey = tuple[Account, Batch, Weights]


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
        self.slot: Any = None  # and device: numbers, None while it waits
        self.device: Any = None
        self.entered = False  # its first plan puts it into its slot on the device
        self.wanted = True
        self.drawn_at = -math.inf
        self._rows, self._lanes = rows_left(ticket.kinds), lanes_left(ticket.kinds)

    @property
    def done(self) -> int:
        """The rows that it has taken."""
        return len(self.ticket.kinds) - self.left

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


class _BatchState:
    """A batch's slots, and whether its programs are there."""

    def __init__(self, batch: Batch, devices: int, now: float):
        self.batch, self.since = batch, now
        self.ready = self.served = False
        self.slots: list[_Picture | None] = [None] * batch.slots
        self._share = batch.slots // devices

    def pictures(self) -> list[_Picture]:
        return [picture for picture in self.slots if picture]

    def has_room_for(self, account: Account) -> bool:
        """Whether an account may have another slot, so that others find one."""
        others = [picture.ticket.account for picture in self.pictures()]
        free = len(self.slots) - len(others)
        near = sum(other.address == account.address for other in others)
        return others.count(account) < free and near < ADDRESS_SLOTS * free

    def free(self, device: int) -> list[int]:
        """Return the free slots on a device."""
        return [
            slot
            for slot in range(device * self._share, (device + 1) * self._share)
            if self.slots[slot] is None
        ]


@dataclasses.dataclass
class _Moves:
    """The items that a plan prepares and gives up."""

    release: list[Batch] = dataclasses.field(default_factory=list)
    drop: list[tuple[int, Weights]] = dataclasses.field(default_factory=list)
    load: list[tuple[int, Weights]] = dataclasses.field(default_factory=list)
    compile: list[Batch] = dataclasses.field(default_factory=list)

    def as_tuples(self) -> dict[str, Any]:
        return {field.name: tuple(getattr(self, field.name)) for field in dataclasses.fields(self)}


class Scheduler:
    """Policy for the `devices` that one worker owns; called by one thread at a time.

    `now` is in seconds, of any clock that does not go back.
    """

    def __init__(
        self,
        devices: int,
        model: LatencyModel,
        *,
        limits: Limits = Limits(),
        memory: int | None = None,
    ):
        """Begin with nothing on the devices; `memory` bounds what lies on each, in bytes."""
        self.limits, self._devices, self._model = limits, range(devices), model
        self._memory = Memory(devices, memory)
        self._shares = AddressShares()
        self._jobs: dict[int, _Job] = {}
        self._waiting: dict[_QueueKey, deque[_Picture]] = {}
        self._batch_states: dict[Batch, _BatchState] = {}
        self._loading: set[tuple[int, Weights]] = set()
        self._switched_at = [-math.inf] * devices  # when a device was last given other weights
        self._reserved: dict[int, _Picture] = {}  # devices that take in nothing else
        self._plan = Plan()
        self._evaluations = 0  # of the device with most to do in the plan
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
            RequestError: the devices can never hold what a picture needs.
        """
        number, account = tickets[0].job, tickets[0].account
        self.check_room(tickets)
        pictures = {ticket.index: _Picture(ticket, next(self._numbers), now) for ticket in tickets}
        if not any(job.account == account for job in self._jobs.values()):
            self._shares.join(account)
        self._jobs[number] = _Job(number, tickets[0], pictures, steps)
        for ticket, picture in zip(tickets, pictures.values(), strict=True):
            queue = self._waiting.setdefault((account, ticket.batch, ticket.weights), deque())
            queue.append(picture)
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
            if not self._memory.fits(ticket.batch, ticket.weights):
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

    def events(self) -> list[tuple[int, Event]]:
        """Return the events since the last call, each with the number of its job."""
        events, self._events = self._events, []
        return events

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be drawn."""
        return not self._jobs

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
        return {*self._batch_states, *(batch for _, batch, _ in self._waiting)}

    @property
    def rows(self) -> int:
        """How many rows are left of all pictures that are wanted."""
        return sum(picture.left for picture in self._unfinished())

    @property
    def held(self) -> frozenset[Weights]:
        """The weights that lie on a device, or are on their way there."""
        return frozenset(
            item
            for device in self._devices
            for item in self._memory.on(device)
            if isinstance(item, Weights)
        )

    def jobs(self) -> list[int]:
        """Return the numbers of the jobs that are not over."""
        return list(self._jobs)

    # --- plans and reports ----------------------------------------------------------------------

    def prepare(self, batch: Batch, now: float) -> Plan:
        """Return a plan that compiles a batch before anybody has asked for it."""
        return Plan(compile=(self._open(batch, now).batch,))

    def hold(self, device: int, weights: Weights) -> None:
        """Record that a device has weights that were loaded there without a plan."""
        self._memory.use(device, weights)

    def schedule(self, now: float) -> Plan:
        """Return what to do next; `update` must have its report before the next call."""
        for picture in self._placed():
            if not picture.wanted:
                self._vacate(picture)
                self._finish(picture, now)
        moves = _Moves()
        self._place_all(moves, now)
        self._plan = self._draw(moves, now)
        self._emit_positions(now)
        return self._plan

    def update(self, report: Report, now: float) -> None:
        """Record the results of the last plan, and of work that ended in the background."""
        for batch, compiled in report.compiled.items():
            self._model.record_compiled(batch, compiled)
            state = self._batch_states.get(batch) or self._open(batch, now)
            state.ready = True
        for (device, weights), seconds in report.loaded.items():
            self._loading.discard((device, weights))
            self._memory.use(device, weights)
            self._model.record_loaded(weights, seconds)
        if self._plan.batch and report.error:
            self._fail(
                self._batch_states[self._plan.batch].pictures(),
                Sentence("Making the pictures failed: {reason}", reason=report.error),
            )
        elif self._plan.batch:
            self._record_drawn(self._batch_states[self._plan.batch], report, now)
        for what, reason in report.failed.items():  # their jobs may have been drawn as well
            self._discard(what, reason)
        self._plan = Plan()

    def abandon(self, message: Sentence) -> None:
        """End all jobs after a fault, and forget everything that waits and is in slots.

        What is on the devices stays, and what was to be prepared is asked for anew.
        """
        for number in self.jobs():
            self._emit(number, Failed(message))
        self._shares, self._plan = AddressShares(), Plan()
        for account in (self._jobs, self._waiting, self._reserved):
            account.clear()
        for device, weights in self._loading:
            self._memory.remove(device, weights)
        self._loading.clear()
        for batch, state in list(self._batch_states.items()):
            state.slots = [None] * batch.slots
            if not state.ready:
                self._evict(0, batch, _Moves())

    def _seconds_of(self, jobs: Iterable[_Job]) -> float:
        """Return the seconds that jobs still take, on all devices together."""
        return sum(
            picture.in_crowd(self._model) for job in jobs for picture in job.waiting()
        ) / len(self._devices)

    # --- placing pictures in slots --------------------------------------------------------------

    def _place_all(self, moves: _Moves, now: float) -> None:
        self._reserved = {
            device: picture
            for device, picture in self._reserved.items()
            if self._still_reserved(picture)
        }
        open_queues = {key: queue for key, queue in self._waiting.items() if self._is_open(key[1])}
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

    def _is_open(self, batch: Batch) -> bool:
        state = self._batch_states.get(batch)
        return state is None or (state.ready and None in state.slots)

    def _place(self, picture: _Picture, moves: _Moves, now: float) -> bool:
        """Give the picture a slot on a device that holds its weights or can.

        Returns whether it has one.
        """
        ticket = picture.ticket
        state = self._batch_states.get(ticket.batch)
        if state is None:
            if any(not other.ready for other in self._batch_states.values()):
                return False  # they are compiled one after the other: turns are taken until then
            if self._has_room_for_batch(picture, moves) and self._make_room(
                self._devices, picture, ticket.batch, moves, now
            ):
                moves.compile.append(self._open(ticket.batch, now).batch)
            return False
        if not state.ready or not state.has_room_for(ticket.account):
            return False
        device = self._best_device(state, picture)
        if device is None:
            self._reserve(self._devices, picture, ticket.weights, now)
            return False
        if missing := self._missing(device, ticket.weights):
            if not self._make_room([device], picture, ticket.weights, moves, now):
                return False
            moves.load += missing
            self._loading.update(missing)
            self._switched_at[device] = now
        for item in (ticket.batch, ticket.weights):
            self._memory.use(device, item)
        picture.device, picture.slot = device, state.free(device)[0]
        state.slots[picture.slot] = picture
        state.served = True
        return True

    def _best_device(self, state: _BatchState, picture: _Picture) -> int | None:
        """Return the device that would draw it first; None if there is no room for it."""
        placed = Counter(other.device for other in self._placed())
        seconds = picture.in_crowd(self._model)

        def ready_after(device: int) -> tuple[float, int, int, int]:
            missing = self._missing(device, picture.ticket.weights)
            load = sum(self._model.load_seconds(weights) for _, weights in missing)
            return load + seconds * placed[device], len(missing), placed[device], device

        free = [
            device
            for device in self._devices
            if state.free(device)
            and self._admits(device, picture)
            and (
                self._memory.holds(device, picture.ticket.weights)
                or self._room(device, picture, picture.ticket.weights) is not None
            )
        ]
        return min(free, key=ready_after, default=None)

    def _missing(self, device: int, weights: Weights) -> list[tuple[int, Weights]]:
        """Return the weights to load onto a device for it to have these, in this order."""
        return [
            (device, each)
            for each in (*weights.needs, weights)
            if not self._memory.holds(device, each)
        ]

    def _admits(self, device: int, picture: _Picture) -> bool:
        reserved = self._reserved.get(device)
        return reserved is None or (
            (reserved.ticket.batch, reserved.ticket.weights)
            == (picture.ticket.batch, picture.ticket.weights)
        )

    def _reserve(self, devices: Iterable[int], picture: _Picture, item: Item, now: float) -> None:
        """Keep other pictures away from devices without room, so that there will be some.

        A batch reserves all devices; weights that no device has reserve the one with least to do.
        """
        free = [
            device
            for device in devices
            if device not in self._reserved
            and now - max(picture.since, self._switched_at[device]) >= SWITCH_SECONDS
        ]
        if isinstance(item, Batch):
            if len(free) == len(self._devices):
                self._reserved = dict.fromkeys(free, picture)
        elif (
            free
            and not any(self._memory.holds(device, item) for device in self._devices)
            and (item not in [other.ticket.weights for other in self._reserved.values()])
        ):
            left = Counter()
            for other in self._placed():
                left[other.device] += other.left
            self._reserved[min(free, key=left.__getitem__)] = picture

    def _still_reserved(self, picture: _Picture) -> bool:
        """Whether a reservation goes on.

        One for weights ends when the batch leaves, which would else not come back, as that needs
        room where others have reservations as well.
        """
        everywhere = [*self._reserved.values()].count(picture) == len(self._devices)
        return (
            picture.wanted
            and picture.slot is None
            and (everywhere or picture.ticket.batch in self._batch_states)
        )

    def _room(self, device: int, picture: _Picture, item: Item) -> list[Item] | None:
        """Return the items that can go from a device so that the item fits there."""
        placed = self._placed()

        def needed(device: int, other: Item) -> bool:
            if isinstance(other, Batch):
                return self._needs_batch(other, device, picture)
            return (device, other) in self._loading or any(
                (p.device, p.ticket.weights) == (device, other) for p in placed
            )

        return self._memory.room_for(device, item, needed)

    def _needs_batch(self, batch: Batch, device: int, picture: _Picture) -> bool:
        """Whether a batch has to stay when a picture needs room."""
        state, comes_first = self._batch_states[batch], self._reserved.get(device) is picture
        return bool(
            not state.ready
            or state.pictures()
            or batch == picture.ticket.batch
            or not (state.served or comes_first)
        )

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
        self, devices: Iterable[int], picture: _Picture, item: Item, moves: _Moves, now: float
    ) -> bool:
        """Evict items that are not needed until the item fits on these devices, and record it.

        Returns whether that was possible.
        """
        devices = list(devices)
        gone: dict[int, Any] = {d: self._room(d, picture, item) for d in devices}
        if None in gone.values() or not all(self._admits(d, picture) for d in devices):
            self._reserve(devices, picture, item, now)
            return False
        for device, others in gone.items():
            for other in others:
                self._evict(device, other, moves)
            self._memory.use(device, item)
        return True

    def _evict(self, device: int, item: Item, moves: _Moves) -> None:
        if isinstance(item, Weights):
            self._memory.remove(device, item)
            moves.drop.append((device, item))
        elif item in self._batch_states:
            for everywhere in self._devices:
                self._memory.remove(everywhere, item)
            del self._batch_states[item]
            moves.release.append(item)

    def _open(self, batch: Batch, now: float) -> _BatchState:
        state = self._batch_states[batch] = _BatchState(batch, len(self._devices), now)
        for device in self._devices:
            self._memory.use(device, batch)
        return state

    # --- turns on the devices -------------------------------------------------------------------

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
        """Plan rows for the batch whose turn it is, on every device with some of its pictures."""
        able = [
            picture
            for picture in self._placed()
            if (picture.device, picture.ticket.weights) not in self._loading
        ]
        if not able:
            return Plan(**moves.as_tuples())
        state = self._batch_states[self._in_turn(able)[0].ticket.batch]
        drawn = [
            self._drawn_on_device(state.batch, pictures)
            for device in self._devices
            if (pictures := [p for p in state.pictures() if p.device == device and p in able])
        ]
        everywhere = [picture for pictures in drawn for picture in pictures]
        least = min(picture.at_once for picture in everywhere)
        rows, evaluations = self._model.of(state.batch).next_rows(
            [np.stack([picture.kinds_left[:least] for picture in pictures]) for pictures in drawn]
        )
        self._evaluations = evaluations
        finish = [picture.slot for picture in everywhere if picture.left == rows]
        for picture in everywhere:
            job = self._jobs[picture.ticket.job]
            job.begun, job.reported = now if job.begun is None else job.begun, None
        return Plan(
            **moves.as_tuples(),
            batch=state.batch,
            weights={pictures[0].device: pictures[0].ticket.weights for pictures in drawn},
            enter={p.slot: p.ticket for p in everywhere if not p.entered},
            rows={picture.slot: rows for picture in everywhere},
            finish=tuple(finish),
            preview=tuple(p.slot for p in everywhere if self._previewed(p, rows)),
        )

    def _drawn_on_device(self, batch: Batch, pictures: list[_Picture]) -> list[_Picture]:
        """Return those of a device's pictures that take rows now.

        These are all of the client whose turn it is that have the same weights, and others of these
        weights if they cost nothing.
        """
        first, *others = self._in_turn(pictures)
        others = [picture for picture in others if picture.ticket.weights == first.ticket.weights]
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
        decoded = _most_on_a_device(pictures[slot] for slot in plan.finish)
        latency.record_rows(self._evaluations, report.advance_seconds)
        if decoded:
            latency.decode_seconds = report.decode_seconds / decoded
        self._charge(
            pictures.values(),
            report.advance_seconds + report.decode_seconds + report.preview_seconds,
        )
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

    def _discard(self, what: Batch | tuple[int, Weights], reason: str) -> None:
        """Fail the jobs that need an item which could not be prepared."""
        if isinstance(what, Batch):
            self._batch_states.pop(what, None)
            for device in self._devices:
                self._memory.remove(device, what)
            message = Sentence("Compiling failed: {reason}", reason=reason)
            lost = [p for p in self._unfinished() if p.ticket.batch == what]
        else:
            self._loading.discard(what)
            self._memory.remove(*what)
            message = Sentence("Loading the model failed: {reason}", reason=reason)
            lost = [
                p
                for p in self._unfinished()
                if what[1] in (p.ticket.weights, *p.ticket.weights.needs)
                and p.device in (None, what[0])
            ]
        self._fail(lost, message)

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
        if not self._is_ready(first.ticket.batch):
            return COMPILING
        return LOADING if (first.device, first.ticket.weights) in self._loading else WAITING

    def _stalled(self, job: _Job) -> bool:
        return all(not self._is_ready(picture.ticket.batch) for picture in job.waiting())

    def _is_ready(self, batch: Batch) -> bool:
        state = self._batch_states.get(batch)
        return state is not None and state.ready

    def _waits(self, numbers: Iterable[int], now: float) -> dict[int, float | None]:
        """Return how long these jobs wait for their turn, where that is known.

        They wait for the earlier jobs of their clients, which share the devices with others.
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
        """Return the seconds until a picture's batch is compiled and a device has its weights.

        Batches that come before it count as well. Returns None if it is not known.
        """
        ticket, seconds = picture.ticket, self._model.compile_seconds()
        loading = min(
            sum(
                self._model.load_seconds(weights)
                for _, weights in self._missing(device, ticket.weights)
            )
            for device in self._devices
        )
        if self._is_ready(ticket.batch):
            return loading
        if seconds is None:
            return None
        left = sum(
            max(0.0, seconds - (now - state.since))
            for state in self._batch_states.values()
            if not state.ready
        )
        if ticket.batch in self._batch_states:
            return loading + left
        cold = {
            batch
            for (_, batch, _), queue in self._waiting.items()
            if batch not in self._batch_states and queue[0].number < picture.number
        }
        return loading + left + seconds * len(cold | {ticket.batch})

    def _seconds_left(self, job: _Job) -> float | None:
        """Return how long a job that has begun still takes, or None if that is not known.

        Its pictures in slots come first, beside those of others, then the ones that wait.
        """
        model = self._model
        if not all(self._is_ready(p.ticket.batch) for p in job.waiting()):
            return None
        placed = self._placed()
        queueing = {account for (account, *_), queue in self._waiting.items() if queue}
        last = 0.0
        for picture in (p for p in placed if p.ticket.job == job.number):
            mine = picture.in_crowd(model)
            own, others = 0.0, dict[Account, float]()
            for other in (p for p in placed if p.device == picture.device):
                account, theirs = other.ticket.account, other.in_crowd(model)
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
        return last + in_turns(waiting, job.account, forever) / len(self._devices)

    # --- bookkeeping ----------------------------------------------------------------------------

    def _placed(self) -> list[_Picture]:
        return [picture for state in self._batch_states.values() for picture in state.pictures()]

    def _unfinished(self) -> list[_Picture]:
        return [picture for job in self._jobs.values() for picture in job.waiting()]

    def _vacate(self, picture: _Picture) -> None:
        self._batch_states[picture.ticket.batch].slots[picture.slot] = None

    def _unqueue(self, picture: _Picture) -> None:
        ticket = picture.ticket
        key = ticket.account, ticket.batch, ticket.weights
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


def _in_rounds(jobs: Iterable[_Job], whose: Callable[[_Job], Hashable]) -> list[_Job]:
    """Order jobs in rounds: the first of everybody by their numbers, then everybody's second ..."""
    rounds: Counter[Hashable] = Counter()
    ranked = []
    for job in jobs:
        rounds[whose(job)] += 1
        ranked.append((rounds[whose(job)], job.number, job))
    return [job for *_, job in sorted(ranked)]


def _most_on_a_device(pictures: Iterable[_Picture]) -> int:
    """Return how many of them are on the device that has most."""
    return max(Counter(picture.device for picture in pictures).values(), default=0)
