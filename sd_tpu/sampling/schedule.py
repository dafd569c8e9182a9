"""How noise was mixed in at training, and grids of levels for taking it out again (NumPy, float64).

A level is a point of the way from noise to image. A grid says at which levels a sampler evaluates
the model and where each step leads.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from sd_tpu.checkpoint.config import CheckpointError, FlowSchedulerConfig, SchedulerConfig
from sd_tpu.sentence import SentenceError

SPACINGS = ("leading", "linspace", "trailing", "karras", "exponential")
TIME_SPACINGS = SPACINGS[:3]  # of timesteps; the others are of sigmas
_SOLVERS = ("DPMSolver", "DEIS", "UniPC")  # as the names of diffusers' classes begin
# Their solver types; another's stands for the default.
_SOLVER_TYPES = {"DPMSolver": ("midpoint", "heun"), "DEIS": ("logrho",), "UniPC": ("bh1", "bh2")}
_OF_SIGMAS = (*_SOLVERS, "EulerDiscrete", "Heun", "KDPM2", "LMS")
TAKEN_BY = {
    **dict.fromkeys(("solver_order", "solver_type"), _SOLVERS),
    "algorithm_type": _SOLVERS[:2],
    "lambda_min_clipped": ("DPMSolver",),
    "use_lu_lambdas": ("DPMSolverMultistep",),
    **dict.fromkeys(("predict_x0", "disable_corrector"), ("UniPC",)),
    "thresholding": (*_SOLVERS, "DDIM", "DDPM", "LCM", "TCD"),
    **dict.fromkeys(("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"), _OF_SIGMAS),
    "use_flow_sigmas": _SOLVERS,
    **dict.fromkeys(("timestep_type", "interpolation_type"), ("EulerDiscrete",)),
    **dict.fromkeys(("sigma_min", "sigma_max"), ("EulerDiscrete", "LMS", "UniPC")),
}
ZERO_SNR_ALPHA = 2.0**-24  # stands in for alphas_cumprod = 0 where something is divided by it


class Level(NamedTuple):
    """A noise level, where x = alpha * x0 + sigma * eps, and how the model is read there."""

    t: float
    alpha: float
    sigma: float
    c_in: float  # c_in * x has unit variance, as the model expects
    p: float  # x0 = p * x + q * out
    q: float

    @property
    def log_snr(self) -> float:
        """The lambda of the DPM-Solver papers."""
        return math.log(self.alpha / self.sigma)


Moves = list[tuple[Level, Level]]  # where each step begins and where it leads


@dataclass(frozen=True, kw_only=True, eq=False)
class NoiseSchedule:
    """How noise was mixed in at training, and what the config says about taking it out again."""

    config: SchedulerConfig
    alphas_cumprod: np.ndarray  # float64 [T]

    @classmethod
    def from_config(cls, scheduler_config: dict[str, Any]) -> Self:
        """Read diffusers' `scheduler_config.json`.

        Raises:
            CheckpointError: a value is unknown, or asks for what a table cannot hold.
        """
        config = SchedulerConfig.from_dict(_heeded(scheduler_config))
        # float32 as in diffusers: the rounding of alphas_cumprod near 1 shows in the last sigmas
        alphas_cumprod = np.cumprod(1 - _betas(config), dtype=np.float64)
        alphas_cumprod = alphas_cumprod.astype(np.float32).astype(np.float64)
        if config.rescale_betas_zero_snr:  # https://arxiv.org/abs/2305.08891, algorithm 1
            root = np.sqrt(alphas_cumprod)
            if root[0] == root[-1]:
                raise CheckpointError("The scheduler's betas leave nothing to rescale to zero SNR.")
            alphas_cumprod = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        return cls(config=config, alphas_cumprod=alphas_cumprod)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NoiseSchedule)
            and self.config == other.config
            and np.array_equal(self.alphas_cumprod, other.alphas_cumprod)
        )

    def __hash__(self) -> int:
        return hash(self.config)

    @property
    def scheduler(self) -> str | None:
        """diffusers' class of the checkpoint's scheduler, without the old `Flax` before it."""
        return (self.config.scheduler or "").removeprefix("Flax") or None

    @property
    def total(self) -> int:
        """Timesteps of training."""
        return len(self.alphas_cumprod)

    @property
    def endless(self) -> float:
        """Sigma from which on it stands for infinity."""
        # A power of a root has rounded it where sigmas are spaced by themselves.
        return math.inf if self.alphas_cumprod[-1] else self.sigmas[-1] * (1 - 1e-6)

    @property
    def sigma_spacing(self) -> str | None:
        """The spacing of sigmas that the config asks for."""
        return next((s for s in SPACINGS[3:] if getattr(self.config, f"use_{s}_sigmas")), None)

    @property
    def sigmas(self) -> np.ndarray:
        """Noise over signal at each training timestep, float64 [T]; finite at zero terminal SNR."""
        signal = np.where(self.alphas_cumprod > 0, self.alphas_cumprod, ZERO_SNR_ALPHA)
        return np.sqrt((1 - signal) / signal)

    def level(self, t: float, alpha: float, sigma: float) -> Level:
        """Return the level x = alpha * x0 + sigma * eps, by the prediction type."""
        c_in = 1 / math.hypot(alpha, sigma)
        match self.config.prediction_type:
            case "epsilon":
                alpha = alpha or math.sqrt(ZERO_SNR_ALPHA)  # pure noise says nothing about x0
                p, q = 1 / alpha, -sigma / alpha
            case "v_prediction":  # Salimans and Ho 2022, https://arxiv.org/abs/2202.00512
                p, q = alpha * c_in**2, -sigma * c_in
            case "sample":
                p, q = 0.0, 1.0
        return Level(float(t), alpha, sigma, c_in, p, q)

    def level_at(self, t: int) -> Level:
        """Return the level of a training timestep, at unit variance."""
        signal = float(self.alphas_cumprod[t])
        return self.level(t, math.sqrt(signal), math.sqrt(1 - signal))

    def timestep(self, sigma: np.ndarray | float) -> np.ndarray | float:
        """Return the fractional training timestep of a noise level, by interpolating log sigma."""
        return np.interp(np.log(sigma), np.log(self.sigmas), np.arange(len(self.sigmas)))


@dataclass(frozen=True, kw_only=True)
class FlowSchedule:
    """Flow matching, x = (1 - sigma) * x0 + sigma * eps, where a model predicts eps - x0.

    Lipman et al. 2022 (arXiv:2210.02747), Liu et al. 2022 (arXiv:2209.03003). Sigmas are shifted
    towards noise, the more so the larger the pictures of training (Esser et al. 2024,
    arXiv:2403.03206, section 5.3.2).
    """

    config: FlowSchedulerConfig
    shift: float  # of sigmas towards noise; 1 is none
    even_sigmas: bool = False  # from 1 to 1 / steps before they are shifted; else as in training
    endless: ClassVar = math.inf  # no sigma stands for infinity

    @classmethod
    def from_config(cls, scheduler_config: dict[str, Any], *, even_sigmas: bool = False) -> Self:
        """Read diffusers' `scheduler_config.json`; raises CheckpointError as NoiseSchedule does."""
        config = FlowSchedulerConfig.from_dict(scheduler_config)
        return cls(config=config, shift=config.constant_shift, even_sigmas=even_sigmas)

    @property
    def scheduler(self) -> str | None:
        """diffusers' class of the checkpoint's scheduler."""
        return self.config.scheduler

    @property
    def total(self) -> int:
        """Timesteps of training."""
        return self.config.num_train_timesteps

    def shifted(self, sigma: Any) -> Any:
        """Return sigmas shifted."""
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)

    def for_tokens(self, tokens: int) -> Self:
        """Return the schedule of a picture of so many tokens, in which the logarithm of the shift
        is linear."""
        config = self.config
        slope = (config.max_shift - config.base_shift) / (
            config.max_image_seq_len - config.base_image_seq_len
        )
        mu = config.base_shift + slope * (tokens - config.base_image_seq_len)
        return replace(self, shift=math.exp(mu))

    def level(self, sigma: float, t: float) -> Level:
        """Return the level of a sigma, where the model is told the timestep t."""
        return Level(t, 1 - sigma, sigma, 1.0, 1.0, -sigma)


