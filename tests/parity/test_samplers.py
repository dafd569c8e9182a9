"""Sampler tables against diffusers' PyTorch schedulers, and properties that need no reference."""

import dataclasses
import importlib
import itertools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.sampling.samplers import (
    COLUMNS,
    FLOW_SAMPLERS,
    HISTORY,
    REACH,
    SAMPLERS,
    Table,
    default_sampler,
    make_table,
    spacing_taken,
    with_forecasts,
)
from sd_tpu.sampling.schedule import TIME_SPACINGS, NoiseSchedule, read_schedule
from sd_tpu.sentence import SentenceError
from tests.support.parity import relative

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # diffusers on NumPy 2

# What Stable Diffusion checkpoints say, over all their scheduler classes.
CONFIG = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "steps_offset": 1,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "clip_sample": False,
}
SOLVER = {"dpmpp_2m_sde": {"algorithm_type": "sde-dpmsolver++"}, "dpmpp_3m": {"solver_order": 3}}
PREDICTIONS = ("epsilon", "v_prediction", "sample")
STEPS = (4, 10, 20, 50)
# What a model predicts changes each row in the same way, whatever steps there are: all predictions
# are compared over few steps, and each of the others over one number of more.
EACH = [*itertools.product(PREDICTIONS, STEPS[:1]), *zip(PREDICTIONS[::-1], STEPS[1:], strict=True)]
DISTILLED = ("lcm", "tcd")  # their timesteps are not up to the config
CASES = [(key, spacing) for key, sampler in SAMPLERS.items() for spacing in sampler.spacings]
ZERO_SNR = [
    (key, spacing)
    for key, spacing in CASES
    if key.startswith(("ddim", "ddpm", "euler", "dpmpp_2m", "dpmpp_3m", "unipc"))
    or key in DISTILLED
]

# diffusers' scheduler refuses these, though the table has no reason to.
NOT_IN_DIFFUSERS = {("pndm", "sample"), ("euler_ancestral", "sample"), ("kdpm2", "sample")}
# diffusers divides by alpha = 0 here and returns nan; leading spacing does not reach that timestep.
NAN_IN_DIFFUSERS = {
    (key, spacing, "epsilon")
    for key in ("ddim", "ddpm", "lcm", "tcd")
    for spacing in ("linspace", "trailing")
}

SHAPE = (1, 4, 3, 3)
RNG = np.random.default_rng(0)
START, CLEAN = RNG.normal(size=(2, *SHAPE))
NOISES = RNG.normal(size=(120, *SHAPE))
MIX = RNG.normal(size=(36, 36)) / 6


def fake_model(x: np.ndarray, t: float) -> np.ndarray:
    """A smooth nonlinear function of the scaled latents and of time."""
    flat = x.reshape(-1)
    mixed = 0.6 * np.tanh(MIX @ flat + np.sin(t / 160)) + 0.4 * np.sin(flat + t / 300)
    return mixed.reshape(x.shape)


def run_table(table: Table, start=START, model=fake_model, noises=NOISES, picture=None, kept=0.0):
    """The table's run: the final x, and for each row the model's input and the preview. A picture
    is put under the noise that begins, and the share of it that is kept after every row."""
    x, seen, previews = table.init_noise_sigma * start, [], []
    levels = [*table.levels, (1.0, 0.0)]
    if picture is not None:
        x = levels[0][0] * picture + levels[0][1] * start
    history = [np.zeros_like(x)] * HISTORY
    for r, (row, noise) in enumerate(zip(table.rows, noises, strict=False)):
        t, c_in, u, v, a, *b, s, p, q = row
        out = model(c_in * x, t)
        seen.append((t, c_in * x))
        previews.append(p * x + q * out)
        history = [u * x + v * out, *history[:-1]]
        x = a * x + sum(b[k] * history[k] for k in range(HISTORY)) + s * noise
        if picture is not None:
            alpha, sigma = levels[r + 1]
            x = np.where(kept, alpha * picture + sigma * start, x)
    return x, seen, previews


def config_for(sampler: str, spacing: str | None = None, **options) -> dict:
    config = CONFIG | SOLVER.get(sampler, {}) | {"_class_name": SAMPLERS[sampler].scheduler}
    if spacing in ("karras", "exponential"):
        config[f"use_{spacing}_sigmas"] = True
    elif spacing:
        config["timestep_spacing"] = spacing
    return {name: value for name, value in (config | options).items() if value is not None}


