"""The training loop: resumed exactly, the same over any number of devices, on batches made ahead;
what runs begin with; the losses."""

import dataclasses
import json
import multiprocessing
import os
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sd_tpu.runtime.mesh import make_mesh, replicated
from sd_tpu.sampling.schedule import NoiseSchedule
from tests.support.processes import told_by
from training import autoencoder, diffusion, grow, recipe, restore, trainer
from training.trainer import (
    Schedule,
    _first,
    _make_step,
    ahead,
    begin,
    from_command_line,
    latest,
    train,
)

RUN = Schedule(steps=60, batch=8, learning_rate=0.05, warmup=5, decay=0.5)
TRUTH = np.array([[1.0], [-2.0], [0.5]], np.float32)
START = {"w": np.zeros((3, 1), np.float32)}


def loss(params, batch, key):
    x, y = batch
    return jnp.mean(jnp.square(x @ params["w"] - y))


def batch_at(step: int):
    x = np.random.default_rng(step).standard_normal((RUN.batch, 3)).astype(np.float32)
    return x, x @ TRUTH


def run(folder, devices=1, batches=batch_at, **changes):
    return train(
        folder,
        dataclasses.replace(RUN, **changes),
        START,
        loss,
        partial(map, batches),
        make_mesh(devices),
        checkpoint_seconds=0.05,
    )


def test_a_run_finds_the_truth_and_keeps_a_log(tmp_path):
    average = run(tmp_path, steps=400)
    np.testing.assert_allclose(average["w"], TRUTH, atol=0.05)
    entries = [json.loads(line) for line in (tmp_path / "loss.jsonl").open()]
    assert entries[-1]["step"] == 400 and entries[-1]["loss"] < 0.01 < entries[0]["loss"]


def test_a_run_that_was_cut_off_ends_with_the_same_bytes(tmp_path):
    whole = run(tmp_path / "whole")

    def cut_off(step):
        if step == 17:
            raise KeyboardInterrupt
        return batch_at(step)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", batches=cut_off)
    resumed = run(tmp_path / "cut")
    assert np.array_equal(whole["w"], resumed["w"])
    assert np.array_equal(latest(tmp_path / "cut", START)["w"], whole["w"])


