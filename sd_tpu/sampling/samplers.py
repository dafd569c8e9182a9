"""Samplers as tables: every scheduler is an affine recursion, so it is rows of numbers.

One row is one evaluation of the model:

    out = guided(model(c_in * x, t, text))
    h   = u * x + v * out                          pushed onto a history of HISTORY, newest first
    x   = a * x + b0 * h[0] + ... + b4 * h[4] + s * noise           (the x before this row)
    the row's estimate of the clean latents = p * x + q * out       (the x before this row)

x starts as `init_noise_sigma` times standard normal noise; after the last row it is the clean
latents. Results, c_in and init_noise_sigma are those of diffusers' scheduler of the same name, so
half of the samplers keep x at unit variance and half (Euler and its kin) let it grow with sigma.
A table that begins midway, for a picture under noise, is what diffusers' schedulers do from there.

A row that `with_forecasts` skips evaluates nothing. With the last two h that were evaluated, e:

    h   = u * e[0] + v * e[1]
    the row's estimate of the clean latents = p * x + q * h

Four things vary independently: the noise schedule (`NoiseSchedule`), the spacing of the steps (a
grid of levels), the method (a generator of rows) and what the model predicts (`Level.p` and `q`).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.sampling.schedule import (
    TIME_SPACINGS,
    FlowSchedule,
    Level,
    Moves,
    NoiseSchedule,
    Schedule,
    ancestral,
    distilled,
    flow_solving,
    flowing,
    growing,
    read_schedule,
    solving,
    strided,
)
from sd_tpu.sentence import SentenceError

HISTORY = 5  # PLMS reaches back five evaluations: its repeated second one is pushed as well
REACH = 120  # timesteps of training, of 1000: how far forecasts follow a line; found by trying
COLUMNS = ("t", "c_in", "u", "v", "a", *(f"b{k}" for k in range(HISTORY)), "s", "p", "q")


class Row(NamedTuple):
    """A method's part of a table row: x = a * x + sum of b[k] * h[k] + s * noise."""

    step: int
    at: Level
    a: float
    b: Iterable[float]
    s: float = 0.0


# Methods: (moves, schedule, begin) -> rows of the steps from `begin` on. SAMPLERS says what the
# history of each holds.


def _steps(moves: Moves, begin: int) -> Iterator[tuple[int, tuple[Level, Level]]]:
    return itertools.islice(enumerate(moves), begin, None)


def _toward(here: Level, there: Level, eta: float = 0.0) -> tuple[float, float, float]:
    """Return a, b, s of x = a * x + b * x0 + s * noise, exact for a constant x0.

    DDIM's step, Song et al. 2020 (https://arxiv.org/abs/2010.02502), eq. 12; eta is the share of
    fresh noise, 0 for none and 1 for ancestral sampling. Written with x0 it holds at any scale of
    x: it is Euler's step too, and the first order of the DPM solvers.
    """
    shrink = there.sigma * here.alpha / (there.alpha * here.sigma)
    fresh = eta**2 * max(0.0, 1 - shrink**2)
    a = there.sigma * math.sqrt(1 - fresh) / here.sigma
    return a, there.alpha - here.alpha * a, there.sigma * math.sqrt(fresh)


def _one_step(moves: Moves, schedule: Schedule, begin: int, eta: float = 0.0) -> Iterator[Row]:
    """DDIM (https://arxiv.org/abs/2010.02502). On growing sigmas Euler and Euler ancestral, Karras
    et al. 2022 (https://arxiv.org/abs/2206.00364) and k-diffusion."""
    for i, (here, there) in _steps(moves, begin):
        a, b, s = _toward(here, there, eta)
        yield Row(i, here, a, (b,), s)


def _ddpm(moves: Moves, schedule: NoiseSchedule, begin: int) -> Iterator[Row]:
    """Ancestral sampling, Ho et al. 2020 (https://arxiv.org/abs/2006.11239), algorithm 2."""
    for i, (here, there) in _steps(moves, begin):
        a, b, s = _toward(here, there, eta=1.0)
        if schedule.config.variance_type == "fixed_large" and here.t > 0:
            s = math.sqrt(1 - (here.alpha / there.alpha) ** 2)
        yield Row(i, here, a, (b,), s)