def diffusers_scheduler(config: dict):
    """diffusers' scheduler of a config, whose steps are not set yet: some constructors set all of
    training, which takes KDPM2's half a second."""
    kind = getattr(diffusers, config["_class_name"])
    set_timesteps = kind.set_timesteps

    def few(scheduler, *_, **__):
        set_timesteps(scheduler, 2)

    with mock.patch.object(kind, "set_timesteps", few):
        return kind.from_config(config)


def run_diffusers(config: dict, steps: int, monkeypatch, begin=None, kept=None, **step_options):
    """The same of diffusers' scheduler, one noise for each evaluation that draws any; as in its
    pipelines that begin with a picture where `begin` says at which step."""
    scheduler = diffusers_scheduler(config)
    scheduler.set_timesteps(steps)
    if hasattr(scheduler, "get_lms_coefficient"):
        # which integrates over numbers in a twentieth of the time that it takes over tensors of one
        numbers = SimpleNamespace(sigmas=scheduler.sigmas.tolist())
        scheduler.get_lms_coefficient = partial(type(scheduler).get_lms_coefficient, numbers)
    if hasattr(scheduler, "set_begin_index"):
        # else a timestep that repeats makes it skip its first step
        scheduler.set_begin_index((begin or 0) * scheduler.order)
    module = importlib.import_module(type(scheduler).__module__)
    draws = {}
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.from_numpy(draws["now"]))
    spread = float(getattr(scheduler, "init_noise_sigma", 1))  # flow matching has none
    x, seen, previews = torch.from_numpy(START) * spread, [], []
    add_noise = getattr(scheduler, "add_noise", None) or (
        lambda picture, noise, t: scheduler.scale_noise(picture, t, noise)
    )
    scaled = getattr(scheduler, "scale_model_input", lambda x, _: x)
    timesteps = scheduler.timesteps[(begin or 0) * scheduler.order :]
    start, picture = torch.from_numpy(START), torch.from_numpy(CLEAN)
    if begin is not None:
        x = add_noise(picture, start, timesteps[:1])
    for i, t in enumerate(timesteps):
        draws["now"] = NOISES[i]
        model_input = scaled(x, t).double().numpy()
        seen.append((float(t), model_input.copy()))
        out = torch.from_numpy(fake_model(model_input, float(t)))
        step = scheduler.step(out, t, x, **step_options)
        x = step.prev_sample
        if kept is not None:
            last = i + 1 == len(timesteps)
            known = picture if last else add_noise(picture, start, timesteps[i + 1 : i + 2])
            x = torch.where(torch.from_numpy(kept), known, x)
        previews.append(getattr(step, "pred_original_sample", None))
    return x.double().numpy(), seen, previews


def assert_agree(config: dict, key: str, steps: int, monkeypatch, within=1e-5, **eta):
    where = f"{key} {steps} {config}"
    table = make_table(key, read_schedule(config), steps, **eta)
    x, seen, previews = run_table(table)
    ref, ref_seen, ref_previews = run_diffusers(config, steps, monkeypatch, **eta)
    assert len(seen) == len(ref_seen), where
    for (t, model_input), (ref_t, ref_input) in zip(seen, ref_seen, strict=True):
        assert t == pytest.approx(ref_t, abs=1e-3), where
        assert relative(model_input, ref_input) < 10 * within, where
    for preview, ref_preview in zip(previews, ref_previews, strict=True):
        if ref_preview is not None:
            assert relative(preview, ref_preview.numpy()) < 10 * within, where
    assert relative(x, ref) < within, where


@pytest.mark.parametrize(("key", "spacing"), CASES)
@pytest.mark.slow("goes through PyTorch's scheduler step by step")
def test_a_table_gives_what_the_pytorch_scheduler_gives(key, spacing, monkeypatch):
    spacing = None if key in DISTILLED else spacing
    for prediction, steps in EACH:
        if (key, prediction) not in NOT_IN_DIFFUSERS:
            config = config_for(key, spacing, prediction_type=prediction)
            assert_agree(config, key, steps, monkeypatch)


