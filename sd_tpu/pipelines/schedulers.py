"""The Flax schedulers of diffusers up to 0.39: an object with a config, and its state as a tree.

Unlike the tables of `sd_tpu.sampling`, which need their numbers on the host, these can be traced:
`set_timesteps` and `step` work under jit, pmap and scan with a state whose numbers are traced. The
betas are such numbers, as programs may put others into a state, so the old classes compute each
step's coefficients from the state. Only `TableScheduler` takes them from a table.

Where the old classes could not run (LMS, Karras-Ve, DDPM with fewer steps than it was trained on,
Euler at fractions of timesteps) the results are those of PyTorch's classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from sd_tpu.pipelines.configs import Configured, warn_of_unknown
from sd_tpu.pipelines.files import take_options
from sd_tpu.sampling.samplers import COLUMNS, HISTORY, default_sampler, make_table
from sd_tpu.sampling.schedule import NoiseSchedule

FEW_STEPS = 15  # of DPM-Solver, below which its last steps are of lower order


@flax.struct.dataclass
class CommonSchedulerState:
    """Numbers that say how noise was mixed in at training, each [T] f32."""

    alphas: jax.Array
    betas: jax.Array
    alphas_cumprod: jax.Array


@flax.struct.dataclass
class SchedulerState:
    """State of a scheduler.

    A field is None where another scheduler has it or `set_timesteps` will set it; to type checkers
    the fields are `Any`. Before `set_timesteps` all leaves are floating-point arrays.
    """

    common: CommonSchedulerState
    init_noise_sigma: jax.Array  # deviation of the noise to begin with
    final_alpha_cumprod: Any = None  # where the last step leads
    num_inference_steps: Any = flax.struct.field(pytree_node=False, default=None)
    timesteps: Any = None  # [steps], falling
    sigmas: Any = None  # [steps + 1], falling to 0
    prk_timesteps: Any = None  # PNDM's Runge-Kutta evaluations
    plms_timesteps: Any = None  # and its others
    history: Any = None  # [order, *shape], newest first
    counter: Any = None  # of evaluations so far
    rows: Any = None  # a sampler's table
    cur_sample: Any = None  # PNDM: where the step in several evaluations began
    cur_model_output: Any = None  # PNDM: the mean of its evaluations so far


class SchedulerOutput(NamedTuple):
    """Result of `step`."""

    prev_sample: jax.Array
    state: Any

    def to_tuple(self) -> tuple[jax.Array, Any]:
        """Return (prev_sample, state)."""
        return tuple(self)


class SavedConfig(Configured):
    """Scheduler whose config is read from a file and written to one."""

    create_state: Callable[..., Any]

    config_name = "scheduler_config.json"
    has_state = True

    def __init__(self, *args: Any, dtype: Any = jnp.float32, **values: Any):
        """Take the values of the config; `dtype` is that of the state between steps."""
        super().__init__(*args, **values)
        self.dtype = dtype

    @classmethod
    def from_pretrained(
        cls, name: str | Path, subfolder: str | None = None, **options: Any
    ) -> tuple[Self, Any]:
        """Read a checkpoint's scheduler.

        Args:
            name: folder or hub id.
            subfolder: the one that has `scheduler_config.json`, mostly "scheduler".
            options: as the pipelines take them, and values to put in place of the config's.

        Returns:
            The scheduler and its first state.

        Raises:
            CheckpointError: there is no such config, or it asks for what is not supported.
        """
        hub = take_options(options)
        dtype = options.pop("dtype", None)
        config = cls.load_config(name, subfolder=subfolder, **hub)
        values = {key: options.pop(key) for key in cls.defaults if key in options}
        warn_of_unknown(options, cls.__name__)
        scheduler = cls.from_config(config, dtype=dtype, **values)
        return scheduler, scheduler.create_state()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write the config, which `from_pretrained` reads."""
        take_options(options)
        warn_of_unknown(options, type(self).__name__)
        self.save_config(folder)