def _lcm(moves: Moves, schedule: NoiseSchedule, begin: int) -> Iterator[Row]:
    """Multistep consistency sampling, Luo et al. 2023 (https://arxiv.org/abs/2310.04378)."""
    for i, (here, there) in _steps(moves, begin):
        time = here.t * schedule.config.timestep_scaling / 0.5  # in deviations of the data
        skip, out = 1 / (time**2 + 1), time / math.sqrt(time**2 + 1)
        yield Row(i, here, there.alpha * skip, (there.alpha * out,), there.sigma)


def _renoised(moves: Moves, schedule: FlowSchedule, begin: int) -> Iterator[Row]:
    """Multistep consistency sampling by flow matching: each step goes to the clean image, and from
    there back to the next level with fresh noise."""
    for i, (here, there) in _steps(moves, begin):
        yield Row(i, here, 0.0, (there.alpha,), there.sigma)


def _tcd(moves: Moves, schedule: NoiseSchedule, begin: int, eta: float = 0.3) -> Iterator[Row]:
    """Strategic stochastic sampling of trajectory consistency models, Zheng et al. 2024
    (https://arxiv.org/abs/2402.19159), algorithm 4: each step goes down to a share 1 - eta of the
    next timestep and is noised up to it; eta is the paper's gamma."""
    for i, (here, there) in _steps(moves, begin):
        # in float32 as in diffusers, which decides where the product is just about whole
        below = schedule.level_at(int(np.float32(1 - eta) * np.float32(there.t)))
        a, b, _ = _toward(here, below)
        up = there.alpha / below.alpha
        yield Row(i, here, a * up, (b * up,), math.sqrt(max(0.0, 1 - up**2)))


def _pndm(moves: Moves, schedule: NoiseSchedule, begin: int) -> Iterator[Row]:
    """Pseudo linear multistep, Liu et al. 2022 (https://arxiv.org/abs/2202.09778), eq. 9 and 12.

    The second evaluation takes the first step again with the mean of both outputs, and is then
    left out of the history, hence the zeros. diffusers repeats the second timestep for that, and
    midway takes whichever two come first for such a pair.
    """

    def transfer(here, there):
        a, b, _ = _toward(here, there)
        return a + b * here.p, b * here.q

    weights = [
        (3 / 2, 0, -1 / 2),
        (23 / 12, -16 / 12, 0, 5 / 12),
        (55 / 24, -59 / 24, 37 / 24, 0, -9 / 24),
        (55 / 24, -59 / 24, 37 / 24, -9 / 24),
    ]
    first, *others = [*moves[:2], *moves[1:]][begin:]
    a0, b0 = transfer(*first)
    yield Row(begin, first[0], a0, (b0,))
    for i, (here, there) in enumerate(others):
        if i == 0:
            stride = len(schedule.alphas_cumprod) // len(moves)
            a, b = transfer(schedule.level_at(int(here.t) + stride), here)
            yield Row(begin, here, a / a0, (b / 2, b / 2 - b0 * a / a0))
        else:
            a, b = transfer(here, there)
            yield Row(begin + i, here, a, np.multiply(b, weights[min(i, 4) - 1]))


def _heun(moves: Moves, schedule: Schedule, begin: int) -> Iterator[Row]:
    """Heun's method, Karras et al. 2022 (https://arxiv.org/abs/2206.00364), algorithm 1.

    A step from noise without any signal, where sigma stands for infinity, is Euler's: Heun's mean
    of both ends would be off by half of what they differ in, times the ratio of their sigmas.
    """
    for i, (here, there) in _steps(moves, begin):
        dt = there.sigma - here.sigma
        yield Row(i, here, 1.0, (dt,))
        if there.sigma > 0 and here.sigma < schedule.endless:
            yield Row(i, there, 1.0, (dt / 2, -dt / 2))


def _kdpm2(moves: Moves, schedule: NoiseSchedule, begin: int) -> Iterator[Row]:
    """DPM-Solver-2 in sigma, by way of the geometric mean: Karras et al. 2022, algorithm 2 with
    k-diffusion's choice of the middle; its last step is Euler's."""
    for i, (here, there) in _steps(moves, begin):
        sigma = math.sqrt(here.sigma * there.sigma)
        yield Row(i, here, 1.0, (sigma - here.sigma,))
        if there.sigma > 0:
            middle = schedule.level(float(schedule.timestep(sigma)), 1.0, sigma)
            yield Row(i, middle, 1.0, (there.sigma - here.sigma, here.sigma - sigma))