@pytest.mark.parametrize(("steps", "begin"), [(10, 0), (10, 3), (20, 4), (20, 13), (4, 3)])
@pytest.mark.parametrize(("key", "spacing"), CASES)
def test_a_picture_under_noise_and_what_is_kept_of_it_are_what_they_are_in_pytorch(
    key, spacing, steps, begin, monkeypatch
):
    config = config_for(key, None if key in DISTILLED else spacing)
    table = make_table(key, NoiseSchedule.from_config(config), steps, begin=begin)
    assert table.step[0] == 0 and table.step[-1] == steps - begin - 1
    # Between the two evaluations of a step diffusers' KDPM2 puts what is kept under the noise of
    # the step's end, and evaluates it at that of the middle.
    kept = np.arange(36).reshape(SHAPE) % 3 == (0 if key != "kdpm2" else 3)
    x, seen, _ = run_table(table, picture=CLEAN, kept=kept)
    ref, ref_seen, _ = run_diffusers(config, steps, monkeypatch, begin=begin, kept=kept)
    assert [t for t, _ in seen] == pytest.approx([t for t, _ in ref_seen], abs=1e-3)
    for (_, model_input), (_, ref_input) in zip(seen, ref_seen, strict=True):
        assert relative(model_input, ref_input) < 1e-4
    assert relative(x, ref) < 1e-5
    assert np.array_equal(x[kept], CLEAN[kept])


def flow_config(key: str, shift: float) -> dict:
    name = FLOW_SAMPLERS[key].scheduler
    if name.startswith("FlowMatch"):
        return {"_class_name": name, "shift": shift}
    return {
        "_class_name": name,
        "use_flow_sigmas": True,
        "flow_shift": shift,
        "prediction_type": "flow_prediction",
    }


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("key", FLOW_SAMPLERS)
def test_flow_matching_gives_what_the_pytorch_scheduler_gives(key, shift, monkeypatch):
    for steps in (1, 2, *STEPS):
        assert_agree(flow_config(key, shift), key, steps, monkeypatch)


@pytest.mark.parametrize("key", FLOW_SAMPLERS)
def test_a_picture_under_noise_by_flow_matching_is_what_it_is_in_pytorch(key, monkeypatch):
    config = flow_config(key, 3.0)
    for steps, begin in ((10, 0), (20, 13), (4, 3)):
        table = make_table(key, read_schedule(config), steps, begin=begin)
        x, seen, _ = run_table(table, picture=CLEAN)
        ref, ref_seen, _ = run_diffusers(config, steps, monkeypatch, begin=begin)
        assert [t for t, _ in seen] == pytest.approx([t for t, _ in ref_seen], abs=1e-3)
        assert relative(x, ref) < 1e-5


def test_what_flow_matching_does_not_have_is_refused_by_name():
    schedule = read_schedule(flow_config("euler", 3.0))
    with pytest.raises(SentenceError, match=r"DDIM is not for this model.*Euler, Heun"):
        make_table("ddim", schedule, 4)
    with pytest.raises(SentenceError, match="DDIM is not for this model"):
        spacing_taken("ddim", schedule, None)
    with pytest.raises(SentenceError, match="Euler has no karras spacing for this model"):
        make_table("euler", schedule, 4, spacing="karras")
    assert spacing_taken("euler", schedule, None) == ""
    with pytest.raises(CheckpointError, match="shift_terminal"):
        read_schedule(flow_config("euler", 3.0) | {"shift_terminal": 0.02})
    with pytest.raises(CheckpointError, match=r"FlowMatchOther.*there are FlowMatchEuler"):
        default_sampler({"_class_name": "FlowMatchOtherScheduler"})
    assert [default_sampler(flow_config(key, 1.0)) for key in FLOW_SAMPLERS] == [
        (key, None) for key in FLOW_SAMPLERS
    ]


@pytest.mark.parametrize("begin", [-1, 10])
def test_a_table_begins_at_one_of_its_steps(begin):
    with pytest.raises(ValueError, match="10 steps cannot begin"):
        make_table("ddim", NoiseSchedule.from_config(CONFIG), 10, begin=begin)


@pytest.mark.parametrize(("key", "prediction"), sorted(NOT_IN_DIFFUSERS))
def test_what_the_pytorch_scheduler_refuses_is_skipped_for_that_reason(
    key, prediction, monkeypatch
):
    config = config_for(key, prediction_type=prediction)
    with pytest.raises((NotImplementedError, ValueError), match="prediction_type"):
        run_diffusers(config, 4, monkeypatch)


