"""The Flax schedulers' faces: the numbers of PyTorch's schedulers, also traced."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.schedulers.deprecated.scheduling_karras_ve import KarrasVeScheduler

from sd_tpu.checkpoint.config import CheckpointError, read_json
from sd_tpu.pipelines import schedulers

SHAPE = (2, 4, 3, 3)
SD = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
PLAIN = dict(clip_sample=False)
# Ours, its config, what PyTorch's config has besides, and the numbers of steps.
CASES = {
    "ddim": ("DDIMScheduler", PLAIN | dict(steps_offset=1, set_alpha_to_one=False), {}),
    "ddim, clipped": ("DDIMScheduler", {}, {}),
    "ddim, velocity": ("DDIMScheduler", PLAIN | dict(prediction_type="v_prediction"), {}),
    "pndm": ("PNDMScheduler", dict(skip_prk_steps=True, steps_offset=1), {}),
    "pndm, runge-kutta": ("PNDMScheduler", dict(prediction_type="v_prediction"), {}),
    "dpm++": ("DPMSolverMultistepScheduler", {}, dict(final_sigmas_type="sigma_min")),
    "dpm++ to zero": ("DPMSolverMultistepScheduler", dict(final_sigmas_type="zero"), {}),
    "dpm++, order 3": (
        "DPMSolverMultistepScheduler",
        dict(solver_order=3),
        dict(final_sigmas_type="sigma_min"),
    ),
    "dpm, heun": (
        "DPMSolverMultistepScheduler",
        dict(algorithm_type="dpmsolver", solver_type="heun"),
        dict(final_sigmas_type="sigma_min"),
    ),
    "dpm, order 3": (
        "DPMSolverMultistepScheduler",
        dict(algorithm_type="dpmsolver", solver_order=3, timestep_spacing="trailing"),
        dict(final_sigmas_type="sigma_min"),
    ),
    "euler": ("EulerDiscreteScheduler", dict(prediction_type="v_prediction"), {}),
    "euler, leading": (
        "EulerDiscreteScheduler",
        dict(timestep_spacing="leading"),
        dict(steps_offset=1),
    ),
    "lms": ("LMSDiscreteScheduler", {}, {}),
}


def model(x, t, sin):
    """Something that depends on both."""
    return 0.3 * sin(2 * x) + 0.0001 * t * x


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def drawn_by_pytorch(name: str, config: dict, steps: int) -> np.ndarray:
    scheduler = getattr(diffusers, name)(**SD | config)
    scheduler.set_timesteps(steps)
    x = torch.tensor(noise()) * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        out = model(scheduler.scale_model_input(x, t), t, torch.sin)
        x = scheduler.step(out, t, x).prev_sample
    return x.numpy()


def drawn(scheduler, state, steps: int) -> jax.Array:
    """As the old pipeline did it, in a loop that is traced."""
    state = scheduler.set_timesteps(state, steps, shape=SHAPE)

    def one(i, carry):
        x, state = carry
        t = jnp.array(state.timesteps, jnp.int32)[i]
        out = model(scheduler.scale_model_input(state, x, t), state.timesteps[i], jnp.sin)
        return scheduler.step(state, out, t, x).to_tuple()

    first = jnp.asarray(noise()) * state.init_noise_sigma
    return jax.lax.fori_loop(0, len(state.timesteps), one, (first, state))[0]


@pytest.mark.parametrize("steps", [6, 20])
@pytest.mark.parametrize("case", CASES)
def test_a_traced_loop_gives_what_pytorchs_scheduler_gives(case, steps):
    name, config, besides = CASES[case]
    scheduler = getattr(schedulers, f"Flax{name}")(**SD | config)
    ours = jax.jit(drawn, static_argnums=(0, 2))(scheduler, scheduler.create_state(), steps)
    theirs = drawn_by_pytorch(name, config | besides, steps)
    assert np.abs(ours - theirs).max() <= 3e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "HeunDiscreteScheduler"])
def test_what_the_old_classes_did_not_know_is_stepped_by_its_table(name):
    scheduler = schedulers.scheduler_for(SD | dict(_class_name=name))
    ours = jax.jit(drawn, static_argnums=(0, 2))(scheduler, scheduler.create_state(), 6)
    theirs = drawn_by_pytorch(name, {}, 6)
    assert np.abs(ours - theirs).max() <= 3e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("config", "face"),
    [
        (dict(_class_name="PNDMScheduler", skip_prk_steps=True), "FlaxPNDMScheduler"),
        (dict(_class_name="FlaxDDIMScheduler"), "FlaxDDIMScheduler"),
        (dict(_class_name="DDIMScheduler", timestep_spacing="trailing"), "TableScheduler"),
        (dict(_class_name="EulerDiscreteScheduler", use_karras_sigmas=True), "TableScheduler"),
    ],
)
def test_a_checkpoints_scheduler_is_an_old_class_where_that_does_all_it_asks(config, face):
    assert type(schedulers.scheduler_for(SD | config)).__name__ == face


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("FlaxPNDMScheduler", {}),
        ("FlaxDPMSolverMultistepScheduler", dict(algorithm_type="dpmsolver", solver_type="heun")),
        ("FlaxDPMSolverMultistepScheduler", dict(solver_order=1)),
    ],
)
def test_what_only_an_old_class_does_is_read_again_by_it(name, values, tmp_path):
    saved = getattr(schedulers, name)(**SD | values)
    saved.save_pretrained(tmp_path)
    again = schedulers.scheduler_for(read_json(tmp_path / "scheduler_config.json"))
    assert type(again) is type(saved) and again.config == saved.config


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (dict(_class_name="DPMSolverMultistepScheduler", thresholding=True), "thresholding=True"),
        (
            dict(_class_name="DPMSolverMultistepScheduler", use_lu_lambdas=True),
            "use_lu_lambdas=True",
        ),
        (
            dict(
                _class_name="DPMSolverMultistepScheduler",
                solver_type="heun",
                use_karras_sigmas=True,
            ),
            "solver_type='heun'",
        ),
        (
            dict(
                _class_name="DPMSolverMultistepScheduler",
                algorithm_type="dpmsolver",
                final_sigmas_type="zero",
            ),
            "algorithm_type='dpmsolver'",
        ),
        (dict(_class_name="EulerDiscreteScheduler", interpolation_type="log_linear"), "log_linear"),
        (dict(_class_name="PNDMScheduler", timestep_spacing="trailing"), "skip_prk_steps"),
    ],
)
def test_what_neither_an_old_class_nor_a_table_does_is_refused(config, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        schedulers.scheduler_for(SD | config)


@pytest.mark.parametrize(("steps", "variance"), [(1000, "fixed_small"), (25, "fixed_large")])
def test_ddpm_takes_pytorchs_means_and_noise_of_its_deviation(steps, variance):
    config = SD | dict(variance_type=variance, prediction_type="v_prediction")
    theirs = diffusers.DDPMScheduler(**config)
    theirs.set_timesteps(steps)
    ours = schedulers.FlaxDDPMScheduler(**config)
    state = ours.set_timesteps(ours.create_state(), steps)
    assert np.array_equal(state.timesteps, theirs.timesteps)
    x, out = 0.5 * noise(1), 0.5 * noise(2)
    for t in (int(state.timesteps[3]), 0):
        key = jax.random.PRNGKey(t)
        fresh = jax.random.normal(jax.random.split(key, 1)[0], SHAPE)
        deviation = theirs._get_variance(t) ** 0.5 if t else 0.0
        theirs_mean = theirs.step(
            torch.tensor(out), t, torch.tensor(x), generator=torch.manual_seed(0)
        ).prev_sample
        drawn = torch.randn(SHAPE, generator=torch.manual_seed(0))
        expected = theirs_mean - deviation * drawn + deviation * torch.tensor(np.asarray(fresh))
        stepped = ours.step(state, jnp.asarray(out), t, jnp.asarray(x), key).prev_sample
        assert np.allclose(stepped, expected, atol=2e-6)


@pytest.mark.parametrize(
    "name",
    [
        "DDIMScheduler",
        "DDPMScheduler",
        "PNDMScheduler",
        "DPMSolverMultistepScheduler",
        "EulerDiscreteScheduler",
    ],
)
def test_noise_is_added_as_pytorch_adds_it(name):
    theirs = getattr(diffusers, name)(**SD)
    theirs.set_timesteps(1000)
    ours = getattr(schedulers, f"Flax{name}")(**SD)
    state, times = ours.create_state(), np.array([3, 700])
    mixed = jax.jit(ours.add_noise)(state, noise(1), noise(2), times)
    expected = theirs.add_noise(torch.tensor(noise(1)), torch.tensor(noise(2)), torch.tensor(times))
    assert np.allclose(mixed, expected, atol=1e-5)
    if name in ("DDIMScheduler", "DDPMScheduler"):
        velocity = ours.get_velocity(state, noise(1), noise(2), times)
        expected = theirs.get_velocity(
            torch.tensor(noise(1)), torch.tensor(noise(2)), torch.tensor(times)
        )
        assert np.allclose(velocity, expected, atol=1e-6)


def test_karras_ve_steps_as_pytorchs_does():
    theirs, ours = KarrasVeScheduler(), schedulers.FlaxKarrasVeScheduler()
    theirs.set_timesteps(10)
    state = ours.set_timesteps(ours.create_state(), 10)
    assert np.allclose(state.schedule, theirs.schedule, rtol=1e-5)
    x, out, sigma = noise(1), noise(2), 30.0
    higher = ours.add_noise_to_input(state, x, sigma, jax.random.PRNGKey(0))
    assert higher[1] == pytest.approx(theirs.add_noise_to_input(torch.tensor(x), sigma)[1])
    deviation = 1.007 * np.sqrt(higher[1] ** 2 - sigma**2)
    assert np.std((higher[0] - x) / deviation) == pytest.approx(1, abs=0.2)
    stepped, slope, _ = ours.step(state, out, 40.0, sigma, x).to_tuple()
    expected = theirs.step(torch.tensor(out), 40.0, sigma, torch.tensor(x))
    assert np.allclose(stepped, expected.prev_sample, atol=1e-4)
    mended = ours.step_correct(state, out, 40.0, sigma, x, stepped, slope, return_dict=False)[0]
    expected = theirs.step_correct(
        torch.tensor(out), 40.0, sigma, torch.tensor(x), expected.prev_sample, expected.derivative
    )
    assert np.allclose(mended, expected.prev_sample, atol=1e-4)


def test_a_checkpoints_scheduler_is_read_and_written_as_any_class(checkpoints, tmp_path):
    scheduler, state = schedulers.FlaxDPMSolverMultistepScheduler.from_pretrained(
        checkpoints["sd1"], subfolder="scheduler", solver_order=3
    )
    assert scheduler.config.beta_end == scheduler.config["beta_end"] == 0.012
    assert (scheduler.config.solver_order, len(scheduler)) == (3, 1000)
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(state))
    scheduler.save_pretrained(tmp_path)
    again, _ = schedulers.FlaxDDIMScheduler.from_pretrained(tmp_path)
    assert again.config.beta_end == 0.012
    assert again.config._class_name == "FlaxDDIMScheduler"


def test_what_no_scheduler_does_is_refused():
    ddim = schedulers.FlaxDDIMScheduler()
    with pytest.raises(ValueError, match="set_timesteps first"):
        ddim.step(ddim.create_state(), noise(), 1, noise())
    with pytest.raises(ValueError, match="thresholding=True is not supported"):
        schedulers.FlaxDPMSolverMultistepScheduler(thresholding=True).create_state()
    with pytest.raises(TypeError, match="has no speed"):
        schedulers.FlaxDDIMScheduler(speed=2)