def _lms(moves: Moves, schedule: NoiseSchedule, begin: int) -> Iterator[Row]:
    """Linear multistep of order 4: integrates the polynomial in sigma through eps; k-diffusion.

    Midway it begins with weights for outputs that were never made, as diffusers' does.
    """
    for i, (here, there) in _steps(moves, begin):
        dt = there.sigma - here.sigma
        nodes = [(level.sigma - here.sigma) / dt for level, _ in moves[i::-1][:4]]
        integrals = dt / np.arange(1, len(nodes) + 1)
        yield Row(i, here, 1.0, np.linalg.solve(np.vander(nodes, increasing=True).T, integrals))


def _width(move: tuple[Level, Level]) -> float:
    """Return the h of the DPM-Solver papers."""
    return move[1].log_snr - move[0].log_snr


def _order(moves: Moves, begin: int, i: int, schedule: Schedule, most: int) -> int:
    """Return the order of a multistep method's step i.

    It is less at the start, and in short runs at the end, and 1 if the last step goes all the way
    or nowhere.
    """
    (here, there), left = moves[i], len(moves) - i
    if there.sigma == 0 or math.isclose(here.sigma, there.sigma):
        return 1
    falls = schedule.config.lower_order_final is not False and len(moves) < 15
    return min(most, i - begin + 1, left if falls else most)


def _dpmpp(
    moves: Moves, schedule: Schedule, begin: int, *, order: int, eta: float = 0.0
) -> Iterator[Row]:
    """DPM-Solver++ multistep, Lu et al. 2022 (https://arxiv.org/abs/2211.01095), algorithm 2; with
    eta = 1 its SDE form."""
    m = np.eye(3)
    for i, (here, there) in _steps(moves, begin):
        a, b, s = _toward(here, there, eta)
        x0 = b * m[0]
        now = 1 if schedule.config.euler_at_final and i == len(moves) - 1 else order
        now = _order(moves, begin, i, schedule, now)
        if now > 1:
            h, h0 = _width(moves[i]), _width(moves[i - 1])
            slope = h / h0 * (m[0] - m[1])
        if now == 2:
            x0 += b / 2 * slope
        if now == 3:
            h1 = _width(moves[i - 2])
            bend = (slope - h / h1 * (m[1] - m[2])) / (h0 + h1)
            phi = 1 + math.expm1(-h) / h
            x0 += there.alpha * (phi * (slope + h0 * bend) - (phi / h - 0.5) * h * bend)
        yield Row(i, here, a, x0, s)


def _dpmpp_2s(moves: Moves, schedule: NoiseSchedule, begin: int) -> Iterator[Row]:
    """DPM-Solver++ single-step, Lu et al. 2022 (https://arxiv.org/abs/2211.01095), algorithm 1.

    Steps come in pairs: the second starts over from the x before the first, got back from x. Midway
    a second one without its first is a step on its own.
    """
    paired = len(moves) - bool(schedule.config.lower_order_final or moves[-1][1].sigma == 0)
    for i, (here, there) in _steps(moves, begin):
        if i % 2 == 0 or i >= paired or i == begin:
            a0, b0, _ = _toward(here, there)
            yield Row(i, here, a0, (b0,))
        else:
            first = moves[i - 1][0]
            a, b, _ = _toward(first, there)
            r = _width((first, there)) / _width((first, here)) / 2
            yield Row(i, here, a / a0, (b * r, b * (1 - r) - b0 * a / a0))


def _unipc(moves: Moves, schedule: Schedule, begin: int) -> Iterator[Row]:
    """UniPC of order 2 with B(h) = e^h - 1, Zhao et al. 2023 (https://arxiv.org/abs/2302.04867).

    Each row first corrects the x that the step before predicted, then predicts the next one with
    what is DPM-Solver++ 2M.
    """
    m = np.eye(3)
    correction = 0 * m[0]
    for i, (here, there) in _steps(moves, begin):
        a, b, _ = _toward(here, there)
        x0 = b * m[0] + a * correction
        most = min(2, len(moves) - i) if schedule.config.lower_order_final is not False else 2
        if _order(moves, begin, i, schedule, most) == 1:
            correction = b / 2 * (m[0] - m[1])
        else:
            h = _width(moves[i])
            r = _width(moves[i - 1]) / h
            x0 += b / 2 * (m[0] - m[1]) / r
            first = -1 / h - 1 / math.expm1(-h)
            second = -2 * first / h - 1 / math.expm1(-h)
            back, new = np.linalg.solve([[1, 1], [-r, 1]], [first, second])
            correction = b * ((0.5 - back) * (m[2] - m[1]) / r + new * (m[0] - m[1]))
        yield Row(i, here, a, x0)


