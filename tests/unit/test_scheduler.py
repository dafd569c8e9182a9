"""The scheduler by itself: a worker that only counts, and a clock that the test moves."""

import dataclasses
import itertools
import math
import pickle
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sd_tpu.request import RequestError
from sd_tpu.runtime.slots import ALONE, FORECAST, GUIDED
from sd_tpu.serving import latency
from sd_tpu.serving import scheduler as schedulers
from sd_tpu.serving.job import (
    COMPILING,
    LOADING,
    WAITING,
    Cancelled,
    Done,
    Failed,
    ImageReady,
    Progress,
    Queued,
)
from sd_tpu.serving.latency import CALL_SECONDS, LatencyModel
from sd_tpu.serving.memory import KeptPrompts
from sd_tpu.serving.plan import (
    Batch,
    Compiled,
    Encoder,
    Plan,
    Prompt,
    Report,
    TextEncoder,
    Ticket,
    Training,
    Weights,
)
from sd_tpu.serving.scheduler import (
    KEPT_BYTES,
    MAX_SPARE,
    MOST_WAITED,
    SWITCH_SECONDS,
    TRAINING_SHARE,
    Busy,
    Limits,
    Scheduler,
)
from sd_tpu.serving.worker import WAIT_SECONDS

SMALL = Batch(architecture="sd", height=64, width=64, slots=16, memory=2)
WIDE = Batch(architecture="sd", height=64, width=96, slots=16, group=4, memory=3)
TRAFFIC = pytest.mark.slow("simulates hours of traffic")
BASE, OTHER = Weights(name="base", memory=4), Weights(name="other", memory=4)
ADAPTED = [Weights(name="base", adapters=((name, 1.0),), base=BASE, memory=1) for name in "abc"]
PIXELS = np.zeros((1, 1, 3), np.uint8)
DEFAULT = Limits()
ROW, DECODE, COMPILE, ENCODER, BRING, STEP = 0.05, 0.02, 20.0, 3.0, 2.0, 0.5  # seconds
START, *SEEN = (Encoder(kind="sd", height=64, width=64 + 8 * number) for number in range(40))
READER = TextEncoder(architecture="sd", shapes=((2, 77),))
TEXTS = Weights(name="base", texts=True)  # that take no room to speak of
PROMPT_BYTES = 1
SPARE = MAX_SPARE - 1  # encoders of pictures beside that of prompts
TRAINING = Training(number=0, weights=BASE, texts=TEXTS, memory=2)


