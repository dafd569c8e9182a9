"""How many rows a call takes, and what a picture costs, by what was measured."""

import numpy as np
import pytest

from sd_tpu.runtime.slots import ALONE, ALONE_SHALLOW, GUIDED, GUIDED_SHALLOW
from sd_tpu.serving.latency import (
    BatchLatency,
    LatencyModel,
    in_turns,
    lanes_left,
    rows_left,
)
from sd_tpu.serving.plan import Batch, Compiled, Weights


def measured(group: int = 1, seconds=(1e-6, 1e-6)) -> BatchLatency:
    """A batch of which the two kinds of evaluations take these seconds."""
    latency = BatchLatency(group)
    latency.row_seconds[:] = seconds
    return latency


@pytest.mark.parametrize("group, devices, rounds", [
    (1, [[GUIDED, ALONE]], 2), (1, [[ALONE] * 3], 2), (1, [[GUIDED]], 1),
    (4, [[GUIDED] * 8], 2), (4, [[ALONE] * 8], 1), (4, [[GUIDED] * 5 + [ALONE]], 3),
    (1, [[GUIDED]] * 8, 1), (1, [[GUIDED, GUIDED], [ALONE]], 2),
])
def test_rounds_are_those_of_the_device_with_most_to_do(group, devices, rounds):
    kinds = [np.array(slots)[:, None] for slots in devices]
    rows, taken = measured(group).next_rows(kinds)
    assert (rows, taken.tolist()) == (1, [rounds, 0])


def test_rounds_are_whole_and_shallow_ones_row_by_row():
    slots = np.array([[GUIDED, GUIDED_SHALLOW, ALONE, ALONE_SHALLOW],
                      [GUIDED, GUIDED, ALONE, ALONE],
                      [ALONE, ALONE_SHALLOW, ALONE, ALONE_SHALLOW]])
    rows, taken = measured().next_rows([slots])
    assert (rows, taken.tolist()) == (4, [3 + 1 + 2 + 1, 0 + 2 + 0 + 1])
    rows, taken = measured(seconds=(1e-3, 1e-4)).next_rows([slot[None] for slot in slots])
    assert (rows, taken.tolist()) == (4, [4, 0]), "each has a device, and one reuses nothing"


def test_a_call_is_as_long_as_its_slowest_device_allows():
    devices = [np.full((4, 4), ALONE_SHALLOW), np.full((1, 4), GUIDED)]
    rows, taken = measured(seconds=(0.1, 0.0085)).next_rows(devices)
    assert (rows, taken.tolist()) == (2, [2, 0])


@pytest.mark.parametrize("seconds, rows", [
    ((0.1, 0.001), 2), ((0.3, 0.3), 1), ((0.06, 0.006), 6), ((0.001, 0.0), 18),
])
def test_a_call_takes_as_many_rows_as_its_time_has_room_for(seconds, rows):
    kinds = np.array([[GUIDED, GUIDED_SHALLOW] * 9])
    assert measured(seconds=seconds).next_rows([kinds])[0] == rows


def test_what_was_known_moves_half_way_to_what_is_new_where_it_was_evaluated():
    latency = measured(seconds=(0.1, 0.01))
    latency.learn(np.array([2, 0]), 0.4)
    assert latency.row_seconds == pytest.approx([0.15, 0.01])
    latency.learn(np.array([1, 5]), 0.1)
    assert latency.row_seconds == pytest.approx([0.1125, 0.0075])


def test_a_picture_alone_takes_its_rows_and_its_decoding():
    latency = measured(group=4, seconds=(0.1, 0.01))
    latency.decode_seconds = 0.5
    kinds = np.array([GUIDED, GUIDED_SHALLOW, ALONE, ALONE_SHALLOW])
    assert latency.of_picture(kinds) == pytest.approx(0.2 + 0.02 + 0.5)


def test_a_picture_in_a_crowd_takes_its_share_of_full_groups():
    latency = measured(group=4, seconds=(0.1, 0.01))
    kinds = np.array([GUIDED, GUIDED_SHALLOW, ALONE, ALONE_SHALLOW, ALONE])
    assert rows_left(kinds)[[0, 1, 4, 5]].tolist() == [[0, 0], [1, 0], [2, 2], [3, 2]]
    assert lanes_left(kinds)[[0, 1, 4, 5]].tolist() == [[0, 0], [1, 0], [2, 3], [4, 3]]
    assert latency.in_crowd(lanes_left(kinds)[5]) == pytest.approx(0.1 * 4 / 8 + 0.01 * 3 / 8)
    assert latency.alone(rows_left(kinds)[5]) == pytest.approx(latency.of_picture(kinds))


def test_what_was_compiled_and_brought_says_how_long_the_next_will_take():
    model, batch = LatencyModel(), Batch(architecture="sd", height=8, width=8)
    assert model.of_compiling() is None and not model.of(batch).known
    model.compiled(batch, Compiled(seconds=30, row_seconds=(0.2, 0.1), decode_seconds=0.3))
    assert model.of_compiling() == 30 and model.of(batch).row_seconds.tolist() == [0.2, 0.1]
    model.brought(Weights(name="a", memory=100), 2.0)
    assert model.of_bringing(Weights(name="b", memory=300)) == pytest.approx(6.0)


def test_in_turns_nobody_gets_more_than_they_want_or_more_than_i_do():
    assert in_turns(3.0, {}) == 3
    assert in_turns(3.0, {"busy": 100.0, "small": 1.0}) == 3 + 3 + 1