@pytest.mark.parametrize(("key", "spacing"), ZERO_SNR)
def test_zero_terminal_snr_gives_what_the_pytorch_scheduler_gives(key, spacing, monkeypatch):
    for prediction, steps in EACH:
        if (key, prediction) in NOT_IN_DIFFUSERS or (key, spacing, prediction) in NAN_IN_DIFFUSERS:
            continue
        config = config_for(
            key,
            None if key in DISTILLED else spacing,
            prediction_type=prediction,
            rescale_betas_zero_snr=True,
        )
        # diffusers rounds x to float32 where sigma is 4096
        assert_agree(config, key, steps, monkeypatch, within=1e-4)


@pytest.mark.parametrize(
    ("key", "steps", "options"),
    [
        ("ddim", 7, {"timestep_spacing": "trailing"}),  # steps that do not divide the timesteps
        ("ddim", 10, {"set_alpha_to_one": True, "steps_offset": 0}),
        ("ddim", 10, {"set_alpha_to_one": None}),
        ("pndm", 10, {"set_alpha_to_one": None}),
        ("ddim", 10, {"num_train_timesteps": 500}),
        ("ddim", 10, {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}),
        ("ddim", 10, {"beta_schedule": "squaredcos_cap_v2"}),
        ("ddim", 10, {"trained_betas": np.linspace(1e-4, 0.02, 1000).tolist()}),
        ("ddpm", 10, {"variance_type": "fixed_large", "steps_offset": 0}),
        ("ddpm", 10, {"variance_type": "fixed_small_log"}),
        ("pndm", 33, {"timestep_spacing": "trailing", "set_alpha_to_one": True}),
        ("euler", 9, {"final_sigmas_type": "sigma_min"}),
        ("euler", 9, {"timestep_spacing": "leading", "use_karras_sigmas": True}),
        ("kdpm2", 9, {"timestep_spacing": "trailing", "use_exponential_sigmas": True}),
        ("dpmpp_2m", 9, {"final_sigmas_type": "sigma_min"}),
        ("dpmpp_2m", 20, {"final_sigmas_type": "sigma_min", "use_karras_sigmas": True}),
        ("dpmpp_2m", 9, {"lower_order_final": False}),
        ("dpmpp_3m", 9, {"lower_order_final": False, "final_sigmas_type": "sigma_min"}),
        ("dpmpp_3m", 20, {"euler_at_final": True, "final_sigmas_type": "sigma_min"}),
        ("dpmpp_2s", 9, {}),
        ("dpmpp_2s", 10, {"final_sigmas_type": "sigma_min"}),
        ("unipc", 9, {"final_sigmas_type": "sigma_min", "lower_order_final": False}),
        ("unipc", 20, {"final_sigmas_type": "sigma_min"}),
        ("unipc", 20, {"final_sigmas_type": "sigma_min", "use_karras_sigmas": True}),
        ("deis", 20, {"lower_order_final": False}),
        ("lcm", 7, {"original_inference_steps": 20, "timestep_scaling": 0.01}),
        ("tcd", 7, {"original_inference_steps": 20}),
    ],
)
def test_what_the_config_asks_for_is_what_the_pytorch_scheduler_does(
    key, steps, options, monkeypatch
):
    assert_agree(config_for(key, **options), key, steps, monkeypatch)


@pytest.mark.parametrize("key", ["ddim", "tcd"])
@pytest.mark.parametrize("eta", [0.0, 0.3, 0.7, 1.0])
def test_eta_adds_the_noise_that_it_adds_in_pytorch(key, eta, monkeypatch):
    assert_agree(config_for(key), key, 10, monkeypatch, eta=eta)


# What the configs of few-step models ask for, and the steps that they are made for.
FEW_STEPS = {
    "SD-Turbo": ("euler", (1, 2, 4), {"timestep_spacing": "trailing", "steps_offset": 1}),
    "SDXL-Turbo": ("euler_ancestral", (1, 2, 4), {"timestep_spacing": "trailing"}),
    "SDXL-Lightning": ("euler", (2, 4, 8), {"timestep_spacing": "trailing"}),
    "SDXL-Lightning, one step": (
        "euler",
        (1,),
        {"timestep_spacing": "trailing", "prediction_type": "sample"},
    ),
    "Hyper-SD": ("ddim", (1, 2, 4, 8), {"timestep_spacing": "trailing"}),
    "Hyper-SD, unified": ("tcd", (1, 2, 4, 8), {}),
    "LCM": ("lcm", (1, 2, 4, 8), {}),
    "NoobAI, v prediction": (
        "euler",
        (1, 8, 28),
        {
            "timestep_spacing": "trailing",
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
        },
    ),
}