def _deis(moves: Moves, schedule: NoiseSchedule, begin: int) -> Iterator[Row]:
    """Exponential integrator of order 2, Zhang and Chen 2022 (https://arxiv.org/abs/2204.13902):
    integrates the line in log rho through eps, with rho = sigma / alpha."""
    for i, (here, there) in _steps(moves, begin):
        rho, end = math.exp(-here.log_snr), math.exp(-there.log_snr)
        b = np.array([end - rho, 0.0])
        if _order(moves, begin, i, schedule, 2) == 2:
            area = end * (math.log(end / rho) - 1) + rho
            b += area / _width(moves[i - 1]) * np.array([-1, 1])
        yield Row(i, here, there.alpha / here.alpha, there.alpha * b)


@dataclass(frozen=True)
class Sampler:
    """A sampler; its `spacings` begin with diffusers' default."""

    label: str
    scheduler: str  # diffusers' class
    spacings: tuple[str, ...]
    grid: Callable[..., Moves]
    rows: Callable[..., Iterator[Row]]
    history: str = "x0"  # what h is: x0, eps or out
    evaluations: int = 1  # of the model, a step
    stochastic: bool = False
    solver: tuple[int, bool] = (2, False)  # config: solver_order; algorithm_type is an SDE's


_EVERY = ("linspace", "leading", "trailing", "karras", "exponential")
_MULTISTEP = "DPMSolverMultistepScheduler"

SAMPLERS = {
    "ddim": Sampler(
        "DDIM", "DDIMScheduler", TIME_SPACINGS, partial(strided, to_one=True), _one_step
    ),
    "ddpm": Sampler("DDPM", "DDPMScheduler", TIME_SPACINGS, ancestral, _ddpm, stochastic=True),
    "pndm": Sampler(
        "PNDM (PLMS)",
        "PNDMScheduler",
        TIME_SPACINGS,
        partial(strided, to_one=False),
        _pndm,
        history="out",
    ),
    "euler": Sampler(
        "Euler", "EulerDiscreteScheduler", _EVERY, partial(growing, sigma_min=True), _one_step
    ),
    "euler_ancestral": Sampler(
        "Euler ancestral",
        "EulerAncestralDiscreteScheduler",
        _EVERY[:3],
        growing,
        partial(_one_step, eta=1.0),
        stochastic=True,
    ),
    "heun": Sampler(
        "Heun", "HeunDiscreteScheduler", _EVERY, growing, _heun, history="eps", evaluations=2
    ),
    "lms": Sampler("LMS", "LMSDiscreteScheduler", _EVERY, growing, _lms, history="eps"),
    "dpmpp_2m": Sampler("DPM++ 2M", _MULTISTEP, _EVERY, solving, partial(_dpmpp, order=2)),
    "dpmpp_2m_sde": Sampler(
        "DPM++ 2M SDE",
        _MULTISTEP,
        _EVERY,
        solving,
        partial(_dpmpp, order=2, eta=1.0),
        stochastic=True,
        solver=(2, True),
    ),
    "dpmpp_3m": Sampler(
        "DPM++ 3M", _MULTISTEP, _EVERY, solving, partial(_dpmpp, order=3), solver=(3, False)
    ),
    "dpmpp_2s": Sampler(
        "DPM++ 2S",
        "DPMSolverSinglestepScheduler",
        ("linspace", "karras", "exponential"),
        solving,
        _dpmpp_2s,
    ),
    "kdpm2": Sampler(
        "KDPM2",
        "KDPM2DiscreteScheduler",
        _EVERY,
        partial(growing, whole_karras=True),
        _kdpm2,
        history="eps",
        evaluations=2,
    ),
    "unipc": Sampler("UniPC", "UniPCMultistepScheduler", _EVERY, solving, _unipc),
    "deis": Sampler(
        "DEIS",
        "DEISMultistepScheduler",
        _EVERY,
        partial(solving, sigma_min=True),
        _deis,
        history="eps",
    ),
    "lcm": Sampler(
        "LCM",
        "LCMScheduler",
        ("trailing",),
        partial(distilled, sampler="LCM"),
        _lcm,
        stochastic=True,
    ),
    "tcd": Sampler(
        "TCD",
        "TCDScheduler",
        ("trailing",),
        partial(distilled, sampler="TCD", to_first=True),
        _tcd,
        stochastic=True,
    ),
}

