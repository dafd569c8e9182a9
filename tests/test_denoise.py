"""Slots and the three programs: compiled once, and an image depends on its own request alone."""

from functools import cache

import jax
import numpy as np
import pytest

from sd_tpu.denoise import Arrival, Programs
from sd_tpu.models import UNet2DConditionModel
from sd_tpu.samplers import make_table
from sd_tpu.sharding import make_mesh, replicated

ALL = 10**6  # rows: more than any table has

# (prompt, negative prompt, sampler, spacing, steps, guidance, seed): nothing in common
DIFFERENT = [
    ("a cat", "", "ddim", None, 7, 7.5, 1),
    ("a dog", "ugly", "euler_ancestral", "trailing", 4, 3.0, 2),
    ("", "", "heun", "karras", 5, 1.0, 3),
    ("a castle in the clouds", "fog", "pndm", None, 9, 12.0, 4),
    ("a red house", "", "dpmpp_2m_sde", "karras", 6, 5.0, 5),
    ("two birds", "blurry", "unipc", None, 8, 0.0, 6),
    ("one bird", "", "lcm", None, 3, 2.0, 2**32 - 1),
    ("a very small ship", "large", "dpmpp_2s", None, 10, 7.5, 8),
]


def arrival(pipeline, prompt, negative, sampler, spacing, steps, guidance, seed) -> Arrival:
    return Arrival(
        ids=pipeline.prepare_inputs([negative, prompt]),
        table=make_table(sampler, pipeline.schedule, steps, spacing=spacing),
        guidance=guidance,
        key=np.asarray(jax.random.PRNGKey(seed)),
    )


