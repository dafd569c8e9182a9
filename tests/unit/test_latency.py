"""How many rows a call takes, and what a picture costs, by what was measured."""

import numpy as np
import pytest

from sd_tpu.runtime.slots import ALONE, FORECAST, GUIDED
from sd_tpu.serving.fairness import Account
from sd_tpu.serving.latency import BatchLatency, LatencyModel, in_turns, lanes_left, rows_left
from sd_tpu.serving.plan import Batch, Compiled, Weights


def measured(group: int = 1, seconds: float = 1e-6) -> BatchLatency:
    """A batch of which an evaluation takes these seconds."""
    latency = BatchLatency(group)
    latency.row_seconds = seconds
    return latency


@pytest.mark.parametrize(
    "group, devices, rounds",
    [
        (1, [[GUIDED, ALONE]], 2),
        (1, [[ALONE] * 3], 2),
        (1, [[GUIDED]], 1),
        (4, [[GUIDED] * 8], 2),
        (4, [[ALONE] * 8], 1),
        (4, [[GUIDED] * 5 + [ALONE]], 3),
        (1, [[GUIDED]] * 8, 1),
        (1, [[GUIDED, GUIDED], [ALONE]], 2),
    ],
)
def test_rounds_are_those_of_the_device_with_most_to_do(group, devices, rounds):
    kinds = [np.array(slots)[:, None] for slots in devices]
    assert measured(group).next_rows(kinds) == (1, rounds)


def test_rounds_are_counted_row_by_row():
    slots = np.array(
        [
            [GUIDED, FORECAST, ALONE, FORECAST],
            [GUIDED, GUIDED, ALONE, ALONE],
            [ALONE, FORECAST, ALONE, FORECAST],
        ]
    )
    assert measured().next_rows([slots]) == (4, 3 + 1 + 2 + 1)
    each = measured(seconds=1e-3).next_rows([slot[None] for slot in slots])
    assert each == (4, 4), "each has a device, and one forecasts nothing"


def test_a_call_is_as_long_as_its_slowest_device_allows():
    devices = [np.full((4, 4), FORECAST), np.full((1, 4), GUIDED)]
    assert measured(seconds=0.1).next_rows(devices) == (2, 2)


@pytest.mark.parametrize("seconds, rows", [(0.1, 4), (0.3, 1), (0.06, 6), (0.001, 18)])
def test_a_call_takes_as_many_rows_as_its_time_has_room_for(seconds, rows):
    kinds = np.array([[GUIDED, FORECAST] * 9])
    assert measured(seconds=seconds).next_rows([kinds])[0] == rows


def test_what_was_known_moves_half_way_to_what_is_new_where_anything_was_evaluated():
    latency = measured(seconds=0.1)
    latency.record_rows(2, 0.4)
    assert latency.row_seconds == pytest.approx(0.15)
    latency.record_rows(0, 0.1)
    assert latency.row_seconds == pytest.approx(0.15)


def test_a_picture_alone_takes_its_rows_and_its_decoding():
    latency = measured(group=4, seconds=0.1)
    latency.decode_seconds = 0.5
    kinds = np.array([GUIDED, FORECAST, ALONE, FORECAST])
    assert latency.of_picture(kinds) == pytest.approx(0.2 + 0.5)


def test_a_picture_in_a_crowd_takes_its_share_of_full_groups():
    latency = measured(group=4, seconds=0.1)
    kinds = np.array([GUIDED, FORECAST, ALONE, FORECAST, ALONE])
    assert rows_left(kinds).tolist() == [0, 1, 1, 2, 2, 3]
    assert lanes_left(kinds).tolist() == [0, 1, 1, 2, 2, 4]
    assert latency.in_crowd(lanes_left(kinds)[5]) == pytest.approx(0.1 * 4 / 8)
    assert latency.alone(rows_left(kinds)[5]) == pytest.approx(latency.of_picture(kinds))


def test_what_was_compiled_and_brought_says_how_long_the_next_will_take():
    model, batch = LatencyModel(), Batch(architecture="sd", height=8, width=8)
    assert model.compile_seconds() is None and not model.of(batch).is_measured
    model.record_compiled(batch, Compiled(seconds=30, row_seconds=0.2, decode_seconds=0.3))
    assert model.compile_seconds() == 30 and model.of(batch).row_seconds == 0.2
    model.record_loaded(Weights(name="a", memory=100), 2.0)
    assert model.load_seconds(Weights(name="b", memory=300)) == pytest.approx(6.0)
    merged = Weights(name="a", adapters=(("lora", 1.0),), base=Weights(name="a"), memory=10)
    model.record_loaded(merged, 2.0)
    assert model.load_seconds(Weights(name="b", memory=300)) == pytest.approx(6.0)


def test_in_turns_nobody_gets_more_than_they_want_or_more_than_i_do():
    me, near = Account("here", "me"), Account("here", "near")
    busy, small = Account("there", "busy"), Account("elsewhere", "small")
    assert in_turns(3.0, me, {}) == 3
    assert in_turns(3.0, me, {busy: 100.0, small: 1.0}) == 3 + 3 + 1
    assert in_turns(3.0, me, {near: 100.0, busy: 100.0}) == (3 + 3) + 6
    assert in_turns(3.0, me, {busy: 100.0, Account("there", "more"): 100.0}) == 3 + 3