@pytest.mark.parametrize("model", FEW_STEPS)
def test_few_step_models_get_the_steps_that_their_configs_ask_for(model, monkeypatch):
    key, counts, options = FEW_STEPS[model]
    config = config_for(key, **options)
    for steps in counts:
        assert default_sampler(config)[0] == key
        assert_agree(config, key, steps, monkeypatch, within=1e-4 if "NoobAI" in model else 1e-5)


@pytest.mark.parametrize(("key", "spacing"), CASES)
def test_with_a_linear_model_the_table_obeys_superposition(key, spacing):
    def linear(x, t):
        return (MIX @ x.reshape(-1)).reshape(x.shape) * t / 1000

    table = make_table(key, NoiseSchedule.from_config(CONFIG), 10, spacing=spacing)
    one, _, _ = run_table(table, START, linear, NOISES)
    other, _, _ = run_table(table, CLEAN, linear, NOISES[::-1])
    both, _, _ = run_table(table, 2 * START - 3 * CLEAN, linear, 2 * NOISES - 3 * NOISES[::-1])
    assert relative(2 * one - 3 * other, both) < 1e-9


def run_ideal(table: Table) -> np.ndarray:
    """The run of a model whose every output says that the clean image is CLEAN."""
    x, history = table.init_noise_sigma * START, [np.zeros(SHAPE)] * HISTORY
    for row, noise in zip(table.rows, NOISES, strict=False):
        _, _, u, v, a, *b, s, p, q = row
        out = (CLEAN - p * x) / q
        history = [u * x + v * out, *history[:-1]]
        x = a * x + sum(b[k] * history[k] for k in range(HISTORY)) + s * noise
    return x


@pytest.mark.parametrize(("key", "spacing"), CASES)
def test_the_last_row_lands_on_the_clean_image_of_an_ideal_denoiser(key, spacing):
    for prediction, zero_snr in itertools.product(PREDICTIONS, (False, True)):
        schedule = NoiseSchedule.from_config(
            CONFIG
            | {
                "prediction_type": prediction,
                "rescale_betas_zero_snr": zero_snr,
                "set_alpha_to_one": True,
            }
        )
        within = dict.fromkeys((1, *STEPS), 1e-9)
        if key in ("deis", "tcd"):  # as in diffusers they stop at the smallest sigma
            within = dict.fromkeys(within, 4 * schedule.sigmas[0])
        elif key == "lcm":  # its boundary condition lets a trace of x through
            within = dict.fromkeys(within, 1e-5)
        elif key == "pndm" and (spacing == "linspace" or prediction == "v_prediction"):
            # It extrapolates raw outputs: v changes on the way, and with linspace diffusers' stride
            # of T // steps misses the next timestep. Both fade with more steps.
            within = {1: 1e-9, 4: 1.0, 10: 0.4, 20: 0.2, 50: 0.05}
        for steps, tolerance in within.items():
            x = run_ideal(make_table(key, schedule, steps, spacing=spacing))
            assert np.abs(x - CLEAN).max() < tolerance, (prediction, zero_snr, steps)


@pytest.mark.parametrize(("key", "spacing"), [case for case in CASES if case[1] in TIME_SPACINGS])
def test_zero_terminal_snr_shows_the_model_nothing_beyond_what_it_was_trained_on(key, spacing):
    schedule = NoiseSchedule.from_config(
        CONFIG | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    )
    for steps in (8, 20):
        _, seen, _ = run_table(make_table(key, schedule, steps, spacing=spacing))
        assert max(np.abs(x).max() for _, x in seen) < 4, steps  # of unit variance