# Those for flow matching, whose sigmas have one spacing only.
FLOW_SAMPLERS = {
    "euler": Sampler("Euler", "FlowMatchEulerDiscreteScheduler", (), flowing, _one_step),
    "heun": Sampler(
        "Heun", "FlowMatchHeunDiscreteScheduler", (), flowing, _heun, history="out", evaluations=2
    ),
    "dpmpp_2m": Sampler(
        "DPM++ 2M", _MULTISTEP, (), partial(flow_solving, from_zero=True), partial(_dpmpp, order=2)
    ),
    "unipc": Sampler("UniPC", "UniPCMultistepScheduler", (), flow_solving, _unipc),
    "lcm": Sampler("LCM", "FlowMatchLCMScheduler", (), flowing, _renoised, stochastic=True),
}


def samplers_for(schedule: Schedule) -> dict[str, Sampler]:
    """Return the samplers that a schedule can be sampled by."""
    return FLOW_SAMPLERS if isinstance(schedule, FlowSchedule) else SAMPLERS


@dataclass(frozen=True, eq=False)
class Table:
    """A run: `rows` float64 [R, len(COLUMNS)]; `step` int [R], the step each row belongs to; and
    `levels` float64 [R, 2], alpha and sigma of the x before each row."""

    rows: np.ndarray
    step: np.ndarray
    levels: np.ndarray
    init_noise_sigma: float


