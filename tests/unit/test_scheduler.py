"""The scheduler by itself: a worker that only counts, and a clock that the test moves."""

import dataclasses
import itertools
import math
import pickle
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
from sd_tpu.serving.latency import LatencyModel
from sd_tpu.serving.plan import Batch, Compiled, Plan, Report, Ticket, Weights
from sd_tpu.serving.scheduler import SWITCH_SECONDS, Busy, Limits, Scheduler
from sd_tpu.serving.worker import WAIT_SECONDS

SMALL = Batch(architecture="sd", height=64, width=64, slots=16, memory=2)
WIDE = Batch(architecture="sd", height=64, width=96, slots=16, group=4, memory=3)
TRAFFIC = pytest.mark.slow("simulates hours of traffic")
BASE, OTHER = Weights(name="base", memory=4), Weights(name="other", memory=4)
ADAPTED = [Weights(name="base", adapters=((name, 1.0),), base=BASE, memory=1) for name in "abc"]
PIXELS = np.zeros((1, 1, 3), np.uint8)
DEFAULT = Limits()
ROW, DECODE, COMPILE, BRING = 0.05, 0.02, 20.0, 2.0  # seconds


class Devices:
    """A worker that takes the given times; checks that each plan can be carried out."""

    def __init__(self, count: int = 1, *, memory: int | None = None, limits: Limits = DEFAULT):
        self.scheduler = Scheduler(count, LatencyModel(), limits=limits, memory=memory)
        self.count, self.memory, self.now, self.decode = count, memory, 0.0, DECODE
        self.preview = 0.0  # seconds of one
        self.slots: dict[Batch, dict[int, list]] = {}  # by slot: [ticket, rows left]
        self.held: list[set] = [set() for _ in range(count)]
        self.background: list[tuple[float, object]] = []  # when it is over
        self.failing: set[Batch | Weights] = set()  # what cannot be prepared
        self.idle = 0.0  # seconds without anything to do
        self.compiler, self.compilations = 0.0, 0  # until when it is busy, with one at a time
        self.told = defaultdict(list)
        self.drawn = Counter()  # seconds by client
        self.numbers = iter(range(1, 10**9))

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
        previews=False,
        address="",
    ) -> int:
        """Submits a job; its number."""
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
        for batch in plan.release:
            assert not self.slots.pop(batch), "pictures are lost"
        for device, weights in plan.drop:
            if weights.name:  # zeros are there or not, as the worker needs them
                self.held[device].remove(weights)
        for what in plan.load:
            self.background.append((self.now + BRING, what))
        for batch in plan.compile:
            self.compiler = max(self.compiler, self.now) + COMPILE
            self.compilations += 1
            self.background.append((self.compiler, batch))
        self._check_memory()
        drawn = self._draw(plan) if plan.batch else {}
        if plan.batch or self.background:
            self.idle = 0.0
        if not plan.batch:
            self._wait()
        return Report(**drawn, **self._come())

    def _wait(self) -> None:
        """Until something in the background is over, or somebody has waited long enough for it."""
        if self.background:
            self.now = max(self.now, min(when for when, _ in self.background))
            return
        self.now, self.idle = self.now + WAIT_SECONDS, self.idle + WAIT_SECONDS
        assert self.idle < 2 * SWITCH_SECONDS, "nothing is to be done, and nothing is on its way"

    def _draw(self, plan: Plan) -> dict:
        slots, share = self.slots[plan.batch], plan.batch.slots // self.count
        for slot, ticket in plan.enter.items():
            assert plan.rows[slot] > 0
            slots[slot] = [ticket, len(ticket.kinds)]
        lanes = Counter()  # by device: what is stepped at a time
        for slot, rows in plan.rows.items():
            ticket, left = slots[slot]
            device = slot // share
            assert plan.weights[device] == ticket.weights
            assert {ticket.weights, *ticket.weights.needs} <= self.held[device]
            assert 0 < rows <= left
            taken = ticket.kinds[-left:][:rows]
            lanes[device] += (np.sum(taken == GUIDED) + np.sum(taken == ALONE) / 2) / rows
            slots[slot][1] -= rows
        assert set(plan.finish) == {slot for slot in plan.rows if slots[slot][1] == 0}
        (rows,) = set(plan.rows.values())
        seconds = ROW * rows * max(-(-of // plan.batch.group) for of in lanes.values())
        decoded = self.decode * len(plan.finish)
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
            what for what in over if (what if isinstance(what, Batch) else what[1]) in self.failing
        ]
        over = [what for what in over if what not in failed]
        for what in over:
            if isinstance(what, Batch):
                self.slots[what] = {}
            else:
                self.held[what[0]].add(what[1])
        speed = Compiled(seconds=COMPILE, row_seconds=ROW, decode_seconds=DECODE)
        return dict(
            failed=dict.fromkeys(failed, "no memory"),
            compiled={what: speed for what in over if isinstance(what, Batch)},
            loaded={what: BRING for what in over if not isinstance(what, Batch)},
        )

    def _check_memory(self) -> None:
        compiled = {*self.slots, *(w for _, w in self.background if isinstance(w, Batch))}
        for device, held in enumerate(self.held):
            coming = {
                w[1] for _, w in self.background if not isinstance(w, Batch) and w[0] == device
            }
            there = compiled | held | coming
            zeros = {each for batch in compiled for each in batch.needs}
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


@TRAFFIC
@pytest.mark.parametrize("count, batch", [(1, SMALL), (1, WIDE), (8, SMALL)])
def test_a_small_picture_of_another_client_is_done_in_three_times_what_it_takes_alone(count, batch):
    devices = warm(Devices(count), batch)
    alone = devices.took(devices.ask("visitor", steps=5, batch=batch))
    for _ in range(100):
        devices.ask("crowd", pictures=8, steps=200, batch=batch, previews=True)
    devices.run(seconds=60)
    for _ in range(5):
        devices.run(seconds=20)
        assert devices.took(devices.ask("visitor", steps=5, batch=batch)) <= 3 * alone


@TRAFFIC
@pytest.mark.parametrize("count", [1, 8])
def test_clients_who_always_want_something_get_the_same(count):
    devices = warm(Devices(count))
    for client, pictures, steps in (("few", 1, 40), ("many", 8, 90), ("short", 4, 5)):
        for _ in range(90 if steps > 5 else 100):
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
    while one.drawn.total() < 300:
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
            one.ask(f"made up {number}", address="192.0.2.1")
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
    assert devices.held[0] == {BASE, ADAPTED[2], ADAPTED[0]}
    devices.took(devices.ask(weights=OTHER))
    assert devices.held[0] == {OTHER}, "a base leaves when nothing is merged into it"
    devices.took(devices.ask(weights=ADAPTED[1]))
    assert devices.held[0] == {BASE, ADAPTED[1]}
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


@TRAFFIC
def test_a_year_of_traffic_is_served():
    devices, random = Devices(8, memory=9), np.random.default_rng(0)
    year, bursts, worst = 365 * 24 * 3600, 250, 0.0
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