class Devices:
    """A worker that takes the given times; checks that each plan can be carried out."""

    def __init__(
        self,
        count: int = 1,
        *,
        memory: int | None = None,
        limits: Limits = DEFAULT,
        keeps: int = KEPT_BYTES,
        texts: Weights | None = TEXTS,
    ):
        self.scheduler = Scheduler(count, LatencyModel(), limits=limits, memory=memory, kept=keeps)
        self.scheduler.prepare(READER, now=0.0)
        self.scheduler.update(Report(compiled={READER: Compiled(seconds=ENCODER)}), 0.0)
        self.readers, self.keeps, self.encode = {READER}, keeps, 0.0  # seconds of a prompt
        self.kept: set[Prompt] = set()
        self.loads: list[tuple[float, Weights]] = []  # when begun, on any device
        self.count, self.memory, self.now, self.decode = count, memory, 0.0, DECODE
        self.preview = 0.0  # seconds of one
        self.slots: dict[Batch, dict[int, list]] = {}  # by slot: [ticket, rows left]
        self.encoders: set[Encoder] = set()
        self.held: list[set] = [set() for _ in range(count)]
        for device, held in enumerate(self.held if texts else ()):
            held.add(texts)
            self.scheduler.hold(device, texts)
        self.background: list[tuple[float, object]] = []  # when it is over
        self.failing: set[Batch | Encoder | Weights] = set()  # what cannot be prepared
        self.idle = 0.0  # seconds without anything to do
        self.compiler, self.compilations = 0.0, 0  # until when it is busy, with one at a time
        self.told = defaultdict(list)
        self.ended: dict[int, float] = {}
        self.drawn = Counter()  # seconds by client
        self.numbers = iter(range(1, 10**9))
        self.trained: list[tuple[float, float]] = []  # when steps of training began and ended
        self.between = lambda: None  # called while a plan is carried out

    def ask(
        self,
        client="",
        pictures=1,
        steps=10,
        *,
        kind=GUIDED,
        interval=1,
        batch=SMALL,
        weights=BASE,
        encoders=(),
        previews=False,
        address="",
        texts=TEXTS,
        said=None,
    ) -> int:
        """Submits a job; its number. Pictures have prompts of their own, or all what is `said`."""
        job = next(self.numbers)
        wanted = zip(
            itertools.cycle([batch] if isinstance(batch, Batch) else batch),
            itertools.cycle([weights] if isinstance(weights, Weights) else weights),
            strict=False,
        )
        kinds = np.full(steps, kind)
        kinds[interval - 1 :: interval] = FORECAST if interval > 1 else kind
        tickets = [
            Ticket(
                job=job,
                index=index,
                client=client,
                address=address,
                batch=batch,
                weights=weights,
                prompt=Prompt(
                    encoder=READER,
                    weights=texts,
                    digest=(f"{job} {index}" if said is None else said).encode(),
                    memory=PROMPT_BYTES,
                ),
                encoders=tuple(encoders),
                kinds=kinds,
                previews=previews,
            )
            for index, (batch, weights) in zip(range(pictures), wanted, strict=False)
        ]
        self.scheduler.submit(tickets, self.now, steps=steps)
        return job

    def step(self) -> Plan:
        """One plan, carried out."""
        plan = self.scheduler.schedule(self.now)
        report = self._carry_out(pickle.loads(pickle.dumps(plan)))
        self.scheduler.update(report, self.now)
        for job, event in self.scheduler.events():
            self.told[job].append(event)
            self.ended[job] = self.now  # by its last event
        return plan

    def run(self, until=lambda: False, seconds: float = math.inf) -> None:
        """Goes on until nothing is left to be drawn."""
        end = self.now + seconds
        while not (self.scheduler.idle or until() or self.now >= end):
            self.step()

    def took(self, job: int) -> float:
        """Seconds until the job is done."""
        begun = self.now
        self.run(lambda: self.over(job))
        assert isinstance(self.told[job][-1], Done)
        return self.now - begun

    def over(self, job: int) -> bool:
        return bool(self.told[job]) and isinstance(self.told[job][-1], Done | Cancelled | Failed)

    def _carry_out(self, plan: Plan) -> Report:
        for program in plan.release:
            if isinstance(program, TextEncoder):
                self.readers.remove(program)
            elif isinstance(program, Encoder):
                self.encoders.remove(program)
            else:
                assert not self.slots.pop(program), "pictures are lost"
        assert not (plan.train and plan.batch)
        for device, weights in plan.drop:
            if weights.name:  # zeros are there or not, as the worker needs them
                self.held[device].remove(weights)
        self.loads += [(self.now, weights) for weights in {weights for _, weights in plan.load}]
        for what in plan.load:
            self.background.append((self.now + BRING, what))
        for program in plan.compile:
            assert program not in self.encoders | self.slots.keys() | self.readers
            took = COMPILE if isinstance(program, Batch) else ENCODER
            self.compiler = max(self.compiler, self.now) + took
            self.compilations += 1
            self.background.append((self.compiler, program))
        self._check_memory()
        self._encode(plan)
        drawn = self._draw(plan) if plan.batch else {}
        drawn |= {"encode_seconds": self.encode * len(plan.encode)}
        if plan.batch or plan.encode or self.background:
            self.idle = 0.0
        if plan.train:
            assert all({plan.train.weights} <= held for held in self.held)
            self.trained.append((self.now, self.now + STEP))
            self.now, self.idle = self.now + STEP / 2, 0.0
            self.between()
            self.now += STEP / 2
            drawn |= {"train_seconds": STEP}
        elif not plan.batch and not plan.encode:
            self._wait()
        return Report(**drawn, **self._come())

    def _wait(self) -> None:
        """Until something in the background is over, or somebody has waited long enough for it."""
        if self.background:
            self.now = max(self.now, min(when for when, _ in self.background))
            return
        self.now, self.idle = self.now + WAIT_SECONDS, self.idle + WAIT_SECONDS
        assert self.idle < 2 * SWITCH_SECONDS, "nothing is to be done, and nothing is on its way"

    def _encode(self, plan: Plan) -> None:
        self.kept -= {*plan.forget}
        for prompt in plan.encode:
            assert prompt not in self.kept, "it is encoded twice"
            assert prompt.encoder in self.readers
            for held in self.held:
                assert {prompt.weights, *prompt.weights.needs} <= held
            self.kept.add(prompt)
        theirs = {*self.scheduler._kept._prompts}
        assert self.kept == theirs, "either knows of what the other keeps"
        self.kept = theirs  # the same objects, which are compared in no time
        entering = sum(not p.entered for p in self.scheduler._placed())
        assert PROMPT_BYTES * len(self.kept) <= max(self.keeps, 1 + entering)
        self.now += self.encode * len(plan.encode)

    def _draw(self, plan: Plan) -> dict:
        slots, share = self.slots[plan.batch], plan.batch.slots // self.count
        for slot, ticket in plan.enter.items():
            assert plan.rows[slot] > 0 and self.encoders.issuperset(ticket.encoders)
            assert ticket.prompt in self.kept
            slots[slot] = [ticket, len(ticket.kinds)]
        lanes = Counter()  # by device: what is stepped at a time
        ending = Counter(slot // share for slot in plan.finish)
        for slot, rows in plan.rows.items():
            ticket, left = slots[slot]
            device = slot // share
            assert plan.weights[device] == ticket.weights
            assert {ticket.weights, *ticket.weights.needs} <= self.held[device]
            assert 0 < rows <= left
            taken = Counter(ticket.kinds[-left:][:rows].tolist())
            lanes[device] += (taken[GUIDED] + taken[ALONE] / 2) / rows
            slots[slot][1] -= rows
        assert set(plan.finish) == {slot for slot in plan.rows if slots[slot][1] == 0}
        (rows,) = set(plan.rows.values())
        seconds = ROW * rows * max(-(-of // plan.batch.group) for of in lanes.values())
        decoded = self.decode * max(ending.values(), default=0)
        previewed = self.preview * len(plan.preview)
        self.now += seconds + decoded + previewed
        for slot, rows in plan.rows.items():
            self.drawn[slots[slot][0].client] += (
                (seconds + decoded + previewed) * rows / sum(plan.rows.values())
            )
        for slot in plan.finish:
            del slots[slot]
        return dict(
            advance_seconds=seconds,
            decode_seconds=decoded,
            preview_seconds=previewed,
            pictures=dict.fromkeys(plan.finish, PIXELS),
            previews=dict.fromkeys(plan.preview, PIXELS),
        )

    def _come(self) -> dict:
        over = [what for when, what in self.background if when <= self.now]
        self.background = [(when, what) for when, what in self.background if when > self.now]
        failed = [
            what for what in over if (what[1] if isinstance(what, tuple) else what) in self.failing
        ]
        over = [what for what in over if what not in failed]
        compiled = {}
        for what in over:
            match what:
                case Batch():
                    self.slots[what] = {}
                    compiled[what] = Compiled(
                        seconds=COMPILE, row_seconds=ROW, decode_seconds=DECODE
                    )
                case TextEncoder():
                    self.readers.add(what)
                    compiled[what] = Compiled(seconds=ENCODER)
                case Encoder():
                    self.encoders.add(what)
                    compiled[what] = Compiled(seconds=ENCODER)
                case (device, weights):
                    self.held[device].add(weights)
        return dict(
            failed=dict.fromkeys(failed, "no memory"),
            compiled=compiled,
            loaded={what: BRING for what in over if isinstance(what, tuple)},
        )

    def _check_memory(self) -> None:
        compiled = {*self.slots, *(w for _, w in self.background if isinstance(w, Batch))}
        for device, held in enumerate(self.held):
            coming = {w[1] for _, w in self.background if isinstance(w, tuple) and w[0] == device}
            there = compiled | held | coming
            zeros = {each for batch in compiled for each in batch.needs}
            training = self.scheduler._training
            if training and self.scheduler._memory.holds(device, training):
                there = there | {training, *training.needs}
            used = sum(item.memory for item in there | zeros)
            assert self.memory is None or used <= self.memory
            assert all(need in there for item in held | coming for need in item.needs)


@pytest.fixture
def one() -> Devices:
    """One device, ready to draw."""
    return warm(Devices())


def warm(devices: Devices, *batches: Batch) -> Devices:
    for batch in batches or [SMALL]:
        devices.took(devices.ask("first", steps=1, batch=batch))
    return devices


def ready(count: int, decode: float, batch: Batch = SMALL) -> Devices:
    """Devices with the weights, where decoding a picture takes so many seconds."""
    devices = Devices(count)
    devices.decode = decode
    for device, held in enumerate(devices.held):
        held.add(BASE)
        devices.scheduler.hold(device, BASE)
    return warm(devices, batch)


@TRAFFIC
def test_pictures_are_decoded_together_where_one_that_is_keeps_the_others_waiting():
    """Eight replicas draw nine tenths of what they would if none waited for another."""
    devices, chance = ready(8, 2 * ROW), random.Random(0)
    jobs, began = [], devices.now
    for number in range(150):
        jobs.append(devices.ask(str(number), pictures=chance.choice((1, 4, 8)), steps=20))
        devices.run(seconds=chance.uniform(0, 1))
    devices.run()
    pictures = sum(isinstance(event, ImageReady) for job in jobs for event in devices.told[job])
    assert 8 * (devices.now - began) * 0.9 <= pictures * (20 * ROW + devices.decode)


def test_who_waits_to_be_decoded_ends_with_those_that_are_waited_for():
    devices = ready(8, 1.0)
    devices.ask("crowd", pictures=7, steps=13)
    devices.run(seconds=8 * ROW)
    devices.ask("late", steps=2)
    ends = []
    while not devices.scheduler.idle:
        ends.append(len(devices.step().finish))
    assert [*filter(None, ends)] == [8]


@pytest.mark.parametrize("count", [1, 8])
def test_pictures_of_one_row_take_turns_as_others_do(count):
    devices = ready(count, DECODE)
    devices.ask("crowd", pictures=400, steps=1)
    devices.run(seconds=4 * (ROW + DECODE))
    assert devices.took(devices.ask("visitor", steps=20)) <= 3 * (20 * ROW + DECODE)


def test_those_of_a_group_step_along_with_one_that_ends():
    """Four in a group, which end one after the other, take no more evaluations than one."""
    batch = dataclasses.replace(SMALL, group=4)
    devices = ready(2, DECODE, batch)
    steps = 20
    for number in range(4):
        devices.ask(str(number), steps=steps - 2 * number, batch=batch)
    begun = devices.now
    devices.run()
    assert devices.now - begun <= steps * ROW + 4 * DECODE


def test_a_picture_waits_to_be_decoded_with_others_for_half_of_its_time_at_most():
    devices = ready(8, 1.0)
    alone = 20 * ROW + devices.decode
    for pictures in (1, 8):  # without others, and as one
        assert devices.took(devices.ask(pictures=pictures, steps=20)) == pytest.approx(alone)
    devices.ask("crowd", pictures=7, steps=400)
    devices.run(seconds=1)
    took = devices.took(devices.ask("visitor", steps=20))
    assert 1.3 * alone < took <= (1 + MOST_WAITED) * alone + CALL_SECONDS


@TRAFFIC
@pytest.mark.parametrize("count, batch", [(1, SMALL), (1, WIDE), (8, SMALL)])
def test_a_small_picture_of_another_client_is_done_in_three_times_what_it_takes_alone(count, batch):
    devices = warm(Devices(count), batch)
    alone = devices.took(devices.ask("visitor", steps=5, batch=batch))
    for _ in range(40):
        devices.ask("crowd", pictures=8, steps=200, batch=batch, previews=True)
    devices.run(seconds=30)
    for _ in range(5):
        devices.run(seconds=10)
        assert devices.took(devices.ask("visitor", steps=5, batch=batch)) <= 3 * alone


@TRAFFIC
@pytest.mark.parametrize("count", [1, 8])
def test_clients_who_always_want_something_get_the_same(count):
    devices = warm(Devices(count))
    for client, pictures, steps in (("few", 1, 40), ("many", 8, 90), ("short", 4, 5)):
        for _ in range(30):
            devices.ask(client, pictures=pictures, steps=steps * count)
    devices.drawn.clear()
    devices.run(seconds=40)
    if count == 1:
        shares = [devices.drawn[client] for client in ("few", "many", "short")]
        assert max(shares) - min(shares) < 5
    else:  # one picture is on one device, however many there are
        assert devices.drawn["few"] > 2


@TRAFFIC
def test_a_client_who_comes_again_and_again_gets_half_and_no_more(one):
    one.ask("crowd", pictures=8, steps=1000)
    one.run(seconds=5)
    one.drawn.clear()
    while one.drawn.total() < 150:
        one.took(one.ask("visitor", steps=5))
    assert 0.45 < one.drawn["visitor"] / one.drawn.total() < 0.6


def test_newcomers_without_end_do_not_keep_anybody_waiting_for_ever(one):
    waiting = one.ask("patient", steps=100)
    for number in range(600):
        one.ask(f"newcomer {number}", steps=20)
        one.run(seconds=1)
        if one.over(waiting):
            break
    assert isinstance(one.told[waiting][-1], Done) and one.now < 400


def test_a_client_fills_no_more_slots_than_it_leaves_free(one):
    one.ask("crowd", pictures=30, steps=1000)
    one.step()
    assert one.scheduler.occupied == 8
    for occupied in (12, 14, 15, 16, 16):
        one.ask(f"client {occupied} {one.now}", pictures=8, steps=1000)
        one.step()
        assert one.scheduler.occupied == occupied


@TRAFFIC
@pytest.mark.parametrize("count, batch", [(1, SMALL), (1, WIDE), (8, SMALL)])
def test_a_newcomer_beside_200_names_of_one_address_waits_three_times_alone_at_most(count, batch):
    devices = warm(Devices(count), batch)
    alone = devices.took(devices.ask("visitor", steps=5, batch=batch, address="away"))
    for number in range(200):
        devices.ask(f"name {number}", pictures=8, steps=50, batch=batch, address="crowd")
    devices.run(seconds=10)
    for number in range(3):
        devices.run(seconds=2)
        took = devices.took(devices.ask(f"visitor {number}", steps=5, batch=batch, address="away"))
        assert took <= 3 * alone


@TRAFFIC
def test_names_of_one_address_share_what_one_address_gets(one):
    for number in range(20):
        one.ask(f"name {number}", pictures=2, steps=1000, address="crowd")
    for number in range(2):
        one.ask(f"other {number}", pictures=2, steps=1000, address=f"other {number}")
    one.run(seconds=120)
    of = {name: one.drawn[name] for name in one.drawn}
    crowd = sum(seconds for name, seconds in of.items() if name.startswith("name"))
    assert crowd / sum(of.values()) == pytest.approx(1 / 3, abs=0.05)
    assert of["other 0"] == pytest.approx(of["other 1"], rel=0.1)


def test_names_of_one_address_leave_slots_to_other_addresses(one):
    for number in range(20):
        one.ask(f"name {number}", pictures=8, steps=1000, address="crowd")
    one.step()
    assert one.scheduler.occupied == 12
    one.ask("visitor", pictures=8, steps=1000, address="away")
    one.step()
    assert one.scheduler.occupied == 14


def test_positions_count_the_first_of_each_address_before_the_second_of_any(one):
    crowd = [
        one.ask(f"name {number}", steps=1000, pictures=8, address="crowd") for number in range(3)
    ]
    visitor = one.ask("visitor", steps=10, address="away")
    said = {job: event for job, event in one.scheduler.events() if isinstance(event, Queued)}
    assert [said[job].position for job in (crowd[0], visitor, *crowd[1:])] == [1, 2, 3, 4]


def test_others_ride_along_where_a_group_has_room_and_not_where_they_cost():
    devices = warm(Devices(), SMALL, WIDE)
    for batch, together in ((SMALL, 1), (WIDE, 4)):
        other = devices.ask("other", pictures=8, steps=100, batch=batch)
        devices.step()
        devices.ask("lead", steps=10, batch=batch)
        assert len(devices.step().rows) == together
        devices.took(other)


def test_pictures_are_divided_over_the_devices():
    devices = warm(Devices(8))
    devices.ask(pictures=8, steps=200)
    devices.run(seconds=BRING)
    assert sorted(slot // 2 for slot in devices.step().rows) == list(range(8))


def test_what_is_cancelled_leaves_within_one_plan(one):
    job, waiting = (one.ask(pictures=8, steps=1000) for _ in range(2))
    one.step()
    one.scheduler.cancel(waiting, one.now)
    assert (waiting, Cancelled()) in one.scheduler.events()
    one.scheduler.cancel(job, one.now, index=3)
    assert len(one.step().rows) == 7
    one.scheduler.cancel(job, one.now)
    assert not one.scheduler.schedule(one.now).rows
    assert one.scheduler.events() == [(job, Cancelled())] and one.scheduler.idle


@pytest.mark.parametrize(
    "limits, of_others, sentence",
    [
        (Limits(jobs=3), 2, "Too many people are waiting"),
        (Limits(pictures=9), 2, "Too many people are waiting"),
        (Limits(client_jobs=1), 0, "Too many of your pictures"),
        (Limits(client_pictures=5), 0, "Too many of your pictures"),
    ],
)
def test_every_bound_holds_and_a_refusal_says_when_to_come_back(limits, of_others, sentence):
    devices = warm(Devices(limits=limits))
    devices.ask("me", pictures=3, steps=20)
    for other in range(of_others):
        devices.ask(f"other {other}", pictures=2, steps=20)
    with pytest.raises(Busy, match=sentence) as refused:
        devices.ask("me", pictures=3)
    assert 1 <= refused.value.retry_after <= 10
    devices.run()
    devices.ask("me", pictures=3)


@TRAFFIC
def test_one_address_leaves_room_for_others_whatever_names_it_gives_itself(one):
    with pytest.raises(Busy, match="from your network") as refused:
        for number in itertools.count():
            one.ask(f"made up {number}", steps=1, address="192.0.2.1")
    assert number == DEFAULT.address_jobs == DEFAULT.jobs // 2 and refused.value.retry_after >= 1
    one.ask("somebody", address="192.0.2.2")
    one.ask("of an address that is not known")
    with pytest.raises(Busy, match="from your network"):
        one.ask("made up", pictures=8, address="192.0.2.1")
    one.run()
    one.ask("made up", address="192.0.2.1")


def test_waiting_jobs_are_told_their_position_the_reason_and_the_time(one):
    one.ask("crowd", pictures=8, steps=100)
    one.step()
    jobs = [one.ask(client, pictures=8) for client in ("crowd", "crowd", "other", "other")]
    told = {job: event for job, event in one.scheduler.events() if isinstance(event, Queued)}
    assert [told[job].position for job in jobs] == [1, 3, 2, 4]
    assert {event.reason for event in told.values()} == {WAITING}
    crowd, job = 8 * 100 * ROW, 8 * 10 * ROW
    assert told[jobs[0]].seconds == pytest.approx(crowd + DECODE * 8, rel=0.2)
    assert told[jobs[3]].seconds == pytest.approx(2 * job + 2 * 8 * DECODE, rel=0.2)


def test_progress_says_how_long_the_rest_takes(one):
    job = one.ask(pictures=2, steps=100)
    one.run(
        lambda: (
            one.told[job]
            and isinstance(one.told[job][-1], Progress)
            and one.told[job][-1].step >= 50
        )
    )
    left, begun = one.told[job][-1].seconds, one.now
    one.run()
    assert left == pytest.approx(one.now - begun, rel=0.05)


def test_pictures_are_shown_from_their_second_row_to_the_last_but_one(one, monkeypatch):
    monkeypatch.setattr(latency, "CALL_SECONDS", 0.0)  # a row at a time
    shown, other = one.ask("a", steps=6, previews=True), one.ask("b", steps=9)
    one.decode = 1e6 * DECODE  # previews need no decoder
    while not one.scheduler.idle:
        one.step()
    told = {
        job: [event for event in one.told[job] if isinstance(event, Progress)]
        for job in (shown, other)
    }
    assert {event.step: set(event.previews) for event in told[shown]} == {
        1: set(),
        2: {0},
        3: {0},
        4: {0},
        5: {0},
    }
    assert told[other] and not any(event.previews for event in told[other])


def test_a_picture_is_first_shown_after_its_second_row_also_where_a_call_takes_more(one):
    one.ask(steps=50)
    one.run()  # until it is known that a call may take four
    shown = one.ask(steps=20, previews=True)
    one.run()
    seen = [event.step for event in one.told[shown] if isinstance(event, Progress)]
    assert seen == [2, 6, 10, 14, 18]


def test_previews_that_take_long_make_calls_no_shorter(one):
    one.preview = 10 * ROW
    one.ask(steps=400, previews=True)
    one.run(seconds=15)
    assert set(one.step().rows.values()) == {round(latency.CALL_SECONDS / ROW)}


def test_a_new_batch_is_compiled_while_another_draws(one):
    job = one.ask(steps=1000)
    one.step()
    other = one.ask(batch=WIDE)
    one.step()
    (told,) = [event for event in one.told[other] if isinstance(event, Queued)]
    assert told.reason == COMPILING and told.seconds >= COMPILE
    one.run(lambda: one.over(other))
    steps = [event.step for event in one.told[job] if isinstance(event, Progress)]
    assert len(steps) > 20, "one waited for the other's programs"


def test_many_new_sizes_do_not_drive_out_what_another_client_draws_with():
    devices = warm(Devices(memory=2 * SMALL.memory + BASE.memory))
    warmed = devices.compilations
    sizes = [dataclasses.replace(SMALL, width=64 + 8 * n) for n in range(1, 9)]
    devices.ask("many", pictures=8, batch=sizes)
    devices.step()
    assert devices.took(devices.ask("visitor")) < 2 * COMPILE
    devices.run()
    assert devices.compilations - warmed <= 9


def test_each_of_three_new_sizes_is_told_how_long_those_before_it_take(one):
    jobs = [
        one.ask(str(n), steps=1, batch=dataclasses.replace(SMALL, width=64 + 8 * n))
        for n in (1, 2, 3)
    ]
    begun = one.now
    for job in jobs:
        one.run(lambda: one.over(job))  # noqa: B023
        told = [event for event in one.told[job] if isinstance(event, Queued)]
        assert told[0].seconds == pytest.approx(one.now - begun, abs=1)


def test_how_long_a_job_takes_is_not_known_while_its_rest_waits_for_programs(one):
    job = one.ask(pictures=2, steps=50, batch=(SMALL, WIDE))
    one.run(lambda: any(isinstance(event, Progress) for event in one.told[job]))
    assert one.told[job][-1].seconds is None


def test_a_job_of_two_sizes_says_once_that_its_rest_waits_for_programs(one):
    job = one.ask(pictures=2, batch=(SMALL, WIDE))
    one.run()
    kinds = [type(event) for event in one.told[job]]
    first = kinds.index(ImageReady)
    (told,) = [event for event in one.told[job][first:] if isinstance(event, Queued)]
    assert told.position == 1 and told.reason == COMPILING and 0 < told.seconds <= COMPILE
    assert kinds.count(ImageReady) == 2 and kinds[-1] == Done


def test_what_cannot_be_compiled_or_drawn_fails_its_own_jobs_only(one):
    good, bad, waits = one.ask(steps=100), one.ask(batch=WIDE), one.ask("other", pictures=30)
    plan = one.scheduler.schedule(one.now)
    assert plan.compile == (WIDE,)
    one._carry_out(plan)
    pictures = dict(advance_seconds=ROW, pictures={})
    one.scheduler.update(Report(failed={WIDE: "no memory"}, **pictures), one.now)
    assert [job for job, event in one.scheduler.events() if isinstance(event, Failed)] == [bad]
    one.scheduler.schedule(one.now)
    one.scheduler.update(Report(error="no memory"), one.now)
    failed = [job for job, event in one.scheduler.events() if isinstance(event, Failed)]
    assert failed == [good, waits] and one.scheduler.idle
    one.slots[SMALL].clear()
    one.took(one.ask())


@pytest.mark.parametrize("missing", [WIDE, OTHER])
def test_what_fails_beside_a_picture_that_is_drawn_fails_its_job_only(one, missing):
    one.failing = {missing}
    other = one.ask("other", steps=1000)
    bad = one.ask(
        pictures=2,
        steps=1000,
        **({"batch": (SMALL, WIDE)} if missing == WIDE else {"weights": (BASE, OTHER)}),
    )
    one.run(lambda: one.over(bad))
    assert isinstance(one.told[bad][-1], Failed)
    one.took(other)


def test_no_room_is_kept_for_a_picture_that_failed():
    devices = warm(Devices(memory=WIDE.memory + BASE.memory))  # too little for both batches
    devices.failing = {WIDE}
    devices.ask("other", steps=int(2 * SWITCH_SECONDS / ROW))
    bad = devices.ask(batch=WIDE)
    devices.run()
    assert isinstance(devices.told[bad][-1], Failed)
    devices.took(devices.ask())


def test_a_picture_goes_to_a_device_that_has_its_weights():
    devices = warm(Devices(2))
    devices.took(devices.ask(weights=OTHER))
    loaded = [set(held) for held in devices.held]
    for weights in (BASE, OTHER, OTHER, BASE):
        devices.took(devices.ask(weights=weights))
    assert devices.held == loaded, "weights were brought to where they were not needed"


def test_weights_that_come_are_waited_for_and_others_go_on(one):
    job = one.ask(steps=400)
    one.step()
    other = one.ask("other", weights=OTHER)
    one.step()
    assert LOADING in [event.reason for event in one.told[other] if isinstance(event, Queued)]
    begun = one.now
    one.run(lambda: one.over(other))
    assert BRING < one.now - begun < BRING + 2 and not one.over(job)


@TRAFFIC
def test_weights_take_turns_where_only_one_fits_and_nobody_starves():
    devices = warm(Devices(memory=SMALL.memory + BASE.memory))
    for number in range(80):  # which do not end together
        for weights in (BASE, OTHER):
            devices.ask(weights=weights, client=weights.name, steps=15 + 7 * number % 29)
    begun, plans = devices.now, []
    devices.run(lambda: OTHER in devices.held[0])
    assert devices.now - begun < 2 * SWITCH_SECONDS + BRING + 8 * 44 * ROW
    while not devices.scheduler.idle:
        plans.append(devices.step())
    switches = sum(len(plan.load) for plan in plans)
    assert 1 <= switches < devices.now / SWITCH_SECONDS


def test_what_was_used_least_recently_makes_room_for_a_batch():
    devices = warm(Devices(memory=SMALL.memory + WIDE.memory + BASE.memory), SMALL, WIDE)
    third = Batch(architecture="sd", height=96, width=96, slots=16, memory=2)
    devices.took(devices.ask(batch=SMALL))
    devices.took(devices.ask(batch=third))
    assert set(devices.slots) == {SMALL, third}
    with pytest.raises(RequestError, match="more memory than the devices have"):
        devices.ask(batch=Batch(architecture="xl", height=1024, width=1024, memory=6))


def test_adapters_take_what_they_change_and_their_base_stays_with_them():
    devices = warm(Devices(memory=SMALL.memory + BASE.memory + 2))
    for weights in (*ADAPTED, BASE, ADAPTED[0]):
        devices.took(devices.ask(weights=weights))
        assert BASE in devices.held[0]
    assert devices.held[0] - {TEXTS} == {BASE, ADAPTED[2], ADAPTED[0]}
    devices.took(devices.ask(weights=OTHER))
    assert devices.held[0] - {TEXTS} == {OTHER}, "a base leaves when nothing is merged into it"
    devices.took(devices.ask(weights=ADAPTED[1]))
    assert devices.held[0] - {TEXTS} == {BASE, ADAPTED[1]}
    with pytest.raises(RequestError, match="more memory than the devices have"):
        devices.ask(weights=dataclasses.replace(ADAPTED[0], memory=3))


def test_a_base_that_cannot_be_read_fails_what_is_merged_into_it(one):
    job, other = one.ask(weights=dataclasses.replace(ADAPTED[0], base=OTHER)), one.ask(steps=30)
    assert one.scheduler.schedule(one.now).load[0] == (0, OTHER)
    one.scheduler.update(Report(failed={(0, OTHER): "It is gone."}), one.now)
    failed = [number for number, event in one.scheduler.events() if isinstance(event, Failed)]
    assert failed == [job] and one.scheduler.jobs() == [other]


def test_zeros_of_an_architecture_are_charged_once_whatever_the_sizes():
    zeros = Weights(name="", architecture="sd", memory=4)
    sizes = [dataclasses.replace(SMALL, width=64 + 8 * n, zeros=zeros) for n in range(3)]
    devices = warm(Devices(memory=3 * SMALL.memory + BASE.memory + zeros.memory), *sizes)
    assert set(devices.slots) == set(sizes)
    devices.took(devices.ask(batch=dataclasses.replace(WIDE, architecture="xl"), weights=OTHER))
    assert zeros not in devices.scheduler._memory.on(0), "zeros leave after the last of their sizes"


def test_zeros_of_a_controlnet_are_charged_beside_those_of_its_model():
    plain = Weights(name="any", architecture="sd", memory=4)
    weights = Weights(
        name="any", architecture="controlled", base=plain, memory=1, network=("controlnet", "lines")
    )
    small, controlled = (
        dataclasses.replace(SMALL, architecture=each.architecture, zeros=each.zeros)
        for each in (plain, weights)
    )
    devices = warm(Devices(memory=2 * SMALL.memory + BASE.memory + 5), small, controlled)
    assert set(devices.slots) == {small, controlled}
    assert controlled.needs == (*small.needs, weights.zeros)
    assert [each.memory for each in controlled.needs] == [4, 1]


asks = st.fixed_dictionaries(
    dict(
        client=st.sampled_from("abcde"),
        pictures=st.integers(1, 8),
        steps=st.integers(1, 60),
        kind=st.sampled_from((GUIDED, ALONE)),
        interval=st.sampled_from((1, 2, 5)),
        batch=st.sampled_from((SMALL, WIDE)),
        weights=st.sampled_from((BASE, OTHER, *ADAPTED)),
        encoders=st.sets(st.sampled_from((START, *SEEN)), max_size=3),
        previews=st.booleans(),
    )
)
cancels = st.tuples(st.integers(0, 30), st.none() | st.integers(0, 7))


@TRAFFIC
@pytest.mark.filterwarnings("error")  # a share of no evaluations is no number
@given(
    st.lists(asks | cancels | st.floats(0.1, 30), max_size=40),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((None, 9, 10)),
)
@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
def test_whatever_is_asked_is_drawn_once_or_cancelled(happens, count, memory):
    devices, asked = Devices(count, memory=memory), {}
    for what in happens:
        match what:
            case dict():
                asked[devices.ask(**what)] = what["pictures"]
            case tuple():
                devices.scheduler.cancel(what[0], devices.now, what[1])
            case seconds:
                devices.run(seconds=seconds)
    devices.run()
    for job, event in devices.scheduler.events():
        devices.told[job].append(event)
    for job, pictures in asked.items():
        *before, end = devices.told[job]
        assert not any(isinstance(event, Done | Cancelled | Failed) for event in before)
        indices = [event.index for event in before if isinstance(event, ImageReady)]
        assert len(indices) == len(set(indices)) <= pictures
        assert isinstance(end, Done | Cancelled)
        if not any(isinstance(what, tuple) for what in happens):
            assert isinstance(end, Done) and len(indices) == pictures
    assert not devices.scheduler.occupied
    devices.step()
    assert len(devices.encoders) <= SPARE


@TRAFFIC
def test_a_year_of_traffic_is_served():
    devices, random = Devices(8, memory=9), np.random.default_rng(0)
    year, bursts, worst = 365 * 24 * 3600, 125, 0.0
    for arrives in np.sort(random.uniform(0, year, bursts)):
        devices.run(lambda: devices.now >= arrives)  # noqa: B023
        devices.now = max(devices.now, arrives)
        begun, burst = devices.now, []
        for _ in range(random.geometric(0.5)):
            burst.append(
                devices.ask(
                    str(random.integers(5)),
                    pictures=int(random.integers(1, 9)),
                    steps=int(random.integers(1, 50)),
                    batch=(SMALL, WIDE)[random.integers(2)],
                    weights=(BASE, OTHER, *ADAPTED)[random.integers(5)],
                    encoders=SEEN[: random.integers(3)],
                )
            )
        devices.run()
        worst = max(worst, devices.now - begun)
        assert all(isinstance(devices.told.pop(job)[-1], Done) for job in burst)
    assert devices.now >= 0.99 * year and worst < 300
    assert devices.scheduler.idle and not devices.scheduler.occupied


def test_no_more_batches_are_compiled_at_a_time_than_their_bound(monkeypatch):
    monkeypatch.setattr(schedulers, "MAX_BATCHES", 3)
    devices = Devices()
    sizes = [dataclasses.replace(SMALL, width=64 + 8 * number) for number in range(8)]
    for batch in sizes:
        devices.took(devices.ask("a", steps=2, batch=batch))
        assert len(devices.slots) <= 3
    assert [*devices.slots] == sizes[-3:]
    compiled = devices.compilations
    devices.took(devices.ask("a", steps=2, batch=sizes[-2]))
    devices.took(devices.ask("a", steps=2, batch=sizes[0]))
    assert devices.compilations == compiled + 1 and {*devices.slots} == {
        sizes[-2],
        sizes[-1],
        sizes[0],
    }


def test_a_batch_beyond_the_bound_waits_until_another_is_empty(monkeypatch):
    monkeypatch.setattr(schedulers, "MAX_BATCHES", 2)
    devices = warm(Devices(), SMALL, WIDE)
    busy = [devices.ask("a", steps=100, batch=batch) for batch in (SMALL, WIDE)]
    devices.step()
    third = dataclasses.replace(SMALL, width=72)
    waiting = devices.ask("b", steps=2, batch=third)
    devices.run(lambda: devices.over(waiting))
    assert any(map(devices.over, busy)) and devices.over(waiting)


def test_batches_that_nobody_waits_for_any_more_make_room_for_others(monkeypatch):
    monkeypatch.setattr(schedulers, "MAX_BATCHES", 2)
    devices = Devices()
    for width in (72, 80):
        unwanted = devices.ask("a", batch=dataclasses.replace(SMALL, width=width))
        devices.step()
        devices.scheduler.cancel(unwanted, devices.now)
        devices.now += COMPILE
        devices.step()
    assert devices.took(devices.ask("b")) < 2 * COMPILE


def test_an_encoder_is_compiled_while_another_draws_and_who_needs_it_is_told(one):
    warm(one, SMALL)
    busy = one.ask("a", steps=200)
    starts = one.ask("b", steps=2, encoders=[START])
    plain = one.ask("b", steps=2)
    assert START in one.step().compile
    one.run(lambda: one.over(plain))
    assert not one.over(starts) and START not in one.encoders
    one.run(lambda: one.over(starts))
    assert not one.over(busy) and one.compilations == 2
    assert {event.reason for event in one.told[starts] if isinstance(event, Queued)} == {COMPILING}
    again = one.ask("b", steps=2, encoders=[START])
    one.run(lambda: one.over(again))
    assert one.compilations == 2 and not one.over(busy)


def test_what_needs_several_new_programs_is_told_how_long_they_take(one):
    warm(one, SMALL)
    assert one.took(one.ask("a", steps=1, encoders=[START])) == pytest.approx(ENCODER, rel=0.1)
    both = one.ask("a", steps=1, batch=WIDE, encoders=SEEN[:2])
    (seconds,) = (each.seconds for job, each in one.scheduler.events() if job == both)
    assert seconds == pytest.approx(COMPILE + 2 * ENCODER)
    assert one.took(both) == pytest.approx(seconds, rel=0.1)


def test_encoders_are_not_compiled_for_who_has_no_slot(one):
    warm(one, SMALL)
    one.ask("a", pictures=8, steps=100)
    one.ask("a", steps=1, encoders=[START])
    for _ in range(5):
        one.step()
    assert one.compilations == 1


def test_encoders_that_fail_fail_those_who_need_them_and_are_tried_again(one):
    warm(one, SMALL)
    one.failing = {START}
    plain, lost = one.ask("a"), [one.ask(name, encoders=[START, SEEN[0]]) for name in "ab"]
    one.run()
    failed = Failed("Compiling failed: no memory")
    assert [one.told[job][-1] for job in lost] == [failed, failed]
    assert isinstance(one.told[plain][-1], Done) and one.compilations == 3
    one.failing = set()
    one.took(one.ask("a", encoders=[START, SEEN[0]]))
    assert one.compilations == 4


def test_encoders_that_pictures_need_stay_and_of_others_those_used_last(one):
    warm(one, SMALL)
    for encoder in SEEN[:30]:
        one.took(one.ask("a", steps=1, encoders=[encoder]))
    one.step()
    assert one.encoders == {*SEEN[30 - SPARE : 30]}
    compiled = one.compilations
    one.took(one.ask("a", steps=1, encoders=SEEN[30 - SPARE : 30]))
    assert one.compilations == compiled
    one.took(one.ask("a", steps=1, encoders=SEEN[30 - SPARE :][:1]))  # used last from now on
    one.took(one.ask("a", steps=1, encoders=SEEN[:1]))
    one.step()
    assert one.compilations == compiled + 1
    assert one.encoders == {SEEN[0], SEEN[30 - SPARE], *SEEN[32 - SPARE : 30]}
    waiting = one.ask("b", steps=1, weights=OTHER, encoders=SEEN)
    one.run(lambda: {*SEEN} <= one.encoders)
    one.run(lambda: one.over(waiting))
    assert isinstance(one.told[waiting][-1], Done)
    one.step()
    assert len(one.encoders) == SPARE


def test_after_a_fault_an_encoder_on_its_way_is_asked_for_anew(one):
    warm(one, SMALL)
    one.ask("a", encoders=[START])
    one.step()
    one.scheduler.abandon("broken")
    one.background.clear()
    one.took(one.ask("a", encoders=[START]))


# --- prompts, and text encoders that cannot stay beside what draws ------------------------------

LARGE = Weights(name="base", texts=True, memory=4)
FOREIGN = Weights(name="other", texts=True, memory=4)
TIGHT = SMALL.memory + BASE.memory + LARGE.memory - 1  # without room for both parts


def tight(count: int = 1, **options) -> Devices:
    """Devices without room for text encoders beside what draws, with programs and what draws."""
    devices = Devices(count, memory=TIGHT, texts=None, **options)
    for device in range(count):
        devices.scheduler.hold(device, BASE)
        devices.held[device].add(BASE)
    devices.took(devices.ask("first", steps=1, texts=LARGE))
    devices.loads.clear()
    return devices


def brought(devices: Devices) -> Counter:
    return Counter(weights for _, weights in devices.loads)


def test_where_all_fits_prompts_are_encoded_by_the_plan_that_draws_and_nothing_is_brought(one):
    one.took(one.ask("a"))
    one.loads.clear()
    job = one.ask("a", pictures=8)
    plan = one.step()
    assert len(plan.encode) == len(plan.enter) == len(plan.rows) == 8
    one.ask("b", pictures=30, steps=50)
    plans = [one.step() for _ in range(40)]
    for each in plans:
        entering = [ticket.prompt for ticket in each.enter.values()]
        assert {*each.encode} <= {*entering}, "nobody waits for prompts of others"
    one.run()
    assert one.over(job) and not one.loads


def test_a_prompt_is_encoded_once_while_what_was_made_of_it_is_kept(one):
    one.ask("a", pictures=3, said="a cat")
    assert len(one.step().encode) == 1
    one.run()
    one.ask("b", said="a cat")
    assert not one.step().encode
    one.run()
    adapted = dataclasses.replace(TEXTS, adapters=(("a", 1.0),), base=TEXTS)
    job = one.ask("b", said="a cat", texts=adapted)
    one.run()
    assert one.over(job) and adapted in one.held[0], "a LoRA reads it in another way"


def test_what_is_kept_of_prompts_is_bounded_and_that_used_last_stays():
    devices = warm(Devices(keeps=4))
    for text in "abcdae":
        devices.took(devices.ask(said=text))
    assert {prompt.digest for prompt in devices.kept} == {b"a", b"c", b"d", b"e"}


def test_all_that_waits_is_encoded_before_text_encoders_go_for_what_draws():
    devices = tight()
    jobs = [devices.ask(client, pictures=8, texts=LARGE) for client in "abcde"]
    devices.run()
    assert all(map(devices.over, jobs))
    assert brought(devices) == {LARGE: 1, BASE: 1}


def test_a_prompt_that_is_kept_needs_no_text_encoders():
    devices = tight()
    devices.took(devices.ask("a", said="a cat", texts=LARGE))
    devices.loads.clear()
    devices.took(devices.ask("b", pictures=8, said="a cat", texts=LARGE))
    assert not devices.loads


@pytest.mark.parametrize("count", [1, 4])
def test_all_replicas_have_text_encoders_or_none(count):
    devices = tight(count)
    devices.took(devices.ask("a", pictures=8, texts=LARGE))
    assert brought(devices)[LARGE] == 1 and not any(LARGE in held for held in devices.held)


def test_text_encoders_come_and_go_within_the_room_for_what_is_made_of_prompts():
    devices = tight(keeps=8)
    jobs = [devices.ask(client, pictures=8, texts=LARGE) for client in "abcde"]
    devices.run()
    assert all(map(devices.over, jobs))
    assert 4 <= brought(devices)[LARGE] <= 7, "for 40 prompts, of which 8 can be kept"


@pytest.mark.parametrize("steady", ["known", "new", "of another model"])
def test_nobody_starves_while_others_want_the_replica_without_end(steady):
    devices = tight()
    wants = dict(known=dict(said="a cat", texts=LARGE), new=dict(texts=LARGE)).get(
        steady, dict(weights=OTHER, texts=FOREIGN)
    )
    worst, visitor, since, visits = 0.0, None, 0.0, 0
    while visits < 12:
        if visitor is None:
            devices.run(seconds=1)
            visitor, since = devices.ask("visitor", steps=5, texts=LARGE), devices.now
        while len(devices.scheduler.jobs()) < 5:
            devices.ask("abc"[devices.scheduler.waiting % 3], steps=40, **wants)
        devices.step()
        if devices.over(visitor):
            worst, visitor, visits = max(worst, devices.now - since), None, visits + 1
    # Until others have had their time, what is in slots is drawn, and both parts are brought.
    assert worst < 2 * SWITCH_SECONDS + 4 * BRING + 4 * 40 * ROW * 3


def test_a_new_prompt_is_read_while_replicas_change_what_draws_one_after_the_other():
    devices, dice = tight(4), random.Random(0)
    models = [BASE, OTHER, Weights(name="third", memory=OTHER.memory)]
    worst = 0.0
    for _ in range(8):
        devices.run(seconds=1)
        visitor, since = devices.ask("visitor", steps=5, texts=LARGE), devices.now
        while not devices.over(visitor):
            while len(devices.scheduler.jobs()) < 5:
                weights, texts = dice.choice(models), dice.choice([LARGE, FOREIGN])
                steps = dice.choice([5, 40, 80])
                devices.ask(
                    dice.choice("abc"), steps=steps, weights=weights, said="a cat", texts=texts
                )
            devices.step()
        worst = max(worst, devices.now - since)
    assert worst < 2 * SWITCH_SECONDS + 4 * BRING + 4 * 80 * ROW


def test_a_prompt_that_is_kept_does_not_keep_a_new_one_waiting():
    """Pictures that need what draws come in all the time, and would never let it go."""
    devices = tight()
    known = dict(said="a cat", texts=LARGE)
    devices.took(devices.ask("a", **known))
    for _ in range(3):
        devices.ask("a", steps=20, **known)
    for _ in range(2):
        devices.step()
    new, begun = devices.ask("b", steps=5, texts=LARGE), devices.now
    differing = itertools.cycle(range(3))  # so that they never end together
    while not devices.over(new) and devices.now < begun + 60:
        while len(devices.scheduler.jobs()) < 4:
            devices.ask("a", steps=20 + next(differing), **known)
        devices.step()
    assert devices.now - begun < SWITCH_SECONDS + 2 * BRING + 4 * 20 * ROW + 5


def test_what_draws_stays_for_pictures_whose_prompts_are_kept():
    """Short pictures end together, so that their weights are idle between two plans."""
    devices = Devices(memory=TIGHT, texts=None)
    batch = dataclasses.replace(SMALL, group=8)
    devices.took(devices.ask("a", said="a cat", texts=LARGE, batch=batch))
    for _ in range(20):
        devices.ask("a", pictures=40, steps=4, said="a cat", texts=LARGE, batch=batch)
    devices.loads.clear()
    begun, new = devices.now, None
    while devices.now < begun + 30:
        if new is None or devices.over(new):
            new = devices.ask("b", steps=1, texts=LARGE, batch=batch)
        devices.step()
    assert len(devices.loads) <= 2 * 30 / (SWITCH_SECONDS + 2 * BRING)


def test_prompts_that_cannot_be_encoded_fail_those_who_wrote_them(one):
    good = one.ask("b", steps=100)
    one.step()
    bad, waiting = one.ask("a", said="bad"), one.ask("b")
    plan = one.scheduler.schedule(one.now)
    (prompt,) = plan.encode
    assert prompt.digest == b"bad"
    one.scheduler.update(Report(unread={prompt: "too much"}), one.now)
    one.run()
    failed = Failed("Making the pictures failed: too much")
    assert (bad, failed) in [(job, each) for job in (bad, good) for each in one.told[job]]
    assert all(isinstance(one.told[job][-1], Done) for job in (good, waiting))
    drawn = one.ask("b", said="bad")
    one.run()
    assert one.over(drawn) and isinstance(one.told[drawn][-1], Done)


def test_prompts_that_cannot_be_encoded_fail_no_others_of_the_plan(one):
    jobs = {said: one.ask("a", said=said) for said in ("good", "bad", "worse")}
    prompts = {prompt.digest.decode(): prompt for prompt in one.scheduler.schedule(one.now).encode}
    assert prompts.keys() == jobs.keys()
    reasons = {"bad": "too much", "worse": "too long"}
    report = Report(unread={prompts[said]: reason for said, reason in reasons.items()})
    one.kept.add(prompts["good"])  # which would be encoded twice if it were not known
    one.scheduler.update(report, one.now)
    one.run()
    assert isinstance(one.told[jobs["good"]][-1], Done)
    for said, reason in reasons.items():
        assert one.told[jobs[said]][-1] == Failed(f"Making the pictures failed: {reason}")


def test_a_step_of_training_counts_though_prompts_could_not_be_encoded(one):
    one.scheduler.train(TRAINING)
    assert one.scheduler.schedule(one.now).train == TRAINING
    lost = Prompt(encoder=READER, weights=TEXTS, digest=b"")
    one.scheduler.update(Report(unread={lost: "too much"}, train_seconds=3 * STEP), one.now)
    assert one.scheduler._step_seconds == 3 * STEP
    one.scheduler.schedule(one.now)
    one.scheduler.update(Report(unread={lost: "too much"}), one.now)
    assert one.scheduler.idle, "no step is left"


def test_a_new_prompt_does_not_wait_for_pictures_behind_it():
    """Those of a client are drawn in their order, so what draws need not stay for the second."""
    devices = tight()
    devices.took(devices.ask("a", said="a cat", texts=LARGE))
    begun = devices.now
    jobs = [devices.ask("a", steps=1, said=said, texts=LARGE) for said in ("a dog", "a cat")]
    devices.run()
    assert all(isinstance(devices.told[job][-1], Done) for job in jobs)
    assert devices.now - begun < SWITCH_SECONDS


def test_what_waits_is_looked_through_a_few_times_in_a_plan(monkeypatch):
    """And not for each client: that would take seconds where hundreds of them wait."""
    devices, looked = tight(), []
    devices.took(devices.ask("known", said="a cat", texts=LARGE))
    for number in range(60):
        devices.ask(f"client {number}", texts=LARGE)
    devices.ask("known", said="a cat", texts=LARGE)
    contains = KeptPrompts.__contains__
    monkeypatch.setattr(
        KeptPrompts, "__contains__", lambda kept, one: looked.append(one) or contains(kept, one)
    )
    waiting = devices.scheduler.waiting
    devices.scheduler.schedule(devices.now)
    assert len(looked) < 10 * waiting


def test_text_encoders_that_cannot_be_brought_fail_no_picture_that_is_drawn():
    """Its prompt has been forgotten for others, and it needs none any more."""
    devices = Devices(memory=TIGHT + 1, texts=None, keeps=1)
    devices.took(devices.ask("a", texts=LARGE))
    drawn = devices.ask("a", steps=1000, texts=LARGE)
    devices.run(lambda: any(picture.entered for picture in devices.scheduler._placed()))
    devices.took(devices.ask("b", steps=1, texts=FOREIGN))
    devices.failing = {LARGE}
    lost = devices.ask("c", texts=LARGE)
    devices.run(lambda: devices.over(lost))
    assert devices.told[lost][-1] == Failed("Loading the model failed: no memory")
    assert not devices.over(drawn)
    devices.run()
    assert isinstance(devices.told[drawn][-1], Done)


def test_text_encoders_that_cannot_be_brought_fail_those_who_need_them():
    devices = tight()
    devices.took(devices.ask("a", said="a cat", texts=LARGE))
    devices.failing = {LARGE}
    lost, kept = devices.ask("a", texts=LARGE), devices.ask("b", said="a cat", texts=LARGE)
    devices.run()
    assert devices.told[lost][-1] == Failed("Loading the model failed: no memory")
    assert isinstance(devices.told[kept][-1], Done)
    devices.failing = set()
    devices.took(devices.ask("a", texts=LARGE))


def test_who_waits_for_text_encoders_is_told_so():
    devices = tight()
    job = devices.ask("a", texts=LARGE)
    devices.step()
    devices.step()
    said = [event.reason for event in devices.told[job] if isinstance(event, Queued)]
    assert LOADING in said


def test_what_cannot_be_held_in_parts_is_refused():
    devices = tight()
    with pytest.raises(RequestError, match="more memory than the devices have"):
        devices.ask(texts=dataclasses.replace(LARGE, memory=TIGHT))


def test_after_a_fault_prompts_are_encoded_anew(one):
    one.took(one.ask("a", said="a cat"))
    one.ask("a", said="a dog")
    one.scheduler.schedule(one.now)  # and the plan is lost
    one.scheduler.abandon("broken")
    again = one.ask("a", said="a cat")
    assert one.step().forget and one.kept
    one.run(lambda: one.over(again))
    assert isinstance(one.told[again][-1], Done)


@TRAFFIC
@pytest.mark.parametrize(("count", "keeps"), [(1, KEPT_BYTES), (2, 20)])
def test_a_day_of_traffic_with_a_model_that_does_not_fit_beside_its_encoders(count, keeps):
    devices, random = tight(count, keeps=keeps), np.random.default_rng(1)
    devices.encode = 0.06
    models = [(BASE, LARGE), (OTHER, FOREIGN), (BASE, LARGE), (ADAPTED[0], LARGE)]
    day, bursts, asked, worst = 24 * 3600.0, 40, 0, 0.0
    for arrives in np.sort(random.uniform(0, day, bursts)):
        devices.now = max(devices.now, arrives)
        waiting = {}
        for _ in range(random.geometric(0.2)):
            weights, texts = models[random.integers(len(models))]
            job = devices.ask(
                str(random.integers(20)),
                pictures=int(random.integers(1, 9)),
                steps=int(random.integers(4, 30)),
                weights=weights,
                texts=texts,
                said=None if random.random() < 0.7 else f"{texts.name} {random.integers(30)}",
            )
            waiting[job], asked = devices.now, asked + 1
            devices.run(seconds=random.exponential(3))
        devices.run()
        for job, since in waiting.items():
            assert isinstance(devices.told.pop(job)[-1], Done)
            worst = max(worst, devices.ended[job] - since)
    begun = [when for when, _ in devices.loads]
    busiest = max(sum(when <= each < when + 60 for each in begun) for when in begun)
    # Two parts are brought for a picture that comes alone, and two in each stay of SWITCH_SECONDS.
    assert len(begun) <= 2 * asked and busiest <= 2 * 60 / SWITCH_SECONDS and worst < 90


mixed = st.fixed_dictionaries(
    dict(
        client=st.sampled_from("abcde"),
        pictures=st.integers(1, 8),
        steps=st.integers(1, 60),
        batch=st.sampled_from((SMALL, dataclasses.replace(SMALL, width=72))),
        weights=st.sampled_from((BASE, OTHER, *ADAPTED[:1])),
        texts=st.sampled_from(
            (
                LARGE,
                FOREIGN,
                dataclasses.replace(LARGE, adapters=(("a", 1.0),), base=LARGE, memory=1),
            )
        ),
        said=st.none() | st.sampled_from("xyz"),
    )
)


@TRAFFIC
@given(
    st.lists(mixed | cancels | st.floats(0.1, 30), max_size=40),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((None, TIGHT, TIGHT + 2, TIGHT + 5)),
    st.sampled_from((KEPT_BYTES, 10, 1)),
)
@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
def test_whatever_is_asked_of_models_in_parts_is_drawn(happens, count, memory, keeps):
    devices, asked = Devices(count, memory=memory, keeps=keeps, texts=None), {}
    devices.encode = 0.02
    for what in happens:
        match what:
            case dict():
                asked[devices.ask(**what)] = what["pictures"]
            case tuple():
                devices.scheduler.cancel(what[0], devices.now, what[1])
            case seconds:
                devices.run(seconds=seconds)
    devices.run()
    for job, event in devices.scheduler.events():
        devices.told[job].append(event)
    for job, pictures in asked.items():
        *before, end = devices.told[job]
        drawn = sum(isinstance(event, ImageReady) for event in before)
        assert isinstance(end, Done | Cancelled) and drawn <= pictures
        if not any(isinstance(what, tuple) for what in happens):
            assert isinstance(end, Done) and drawn == pictures
    assert not devices.scheduler.occupied and len(devices.loads) <= 8 * max(1, sum(asked.values()))


# --- training beside what is drawn --------------------------------------------------------------


def waits_for_steps(devices: Devices, submitted: float) -> int:
    """How many steps of training have kept somebody waiting from then on."""
    return sum(ends > submitted for _, ends in devices.trained)


def test_a_training_goes_on_alone_and_a_picture_waits_for_the_step_that_is_under_way(one):
    one.scheduler.train(TRAINING)
    assert not one.scheduler.idle
    one.run(lambda: len(one.trained) == 3)
    asked = []
    one.between = lambda: asked or asked.append((one.now, one.ask(steps=200)))
    one.step()
    ((since, job),) = asked
    one.run(lambda: one.over(job))
    assert waits_for_steps(one, since) == 1
    before = len(one.trained)
    one.run(lambda: len(one.trained) == before + 3)
    one.scheduler.end_training()
    assert one.scheduler.idle


@TRAFFIC
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 6), st.sampled_from("abc"), st.integers(1, 8), st.integers(1, 30)),
        min_size=1,
        max_size=12,
    ),
    count=st.sampled_from([1, 2]),
)
def test_no_picture_waits_for_two_steps_whatever_is_asked_for(arrivals, count):
    devices = warm(Devices(count))
    devices.took(devices.ask(pictures=8))  # the weights are on all devices from now on
    devices.scheduler.train(TRAINING)
    devices.run(lambda: devices.trained)
    begun, jobs, waiting = devices.now, {}, sorted(arrivals)

    def arrive():
        while waiting and waiting[0][0] <= devices.now - begun:
            _, client, pictures, steps = waiting.pop(0)
            jobs[devices.ask(client, pictures=pictures, steps=steps)] = devices.now

    devices.between = arrive
    while waiting or not all(map(devices.over, jobs)):
        arrive()
        open_jobs = {job: since for job, since in jobs.items() if not devices.over(job)}
        devices.step()
        for job, since in open_jobs.items():
            assert waits_for_steps(devices, since) <= 1, job


