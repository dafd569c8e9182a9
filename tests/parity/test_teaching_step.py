"""The loss of a step of teaching and the gradients of all factors, against PyTorch and peft."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers.training_utils import compute_snr
from flax import nnx

from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.models.layers import Attention, ResnetBlock
from sd_tpu.sampling.schedule import read_schedule
from sd_tpu.training import factors
from sd_tpu.training.factors import FEED_FORWARD, Adaptation
from sd_tpu.training.losses import loss
from tests.support import anima, flux, flux2, krea2, sd3, tiny, z_image

RANK, BATCH, SIDE = 4, 2, 64


def of_unet(network, x, t, cond):
    """Call a UNet of PyTorch's."""
    added = {name: cond[name] for name in ("text_embeds", "time_ids") if name in cond}
    return network(x, t, cond["text"], added_cond_kwargs=added).sample


def of_sd3(network, x, t, cond):
    return network(x, cond["text"], cond["pooled"], t).sample


def of_z_image(network, x, t, cond):
    texts = [text[:count] for text, count in zip(cond["text"], cond["lengths"], strict=True)]
    out = network(list(x[:, :, None]), 1 - t / 1000, texts).sample
    return -torch.stack(list(out))[:, :, 0]


def of_klein(network, x, t, cond):
    batch, channels, height, width = x.shape
    pipeline = diffusers.Flux2KleinPipeline
    out = network(
        hidden_states=x.reshape(batch, channels, -1).transpose(1, 2),
        encoder_hidden_states=cond["text"],
        timestep=t / 1000,
        img_ids=pipeline._prepare_latent_ids(x)[:1],
        txt_ids=pipeline._prepare_text_ids(cond["text"])[:1],
    ).sample
    return out.transpose(1, 2).reshape(batch, -1, height, width)


def of_flux(network, x, t, cond):
    batch, channels, height, width = x.shape
    pipeline = diffusers.FluxPipeline
    out = network(
        hidden_states=pipeline._pack_latents(x, batch, channels, height, width),
        encoder_hidden_states=cond["text"],
        pooled_projections=cond["pooled"],
        timestep=t / 1000,
        img_ids=pipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", x.dtype),
        txt_ids=torch.zeros(cond["text"].shape[1], 3),
        guidance=cond["guidance"][:, 0] if cond["guidance"].ndim > 1 else cond["guidance"],
    ).sample
    return pipeline._unpack_latents(out, 8 * height, 8 * width, 8)


def of_anima(network, x, t, cond):
    mask = torch.zeros(1, 1, *x.shape[2:], dtype=x.dtype)
    return network(x[:, :, None], t / 1000, cond["text"], padding_mask=mask).sample[:, :, 0]


def of_krea2(network, x, t, cond):
    pipeline, text = SimpleNamespace(patch_size=2, vae_scale_factor=8), cond["text"]
    height, width = x.shape[2:]
    out = network(
        hidden_states=diffusers.Krea2Pipeline._pack_latents(pipeline, x, *x.shape),
        encoder_hidden_states=text.unflatten(2, (network.config.num_text_layers, -1)),
        timestep=t / 1000,
        position_ids=diffusers.Krea2Pipeline.prepare_position_ids(
            text.shape[1], height // 2, width // 2, "cpu"
        ),
        encoder_attention_mask=torch.arange(text.shape[1]) < cond["lengths"][:, None],
    ).sample
    size = 8 * height, 8 * width
    return diffusers.Krea2Pipeline._unpack_latents(pipeline, out, *size)[:, :, 0]


def with_unet(layout: str) -> diffusers.DiffusionPipeline:
    """Return a tiny pipeline whose UNet's signals keep their size, so that gradients do."""
    pipeline = tiny.make_pipeline(layout, **tiny.SHALLOW[layout])
    with torch.no_grad():
        for name, parameter in pipeline.unet.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(mean=float(name.endswith("weight")), std=0.1)
    return pipeline