def test_the_batch_may_be_divided_over_devices(tmp_path):
    alone, divided = run(tmp_path / "1"), run(tmp_path / "8", devices=8)
    np.testing.assert_allclose(alone["w"], divided["w"], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    run(tmp_path, steps=10)
    for other in ({"w": np.zeros((4, 1), np.float32)}, {"v": np.zeros((3, 1), np.float32)}):
        with pytest.raises(ValueError, match="of another recipe"):
            latest(tmp_path, other)


def test_a_run_can_begin_with_given_weights_but_keeps_what_it_has(tmp_path):
    given = {"w": np.full((3, 1), 7.0, np.float32)}
    begin(tmp_path, RUN, given)
    np.testing.assert_array_equal(latest(tmp_path, START)["w"], given["w"])
    average = run(tmp_path, steps=10)
    assert not np.array_equal(average["w"], given["w"])
    begin(tmp_path, RUN, given)
    np.testing.assert_array_equal(latest(tmp_path, START)["w"], average["w"])


def test_batches_are_made_ahead_by_other_processes_which_end_with_the_last():
    asked = []

    class Steps:
        """A range that tells how far it was gone through."""

        def __iter__(self):
            for step in range(1000):
                asked.append(step)
                yield step

    batches = ahead(_made, Steps())
    (first, process), (second, _) = next(batches), next(batches)
    assert (first, second) == (0, 1) and process != os.getpid()
    assert 2 < len(asked) < 100, "not one by one, and not all of them"
    assert multiprocessing.active_children()
    batches.close()
    assert not multiprocessing.active_children()


def test_what_goes_wrong_in_a_batch_is_told():
    with pytest.raises(ZeroDivisionError):
        list(ahead(_made, [3, None, 4]))


def _made(step):
    if step is None:
        raise ZeroDivisionError
    return step, os.getpid()


def test_importing_what_trains_opens_no_device():
    """Every process that makes batches does: an accelerator is the parent's."""
    script = (
        "from jax._src import xla_bridge\n"
        "from training import autoencoder, diffusion, grow, judge, sharpen\n"
        "assert not xla_bridge._backends"
    )
    told_by(script)


def test_a_step_is_compiled_once_whatever_the_length_and_the_rate(tmp_path):
    traced = []

    def counted(params, batch, key):
        traced.append(1)
        return loss(params, batch, key)

    mesh = make_mesh(1)
    step = _make_step(RUN.optimizer(), counted, RUN.ema, mesh)
    state = jax.device_put(_first(RUN.optimizer(), START), replicated(mesh))
    for rate in (0.1, 0.2):
        state, _ = step(state, batch_at(0), jax.random.key(0), np.float32(rate))
    assert len(traced) == 1


def test_the_learning_rate_rises_stays_and_falls():
    rates = [RUN.rate(step) for step in range(RUN.steps)]
    assert rates[0] == 0 and rates[4] < rates[5] == rates[30] == RUN.learning_rate > rates[31]
    assert rates[-1] == pytest.approx(RUN.learning_rate / 30)


def test_a_run_is_shortened_to_the_time_it_has(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: trainer.BEGUN + 60)
    monkeypatch.setattr(trainer, "time", clock)
    run = Schedule(steps=1000, batch=8, learning_rate=0.1, seconds=100)
    assert run.fitted(50, speed=5).steps == 50 + 5 * 40
    assert run.fitted(50, speed=500) == run, "never longer"
    assert dataclasses.replace(run, seconds=50).fitted(50, speed=5).steps == 50
    assert dataclasses.replace(run, seconds=None).fitted(50, speed=5).steps == 1000


def test_slow_first_steps_do_not_shorten_a_run_and_what_once_was_slow_is_forgotten(
    tmp_path, monkeypatch
):
    told = []

    def fitted(schedule, step, speed):
        told.append((schedule.steps, step))
        return dataclasses.replace(schedule, steps={100: 400, 150: 300}[step])

    monkeypatch.setattr(Schedule, "fitted", fitted)
    run(tmp_path, steps=1000, seconds=100, decay=0.5)
    assert told == [(1000, 100), (1000, 150)], "neither of the first steps nor of a falling rate"
    entries = [json.loads(line) for line in (tmp_path / "loss.jsonl").open()]
    assert entries[-1]["step"] == 300


def test_a_run_whose_time_is_over_ends_with_a_checkpoint(tmp_path):
    run(tmp_path, steps=1000, seconds=0)
    entries = [json.loads(line) for line in (tmp_path / "loss.jsonl").open()]
    assert [entry["step"] for entry in entries] == [trainer.REPORTED, 2 * trainer.REPORTED]
    assert latest(tmp_path, START)["w"].shape == (3, 1)


def test_the_command_line_may_change_a_run(monkeypatch):
    monkeypatch.setattr("sys.argv", "x --steps 7 --batch 4 --learning-rate 0.5".split())
    assert from_command_line(RUN, "") == dataclasses.replace(
        RUN, steps=7, batch=4, learning_rate=0.5
    )


def test_a_batch_that_cannot_be_divided_is_refused(tmp_path):
    with pytest.raises(ValueError, match="A batch of 8 cannot be divided over 3 devices"):
        run(tmp_path, devices=3)


def test_a_pool_is_encoded_once_and_has_captions_beside_their_latents(tmp_path, monkeypatch):
    calls = []

    def compose(stream, count, step):
        return np.full((count, 2, 2, 3), step, np.uint8), np.full((count, 77), step, np.int32)

    def encode(params, pictures):
        calls.append(1)
        return params["w"] * pictures[:, :1, :1].astype(np.float32)

    monkeypatch.setattr(recipe, "CACHE", tmp_path)
    monkeypatch.setattr(recipe, "captioned", compose)
    monkeypatch.setattr(diffusion, "POOL", 256)
    monkeypatch.setattr(diffusion, "ahead", map)
    monkeypatch.setattr(autoencoder, "halves", lambda graph: (encode, None))
    monkeypatch.setattr(autoencoder, "scale", lambda: 1.0)
    for factor, encoded in ((2, 2), (2, 2), (3, 4)):
        monkeypatch.setattr(grow, "trained", lambda w=factor: (None, {"w": np.float32(w)}))
        pool = diffusion.make_pool()
        assert len(calls) == encoded, "again for other weights only"
        assert pool["latents"].dtype == np.float16 and len(pool["latents"]) == 256
        np.testing.assert_array_equal(pool["latents"][:, 0, 0, 0], factor * pool["ids"][:, 0])


@pytest.mark.parametrize(
    ("network", "runs"), [("FIRST_VAE", {"autoencoder"}), ("VAE", {"growing", "sharpening"})]
)
def test_runs_begin_with_a_checkpoints_weights_and_its_latents_scale(
    tmp_path, monkeypatch, network, runs
):
    params = {
        name: {"w": np.full(2, i, np.float16)}
        for i, name in enumerate(("text_encoder", "unet", "vae"))
    }
    widths = getattr(recipe, network)["block_out_channels"]
    config = {"scaling_factor": 0.75, "block_out_channels": widths}
    checkpoint = SimpleNamespace(configs={"vae": config})
    monkeypatch.setattr(
        restore.Checkpoint, "from_pretrained", lambda folder: (checkpoint, dict(params))
    )
    monkeypatch.setattr(restore.autoencoder, "FOLDER", tmp_path / "autoencoder")
    monkeypatch.setattr(restore.autoencoder, "SCALE_FILE", tmp_path / "autoencoder" / "scale.json")
    monkeypatch.setattr(restore.grow, "FOLDER", tmp_path / "growing")
    monkeypatch.setattr(restore.sharpen, "FOLDER", tmp_path / "sharpening")
    monkeypatch.setattr(restore.sharpen, "build", lambda: ({}, {"decoder": {"w": 0.0}}))
    monkeypatch.setattr(restore.diffusion, "FOLDER", tmp_path / "diffusion")
    monkeypatch.setattr("sys.argv", ["restore", "a/folder"])
    restore.main()
    vae = params.pop("vae")
    begun = {"autoencoder": vae, "growing": vae, "sharpening": {"decoder": vae}}
    wanted = {"diffusion": params, **{run: begun[run] for run in runs}}
    assert {file.parent.name for file in tmp_path.rglob("state.safetensors")} == set(wanted)
    for name, begun in wanted.items():
        found = latest(tmp_path / name, jax.tree.map(np.float32, begun))
        assert jax.tree.all(jax.tree.map(np.array_equal, found, begun))
    assert restore.autoencoder.scale() == 0.75


def test_what_was_never_trained_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="run the training"):
        latest(tmp_path, START)


