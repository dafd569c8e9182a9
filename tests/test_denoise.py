"""What each row of a slot's table evaluates."""

import numpy as np
import pytest
from diffusers.guiders import ClassifierFreeGuidance

from sd_tpu.denoise import ALONE, ALONE_SHALLOW, GUIDED, GUIDED_SHALLOW, row_kinds
from sd_tpu.samplers import SAMPLERS, make_table
from sd_tpu.schedule import NoiseSchedule

SCHEDULE = {"_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012,
            "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}


@pytest.mark.parametrize("start, stop", [(0.0, 1.0), (0.0, 0.5), (0.2, 0.8), (0.29, 0.57),
                                         (0.33, 1.0), (0.5, 0.51), (0.99, 1.0)])
@pytest.mark.parametrize("steps", [1, 7, 20, 100])
def test_guidance_is_in_the_steps_in_which_diffusers_guides(start, stop, steps):
    guider = ClassifierFreeGuidance(guidance_scale=7.5, start=start, stop=stop)
    theirs = []
    for step in range(steps):
        guider.set_state(step=step, num_inference_steps=steps, timestep=None)
        theirs.append(guider.num_conditions == 2)
    table = make_table("ddim", NoiseSchedule.from_config(SCHEDULE), steps)
    kinds = row_kinds(table, 7.5, start=start, stop=stop)
    assert np.array_equal(kinds == GUIDED, theirs) and set(kinds) <= {ALONE, GUIDED}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_rows_of_a_step_are_alike_and_the_last_is_guided_unless_it_is_left_out(sampler):
    table = make_table(sampler, NoiseSchedule.from_config(SCHEDULE), 10)
    guided = row_kinds(table, 3.0, start=0.3, stop=0.7) == GUIDED
    assert set(table.step[guided]) == {3, 4, 5, 6}
    assert set(table.step[~guided]) == {0, 1, 2, 7, 8, 9}
    assert (row_kinds(table, 3.0, start=0.5)[-1], row_kinds(table, 3.0)[-1]) == (GUIDED, GUIDED)


def test_the_row_in_which_guidance_begins_is_evaluated_as_a_whole():
    table = make_table("ddim", NoiseSchedule.from_config(SCHEDULE), 8)
    kinds = row_kinds(table, 3.0, start=0.25, stop=0.75, interval=4)
    assert kinds.tolist() == [ALONE, ALONE_SHALLOW, GUIDED, GUIDED_SHALLOW, GUIDED, GUIDED_SHALLOW,
                              ALONE_SHALLOW, ALONE_SHALLOW]
    alone = row_kinds(table, 1.0, start=0.25, interval=4)
    assert alone.tolist() == [ALONE, *[ALONE_SHALLOW] * 3] * 2