def test_a_training_moves_under_steady_load_and_takes_a_small_share(one):
    one.scheduler.train(TRAINING)
    begun = one.now
    while one.now < begun + 200:
        if len(one.scheduler.jobs()) < 3:
            one.ask("abc"[int(one.now) % 3], steps=30)
        one.step()
    share = len(one.trained) * STEP / (one.now - begun)
    assert 0.5 * TRAINING_SHARE < share <= TRAINING_SHARE


def test_a_training_waits_for_no_picture_that_is_compiled_for(one):
    one.scheduler.train(TRAINING)
    job = one.ask(batch=WIDE)
    one.run(lambda: one.over(job))
    assert len(one.trained) >= 0.9 * COMPILE / STEP


def test_a_training_leaves_for_a_picture_that_needs_its_room_and_comes_back():
    devices = warm(Devices(memory=SMALL.memory + BASE.memory + TRAINING.memory + 1))
    devices.scheduler.train(TRAINING)
    devices.run(lambda: len(devices.trained) == 2)
    job, plans = devices.ask(weights=OTHER), []
    for _ in range(100):
        plans += [] if devices.over(job) else [devices.step()]
    assert devices.over(job), "it keeps its room"
    assert [plan.suspend for plan in plans if plan.suspend] == [(TRAINING,)]
    assert (0, BASE) in [each for plan in plans for each in plan.drop]
    before = len(devices.trained)
    devices.run(lambda: len(devices.trained) > before)
    assert devices.held[0] - {TEXTS} == {BASE}, "what nobody draws with made room again"