CASES: dict[str, tuple[Callable, Callable]] = {
    "SD 1": (lambda folder: with_unet("sd1"), of_unet),
    "SDXL": (lambda folder: with_unet("sdxl"), of_unet),
    "SD 3.5": (lambda folder: sd3.make_pipeline(folder, "SD 3.5 medium", t5=False), of_sd3),
    "Z-Image": (lambda folder: z_image.make_pipeline(folder, shift=6.0), of_z_image),
    "klein": (
        lambda folder: flux2.make_pipeline(folder, distilled=False, single_layers=1),
        of_klein,
    ),
    "FLUX.1": (lambda folder: flux.make_pipeline(folder, dev=True, num_single_layers=1), of_flux),
    "Anima": (anima.make_pipeline, of_anima),
    "Krea 2": (krea2.make_pipeline, of_krea2),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> SimpleNamespace:
    """A checkpoint, PyTorch's network of it, and a batch of random latents with random texts."""
    make, call = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    pipeline = make(tmp_path_factory.mktemp("tokenizer"))
    pipeline.save_pretrained(folder)
    checkpoint, params = Checkpoint.from_pretrained(folder)
    model, rng = checkpoint.model, np.random.default_rng(5)
    conds, spread = [], 1.0 if model.flow else 0.1  # of what tiny encoders give
    for prompt in ("a fox in the snow", "a zork"):
        inputs = checkpoint.prompt_inputs(prompt, height=SIDE, width=SIDE, guidance=1.0)
        both = jax.eval_shape(model.for_inputs(inputs).encode_prompt, params, inputs)
        conds.append(
            {
                name: np.resize(inputs[name], of.shape)[-1]
                if name in inputs
                else spread * rng.standard_normal(of.shape[1:], np.float32)
                for name, of in both.items()
            }
        )
    shape = BATCH, *model.latent_shape(SIDE, SIDE)
    flows = model.flow
    return SimpleNamespace(
        checkpoint=checkpoint,
        params=params,
        pipeline=pipeline,
        call=call,
        cond=jax.tree.map(lambda *x: jnp.stack(x), *conds),
        latents=rng.standard_normal(shape, np.float32),
        noise=rng.standard_normal(shape, np.float32),
        indices=np.array([220, 911] if flows else [3, 741]),
        flows=flows,
    )


def as_double(x) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(x))
    return tensor.double() if tensor.is_floating_point() else tensor


def answers(case, network) -> torch.Tensor:
    """Return PyTorch's loss, as diffusers' scripts compute it.

    In float64: SDXL's gradients in its float32 are off by nearly as much as is allowed for ours.
    """
    latents, noise = (as_double(each).permute(0, 3, 1, 2) for each in (case.latents, case.noise))
    cond = jax.tree.map(as_double, case.cond)
    if case.flows:
        config = {**case.pipeline.scheduler.config}
        # Shifts that depend on the size are none in the scripts.
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
        sigmas = scheduler.sigmas[case.indices].reshape(-1, 1, 1, 1)
        x = (1 - sigmas) * latents + sigmas * noise
        out = case.call(network, x, scheduler.timesteps[case.indices], cond)
        return torch.mean((out - (noise - latents)) ** 2)
    scheduler = diffusers.DDPMScheduler.from_config(case.pipeline.scheduler.config)
    t = torch.from_numpy(case.indices)
    out = case.call(network, scheduler.add_noise(latents, noise, t), t, cond)
    snr = compute_snr(scheduler, t)
    weights = torch.clamp(snr, max=5.0)
    if scheduler.config.prediction_type == "v_prediction":
        wanted, weights = scheduler.get_velocity(latents, noise, t), weights / (snr + 1)
    else:
        wanted, weights = noise, weights / snr
    errors = torch.nn.functional.mse_loss(out, wanted, reduction="none").mean(dim=(1, 2, 3))
    return (errors * weights).mean()


@pytest.mark.slow("compiles a network and its gradient")
def test_loss_and_gradients_are_pytorchs(case):
    checkpoint, part = case.checkpoint, case.checkpoint.model.denoiser
    shapes = {part: checkpoint.parameters.shapes[part]}
    attention = Adaptation.of(checkpoint.model, shapes, RANK, pixels=BATCH * SIDE**2)
    adaptation = Adaptation.of(
        checkpoint.model, shapes, RANK, pixels=BATCH * SIDE**2, feed_forward=True
    )
    assert attention.layers.items() < adaptation.layers.items()
    assert not any(FEED_FORWARD.fullmatch(name) for name in attention.layers)
    rng = np.random.default_rng(7)
    factors = jax.tree.map(
        lambda x: rng.standard_normal(x.shape, np.float32) / len(x) ** 0.5, adaptation.first(0)
    )
    times = 1 - case.indices / 1000 if case.flows else case.indices

    def ours(factors):
        return loss(
            adaptation.model,
            checkpoint.schedule,
            adaptation.applied(case.params, factors),
            case.latents,
            case.cond,
            case.noise,
            jnp.asarray(times, jnp.float32),
        )

    value, gradients = jax.jit(jax.value_and_grad(ours))(factors)

    network = getattr(case.pipeline, part).double()
    names = {name.removeprefix(f"{part}."): name for name in adaptation.layers}
    network.add_adapter(
        peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[*names], init_lora_weights=False)
    )
    try:
        adapted = {
            name: module
            for name, module in network.named_modules()
            if isinstance(module, peft.tuners.lora.Linear)
        }
        assert adapted.keys() == names.keys()
        with torch.no_grad():
            for name, module in adapted.items():
                for factor in "AB":
                    weight = getattr(module, f"lora_{factor}")["default"].weight
                    weight.copy_(torch.from_numpy(factors[names[name]][factor].T))
        wanted = answers(case, network)
        wanted.backward()
        assert float(value) == pytest.approx(wanted.item(), rel=1e-5)
        for name, module in adapted.items():
            for factor in "AB":
                gradient = getattr(module, f"lora_{factor}")["default"].weight.grad.numpy().T
                found = np.asarray(gradients[names[name]][factor])
                largest = np.abs(gradient).max()
                assert np.abs(found - gradient).max() <= 1e-4 * largest, f"{name} {factor}"
    finally:
        network.delete_adapters("default")