@pytest.mark.parametrize("key", SAMPLERS)
def test_what_an_ideal_denoiser_says_is_forecast_exactly(key):
    exact = make_table(key, NoiseSchedule.from_config(CONFIG), 20)
    skipped = np.arange(len(exact.rows)) % 5 > 1
    x, history, evaluated = exact.init_noise_sigma * START, [np.zeros(SHAPE)] * HISTORY, []
    for row, skip, noise in zip(with_forecasts(exact, skipped).rows, skipped, NOISES, strict=False):
        _, _, u, v, a, *b, s, p, q = row
        out = newest = u * evaluated[-1] + v * evaluated[-2] if skip else (CLEAN - p * x) / q
        if not skip:
            newest = u * x + v * out
            evaluated.append(newest)
        assert relative(p * x + q * out, CLEAN) < 1e-9, "the row's estimate of the clean latents"
        history = [newest, *history[:-1]]
        x = a * x + sum(b[k] * history[k] for k in range(HISTORY)) + s * noise
    assert relative(x, run_ideal(exact)) < 1e-9


@pytest.mark.parametrize(("key", "spacing"), CASES)
def test_a_forecast_is_on_the_line_in_t_through_the_last_two_that_were_evaluated(key, spacing):
    exact = make_table(key, NoiseSchedule.from_config(CONFIG), 12, spacing=spacing)
    skipped = np.isin(np.arange(len(exact.rows)), (2, 3, 4, 6, 9, 10))
    rows, t = with_forecasts(exact, skipped).rows, exact.rows[:, 0]
    assert np.array_equal(rows[~skipped], exact.rows[~skipped])
    for r, newest, before in ((2, 1, 0), (3, 1, 0), (4, 1, 0), (6, 5, 1), (9, 8, 7), (10, 8, 7)):
        u, v = rows[r, 2:4]
        assert u + v == pytest.approx(1)
        if t[newest] != t[before] and t[newest] - t[r] <= REACH:
            assert u * t[newest] + v * t[before] == pytest.approx(t[r])
        else:
            assert (u, v) == (1, 0)


def test_where_the_last_two_have_the_same_t_the_newest_is_the_forecast():
    table = make_table("pndm", NoiseSchedule.from_config(CONFIG), 12, begin=1)
    assert table.rows[0, 0] == table.rows[1, 0]
    forecast = with_forecasts(table, np.arange(len(table.rows)) == 2)
    assert forecast.rows[2, 2:4].tolist() == [1, 0]


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("key", SAMPLERS)
def test_the_preview_shows_the_clean_image_that_the_latents_are_mixed_from(key, prediction):
    schedule = NoiseSchedule.from_config(CONFIG | {"prediction_type": prediction})
    rows = make_table(key, schedule, 10).rows
    for t, c_in, *_, p, q in rows:
        if c_in == pytest.approx(1):  # unit variance: the timestep alone tells alpha and sigma
            alpha = np.sqrt(np.interp(t, np.arange(1000), schedule.alphas_cumprod))
            x = alpha * CLEAN + np.sqrt(1 - alpha**2) * START
        else:
            alpha = c_in
            x = CLEAN + np.sqrt(1 / c_in**2 - 1) * START
        sigma = np.sqrt(1 - alpha**2)
        out = {"epsilon": START, "v_prediction": alpha * START - sigma * CLEAN, "sample": CLEAN}
        assert relative(p * x + q * out[prediction], CLEAN) < 1e-6


@pytest.mark.parametrize(("key", "spacing"), CASES)
def test_zero_terminal_snr_is_finite(key, spacing):
    for prediction, steps in itertools.product(PREDICTIONS, (1, 2, *STEPS)):
        schedule = NoiseSchedule.from_config(
            CONFIG | {"prediction_type": prediction, "rescale_betas_zero_snr": True}
        )
        assert schedule.alphas_cumprod[-1] == 0
        table = make_table(key, schedule, steps, spacing=spacing)
        assert np.isfinite(table.rows).all()
        assert np.isfinite(table.init_noise_sigma)


@pytest.mark.parametrize("key", ["dpmpp_2m", "dpmpp_2m_sde", "dpmpp_3m", "unipc"])
def test_a_last_step_of_no_length_adds_nothing_to_the_latents(key):
    schedule = NoiseSchedule.from_config(
        CONFIG | {"final_sigmas_type": "sigma_min", "lower_order_final": False}
    )
    for steps, spacing in itertools.product((3, 16, 17, 25, 41), ("karras", "exponential")):
        _, _, _, _, a, *b, s, _, _ = make_table(key, schedule, steps, spacing=spacing).rows[-1]
        assert (a, sum(b), s) == pytest.approx((1.0, 0.0, 0.0), abs=1e-6)