def test_a_training_leaves_the_programs_that_were_used_last():
    room = SMALL.memory + BASE.memory + OTHER.memory + TRAINING.memory - 1
    devices = warm(Devices(memory=room))
    devices.took(devices.ask(weights=OTHER))
    compiled = devices.compilations
    devices.scheduler.train(TRAINING)
    for _ in range(3):  # lone pictures, each between steps
        before = len(devices.trained)
        devices.run(lambda before=before: len(devices.trained) >= before + 2)
        devices.took(devices.ask(weights=OTHER))
    assert devices.compilations == compiled


def test_a_training_without_steps_left_ends_and_what_is_drawn_sets_its_pace(one):
    one.scheduler.train(TRAINING)
    one.run(lambda: len(one.trained) == 3)
    plan = one.scheduler.schedule(one.now)
    assert plan.train == TRAINING
    one.scheduler.update(Report(), one.now)
    assert one.scheduler.idle
    assert one.scheduler._step_seconds == STEP


def test_a_training_brings_its_weights_and_fails_without_them(one):
    training = dataclasses.replace(TRAINING, number=7, weights=OTHER)
    one.scheduler.train(training)
    one.run(lambda: one.trained)
    one.scheduler.end_training()
    one.held[0].discard(OTHER)
    one.scheduler._memory.remove(0, OTHER)
    one.failing = {OTHER}
    one.scheduler.train(training)
    one.run()
    assert isinstance(one.told[7][-1], Failed)


def test_what_a_training_needs_is_bounded_as_what_is_drawn():
    devices = warm(Devices(memory=SMALL.memory + BASE.memory))
    with pytest.raises(RequestError, match="more memory than the devices have"):
        devices.scheduler.train(dataclasses.replace(TRAINING, memory=100))
    assert devices.scheduler.idle


def test_a_training_that_fails_ends_and_pictures_are_drawn(one):
    one.scheduler.train(TRAINING)
    one.run(lambda: one.trained)
    job = one.ask()
    report = one._carry_out(one.scheduler.schedule(one.now))
    report = dataclasses.replace(report, failed={TRAINING: "It is out of memory."})
    one.scheduler.update(report, one.now)
    failed = [number for number, event in one.scheduler.events() if isinstance(event, Failed)]
    assert failed == [TRAINING.number]
    one.took(job)
    assert one.scheduler.idle
