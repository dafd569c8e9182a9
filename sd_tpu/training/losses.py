"""Losses: a network's answers at a noise level against those wanted, and their weights."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sd_tpu.checkpoint.weights import Params
from sd_tpu.sampling.schedule import FlowSchedule, NoiseSchedule, Schedule
from sd_tpu.settings import RequestError

GAMMA = 5.0  # of Min-SNR weighting (Hang et al. 2023, arXiv:2303.09556)


class Question(NamedTuple):
    """Noisy latents, and the answer that is wanted of the network.

    Attributes:
        x: [B, h, w, C].
        t: [B], timesteps of training, fractions allowed.
        wanted: like x.
        weight: [B], how much each counts.
    """

    x: jax.Array
    t: jax.Array
    wanted: jax.Array
    weight: jax.Array


def check_schedule(schedule: Schedule) -> None:
    """Raise RequestError for a schedule by which nothing is trained here."""
    if isinstance(schedule, NoiseSchedule) and schedule.config.prediction_type == "sample":
        raise RequestError(
            "This model predicts pictures, and cannot be taught: models that predict noise "
            "(epsilon), v or a flow can."
        )


def draw_time(schedule: Schedule, key: jax.Array) -> jax.Array:
    """Draw a time for `question`: a timestep, each alike, or a logit-normal part of a flow's way.

    The latter is that of Esser et al. 2024, arXiv:2403.03206, with mean 0 and deviation 1.
    """
    if isinstance(schedule, FlowSchedule):
        return jax.nn.sigmoid(jax.random.normal(key))
    return jax.random.randint(key, (), 0, schedule.total).astype(jnp.float32)


def question(
    schedule: Schedule,
    latents: Float[Array, "b h w c"],
    noise: Float[Array, "b h w c"],
    times: Float[Array, " b"],
) -> Question:
    """Mix noise into latents.

    Args:
        schedule: of the checkpoint. A flow's sigmas are shifted by what its config says for all
            sizes, as in diffusers' scripts.
        latents: of unit variance.
        noise: standard normal.
        times: as `draw_time` draws them, one for each.
    """
    if isinstance(schedule, FlowSchedule):
        sigma = schedule.shifted(times) if not schedule.config.use_dynamic_shifting else times
        spread = _by_picture(sigma)
        noisy = (1 - spread) * latents + spread * noise
        return Question(noisy, schedule.total * sigma, noise - latents, jnp.ones_like(times))
    squared = jnp.asarray(schedule.alphas_cumprod, jnp.float32)[times.astype(jnp.int32)]
    signal, spread = _by_picture(jnp.sqrt(squared)), _by_picture(jnp.sqrt(1 - squared))
    noisy = signal * latents + spread * noise
    snr = squared / (1 - squared)
    if schedule.config.prediction_type == "epsilon":
        return Question(noisy, times, noise, jnp.minimum(1, GAMMA / snr))
    velocity = signal * noise - spread * latents  # Salimans and Ho 2022, arXiv:2202.00512
    return Question(noisy, times, velocity, jnp.minimum(snr, GAMMA) / (snr + 1))


def loss(
    model: Any,
    schedule: Schedule,
    params: Params,
    latents: Float[Array, "b h w c"],
    cond: Mapping[str, Any],
    noise: Float[Array, "b h w c"],
    times: Float[Array, " b"],
) -> jax.Array:
    """Return the weighted mean squared error of a model's answers: float32 [].

    Args:
        model: of a family.
        schedule: as `question` takes it, like latents, noise and times.
        params: the model's.
        latents: of the pictures.
        cond: their conditions, one of each.
        noise: to be mixed in.
        times: when.
    """
    asked = question(schedule, latents, noise, times)
    errors = model.denoise(params, asked.x, asked.t, cond) - asked.wanted
    means = jnp.sum(jnp.square(errors), axis=(1, 2, 3)) / math.prod(errors.shape[1:])
    return jnp.mean(asked.weight * means)


def _by_picture(values: jax.Array) -> jax.Array:
    return values[:, None, None, None]