class FlaxScheduler(SavedConfig):
    """Base of all schedulers but Karras-Ve's."""

    noise: ClassVar[dict[str, Any]] = dict(
        num_train_timesteps=1000,
        beta_start=0.0001,
        beta_end=0.02,
        beta_schedule="linear",
        trained_betas=None,
    )
    order: ClassVar[int] = 0  # of the history
    stochastic: ClassVar[bool] = False  # whether `step` takes noise
    _step: Callable[..., Any]  # each class's own

    def __len__(self) -> int:
        return self.config.num_train_timesteps

    def create_state(self, common: CommonSchedulerState | None = None) -> SchedulerState:
        """Return the state to begin with.

        Raises:
            CheckpointError: the config asks for what is not supported.
        """
        common = common or self._common()
        final = None
        if "set_alpha_to_one" in self.defaults:
            to_one = self.config.set_alpha_to_one
            final = jnp.ones(()) if to_one else jnp.asarray(common.alphas_cumprod)[0]
        return SchedulerState(
            common=common,
            final_alpha_cumprod=final,
            init_noise_sigma=self._first_deviation(common.alphas_cumprod),
        )

    def _common(self) -> CommonSchedulerState:
        training = (
            *self.noise,
            "prediction_type",
            "variance_type",
            "rescale_betas_zero_snr",
            "thresholding",
        )
        schedule = {name: self.config[name] for name in training if name in self.config}
        if schedule["trained_betas"] is not None:
            schedule["trained_betas"] = np.asarray(schedule["trained_betas"]).tolist()
        signal = NoiseSchedule.from_config(schedule).alphas_cumprod
        alphas = signal / np.append(1.0, signal[:-1])
        return CommonSchedulerState(
            *(jnp.asarray(values, jnp.float32) for values in (alphas, 1 - alphas, signal))
        )

    def _first_deviation(self, alphas_cumprod: jax.Array) -> jax.Array:
        return jnp.ones((), jnp.float32)

    def set_timesteps(
        self, state: SchedulerState, num_inference_steps: int, shape: tuple[int, ...] = ()
    ) -> SchedulerState:
        """Return the state before the first step.

        Args:
            state: any of this scheduler.
            num_inference_steps: a number, not traced.
            shape: of the samples, where earlier results are kept.

        Raises:
            ValueError: the spacing is unknown.
        """
        return dataclasses.replace(
            state,
            num_inference_steps=num_inference_steps,
            counter=jnp.int32(0),
            history=jnp.zeros((self.order, *shape), self.dtype) if self.order else None,
            **self._run_fields(state, num_inference_steps, shape),
        )

    def _run_fields(
        self, state: SchedulerState, steps: int, shape: tuple[int, ...]
    ) -> dict[str, Any]:
        """Return the fields of the state that `set_timesteps` sets in this class."""
        return dict(timesteps=jnp.asarray(self._timesteps(steps)))

    def _timesteps(self, steps: int) -> np.ndarray:
        """Return the timesteps that are passed to the model, [steps] i32."""
        return self._spaced("leading", steps, steps).astype(np.int32)

    def _spaced(self, spacing: str, steps: int, points: int) -> np.ndarray:
        """Return the first `steps` of so many falling timesteps from end to end of the training's.

        Raises:
            ValueError: the spacing is unknown.
        """
        total = len(self)
        match spacing:
            case "linspace":
                # A single step begins at the last of them, as in the old classes.
                return np.linspace(0, total - 1, max(points, 2))[::-1][:steps]
            case "leading":
                times = np.arange(points)[::-1][:steps] * (total // points)
                return times + self.config.get("steps_offset", 0)
            case "trailing":
                return np.arange(total, 0, -total / steps).round() - 1
        raise ValueError(
            f"There is no {spacing!r} spacing; there are linspace, leading and trailing."
        )

    def scale_model_input(
        self, state: SchedulerState, sample: jax.Array, timestep: Any = None
    ) -> jax.Array:
        """Return the sample as the model takes it."""
        return sample

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple:
        """Take one step, from the model's output at a timestep.

        Args:
            state: after `set_timesteps`.
            model_output: like sample.
            timestep: a number, perhaps traced.
            sample: of any shape.
            return_dict: False for a plain tuple.

        Returns:
            The sample before it and the next state, as `.prev_sample` and `.state`.

        Raises:
            ValueError: there are no timesteps yet.
        """
        self._check(state)
        return _output(*self._step(state, model_output, timestep, sample), return_dict)

    def _check(self, state: SchedulerState) -> None:
        if state.num_inference_steps is None:
            raise ValueError("There are no timesteps yet: call set_timesteps first.")

    def _level(self, state: SchedulerState, timestep: Any) -> tuple[jax.Array, jax.Array]:
        """Return alpha and sigma of x = alpha * x0 + sigma * eps at a timestep.

        Past the end they are those that the last step leads to.
        """
        timestep = jnp.asarray(timestep, jnp.int32)
        end = 1.0 if state.final_alpha_cumprod is None else state.final_alpha_cumprod
        signal = jnp.asarray(state.common.alphas_cumprod)[jnp.maximum(timestep, 0)]
        signal = jnp.where(timestep >= 0, signal, end)
        return jnp.sqrt(signal), jnp.sqrt(1 - signal)

    def _predictions(
        self, model_output: jax.Array, sample: jax.Array, alpha: jax.Array, sigma: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return x0 and eps of a sample of unit variance."""
        match self.config.prediction_type:
            case "epsilon":
                return (sample - sigma * model_output) / alpha, model_output
            case "v_prediction":
                return (
                    alpha * sample - sigma * model_output,
                    alpha * model_output + sigma * sample,
                )
            case _:
                return model_output, (sample - alpha * model_output) / sigma

    def _index(self, state: SchedulerState, timestep: Any) -> jax.Array:
        """Return which step begins at a timestep, which may have been rounded down before."""
        return jnp.argmax(jnp.floor(state.timesteps) <= jnp.asarray(timestep))

    def add_noise(
        self,
        state: SchedulerState,
        original_samples: jax.Array,
        noise: jax.Array,
        timesteps: jax.Array,
    ) -> jax.Array:
        """Add noise [B, ...] to samples [B, ...] as at these timesteps, [B] or one number."""
        alpha, sigma = self._mix(state, original_samples, timesteps)
        return alpha * original_samples + sigma * noise

    def get_velocity(
        self, state: SchedulerState, sample: jax.Array, noise: jax.Array, timesteps: jax.Array
    ) -> jax.Array:
        """Return the velocity that a model learns to predict.

        Salimans and Ho 2022, arXiv:2202.00512.

        Args:
            state: of this scheduler.
            sample: [B, ...].
            noise: [B, ...].
            timesteps: [B] or one number.
        """
        alpha, sigma = self._mix(state, sample, timesteps)
        return alpha * noise - sigma * sample

    def _mix(
        self, state: SchedulerState, like: jax.Array, timesteps: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        signal = _column(jnp.asarray(state.common.alphas_cumprod)[jnp.asarray(timesteps)], like)
        return jnp.sqrt(signal), jnp.sqrt(1 - signal)

    def consistent(self, state: SchedulerState) -> SchedulerState:
        """Return the state as a picture is drawn with it.

        Numbers that were cast to half precision along with a model's parameters, and perhaps back,
        are put back to the config's; where only the betas are others, alphas_cumprod follows them.
        """
        own, common = self.create_state(), state.common
        if jnp.finfo(common.alphas_cumprod.dtype).bits < 32:
            return own
        if common.betas.shape != own.common.betas.shape:
            return state
        alone = jnp.any(common.betas != own.common.betas) & jnp.all(
            common.alphas_cumprod == own.common.alphas_cumprod
        )
        signal = jnp.where(alone, jnp.cumprod(1 - common.betas), common.alphas_cumprod)
        # Not by `astype` there and back, which XLA may leave out.
        halves = (
            jax.lax.reduce_precision(own.common.alphas_cumprod, info.nexp, info.nmant)
            for info in map(jnp.finfo, (jnp.bfloat16, jnp.float16))
        )
        rounded = jnp.stack([jnp.all(half == common.alphas_cumprod) for half in halves]).any()
        return dataclasses.replace(
            state,
            common=jax.tree.map(
                lambda ours, theirs: jnp.where(rounded, ours, theirs),
                own.common,
                dataclasses.replace(common, alphas_cumprod=signal),
            ),
        )


def _output(sample: jax.Array, state: Any, return_dict: bool) -> SchedulerOutput | tuple:
    output = SchedulerOutput(sample, state)
    return output if return_dict else output.to_tuple()


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
    values = jnp.ravel(values)
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _take_row(
    state: SchedulerState, sample: jax.Array, newest: jax.Array, a: Any, b: jax.Array
) -> tuple[jax.Array, SchedulerState]:
    """Take the step of a row of `sd_tpu.sampling.samplers`, x = a * x + b[0] * h[0] + ...

    Args:
        state: with the history h of earlier rows.
        sample: x.
        newest: h of this row.
        a: a number.
        b: one number for each of the history.
    """
    history = _pushed(state.history, newest)
    state = dataclasses.replace(state, history=history, counter=state.counter + 1)
    return a * sample + _weighted(b, history), state


def _pushed(history: jax.Array, newest: jax.Array) -> jax.Array:
    return jnp.concatenate([newest[None].astype(history.dtype), history[:-1]])


def _weighted(weights: jax.Array, history: jax.Array) -> jax.Array:
    return jnp.tensordot(weights, history, axes=1)


class FlaxDDIMScheduler(FlaxScheduler):
    """DDIM, Song et al. 2020 (https://arxiv.org/abs/2010.02502)."""

    defaults: ClassVar = FlaxScheduler.noise | dict(
        clip_sample=True,
        clip_sample_range=1.0,
        set_alpha_to_one=True,
        steps_offset=0,
        prediction_type="epsilon",
    )

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        eta: float = 0.0,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple:
        """Take a step, as `FlaxScheduler.step`.

        `eta` is the share of the noise to leave out. As in the old class no fresh noise replaces
        it.
        """
        self._check(state)
        alpha, sigma = self._level(state, timestep)
        x0, eps = self._predictions(model_output, sample, alpha, sigma)
        if self.config.clip_sample:
            x0 = jnp.clip(x0, -self.config.clip_sample_range, self.config.clip_sample_range)
        back = jnp.asarray(timestep, jnp.int32) - len(self) // state.num_inference_steps
        next_alpha, next_sigma = self._level(state, back)
        fresh = eta**2 * (1 - (next_sigma * alpha / (next_alpha * sigma)) ** 2)  # eq. 16
        return _output(next_alpha * x0 + next_sigma * jnp.sqrt(1 - fresh) * eps, state, return_dict)


class _Stochastic(FlaxScheduler):
    """Schedulers whose steps take fresh noise."""

    stochastic = True

    def step(
        self,
        state: SchedulerState,
        model_output: jax.Array,
        timestep: Any,
        sample: jax.Array,
        key: jax.Array | None = None,
        return_dict: bool = True,
        *,
        noise: jax.Array | None = None,
    ) -> SchedulerOutput | tuple:
        """Take a step, as `FlaxScheduler.step`, with fresh noise: `noise`, or drawn from `key`."""
        if noise is None:
            key = jax.random.split(jax.random.key(0) if key is None else key, 1)[0]
            noise = jax.random.normal(key, model_output.shape, self.dtype)
        return _output(*self._step(state, model_output, timestep, sample, noise), return_dict)


class FlaxDDPMScheduler(_Stochastic):
    """Ancestral sampling, Ho et al. 2020 (https://arxiv.org/abs/2006.11239).

    Without timesteps in the state each step goes to the training's timestep before.
    """

    defaults: ClassVar = FlaxScheduler.noise | dict(
        variance_type="fixed_small", clip_sample=True, prediction_type="epsilon"
    )

    def _step(self, state, model_output, timestep, sample, noise):
        timestep = jnp.asarray(timestep, jnp.int32)
        mean, deviation = self._posterior(state, model_output, timestep, sample)
        return mean + jnp.where(timestep > 0, deviation, 0) * noise, state

    def _posterior(
        self, state: SchedulerState, model_output: jax.Array, timestep: jax.Array, sample: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return mean and deviation of the previous sample, eq. 6 and 7."""
        stride = len(self) // (state.num_inference_steps or len(self))
        alpha, sigma = self._level(state, timestep)
        next_alpha, next_sigma = self._level(state, timestep - stride)
        x0, _ = self._predictions(model_output, sample, alpha, sigma)
        if self.config.clip_sample:
            x0 = jnp.clip(x0, -1, 1)
        share = alpha / next_alpha
        beta = 1 - share**2
        mean = (next_alpha * beta * x0 + share * next_sigma**2 * sample) / sigma**2
        large = self.config.variance_type == "fixed_large"
        return mean, jnp.sqrt(beta) if large else jnp.sqrt(beta) * next_sigma / sigma


class FlaxPNDMScheduler(FlaxScheduler):
    """Pseudo numerical methods, Liu et al. 2022 (https://arxiv.org/abs/2202.09778)."""

    defaults: ClassVar = FlaxScheduler.noise | dict(
        skip_prk_steps=False, set_alpha_to_one=False, steps_offset=0, prediction_type="epsilon"
    )
    order = 4
    # Of the outputs, newest first, in the evaluations 0, 1 (of the same step), 2, 3 and all after.
    WEIGHTS = (
        (1, 0, 0, 0),
        (1 / 2, 1 / 2, 0, 0),
        (3 / 2, -1 / 2, 0, 0),
        (23 / 12, -16 / 12, 5 / 12, 0),
        (55 / 24, -59 / 24, 37 / 24, -9 / 24),
    )
    RUNGE_KUTTA = (1 / 6, 1 / 3, 1 / 3, 1 / 6)

    def _run_fields(
        self, state: SchedulerState, steps: int, shape: tuple[int, ...]
    ) -> dict[str, Any]:
        runge_kutta, multistep = self._both_timesteps(steps)
        return dict(
            timesteps=jnp.concatenate([runge_kutta, multistep]),
            prk_timesteps=jnp.asarray(runge_kutta),
            plms_timesteps=jnp.asarray(multistep),
            cur_sample=jnp.zeros(shape, self.dtype),
            cur_model_output=jnp.zeros(shape, self.dtype),
        )

    def _both_timesteps(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the timesteps of Runge-Kutta evaluations, four a step, and of multistep ones."""
        times = self._timesteps(steps)
        if self.config.skip_prk_steps:
            return times[:0], np.insert(times, 1, times[1:2])
        points = np.repeat(times[:4], 2)
        points[::2] += len(self) // steps // 2
        return np.repeat(points[1:], 2)[1:-1], times[3:]

    def _step(self, state, model_output, timestep, sample):
        multistep = self.step_plms(state, model_output, timestep, sample)
        if self.config.skip_prk_steps:
            return multistep
        runge_kutta = self.step_prk(state, model_output, timestep, sample)
        first = state.counter < len(state.prk_timesteps)
        return jax.tree.map(lambda a, b: jnp.where(first, a, b), runge_kutta, multistep)

    def step_plms(
        self, state: SchedulerState, model_output: jax.Array, timestep: Any, sample: jax.Array
    ) -> tuple[jax.Array, SchedulerState]:
        """Take a linear multistep, eq. 12.

        The first one takes two evaluations, the second of which repeats it with the mean of both
        outputs.
        """
        again = state.counter == 1
        stride = len(self) // state.num_inference_steps
        start = jnp.asarray(timestep, jnp.int32) + again * stride
        pushed = _pushed(state.history, model_output)
        weights = jnp.asarray(self.WEIGHTS)[jnp.minimum(state.counter, 4)]
        begun = jnp.where(again, state.cur_sample, sample)
        moved = self._transfer(state, begun, start, start - stride, _weighted(weights, pushed))
        return moved, dataclasses.replace(
            state,
            history=jnp.where(again, state.history, pushed),
            cur_sample=begun,
            counter=state.counter + 1,
        )

    def step_prk(
        self, state: SchedulerState, model_output: jax.Array, timestep: Any, sample: jax.Array
    ) -> tuple[jax.Array, SchedulerState]:
        """Take one of the four evaluations of a Runge-Kutta step, eq. 13."""
        stage = state.counter % 4
        half = len(self) // state.num_inference_steps // 2
        start = state.prk_timesteps[jnp.minimum(state.counter, 11) // 4 * 4]
        end = jnp.asarray(timestep, jnp.int32) - jnp.where(stage % 2, 0, half)
        mean = (
            jnp.where(stage == 0, 0, state.cur_model_output)
            + jnp.asarray(self.RUNGE_KUTTA)[stage] * model_output
        )
        begun = jnp.where(stage == 0, sample, state.cur_sample)
        history = jnp.where(stage == 0, _pushed(state.history, model_output), state.history)
        moved = self._transfer(state, begun, start, end, jnp.where(stage == 3, mean, model_output))
        return moved, dataclasses.replace(
            state,
            history=history,
            cur_sample=begun,
            cur_model_output=mean,
            counter=state.counter + 1,
        )

    def _transfer(self, state, sample, timestep, back, model_output) -> jax.Array:
        """Transfer a sample by eq. 9, which is DDIM's step."""
        x0, eps = self._predictions(model_output, sample, *self._level(state, timestep))
        alpha, sigma = self._level(state, back)
        return alpha * x0 + sigma * eps


class FlaxDPMSolverMultistepScheduler(FlaxScheduler):
    """DPM-Solver and DPM-Solver++, Lu et al. 2022.

    https://arxiv.org/abs/2206.00927 and https://arxiv.org/abs/2211.01095. The last step leads to
    timestep 0, or to no noise if the config has `final_sigmas_type="zero"`, which is the default of
    PyTorch's class.
    """

    defaults: ClassVar = FlaxScheduler.noise | dict(
        solver_order=2,
        prediction_type="epsilon",
        thresholding=False,
        dynamic_thresholding_ratio=0.995,
        sample_max_value=1.0,
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        lower_order_final=True,
        timestep_spacing="linspace",
        final_sigmas_type="sigma_min",
    )
    order = 3

    def _timesteps(self, steps: int) -> np.ndarray:
        times = self._spaced(self.config.timestep_spacing, steps, steps + 1)
        return times.round().astype(np.int32)

    def _step(self, state, model_output, timestep, sample):
        index = self._index(state, timestep)
        predictions = self._predictions(model_output, sample, *self._level(state, timestep))
        newest = predictions[0] if self._of_data else predictions[1]
        return _take_row(state, sample, newest, *self._coefficients(state, index))

    @property
    def _of_data(self) -> bool:
        """Return whether the integral is of x0 (DPM-Solver++) or of eps."""
        return self.config.algorithm_type == "dpmsolver++"

    def _coefficients(self, state: SchedulerState, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the coefficients of the sample and, [3], of the predictions, newest first."""
        steps = len(state.timesteps)
        last = index == steps - 1
        there = jnp.where(last, 0, state.timesteps[jnp.minimum(index + 1, steps - 1)])
        alpha, sigma = self._level(state, there)
        if self.config.final_sigmas_type == "zero":
            alpha, sigma = jnp.where(last, 1.0, alpha), jnp.where(last, 0.0, sigma)
        alphas, sigmas = self._level(state, state.timesteps[jnp.maximum(index - np.arange(3), 0)])
        snr = jnp.log(jnp.append(alpha, alphas)) - jnp.log(jnp.append(sigma, sigmas))
        if self._of_data:
            ratio, scale, k = sigma / sigmas[0], alpha, snr[1] - snr[0]
        else:
            ratio, scale, k = alpha / alphas[0], sigma, snr[0] - snr[1]
        return ratio, -scale * self._weights(snr, k)[self._order(state, index) - 1]

    def _order(self, state: SchedulerState, index: jax.Array) -> jax.Array:
        """Return the order of a step: less at the start, and in short runs or ones to zero."""
        left = len(state.timesteps) - index
        order = jnp.minimum(self.config.solver_order, state.counter + 1)
        if self.config.lower_order_final and len(state.timesteps) < FEW_STEPS:
            order = jnp.minimum(order, left)
        to_zero = bool(self.config.final_sigmas_type == "zero" or self.config.get("euler_at_final"))
        return jnp.where(to_zero & (left == 1), 1, order)

    def _weights(self, snr: jax.Array, k: jax.Array) -> jax.Array:
        """Return weights of predictions in steps of orders 1, 2 and 3, [3, 3], up to a factor."""
        h, h0, h1 = snr[0] - snr[1], snr[1] - snr[2], snr[2] - snr[3]
        now, slope = jnp.eye(3)[0], h / h0 * jnp.array([1.0, -1, 0])
        earlier = h / h1 * jnp.array([0.0, 1, -1])
        phi1 = jnp.expm1(k)
        phi2 = phi1 / k - 1
        phi3 = (phi1 - k) / k**2 - 0.5
        second = phi2 if self.config.solver_type == "heun" else phi1 / 2
        bend = (slope - earlier) * h / (h0 + h1)
        return jnp.stack(
            [
                phi1 * now,
                phi1 * now + second * slope,
                phi1 * now + phi2 * (slope + h0 / h * bend) + phi3 * bend,
            ]
        )


class _Growing(FlaxScheduler):
    """Samplers of k-diffusion: x = x0 + sigma * eps."""

    def _first_deviation(self, alphas_cumprod: jax.Array) -> jax.Array:
        return self._deviation(_sigmas(alphas_cumprod)[-1])

    def _deviation(self, sigma: jax.Array) -> jax.Array:
        leading = self.config.get("timestep_spacing") == "leading"
        return jnp.sqrt(sigma**2 + 1) if leading else sigma

    def _run_fields(
        self, state: SchedulerState, steps: int, shape: tuple[int, ...]
    ) -> dict[str, Any]:
        spacing = self.config.get("timestep_spacing", "linspace")
        times = jnp.asarray(self._spaced(spacing, steps, steps), jnp.float32)
        sigmas = jnp.append(self._sigma(state, times), 0.0)
        return dict(timesteps=times, sigmas=sigmas, init_noise_sigma=self._deviation(sigmas[0]))

    def _sigma(self, state: SchedulerState, timesteps: jax.Array) -> jax.Array:
        sigmas = _sigmas(jnp.asarray(state.common.alphas_cumprod))
        return jnp.interp(jnp.asarray(timesteps), jnp.arange(len(sigmas)), sigmas)

    def scale_model_input(
        self, state: SchedulerState, sample: jax.Array, timestep: Any = None
    ) -> jax.Array:
        """Return the sample at unit variance, as the model takes it."""
        return sample / jnp.sqrt(state.sigmas[self._index(state, timestep)] ** 2 + 1)

    def _slope(self, model_output: jax.Array, sample: jax.Array, sigma: jax.Array) -> jax.Array:
        """Return the derivative by sigma, which is eps."""
        alpha = 1 / jnp.sqrt(sigma**2 + 1)
        return self._predictions(model_output, sample * alpha, alpha, sigma * alpha)[1]

    def add_noise(
        self,
        state: SchedulerState,
        original_samples: jax.Array,
        noise: jax.Array,
        timesteps: jax.Array,
    ) -> jax.Array:
        """Add noise [B, ...] to samples [B, ...] as at these timesteps, [B] or one number."""
        return original_samples + _column(self._sigma(state, timesteps), noise) * noise


def _sigmas(alphas_cumprod: jax.Array) -> jax.Array:
    return jnp.sqrt((1 - alphas_cumprod) / alphas_cumprod)


class FlaxEulerDiscreteScheduler(_Growing):
    """Euler's method, Karras et al. 2022 (https://arxiv.org/abs/2206.00364), algorithm 2."""

    defaults: ClassVar = FlaxScheduler.noise | dict(
        prediction_type="epsilon", timestep_spacing="linspace", steps_offset=1
    )

    def _step(self, state, model_output, timestep, sample):
        index = self._index(state, timestep)
        sigma, there = state.sigmas[index], state.sigmas[index + 1]
        return sample + (there - sigma) * self._slope(model_output, sample, sigma), state


class FlaxLMSDiscreteScheduler(_Growing):
    """Linear multistep of order 4 in sigma: k-diffusion."""

    defaults: ClassVar = FlaxScheduler.noise | dict(prediction_type="epsilon")
    order = 4

    def _step(self, state, model_output, timestep, sample):
        index = self._index(state, timestep)
        slope = self._slope(model_output, sample, state.sigmas[index])
        return _take_row(state, sample, slope, 1, self._integrals(state, index))

    def _integrals(self, state: SchedulerState, index: jax.Array) -> jax.Array:
        """Integrate Lagrange's polynomials through the newest slopes, [4], over the step.

        Gauss's two points are exact for a cubic.
        """
        here, there = state.sigmas[index], state.sigmas[index + 1]
        at = (here + there) / 2 + (there - here) / 2 * jnp.array([-1, 1]) / jnp.sqrt(3)
        nodes = state.sigmas[jnp.maximum(index - np.arange(4), 0)]
        known = jnp.arange(4) <= state.counter
        others = known[None] & ~np.eye(4, dtype=bool)
        factors = (at[:, None, None] - nodes) / jnp.where(others, nodes[:, None] - nodes, 1.0)
        values = jnp.prod(jnp.where(others, factors, 1.0), axis=-1)  # [points, 4]
        return jnp.where(known, values.sum(0) * (there - here) / 2, 0.0)


class TableScheduler(_Stochastic):
    """Any sampler of `sd_tpu.sampling`, as its config says it.

    Its table is made on the host, so other betas in a state change nothing. Steps follow one
    another, whatever the timestep.
    """

    defaults: ClassVar = FlaxScheduler.noise | dict(prediction_type="epsilon")
    order = HISTORY

    def _run_fields(
        self, state: SchedulerState, steps: int, shape: tuple[int, ...]
    ) -> dict[str, Any]:
        sampler, spacing = default_sampler(self.config)
        schedule = NoiseSchedule.from_config(self.config)
        table = make_table(sampler, schedule, steps, spacing=spacing)
        rows = jnp.asarray(table.rows, jnp.float32)
        return dict(
            timesteps=rows[:, 0], rows=rows, init_noise_sigma=jnp.float32(table.init_noise_sigma)
        )

    def _row(self, state: SchedulerState) -> dict[str, jax.Array]:
        return dict(zip(COLUMNS, state.rows[state.counter], strict=True))

    def scale_model_input(
        self, state: SchedulerState, sample: jax.Array, timestep: Any = None
    ) -> jax.Array:
        """Return the sample at unit variance, as the model takes it."""
        return self._row(state)["c_in"] * sample

    def _step(self, state, model_output, timestep, sample, noise):
        self._check(state)
        row = self._row(state)
        newest = row["u"] * sample + row["v"] * model_output
        weights = jnp.stack([row[f"b{k}"] for k in range(HISTORY)])
        moved, state = _take_row(state, sample, newest, row["a"], weights)
        return moved + row["s"] * noise, state


LEADING = (FlaxDDIMScheduler, FlaxDDPMScheduler, FlaxPNDMScheduler)  # the only spacing they have
OLD_CLASSES = {
    each.__name__: each
    for each in (
        *LEADING,
        FlaxDPMSolverMultistepScheduler,
        FlaxEulerDiscreteScheduler,
        FlaxLMSDiscreteScheduler,
    )
}
# Settings that the old classes do not have, with the values that change nothing.
BEYOND = {
    "use_karras_sigmas": (False, None),
    "use_exponential_sigmas": (False, None),
    "rescale_betas_zero_snr": (False, None),
    "algorithm_type": ("dpmsolver", "dpmsolver++", None),
}
# What only the old classes do: the values, and a value of the tables to check the config with.
BESIDE = {
    "skip_prk_steps": ((False, None), True),
    "algorithm_type": (("dpmsolver",), "dpmsolver++"),
    "solver_type": (("heun",), "midpoint"),
    "solver_order": ((1,), 2),
}


def scheduler_for(config: Mapping[str, Any]) -> FlaxScheduler:
    """Return the scheduler of a checkpoint's config.

    It is one of the old classes if it does what the config says, or else the sampler's table.

    Raises:
        CheckpointError: no sampler here does what the config says.
    """
    name = str(config.get("_class_name") or "").removeprefix("Flax")
    old_class = OLD_CLASSES.get(f"Flax{name}")
    known = all(config.get(key) in values for key, values in BEYOND.items())
    if old_class in LEADING and config.get("timestep_spacing", "leading") != "leading":
        known = False
    if (config.get("algorithm_type"), config.get("final_sigmas_type")) == ("dpmsolver", "zero"):
        known = False  # an integral of eps does not reach the end of the noise
    if old_class and known:
        instead = {
            key: other for key, (values, other) in BESIDE.items() if config.get(key) in values
        }
        default_sampler({**config, **instead})  # refuses what no class does
        return old_class.from_config(config)
    default_sampler(config)  # ty: ignore[invalid-argument-type]
    scheduler = TableScheduler.from_config(config)
    scheduler.config["_class_name"] = name
    return scheduler


@flax.struct.dataclass
class KarrasVeSchedulerState:
    """State of `FlaxKarrasVeScheduler`; all fields are None until `set_timesteps`."""

    num_inference_steps: int | None = flax.struct.field(pytree_node=False, default=None)
    timesteps: jax.Array | None = None  # [steps] i32, falling to 0
    schedule: jax.Array | None = None  # [steps] f32: the noise level of each, squared


class KarrasVeOutput(NamedTuple):
    """Result of `step` and `step_correct`."""

    prev_sample: jax.Array
    derivative: jax.Array
    state: KarrasVeSchedulerState

    def to_tuple(self) -> tuple[jax.Array, jax.Array, KarrasVeSchedulerState]:
        """Return (prev_sample, derivative, state)."""
        return tuple(self)


class FlaxKarrasVeScheduler(SavedConfig):
    """Stochastic sampling of variance-exploding models.

    Karras et al. 2022 (https://arxiv.org/abs/2206.00364), algorithm 2.
    """

    defaults: ClassVar = dict(
        sigma_min=0.02, sigma_max=100, s_noise=1.007, s_churn=80, s_min=0.05, s_max=50
    )

    def create_state(self) -> KarrasVeSchedulerState:
        """Return the state to begin with, which is empty."""
        return KarrasVeSchedulerState()

    def set_timesteps(
        self, state: KarrasVeSchedulerState, num_inference_steps: int, shape: tuple[int, ...] = ()
    ) -> KarrasVeSchedulerState:
        """Return the state before the first step."""
        times = np.arange(num_inference_steps, dtype=np.int32)[::-1]
        low, high = self.config.sigma_min, self.config.sigma_max
        schedule = high**2 * (low**2 / high**2) ** (times / max(num_inference_steps - 1, 1))
        return dataclasses.replace(
            state,
            num_inference_steps=num_inference_steps,
            timesteps=jnp.asarray(times),
            schedule=jnp.asarray(schedule, jnp.float32),
        )

    def add_noise_to_input(
        self, state: KarrasVeSchedulerState, sample: jax.Array, sigma: Any, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the sample at a higher noise level, and that level."""
        config = self.config
        churn = min(config.s_churn / state.num_inference_steps, 2**0.5 - 1)
        churned = (config.s_min <= jnp.asarray(sigma)) & (jnp.asarray(sigma) <= config.s_max)
        higher = sigma + jnp.where(churned, churn, 0.0) * sigma
        noise = config.s_noise * jax.random.normal(jax.random.split(key, 1)[0], sample.shape)
        return sample + jnp.sqrt(higher**2 - sigma**2) * noise, higher

    def step(
        self,
        state: KarrasVeSchedulerState,
        model_output: jax.Array,
        sigma_hat: Any,
        sigma_prev: Any,
        sample_hat: jax.Array,
        return_dict: bool = True,
    ) -> KarrasVeOutput | tuple:
        """Take Euler's step from one noise level to another."""
        slope = (sample_hat - (sample_hat + sigma_hat * model_output)) / sigma_hat
        output = KarrasVeOutput(sample_hat + (sigma_prev - sigma_hat) * slope, slope, state)
        return output if return_dict else output.to_tuple()

    def step_correct(
        self,
        state: KarrasVeSchedulerState,
        model_output: jax.Array,
        sigma_hat: Any,
        sigma_prev: Any,
        sample_hat: jax.Array,
        sample_prev: jax.Array,
        derivative: jax.Array,
        return_dict: bool = True,
    ) -> KarrasVeOutput | tuple:
        """Correct the step by the mean of the slopes at both of its ends."""
        there = (sample_prev - (sample_prev + sigma_prev * model_output)) / sigma_prev
        mean = 0.5 * derivative + 0.5 * there
        output = KarrasVeOutput(sample_hat + (sigma_prev - sigma_hat) * mean, derivative, state)
        return output if return_dict else output.to_tuple()

    def add_noise(
        self,
        state: KarrasVeSchedulerState,
        original_samples: jax.Array,
        noise: jax.Array,
        timesteps: jax.Array,
    ) -> jax.Array:
        """Raise NotImplementedError, as the old class did."""
        raise NotImplementedError("FlaxKarrasVeScheduler adds noise by add_noise_to_input.")