@pytest.mark.parametrize(("key", "spacing"), CASES)
def test_a_table_survives_float32(key, spacing):
    table = make_table(key, NoiseSchedule.from_config(CONFIG), 20, spacing=spacing)
    exact, _, _ = run_table(table)
    narrow = dataclasses.replace(
        table,
        rows=table.rows.astype(np.float32),
        init_noise_sigma=np.float32(table.init_noise_sigma),
    )
    single, _, _ = run_table(
        narrow,
        START.astype(np.float32),
        lambda x, t: fake_model(x, t).astype(np.float32),
        NOISES.astype(np.float32),
    )
    assert single.dtype == np.float32
    assert relative(single, exact) < 1e-4


def test_pndm_evaluates_its_second_timestep_twice_and_so_once_more_than_it_steps():
    schedule = NoiseSchedule.from_config(CONFIG)
    for steps in (2, 3, 4, 50):
        assert len(make_table("pndm", schedule, steps).rows) == steps + 1
    table = make_table("pndm", schedule, 50)
    assert table.rows[:4, 0].tolist() == [981, 961, 961, 941]
    assert table.rows[-1, 0] == 1


@pytest.mark.parametrize(("key", "spacing"), CASES)
def test_rows_name_the_step_they_belong_to_and_are_as_many_as_announced(key, spacing):
    for steps in (1, 2, 9):
        table = make_table(key, NoiseSchedule.from_config(CONFIG), steps, spacing=spacing)
        assert table.rows.dtype == np.float64
        assert table.rows.shape == (len(table.step), len(COLUMNS))
        assert sorted(set(table.step.tolist())) == list(range(steps))
        assert (np.diff(table.step) >= 0).all()
        if key != "pndm":
            most = SAMPLERS[key].evaluations
            assert len(table.rows) == most * steps - (most - 1)  # the last step needs but one


@pytest.mark.parametrize("key", SAMPLERS)
def test_noise_is_drawn_by_the_stochastic_samplers_only(key):
    noise = make_table(key, NoiseSchedule.from_config(CONFIG), 10).rows[:, COLUMNS.index("s")]
    assert noise.any() == SAMPLERS[key].stochastic
    assert noise[-1] == 0


@pytest.mark.parametrize("key", SAMPLERS)
def test_steps_out_of_range_are_refused_with_the_range(key):
    schedule = NoiseSchedule.from_config(CONFIG)
    for steps in (-1, 0, 1001):
        with pytest.raises(ValueError, match="takes 1 to 1000 steps"):
            make_table(key, schedule, steps)


@pytest.mark.parametrize(("key", "spacing"), CASES)
def test_as_many_steps_as_there_are_timesteps_work_or_are_refused(key, spacing):
    schedule = NoiseSchedule.from_config(CONFIG | {"num_train_timesteps": 60})
    for steps in (31, 49, 59, 60):
        try:
            table = make_table(key, schedule, steps, spacing=spacing)
        except ValueError as refusal:
            assert "steps" in str(refusal)
        else:
            assert np.isfinite(table.rows).all()
            assert table.rows[:, 0].max() <= 59


@pytest.mark.parametrize(("key", "label"), [("lcm", "LCM"), ("tcd", "TCD")])
def test_consistency_models_are_refused_more_steps_than_they_were_distilled_at(key, label):
    with pytest.raises(ValueError, match=f"{label} takes at most 50 steps"):
        make_table(key, NoiseSchedule.from_config(CONFIG), 51)


def test_an_unknown_sampler_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'magic' is unknown; there are ddim, ddpm, pndm"):
        make_table("magic", NoiseSchedule.from_config(CONFIG), 10)


def test_a_spacing_that_a_sampler_lacks_is_refused_with_those_it_has():
    with pytest.raises(ValueError, match="no 'karras' spacing; it has leading, linspace, trailing"):
        make_table("ddim", NoiseSchedule.from_config(CONFIG), 10, spacing="karras")


@pytest.mark.parametrize(("key", "eta"), [("euler", 0.5), ("ddim", -0.1), ("ddim", 1.5)])
def test_eta_is_refused_out_of_its_range_and_by_samplers_without_it(key, eta):
    with pytest.raises(ValueError, match="eta is"):
        make_table(key, NoiseSchedule.from_config(CONFIG), 10, eta=eta)


