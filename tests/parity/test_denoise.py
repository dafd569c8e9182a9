"""What each row of a slot's table evaluates, and what guidance makes of that."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

from sd_tpu.runtime.slots import ALONE, FORECAST, GUIDED, _guided, row_kinds
from sd_tpu.sampling.samplers import SAMPLERS, make_table
from sd_tpu.sampling.schedule import NoiseSchedule

SCHEDULE = {
    "_class_name": "DDIMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}


@pytest.mark.parametrize(
    "start, stop",
    [(0.0, 1.0), (0.0, 0.5), (0.2, 0.8), (0.29, 0.57), (0.33, 1.0), (0.5, 0.51), (0.99, 1.0)],
)
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


def test_the_last_row_is_evaluated_and_two_where_all_or_guidance_begins_or_ends():
    table = make_table("ddim", NoiseSchedule.from_config(SCHEDULE), 10)
    kinds = row_kinds(table, 3.0, start=0.3, stop=0.7, interval=4)
    assert kinds.tolist() == [
        ALONE,
        ALONE,
        FORECAST,
        GUIDED,
        GUIDED,
        GUIDED,
        FORECAST,
        ALONE,
        ALONE,
        ALONE,
    ]
    kinds = row_kinds(table, 3.0, start=0.1, interval=2)
    assert kinds.tolist() == [ALONE, GUIDED, GUIDED, *[GUIDED, FORECAST] * 3, GUIDED]
    alone = row_kinds(table, 1.0, start=0.3, interval=4)
    assert alone.tolist() == [ALONE, ALONE, *[FORECAST] * 3, ALONE, *[FORECAST] * 3, ALONE]


def test_each_picture_has_a_guidance_rescale_of_its_own_and_it_is_that_of_diffusers():
    negative, positive = np.random.default_rng(0).normal(size=(2, 3, 4, 4, 2)).astype(np.float32)
    guidance, shares = np.float32([7.5, 3, 12]), np.float32([0.7, 0, 1])
    out = _guided(jnp.concatenate([negative, positive]), jnp.tile(guidance, 2), jnp.tile(shares, 2))
    assert np.array_equal(out[:3], out[3:])  # for both texts of a pair
    for ours, n, p, scale, share in zip(out, negative, positive, guidance, shares, strict=False):
        n, p = torch.tensor(n[None]), torch.tensor(p[None])
        theirs = rescale_noise_cfg(n + scale * (p - n), p, guidance_rescale=float(share))
        assert np.allclose(ours, theirs[0], rtol=1e-5, atol=1e-6)