Schedule = NoiseSchedule | FlowSchedule


def read_schedule(scheduler_config: dict[str, Any], *, even_sigmas: bool = False) -> Schedule:
    """Read diffusers' `scheduler_config.json`, whichever scheduler's.

    Args:
        scheduler_config: its contents.
        even_sigmas: of flow matching, as the pipelines of some models want them.

    Raises:
        CheckpointError: a value is unknown, or asks for what a table cannot hold.
    """
    name = str(scheduler_config.get("_class_name"))
    flows = name.startswith("FlowMatch") or (
        name.startswith(_SOLVERS) and scheduler_config.get("use_flow_sigmas")
    )
    if flows:
        return FlowSchedule.from_config(scheduler_config, even_sigmas=even_sigmas)
    return NoiseSchedule.from_config(scheduler_config)


def _heeded(config: dict[str, Any]) -> dict[str, Any]:
    """Return a scheduler's config without the values that its class does not know.

    diffusers writes all that it has read, so a checkpoint whose scheduler was exchanged carries
    settings of the one before. How the noise was scaled at training (`rescale_betas_zero_snr`)
    counts whichever class says so, also where diffusers' passes over it: any sampler may be chosen
    for the model.
    """
    name = str(config.get("_class_name") or "").removeprefix("Flax")
    unknown = {
        setting for setting, classes in TAKEN_BY.items() if name and not name.startswith(classes)
    }
    others = {
        each for kind, types in _SOLVER_TYPES.items() if not name.startswith(kind) for each in types
    }
    unknown |= {"solver_type"} if config.get("solver_type") in others else set()
    return {setting: value for setting, value in config.items() if setting not in unknown}