def test_without_a_spacing_it_is_the_configs_or_else_the_samplers_first():
    def timesteps(key, options, **spacing):
        schedule = NoiseSchedule.from_config(CONFIG | options)
        return make_table(key, schedule, 10, **spacing).rows[:, 0].tolist()

    karras = {"_class_name": "DPMSolverMultistepScheduler", "use_karras_sigmas": True}
    same = [
        (("euler", {}), "linspace"),
        (("euler", {"timestep_spacing": "trailing"}), "trailing"),
        (("dpmpp_2s", {"timestep_spacing": "trailing"}), "linspace"),
        (("dpmpp_2m", karras), "karras"),
        (("dpmpp_3m", karras), "karras"),
        (("unipc", karras), "linspace"),
    ]
    for (key, options), spacing in same:
        assert timesteps(key, options) == timesteps(key, options, spacing=spacing)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        *[(config_for(key), (key, None)) for key in SAMPLERS],
        (config_for("pndm", _class_name="FlaxPNDMScheduler"), ("pndm", None)),
        (config_for("euler", "trailing"), ("euler", "trailing")),
        (config_for("dpmpp_2m", "karras"), ("dpmpp_2m", "karras")),
        (
            config_for("dpmpp_2m_sde", "karras", timestep_spacing="leading"),
            ("dpmpp_2m_sde", "karras"),
        ),
        (config_for("unipc", "exponential"), ("unipc", "exponential")),
        (config_for("lcm", "leading"), ("lcm", None)),
        # Values of an earlier scheduler in its config, which diffusers writes and does not heed
        (config_for("euler_ancestral", use_karras_sigmas=True), ("euler_ancestral", None)),
        (config_for("ddim", use_karras_sigmas=True, sigma_min=0.1), ("ddim", None)),
        (
            config_for(
                "euler",
                algorithm_type="sde-dpmsolver++",
                solver_order=3,
                solver_type="heun",
                thresholding=True,
            ),
            ("euler", None),
        ),
        (config_for("unipc", algorithm_type="sde-dpmsolver++"), ("unipc", None)),
        (config_for("unipc", solver_type="heun"), ("unipc", None)),
        (config_for("deis", solver_type="bh1"), ("deis", None)),
    ],
)
def test_the_default_is_the_sampler_and_spacing_of_the_checkpoint(options, expected):
    assert default_sampler(options) == expected
    assert len(make_table(expected[0], NoiseSchedule.from_config(options), 4).rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"_class_name": "ScoreSdeVeScheduler"},
            "'ScoreSdeVeScheduler' is not supported; there are",
        ),
        ({}, "None is not supported"),
        (config_for("pndm", skip_prk_steps=False), "skip_prk_steps=true"),
        (config_for("euler", sigma_min=0.1), "sigma_min=0.1 is not supported"),
        (config_for("unipc", solver_order=3), "UniPCMultistepScheduler of order 3"),
        (config_for("unipc", solver_type="bh1"), "solver_type='bh1' is not supported"),
        (config_for("dpmpp_2m", solver_type="heun"), "solver_type='heun' is not supported"),
        (config_for("dpmpp_2m_sde", solver_order=3), "order 3 for an SDE"),
    ],
)
def test_a_scheduler_that_no_sampler_here_equals_is_refused(options, message):
    with pytest.raises(CheckpointError, match=message):
        default_sampler(CONFIG | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prediction_type": "flow_prediction"},
            "prediction_type='flow_prediction' is not supported",
        ),
        ({"beta_schedule": "sigmoid"}, "expected 'linear', 'scaled_linear' or 'squaredcos_cap_v2'"),
        ({"timestep_spacing": "random"}, "timestep_spacing='random'"),
        ({"thresholding": True}, "thresholding=True"),
        ({"algorithm_type": "dpmsolver"}, "algorithm_type='dpmsolver'"),
        ({"use_lu_lambdas": True}, "use_lu_lambdas=True"),
        ({"beta_start": None}, "lacks beta_start"),
        ({"use_karras_sigmas": True, "use_exponential_sigmas": True}, "at once"),
    ],
)
def test_a_config_that_no_table_can_follow_is_refused_with_the_value(options, message):
    with pytest.raises(CheckpointError, match=message):
        NoiseSchedule.from_config(CONFIG | options)