def draw(programs, params, arrivals: dict[int, Arrival], rows_a_call: int = ALL) -> np.ndarray:
    """Pictures [S, H, W, 3] uint8 of what enters empty slots together."""
    slots = programs.encode(params, programs.empty(), arrivals)
    longest = max(len(a.table.rows) for a in arrivals.values())
    for _ in range(-(-longest // rows_a_call)):
        slots = programs.advance(params, slots, rows_a_call)
    return np.asarray(programs.decode(params, slots.latents, np.isin(range(programs.slots),
                                                                     list(arrivals))))


def make_programs(pipeline, devices: int, group: int = 1) -> Programs:
    return Programs(pipeline.models, make_mesh(devices), slots=8, height=32, width=32, group=group)


LAYOUTS = {"a slot a device": (8, 1), "one device": (1, 1), "one device in fours": (1, 4)}


@pytest.fixture(scope="module")
def drawn(sd1):
    """By a layout's name: (pipeline, params, programs), and the DIFFERENT pictures in one batch."""
    pipeline, params = sd1

    @cache
    def draw_on(name: str):
        programs = make_programs(pipeline, *LAYOUTS[name])
        everywhere = jax.device_put(params, replicated(programs.mesh))
        arrivals = {i: arrival(pipeline, *d) for i, d in enumerate(DIFFERENT)}
        return (pipeline, everywhere, programs), draw(programs, everywhere, arrivals)

    return draw_on


@pytest.fixture(scope="module", params=LAYOUTS)
def layout_name(request) -> str:
    """Eight devices, and one that its slots share."""
    return request.param


@pytest.fixture(scope="module")
def on(drawn, layout_name):
    """(pipeline, params, programs) of each layout in turn."""
    return drawn(layout_name)[0]


@pytest.fixture(scope="module")
def together(drawn, layout_name) -> np.ndarray:
    """The eight DIFFERENT pictures, made in one batch."""
    return drawn(layout_name)[1]


def test_eight_different_samplers_in_one_batch_give_the_bytes_each_gives_alone(on, together):
    pipeline, params, programs = on
    assert len({image.tobytes() for image in together}) == 8
    for i, different in enumerate(DIFFERENT):
        alone = draw(programs, params, {i: arrival(pipeline, *different)})
        assert np.array_equal(alone[i], together[i]), different
        assert not alone[np.arange(8) != i].any()


def test_the_slot_and_the_neighbours_do_not_matter(on, together):
    pipeline, params, programs = on
    moved = {(3 * i + 1) % 8: i for i in range(8) if i != 4}
    images = draw(programs, params,
                  {slot: arrival(pipeline, *DIFFERENT[i]) for slot, i in moved.items()})
    for slot, i in moved.items():
        assert np.array_equal(images[slot], together[i]), DIFFERENT[i]


def test_an_image_that_enters_while_others_are_on_their_way_is_the_same(on, together):
    pipeline, params, programs = on
    slots = programs.encode(params, programs.empty(), {0: arrival(pipeline, *DIFFERENT[7])})
    slots = programs.advance(params, slots, 3)
    slots = programs.encode(params, slots, {1: arrival(pipeline, *DIFFERENT[4])})
    slots = programs.advance(params, slots, ALL)
    images = np.asarray(programs.decode(params, slots.latents, np.arange(8) < 2))
    assert np.array_equal(images[0], together[7])
    assert np.array_equal(images[1], together[4])


def test_one_row_at_a_time_is_all_at_once(on, together):
    pipeline, params, programs = on
    arrivals = {i: arrival(pipeline, *d) for i, d in enumerate(DIFFERENT)}
    assert np.array_equal(draw(programs, params, arrivals, rows_a_call=1), together)


def test_a_vacated_slot_is_idle_and_its_neighbour_goes_on(on, together):
    pipeline, params, programs = on
    arrivals = {i: arrival(pipeline, *DIFFERENT[i]) for i in (0, 3)}
    slots = programs.advance(params, programs.encode(params, programs.empty(), arrivals), 2)
    slots = programs.encode(params, slots, {0: None})
    slots = programs.advance(params, slots, ALL)
    assert int(slots.row[0]) == int(slots.end[0]) == 0
    image = np.asarray(programs.decode(params, slots.latents, np.arange(8) == 3))[3]
    assert np.array_equal(image, together[3])


def test_the_finished_latents_are_the_last_estimate_of_the_clean_image(on):
    pipeline, params, programs = on
    slots = programs.encode(params, programs.empty(), {2: arrival(pipeline, *DIFFERENT[0])})
    slots = programs.advance(params, slots, ALL)
    # The last step of DDIM goes to alphas_cumprod[0] here (set_alpha_to_one is off), not to 1.
    np.testing.assert_allclose(slots.latents[2], slots.clean[2], atol=0.2)
    assert float(abs(slots.latents[2]).max()) > 0.5


@pytest.mark.parametrize("group, cases", [
    (1, [([7.5], 1), ([1.0], 1), ([1.0, 0.0], 1), ([1.0] * 8, 4), ([1.5, 1.0, 7.5, 1.0, 0.5], 4)]),
    (4, [([1.0] * 8, 1), ([1.5, 1.0, 7.5, 1.0, 0.5], 2)]),
])
def test_what_is_not_guided_shares_evaluations_two_by_two(sd1, monkeypatch, group, cases):
    pipeline, params = sd1
    evaluations = []

    def counted(self, *inputs, evaluate=UNet2DConditionModel.__call__):
        jax.debug.callback(lambda: evaluations.append(len(inputs[0])))
        return evaluate(self, *inputs)

    monkeypatch.setattr(UNet2DConditionModel, "__call__", counted)
    programs = make_programs(pipeline, 1, group)
    params = jax.device_put(params, replicated(programs.mesh))
    for guidances, rounds in cases:
        evaluations.clear()
        draw(programs, params, {i: arrival(pipeline, "a cat", "a dog", "ddim", None, 3, guidance, i)
                                for i, guidance in enumerate(guidances)})
        jax.effects_barrier()
        assert evaluations == [2 * group] * (3 * rounds), guidances


def test_every_program_is_traced_once_whatever_changes(on, together):
    pipeline, params, programs = on
    for filled in (1, 5, 8):
        draw(programs, params, {i: arrival(pipeline, *d) for i, d in
                                enumerate(DIFFERENT[8 - filled:])}, rows_a_call=filled)
    assert programs.traces == {"encode": 1, "advance": 1, "decode": 1}


def test_other_numbers_of_devices_and_groups_differ_by_rounding_at_most(drawn):
    images = [drawn(name)[1].astype(int) for name in LAYOUTS]
    for other in images[1:]:
        assert np.mean(np.abs(other - images[0]) > 1) <= 0.001


def test_sizes_that_the_model_cannot_make_are_refused_with_the_multiple_it_needs(sd1):
    pipeline, _ = sd1
    with pytest.raises(ValueError, match=r"30x32 is not possible.*multiples of 4"):
        Programs(pipeline.models, make_mesh(), slots=8, height=32, width=30)