@pytest.mark.parametrize("prediction", [{}, tiny.V_PREDICTION], ids=["epsilon", "v"])
def test_loss_by_what_a_network_predicts_is_pytorchs(prediction):
    """The network is a product: what it is given, times a parameter."""
    scheduler = diffusers.DDIMScheduler(**tiny.COMMON, **prediction)
    rng, shape = np.random.default_rng(5), (BATCH, 8, 8, 4)
    latents, noise = (rng.standard_normal(shape, np.float32) for _ in range(2))
    times = np.array([3, 741])
    value, gradient = jax.value_and_grad(
        lambda scale: loss(
            SimpleNamespace(denoise=lambda scale, x, t, cond: scale * x),
            read_schedule({"_class_name": "DDIMScheduler", **scheduler.config}),
            scale,
            latents,
            {},
            noise,
            jnp.asarray(times, jnp.float32),
        )
    )(jnp.float32(0.7))
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    case = SimpleNamespace(
        latents=latents,
        noise=noise,
        indices=times,
        flows=False,
        cond={},
        pipeline=SimpleNamespace(scheduler=scheduler),
        call=lambda scale, x, t, cond: scale * x,
    )
    wanted = answers(case, scale)
    wanted.backward()
    assert float(value) == pytest.approx(wanted.item(), rel=1e-5)
    assert float(gradient) == pytest.approx(scale.grad.item(), rel=1e-4)


def test_schedules_of_equal_configs_are_equal_and_others_are_not():
    """A step is compiled once for equal checkpoints."""
    configs = [
        {"_class_name": "DDIMScheduler", **tiny.COMMON},
        {"_class_name": "DDIMScheduler", **tiny.COMMON, **tiny.V_PREDICTION},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 6.0},
    ]
    schedules = [read_schedule(config) for config in configs]
    assert [schedules.index(read_schedule(config)) for config in configs] == [0, 1, 2, 3]
    assert len({*schedules, *map(read_schedule, configs)}) == 4
    other = dataclasses.replace(schedules[0], alphas_cumprod=schedules[0].alphas_cumprod / 2)
    assert other != schedules[0]


def traced(block: nnx.Module, x: jax.Array, *others: jax.Array) -> str:
    """Return the program of the gradient of a block's results for x."""
    return str(jax.make_jaxpr(jax.grad(lambda x: block(x, *others).sum()))(x))


@pytest.mark.parametrize(
    ("platform", "keep", "again"), [("cpu", True, 0), ("cpu", False, 1), ("tpu", True, 1)]
)
def test_convolutions_are_computed_again_where_their_results_are_not_kept(
    monkeypatch, platform, keep, again
):
    monkeypatch.setattr(factors, "platform", lambda: platform)
    block = ResnetBlock(8, 8, groups=4, eps=1e-5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    block.__class__ = factors.recomputing(ResnetBlock, keep=keep)
    program = traced(block, jnp.ones((1, 4, 4, 8)))
    # Two there and two back; what the last one gives is only added, so nobody needs it again.
    assert program.count("conv_general_dilated[") == 4 + again


@pytest.mark.parametrize(("keep", "again"), [(True, 0), (False, 5)])
def test_attention_is_computed_again_where_results_are_not_kept(keep, again):
    layer = Attention(8, 8, 2, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.__class__ = factors.recomputing(Attention, keep=keep)
    program = traced(layer, jnp.ones((1, 1024, 8)), jnp.ones((1, 1024, 8)))
    # Four layers and two products there; two layers, as keys are of something else, and five
    # products back; three layers and both products again.
    assert program.count("dot_general[") == 13 + again


def test_results_are_kept_up_to_so_many_pixels(case):
    part = case.checkpoint.model.denoiser
    shapes = {part: case.checkpoint.parameters.shapes[part]}
    few, most, more = (
        Adaptation.of(case.checkpoint.model, shapes, RANK, pixels=pixels).model
        for pixels in (1, factors.MOST_KEPT, factors.MOST_KEPT + 1)
    )
    assert few == most != more