def test_the_autoencoders_loss_falls_as_its_latents_near_the_prior():
    config = {**recipe.VAE, "block_out_channels": [4, 8], "layers_per_block": 1}
    graph, params = autoencoder.build(config)
    batch = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    value = jax.jit(autoencoder.make_loss(graph))
    low = value(params, batch, jax.random.key(0))
    # Moments far from the prior: the KL term must grow with the square of the mean.
    far = jax.tree.map(lambda x: x, params)
    far["quant_conv"]["bias"] = params["quant_conv"]["bias"] + 1000.0
    assert float(value(far, batch, jax.random.key(0))) > float(low) + 100


def test_a_sharp_guess_costs_less_than_a_blur_where_an_edge_may_lie_in_two_places():
    columns = np.arange(16)[None, None, :, None]
    either, other = (
        jnp.where(columns < edge, 1.0, -1.0) + jnp.zeros((1, 16, 16, 3)) for edge in (5, 7)
    )
    blur = (either + other) / 2

    def mean_cost(guess):
        return (
            float(autoencoder.difference(guess, either) + autoencoder.difference(guess, other)) / 2
        )

    assert autoencoder.difference(either, either) == 0
    assert mean_cost(either) < 0.95 * mean_cost(blur)


def test_a_perfect_velocity_has_no_loss_and_the_last_timestep_is_pure_noise(monkeypatch):
    schedule = NoiseSchedule.from_config(recipe.SCHEDULER)
    assert schedule.alphas_cumprod[-1] == 0
    latents = np.random.default_rng(0).standard_normal((4, 2, 2, 8)).astype(np.float16)

    class Oracle:
        """Knows the latents, so it can work the velocity out of what it is shown."""

        def __call__(self, noisy, t, text):
            alphas = jnp.asarray(schedule.alphas_cumprod, jnp.float32)[t][:, None, None, None]
            signal, spread = jnp.sqrt(alphas), jnp.sqrt(1 - alphas)
            return signal * (noisy - signal * latents) / spread - spread * latents

    parts = {"unet": Oracle(), "text_encoder": lambda ids: ids}
    monkeypatch.setattr(diffusion.nnx, "merge", lambda graph, params: parts[graph])
    value = diffusion.make_loss({name: name for name in parts}, schedule)
    batch = (latents, np.zeros((4, 77), np.int32))
    assert float(value(dict.fromkeys(parts), batch, jax.random.key(0))) < 1e-8