def _betas(config: SchedulerConfig) -> np.ndarray:
    if config.trained_betas is not None:
        return np.asarray(config.trained_betas, np.float32)
    start, end, total = config.beta_start, config.beta_end, config.num_train_timesteps
    assert start is not None and end is not None  # without `trained_betas` the config has them
    match config.beta_schedule:
        case "linear":
            return np.linspace(start, end, total).astype(np.float32)
        case "scaled_linear":
            return np.linspace(start**0.5, end**0.5, total).astype(np.float32) ** 2
        case "squaredcos_cap_v2":  # https://arxiv.org/abs/2102.09672, equation 17
            signal = np.cos((np.arange(total + 1) / total + 0.008) / 1.008 * np.pi / 2) ** 2
            return np.minimum(1 - signal[1:] / signal[:-1], 0.999).astype(np.float32)
    raise ValueError(f"There are no betas called {config.beta_schedule}.")


# Grids: (schedule, steps, spacing, times) -> moves. `times` is the spacing of the timesteps, which
# is `spacing` itself or, where that is one of sigmas, the one that sets the range of the sigmas.


def _timesteps(schedule: NoiseSchedule, steps: int, times: str, points: int) -> np.ndarray:
    """Return the falling timesteps at which `steps` steps begin, of `points` on the whole way."""
    total = len(schedule.alphas_cumprod)
    match times:
        case "leading":
            timesteps = np.arange(points) * (total // points) + float(schedule.config.steps_offset)
            return np.minimum(timesteps, total - 1)[::-1][:steps]
        case "linspace":
            return np.linspace(0, total - 1, points)[::-1][:steps]
        case "trailing":
            return np.round(total - np.arange(steps) * (total / steps)) - 1
    raise ValueError(f"There are no timesteps called {times}.")


def _sigmas_between(first: float, last: float, steps: int, spacing: str) -> np.ndarray:
    """Return a geometric series, or the sigmas of Karras et al. 2022, eq. 5.

    https://arxiv.org/abs/2206.00364
    """
    if spacing == "exponential":
        return np.geomspace(first, last, steps)
    return np.linspace(first ** (1 / 7), last ** (1 / 7), steps) ** 7


def _chain(levels: Iterable[Level]) -> Moves:
    return list(itertools.pairwise(levels))


def strided(schedule, steps, spacing, times, *, to_one) -> Moves:
    """Training timesteps. A step leads T // steps back, wherever the next one begins."""
    asked = schedule.config.set_alpha_to_one
    to_one = to_one if asked is None else asked
    end = schedule.level(0, 1.0, 0.0) if to_one else schedule.level_at(0)
    stride = len(schedule.alphas_cumprod) // steps
    timesteps = np.round(_timesteps(schedule, steps, times, steps)).astype(int)
    leads = [schedule.level_at(t - stride) if t >= stride else end for t in timesteps]
    return list(zip(map(schedule.level_at, timesteps), leads, strict=True))


def ancestral(schedule, steps, spacing, times) -> Moves:
    """Training timesteps. A step leads to the next one and the last to the clean image."""
    timesteps = np.round(_timesteps(schedule, steps, times, steps)).astype(int)
    return _chain([*map(schedule.level_at, timesteps), schedule.level(0, 1.0, 0.0)])


def distilled(schedule, steps, spacing, times, *, sampler, to_first=False) -> Moves:
    """Select from the timesteps that a consistency model was distilled at.

    The last step leads to the clean image, or to the first timestep.
    """
    total, original = len(schedule.alphas_cumprod), schedule.config.original_inference_steps
    if not steps <= original <= total:
        raise SentenceError(
            "{sampler} takes at most {limit} steps here, not {steps}.",
            sampler=sampler,
            limit=min(original, total),
            steps=steps,
        )
    chosen = np.floor(np.linspace(0, original, steps, endpoint=False)).astype(int)
    timesteps = (original - chosen) * (total // original) - 1
    end = schedule.level_at(0) if to_first else schedule.level(0, 1.0, 0.0)
    return _chain([*map(schedule.level_at, timesteps), end])


def growing(schedule, steps, spacing, times, *, whole_karras=False, sigma_min=False) -> Moves:
    """Sigmas of fractional timesteps, x = x0 + sigma * eps: the k-diffusion samplers."""
    timesteps = _timesteps(schedule, steps, times, steps)
    sigmas = np.interp(timesteps, np.arange(len(schedule.sigmas)), schedule.sigmas)
    if spacing != times:
        sigmas = _sigmas_between(sigmas[0], sigmas[-1], steps, spacing)
        timesteps = schedule.timestep(sigmas)
        if whole_karras and spacing == "karras":
            timesteps = np.round(timesteps)
    stops = sigma_min and schedule.config.final_sigmas_type == "sigma_min"
    end = schedule.sigmas[0] if stops else 0.0
    pairs = zip([*timesteps, 0], [*sigmas.tolist(), float(end)], strict=True)
    return _chain(schedule.level(t, 1.0, sigma) for t, sigma in pairs)


def flowing(schedule, steps, spacing, times) -> Moves:
    """Sigmas of flow matching: Euler, Heun and LCM.

    Those of training are shifted twice, as in diffusers.
    """
    ends = np.array([1.0, 1 / (steps if schedule.even_sigmas else schedule.total)])
    first, last = ends if schedule.even_sigmas else schedule.shifted(ends)
    sigmas = schedule.shifted(np.linspace(first, last, steps))
    return _flow(schedule, sigmas, schedule.total * sigmas)


def flow_solving(schedule, steps, spacing, times, *, from_zero=False) -> Moves:
    """Sigmas of flow matching at whole timesteps: DPM-Solver++ and UniPC.

    They are spaced from pure noise, or down to the clean image, at whose end is none.
    """
    last = 1 / schedule.total
    if from_zero:
        even = np.linspace(1 - last, 0, steps, endpoint=False)
    elif schedule.even_sigmas:
        even = np.linspace(1, 1 / steps, steps)
    else:
        even = np.linspace(1, last, steps, endpoint=False)
    sigmas = schedule.shifted(even)
    sigmas[0] = min(sigmas[0], 1 - 1e-6)  # the logarithm of the signal is taken
    return _flow(schedule, sigmas, np.trunc(schedule.total * sigmas))


def _flow(schedule: FlowSchedule, sigmas: np.ndarray, timesteps: np.ndarray) -> Moves:
    pairs = zip([*sigmas.tolist(), 0.0], [*timesteps.tolist(), 0.0], strict=True)
    return _chain(schedule.level(*pair) for pair in pairs)


def solving(schedule, steps, spacing, times, *, sigma_min=False) -> Moves:
    """Sigmas of whole timesteps, x at unit variance: DPM-Solver and its relatives."""
    sigmas = schedule.sigmas
    end = sigmas[0] if sigma_min or schedule.config.final_sigmas_type == "sigma_min" else 0.0
    if spacing == times:
        timesteps = np.round(_timesteps(schedule, steps, times, steps + 1))
        sigmas = np.interp(timesteps, np.arange(len(sigmas)), sigmas)
    else:
        sigmas = _sigmas_between(sigmas[-1], sigmas[0], steps, spacing)
        timesteps = schedule.timestep(sigmas)
        # diffusers cuts exponential timesteps off, the first of them, T - 1 less rounding, as well
        timesteps = np.round(timesteps) if spacing == "karras" else np.trunc(timesteps - 1e-6)
    sigmas = np.append(sigmas, end)
    alphas = 1 / np.sqrt(1 + sigmas**2)
    columns = zip([*timesteps, 0], alphas.tolist(), (alphas * sigmas).tolist(), strict=True)
    return _chain(schedule.level(*column) for column in columns)