def make_table(
    sampler: str,
    schedule: Schedule,
    steps: int,
    *,
    spacing: str | None = None,
    eta: float | None = None,
    begin: int = 0,
) -> Table:
    """Return the table for `steps` steps of the sampler with this key of SAMPLERS.

    Without `spacing` it is the checkpoint's, or else the sampler's first. `eta` is a share of fresh
    noise, 0 to 1: of DDIM, by default 0, and of TCD, by default 0.3. What is taken are the steps
    from `begin` on, as of a picture under noise: alpha and sigma of the first level, times the
    picture and the noise.

    Raises:
        ValueError: the sampler or the spacing is unknown, or steps, eta or begin are out of range.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"Sampler {sampler!r} is unknown; there are {', '.join(SAMPLERS)}.")
    method, total = _method(sampler, schedule), schedule.total
    if not 1 <= steps <= total:
        raise SentenceError(
            "{sampler} takes 1 to {total} steps, not {steps}.",
            sampler=method.label,
            total=total,
            steps=steps,
        )
    if eta is not None and sampler not in ("ddim", "tcd"):
        raise ValueError(f"eta is for ddim and tcd; {sampler} has none.")
    if eta is not None and not 0 <= eta <= 1:
        raise ValueError(f"eta is a share of noise, 0 to 1, not {eta}.")
    if not 0 <= begin < steps:
        raise ValueError(f"A table of {steps} steps cannot begin at step {begin}.")
    spacing, times = _spacings(method, schedule, spacing)
    moves = method.grid(schedule, steps, spacing, times)
    if min(np.diff([here.alpha / here.sigma for here, _ in moves]), default=1.0) <= 0:
        raise SentenceError(
            "{steps} steps are too many for {sampler} with {spacing} spacing: some of the "
            "{total} timesteps would repeat. Take fewer steps or another spacing.",
            steps=steps,
            sampler=method.label,
            spacing=spacing,
            total=total,
        )
    rows = list(method.rows(moves, schedule, begin, **({} if eta is None else {"eta": eta})))
    first = moves[0][0]
    # With leading spacing diffusers lets Euler and its kin start on noise and a clean image's worth
    sigma_only = first.alpha == 1 and times != "leading"
    noise = first.sigma if sigma_only else math.hypot(first.alpha, first.sigma)
    return Table(
        rows=np.array([_columns(row, method.history) for row in rows]),
        step=np.array([row.step - begin for row in rows]),
        levels=np.array([[row.at.alpha, row.at.sigma] for row in rows]),
        init_noise_sigma=1.0 if isinstance(schedule, FlowSchedule) else noise,
    )


def steps_taken(steps: int, strength: float) -> int:
    """Return how many of these steps, the last ones, a picture under so much noise takes.

    As in diffusers they are rounded down.
    """
    return int(steps * strength)


def _columns(row: Row, history: str) -> list[float]:
    t, alpha, sigma, c_in, p, q = row.at
    match history:
        case "x0":
            u, v = p, q
        case "eps":
            u, v = (1 - alpha * p) / sigma, -alpha * q / sigma
        case "out":
            u, v = 0.0, 1.0
    b = [*row.b, *[0.0] * HISTORY][:HISTORY]
    return [t, c_in, u, v, row.a, *b, row.s, p, q]


def with_forecasts(table: Table, skipped: Bool[np.ndarray, " R"]) -> Table:
    """Return the table with the model's output forecast in skipped rows.

    Their h is on the line in t through those of the last two rows before that are evaluated;
    farther than REACH from the last, or where both have the same t, as in PLMS, it is that of the
    last.

    It is TaylorSeer's of order 1 (Liu et al. 2025, https://arxiv.org/abs/2503.06923), of the
    sampler's history instead of features inside the model (decision 0018).
    """
    rows, t = table.rows.copy(), table.rows[:, 0]
    for r in np.flatnonzero(skipped):
        newest, before = np.flatnonzero(~skipped[:r])[:-3:-1]
        reach, span = t[newest] - t[r], t[before] - t[newest]
        share = reach / span if span and reach <= REACH else 0.0
        row = dict(zip(COLUMNS, rows[r], strict=True))
        q = row["q"] / row["v"]
        rows[r] = list((row | dict(u=1 + share, v=-share, p=row["p"] - q * row["u"], q=q)).values())
    return dataclasses.replace(table, rows=rows)


def spacing_taken(sampler: str, schedule: Schedule, spacing: str | None) -> str:
    """Return the spacing that a sampler takes, if asked for this one or for none.

    Raises:
        ValueError: the schedule cannot be sampled so.
    """
    return _spacings(_method(sampler, schedule), schedule, spacing)[0]


def _method(sampler: str, schedule: Schedule) -> Sampler:
    methods = samplers_for(schedule)
    if sampler not in methods:
        raise SentenceError(
            "{sampler} is not for this model, which was trained by flow matching; there are "
            "{known}.",
            sampler=SAMPLERS[sampler].label,
            known=", ".join(method.label for method in methods.values()),
        )
    return methods[sampler]


def _spacings(method: Sampler, schedule: Schedule, spacing: str | None) -> tuple[str, str]:
    """Return the spacing to take, and the spacing of timesteps that it is or rests on; "" both for
    flow matching, which has no choice."""
    if isinstance(schedule, FlowSchedule):
        if spacing:
            raise SentenceError(
                "{sampler} has no {spacing} spacing for this model, which was trained by flow "
                "matching: leave the spacing to it.",
                sampler=method.label,
                spacing=spacing,
            )
        return "", ""
    times = schedule.config.timestep_spacing
    if times not in method.spacings:
        times = method.spacings[0]
    if spacing is None and schedule.scheduler == method.scheduler:
        spacing = schedule.sigma_spacing
    spacing = spacing or times
    if spacing not in method.spacings:
        raise ValueError(
            f"{method.label} has no {spacing!r} spacing; it has {', '.join(method.spacings)}."
        )
    return spacing, spacing if spacing in TIME_SPACINGS else times


def default_sampler(scheduler_config: dict[str, Any]) -> tuple[str, str | None]:
    """Return the sampler's key and the spacing that a `scheduler_config.json` asks for.

    The spacing is None where the config leaves it to the sampler.

    Raises:
        CheckpointError: no sampler here does what the config says.
    """
    schedule = read_schedule(scheduler_config)
    name = schedule.scheduler
    if isinstance(schedule, FlowSchedule):
        for key, sampler in FLOW_SAMPLERS.items():
            if sampler.scheduler == name:
                return key, None
        known = ", ".join(sampler.scheduler for sampler in FLOW_SAMPLERS.values())
        raise CheckpointError(
            f"The scheduler {name!r} is not supported for flow matching; there are {known}."
        )
    if name == "PNDMScheduler" and not schedule.config.skip_prk_steps:
        raise CheckpointError("PNDMScheduler is supported with skip_prk_steps=true only.")
    order = schedule.config.solver_order
    sde = schedule.config.algorithm_type == "sde-dpmsolver++"
    for key, sampler in SAMPLERS.items():
        if (sampler.scheduler, sampler.solver) == (name, (order, sde)):
            spacing = schedule.sigma_spacing or schedule.config.timestep_spacing
            return key, spacing if spacing in sampler.spacings else None
    known = dict.fromkeys(sampler.scheduler for sampler in SAMPLERS.values())
    if name in known:
        kind = "an SDE" if sde else "an ODE"
        raise CheckpointError(f"{name} of order {order} for {kind} is not supported.")
    raise CheckpointError(f"The scheduler {name!r} is not supported; there are {', '.join(known)}.")
