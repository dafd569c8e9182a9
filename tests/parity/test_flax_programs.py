"""Programs as people wrote them against diffusers up to 0.35, with the import and the model's name
changed. Each is run as it stands; what it should have done is asserted after it."""

import copy
import textwrap
import weakref
from functools import partial

import diffusers
import jax
import numpy as np
import pytest
import torch
from flax.serialization import to_bytes
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sd_tpu import BUNDLED_MODEL, CheckpointError, FlaxDDIMScheduler, FlaxStableDiffusionPipeline
from sd_tpu.pipelines.pipeline import _shared_programs
from sd_tpu.runtime.mesh import make_mesh


def run(program: str, **names) -> dict:
    """The names that a program leaves."""
    exec(textwrap.dedent(program), names)
    return names


@pytest.fixture(scope="module", autouse=True)
def new_programs() -> None:
    """Nothing that pipelines of other modules have traced counts here."""
    _shared_programs.cache_clear()


@pytest.fixture(scope="module")
def model(least) -> str:
    return str(least)


@pytest.fixture(scope="module")
def expected(model) -> np.ndarray:
    """Eight pictures of a cat, drawn the plain way."""
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(model)
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    return pipeline(pipeline.prepare_inputs(["a cat"] * 8), params, keys, 4).images


def near(images, expected) -> bool:
    """Whether these are the same pictures, computed in another order."""
    difference = np.abs(np.asarray(images, np.float32).reshape(expected.shape) - expected)
    return np.mean(difference > 0.02) < 0.001


# --- params["scheduler"] ------------------------------------------------------------------------

CAST = """
    import jax, jax.numpy as jnp
    from flax.jax_utils import replicate
    from flax.training.common_utils import shard
    from sd_tpu import FlaxStableDiffusionPipeline

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(MODEL, split_head_dim=True)
    scheduler_state = params.pop("scheduler")
    params = jax.tree_util.tree_map(lambda x: x.astype(jnp.bfloat16), params)
    params = jax.tree_util.tree_map(lambda x: x.astype(jnp.float32), params)
    params["scheduler"] = scheduler_state

    prompt_ids = shard(pipeline.prepare_inputs(["a cat"] * jax.device_count()))
    p_params = replicate(params)
    rng = jax.random.split(jax.random.PRNGKey(0), jax.device_count())
    images = pipeline(prompt_ids, p_params, rng, num_inference_steps=4, jit=True).images
"""


@pytest.mark.slow("compiles pipelines as old programs do")
def test_the_schedulers_state_is_popped_put_back_and_replicated_with_the_rest(model, expected):
    names = run(CAST, MODEL=model)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(names["scheduler_state"]))
    difference = np.abs(names["images"][:, 0] - expected)  # of weights rounded to bfloat16
    assert 0 < difference.mean() < 0.02


OTHER_BETAS = """
    import jax
    from functools import partial
    from flax.jax_utils import replicate
    from sd_tpu import FlaxPNDMScheduler, FlaxStableDiffusionPipeline

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(MODEL)
    prompt_ids = pipeline.prepare_inputs(["a cat"] * 8)
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    whole = jax.tree.map(lambda x: x, params)
    del params["scheduler"]
    without = pipeline(prompt_ids, params, keys, 4).images
    params["scheduler"] = FlaxPNDMScheduler(
        beta_start=0.0001, beta_end=0.02, skip_prk_steps=True).create_state()
    others = pipeline(prompt_ids, params, keys, 4).images
    mapped = jax.pmap(partial(pipeline._generate, num_inference_steps=4))(
        prompt_ids[:, None], replicate(params), keys)
    common = whole["scheduler"].common
    whole["scheduler"] = whole["scheduler"].replace(
        common=common.replace(betas=params["scheduler"].common.betas))
    betas_alone = pipeline(prompt_ids, whole, keys, 4).images
"""


@pytest.mark.slow("compiles pipelines as old programs do")
def test_other_betas_in_the_state_change_the_picture_traced_or_not(model, expected):
    names = run(OTHER_BETAS, MODEL=model)
    assert np.array_equal(names["without"], expected)
    assert not near(names["others"], expected)
    assert near(names["mapped"], names["others"])
    assert near(names["betas_alone"], names["others"])


# --- schedulers ---------------------------------------------------------------------------------

GIVEN = """
    import jax
    from sd_tpu import FlaxDPMSolverMultistepScheduler, FlaxStableDiffusionPipeline

    dpmpp, dpmpp_state = FlaxDPMSolverMultistepScheduler.from_pretrained(
        MODEL, subfolder="scheduler")
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
        MODEL, scheduler=dpmpp, safety_checker=None, feature_extractor=None)
    absent = "scheduler" not in params
    params["scheduler"] = dpmpp_state
    prompt_ids = pipeline.prepare_inputs(["a cat"] * 8)
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    given = pipeline(prompt_ids, params, keys, 4).images

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(MODEL)
    pipeline.scheduler = dpmpp
    params["scheduler"] = dpmpp_state
    put = pipeline(prompt_ids, params, keys, 4).images
    mapped = jax.pmap(pipeline._generate, in_axes=(0, None, 0, None),
                      static_broadcasted_argnums=(3,))(prompt_ids[:, None], params, keys, 4)
    pipeline.safety_checker = pipeline.feature_extractor = None
    output = pipeline(prompt_ids, params, keys, 4)
    if output.nsfw_content_detected:
        raise ValueError("not safe for work")
"""


@pytest.mark.slow("compiles pipelines as old programs do")
def test_a_scheduler_is_given_or_put_in_the_place_of_the_checkpoints(model, expected):
    names = run(GIVEN, MODEL=model)
    assert names["absent"]
    assert not near(names["given"], expected)
    assert np.array_equal(names["given"], names["put"])
    assert np.array_equal(names["given"], names["output"][0])
    assert near(names["mapped"], names["given"])


RUNGE_KUTTA = """
    import jax
    from sd_tpu import FlaxPNDMScheduler, FlaxStableDiffusionPipeline

    scheduler = FlaxPNDMScheduler(beta_start=0.00085, beta_end=0.012,
                                  beta_schedule="scaled_linear", steps_offset=1)
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(MODEL, scheduler=scheduler)
    params["scheduler"] = scheduler.create_state()
    prompt_ids = pipeline.prepare_inputs(["a cat", "a dog", "a mat"])
    images = pipeline(prompt_ids, params, jax.random.PRNGKey(0), 5, latents=START).images
"""


@pytest.mark.slow("compiles pipelines as old programs do")
def test_steps_that_are_no_table_are_drawn_as_pytorch_draws_them(model, least_pipeline):
    start = np.random.default_rng(0).standard_normal((3, 4, 8, 8)).astype(np.float32)
    images = run(RUNGE_KUTTA, MODEL=model, START=start)["images"]
    reference = copy.copy(least_pipeline)
    reference.set_progress_bar_config(disable=True)
    reference.scheduler = diffusers.PNDMScheduler.from_config(
        reference.scheduler.config, skip_prk_steps=False
    )
    theirs = reference(
        ["a cat", "a dog", "a mat"],
        num_inference_steps=5,
        guidance_scale=7.5,
        latents=torch.tensor(start),
        output_type="np",
    ).images
    assert near(images, theirs)


OWN_LOOP = """
    import jax, jax.numpy as jnp, numpy as np
    from PIL import Image
    from sd_tpu import FlaxDDIMScheduler, FlaxStableDiffusionPipeline

    scheduler = FlaxDDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1)
    pipe, params = FlaxStableDiffusionPipeline.from_pretrained(MODEL, scheduler=scheduler,
                                                               from_pt=True)
    params["scheduler"] = scheduler.create_state()

    def encode(prompts):
        ids = pipe.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="np",
                             max_length=pipe.tokenizer.model_max_length).input_ids
        return pipe.text_encoder(ids, params=params["text_encoder"])[0]

    @jax.jit
    def sample(params, context, latents):
        state = pipe.scheduler.set_timesteps(params["scheduler"], num_inference_steps=4,
                                             shape=latents.shape)

        def loop_body(step, args):
            latents, state = args
            t = jnp.array(state.timesteps, dtype=jnp.int32)[step]
            latents_input = pipe.scheduler.scale_model_input(state, jnp.concatenate([latents] * 2),
                                                             t)
            timestep = jnp.broadcast_to(t, latents_input.shape[0])
            noise_pred = pipe.unet.apply(
                {"params": params["unet"]}, jnp.array(latents_input),
                jnp.array(timestep, dtype=jnp.int32), encoder_hidden_states=context).sample
            uncond, text = jnp.split(noise_pred, 2, axis=0)
            noise_pred = uncond + 7.5 * (text - uncond)
            return pipe.scheduler.step(state, noise_pred, t, latents).to_tuple()

        latents, _ = jax.lax.fori_loop(0, 4, loop_body, (latents * state.init_noise_sigma, state))
        latents = 1 / pipe.vae.config["scaling_factor"] * latents
        image = pipe.vae.apply({"params": params["vae"]}, latents, method=pipe.vae.decode).sample
        return (image / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)

    height = pipe.unet.config.sample_size * pipe.vae_scale_factor
    latents = jax.random.normal(
        jax.random.PRNGKey(7), (2, pipe.unet.config.in_channels, height // pipe.vae_scale_factor,
                                height // pipe.vae_scale_factor))
    images = sample(params, jnp.concatenate([encode(["", ""]), encode(["a cat", "a dog"])]),
                    latents)
    pictures = [Image.fromarray(row) for row in (np.asarray(images) * 255).round().astype("uint8")]
    drawn = pipe(pipe.prepare_inputs(["a cat", "a dog"]), params, jax.random.PRNGKey(0), 4,
                 latents=latents).images
"""


@pytest.mark.slow("compiles pipelines as old programs do")
def test_a_loop_of_ones_own_over_the_pipelines_parts_gives_the_pipelines_pictures(model):
    names = run(OWN_LOOP, MODEL=model)
    assert near(names["images"], names["drawn"])
    assert names["pictures"][0].size == (32, 32)


# --- _generate ----------------------------------------------------------------------------------

MAPPED = """
    import jax, jax.numpy as jnp
    from flax.jax_utils import replicate
    from flax.training.common_utils import shard
    from sd_tpu import FlaxStableDiffusionPipeline

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(MODEL)
    p_params = replicate(params)
    prompt_ids = shard(pipeline.prepare_inputs(["a cat"] * 8))
    neg_ids = shard(pipeline.prepare_inputs([""] * 8))
    rng = jax.random.split(jax.random.PRNGKey(0), 8)
    g = jnp.array([7.5] * 8, dtype=jnp.float32)[:, None]
    latents = None

    compiled = (jax.pmap(pipeline._generate, static_broadcasted_argnums=[3, 4, 5])
                .lower(prompt_ids, p_params, rng, 4, 32, 32, g, latents, neg_ids).compile())
    ahead = compiled(prompt_ids, p_params, rng, g, latents, neg_ids)
    given = jax.random.normal(jax.random.PRNGKey(3), (8, 4, 8, 8))
    jitted = jax.jit(pipeline._generate, static_argnums=(3, 4, 5, 6))(
        prompt_ids[:, 0], params, rng, 4, 32, 32, 7.5, given)
    as_called = pipeline(prompt_ids[:, 0], params, rng, 4, latents=given).images
"""


def test_pipelines_of_equal_models_share_programs(model):
    one, two = (FlaxStableDiffusionPipeline.from_pretrained(model)[0] for _ in range(2))
    found, same, stacked = (
        each._programs_for(each._structure()[0], 3, (32, 32), is_stacked)
        for each, is_stacked in ((one, False), (two, False), (two, True))
    )
    assert found is same is not stacked


def test_what_was_compiled_is_of_the_parts_and_the_config_that_there_are_now(model):
    pipeline, _ = FlaxStableDiffusionPipeline.from_pretrained(model)
    one = partial(pipeline._compiled, make_mesh(), {"height": 32, "width": 32}, False)
    first = one()
    assert one() is first
    kept = weakref.ref(pipeline.scheduler)
    pipeline.scheduler = FlaxDDIMScheduler.from_config(pipeline.scheduler.config)
    assert one() is not first and kept() is not None, "its number would be given to another"
    second = one()
    pipeline.scheduler.config["prediction_type"] = "v_prediction"
    assert one() is not second


@pytest.mark.slow("compiles pipelines as old programs do")
def test_generate_is_jitted_and_compiled_ahead_by_position(model, expected):
    names = run(MAPPED, MODEL=model)
    assert near(names["ahead"], expected)
    assert near(names["jitted"], names["as_called"])


# --- keywords and results -----------------------------------------------------------------------

KEYWORDS = """
    import jax, numpy as np
    from sd_tpu import FlaxDiffusionPipeline

    pipeline, params = FlaxDiffusionPipeline.from_pretrained(
        MODEL, from_pt=True, split_head_dim=True, cache_dir="cache", local_files_only=True,
        use_memory_efficient_attention=True, use_auth_token=True, safety_checker=None,
        feature_extractor=None, speed=2)
    pipeline.set_progress_bar_config(disable=True)
    images, has_nsfw_concept = pipeline(
        pipeline.prepare_inputs(["a cat"] * 8), params,
        jax.random.split(jax.random.PRNGKey(0), 8), num_inference_steps=4, return_dict=False)
    counted = [i for i in pipeline.progress_bar(range(3))]
    copy = type(pipeline)(**pipeline.components)
"""


def test_old_keywords_are_accepted_and_unknown_ones_warned_of(model, expected):
    with pytest.warns(UserWarning, match="FlaxStableDiffusionPipeline has no speed: ignored"):
        names = run(KEYWORDS, MODEL=model)
    assert np.array_equal(names["images"], expected)
    assert isinstance(names["images"], np.ndarray)
    assert not names["has_nsfw_concept"]
    assert type(names["pipeline"]) is FlaxStableDiffusionPipeline
    assert names["pipeline"].config.unet == ("sd_tpu", "FlaxUNet2DConditionModel")
    assert names["copy"].unet is names["pipeline"].unet


# --- training -----------------------------------------------------------------------------------

TRAINING = """
    import jax, jax.numpy as jnp, optax
    from flax import jax_utils
    from flax.training import train_state
    from flax.training.common_utils import shard
    from transformers import CLIPTokenizer
    from sd_tpu import (FlaxAutoencoderKL, FlaxCLIPTextModel, FlaxDDPMScheduler, FlaxPNDMScheduler,
                        FlaxStableDiffusionPipeline, FlaxUNet2DConditionModel)

    tokenizer = CLIPTokenizer.from_pretrained(MODEL, subfolder="tokenizer")
    text_encoder = FlaxCLIPTextModel.from_pretrained(MODEL, subfolder="text_encoder",
                                                     dtype=jnp.float32, from_pt=True)
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(MODEL, subfolder="vae", from_pt=True)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(MODEL, subfolder="unet",
                                                                 from_pt=True)

    adamw = optax.adamw(learning_rate=1e-3)
    state = train_state.TrainState.create(apply_fn=unet.__call__, params=unet_params,
                                          tx=optax.chain(optax.clip_by_global_norm(1.0), adamw))
    noise_scheduler = FlaxDDPMScheduler(beta_start=0.00085, beta_end=0.012,
                                        beta_schedule="scaled_linear", num_train_timesteps=1000)
    noise_scheduler_state = noise_scheduler.create_state()

    def train_step(state, text_encoder_params, vae_params, batch, train_rng):
        dropout_rng, sample_rng, new_train_rng = jax.random.split(train_rng, 3)

        def compute_loss(params):
            vae_outputs = vae.apply({"params": vae_params}, batch["pixel_values"],
                                    deterministic=True, method=vae.encode)
            latents = vae_outputs.latent_dist.sample(sample_rng)
            latents = jnp.transpose(latents, (0, 3, 1, 2)) * vae.config.scaling_factor
            noise_rng, timestep_rng = jax.random.split(sample_rng)
            noise = jax.random.normal(noise_rng, latents.shape)
            timesteps = jax.random.randint(timestep_rng, (latents.shape[0],), 0,
                                           noise_scheduler.config.num_train_timesteps)
            noisy_latents = noise_scheduler.add_noise(noise_scheduler_state, latents, noise,
                                                      timesteps)
            hidden = text_encoder(batch["input_ids"], params=text_encoder_params, train=False)[0]
            model_pred = unet.apply({"params": params}, noisy_latents, timesteps, hidden,
                                    train=True).sample
            if noise_scheduler.config.prediction_type == "epsilon":
                target = noise
            else:
                target = noise_scheduler.get_velocity(noise_scheduler_state, latents, noise,
                                                      timesteps)
            return ((target - model_pred) ** 2).mean()

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        grad = jax.lax.pmean(grad, "batch")
        new_state = state.apply_gradients(grads=grad)
        return new_state, jax.lax.pmean({"loss": loss}, axis_name="batch"), new_train_rng

    p_train_step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    state = jax_utils.replicate(state)
    text_encoder_params = jax_utils.replicate(text_encoder.params)
    vae_params = jax_utils.replicate(vae_params)
    rngs = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
    ids = tokenizer(["a cat"] * 8, padding="max_length", max_length=77, return_tensors="np")
    batch = shard({"pixel_values": jnp.ones((8, 3, 32, 32)), "input_ids": ids.input_ids})
    losses = []
    for _ in range(3):
        state, metrics, _ = p_train_step(state, text_encoder_params, vae_params, batch, rngs)
        losses.append(float(metrics["loss"][0]))

    scheduler = FlaxPNDMScheduler(beta_start=0.00085, beta_end=0.012,
                                  beta_schedule="scaled_linear", skip_prk_steps=True)
    pipeline = FlaxStableDiffusionPipeline(
        text_encoder=text_encoder, vae=vae, unet=unet, tokenizer=tokenizer, scheduler=scheduler,
        safety_checker=None, feature_extractor=None)

    def get_params_to_save(params):
        return jax.device_get(jax.tree_util.tree_map(lambda x: x[0], params))

    pipeline.save_pretrained(OUTPUT, params={
        "text_encoder": get_params_to_save(text_encoder_params),
        "vae": get_params_to_save(vae_params),
        "unet": get_params_to_save(state.params),
        "safety_checker": {}})
    trained, params = FlaxStableDiffusionPipeline.from_pretrained(OUTPUT)
    images = trained(trained.prepare_inputs("a cat"), params, jax.random.PRNGKey(0), 4).images
"""


@pytest.mark.long("trains for a few steps, as diffusers' example did")
def test_the_last_lines_of_a_training_script_write_a_checkpoint_that_pytorch_reads(
    model, tmp_path, least_pipeline
):
    names = run(TRAINING, MODEL=model, OUTPUT=str(tmp_path))
    assert names["losses"][2] < names["losses"][0]
    assert names["images"].shape == (1, 32, 32, 3)
    theirs = type(least_pipeline).from_pretrained(tmp_path)
    assert type(theirs.scheduler).__name__ == "PNDMScheduler"
    kernel = get(names["params"]["unet"], "conv_in", "kernel")
    weight = theirs.unet.conv_in.weight.detach().numpy()
    assert np.array_equal(kernel, weight.transpose(2, 3, 1, 0))
    assert not np.array_equal(weight, least_pipeline.unet.conv_in.weight.detach().numpy())


def get(tree, *path):
    for name in path:
        tree = tree[name]
    return np.asarray(tree)


# --- SDXL ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def xl(tmp_path_factory, least_pipeline) -> tuple[str, diffusers.StableDiffusionXLPipeline]:
    """A tiny SDXL as a folder, and PyTorch's pipeline."""
    torch.manual_seed(0)
    text = dict(
        vocab_size=49408,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        projection_dim=32,
        eos_token_id=49407,
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16,),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        transformer_layers_per_block=(1,),
        attention_head_dim=(2,),
        use_linear_projection=True,
        cross_attention_dim=64,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )
    tokenizer = least_pipeline.tokenizer
    pipeline = diffusers.StableDiffusionXLPipeline(
        text_encoder=CLIPTextModel(CLIPTextConfig(**text)).eval(),
        text_encoder_2=CLIPTextModelWithProjection(
            CLIPTextConfig(**text | {"hidden_act": "gelu"})
        ).eval(),
        vae=least_pipeline.vae,
        unet=unet.eval(),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
    )
    folder = tmp_path_factory.mktemp("xl")
    pipeline.save_pretrained(folder)
    return str(folder), pipeline


XL = """
    import time
    import jax, jax.numpy as jnp, numpy as np
    from flax.jax_utils import replicate
    from sd_tpu import FlaxStableDiffusionXLPipeline

    NUM_DEVICES = jax.device_count()
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(
        MODEL, revision="refs/pr/95", split_head_dim=True)
    p_params = replicate(params)

    def replicate_all(prompt_ids, neg_prompt_ids, seed):
        p_prompt_ids = replicate(prompt_ids)
        p_neg_prompt_ids = replicate(neg_prompt_ids)
        rng = jax.random.split(jax.random.PRNGKey(seed), NUM_DEVICES)
        return p_prompt_ids, p_neg_prompt_ids, rng

    prompt_ids = pipeline.prepare_inputs("a cat")
    neg_prompt_ids = pipeline.prepare_inputs("fog, grainy")
    ids, neg_ids, rng = replicate_all(prompt_ids, neg_prompt_ids, 33)
    called = pipeline(ids, p_params, rng, num_inference_steps=3, neg_prompt_ids=neg_ids,
                      guidance_scale=5.0, jit=True).images
    g = jnp.array([5.0] * ids.shape[0], dtype=jnp.float32)[:, None]
    p_generate = jax.pmap(
        pipeline._generate, static_broadcasted_argnums=[3, 4, 5, 9],
    ).lower(ids, p_params, rng, 3, 32, 32, g, None, neg_ids, False).compile()
    images = p_generate(ids, p_params, rng, g, None, neg_ids)
    images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
    pictures = pipeline.numpy_to_pil(np.array(images))

    latents = pipeline(prompt_ids, params, jax.random.PRNGKey(0), 3, 5.0, output_type="latent",
                       latents=START).images
    without = pipeline(prompt_ids, params, jax.random.PRNGKey(0), 3, 5.0, latents=START,
                       return_dict=False)[0]
    longer = pipeline(prompt_ids, params, jax.random.PRNGKey(0), 5, 3.0, latents=START).images
    words, pooled = pipeline.get_embeddings(prompt_ids, params)
"""


@pytest.mark.slow("compiles pipelines as old programs do")
def test_sdxl_is_drawn_as_pytorch_draws_it_called_mapped_or_compiled_ahead(xl):
    model, reference = xl
    start = np.random.default_rng(0).standard_normal((1, 4, 8, 8)).astype(np.float32)
    names = run(XL, MODEL=model, START=start)
    assert names["prompt_ids"].shape == (1, 2, 77)
    assert (names["words"].shape, names["pooled"].shape) == ((1, 77, 64), (1, 32))
    assert near(names["images"], names["called"][:, 0])
    assert len({picture.tobytes() for picture in names["pictures"]}) == 8
    reference.set_progress_bar_config(disable=True)
    for name, steps, guidance, kind in (
        ("latents", 3, 5.0, "latent"),
        ("without", 3, 5.0, "np"),
        ("longer", 5, 3.0, "np"),
    ):
        theirs = np.asarray(
            reference(
                "a cat",
                num_inference_steps=steps,
                guidance_scale=guidance,
                output_type=kind,
                latents=torch.tensor(start),
                height=32,
                width=32,
            ).images
        )
        rounding = 0 if kind == "latent" else 0.5 / 255
        off = np.abs(names[name] - theirs).max()
        assert off < 2e-4 * np.abs(theirs).max() + rounding, name
    # Steps, guidance, negative prompts and whether latents are wanted compile nothing: there are
    # programs for eight pictures with replicated parameters, and for one.
    programs = names["pipeline"]._programs.values()
    assert [programs.traces for programs in programs] == [dict(encode=1, advance=1, decode=1)] * 2


# --- Flax's own files ---------------------------------------------------------------------------


def test_a_folder_of_msgpack_weights_with_flaxs_names_is_read(model, tmp_path, expected):
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(model)
    pipeline.save_pretrained(tmp_path, params)
    for part in pipeline.networks:
        next((tmp_path / part).glob("*.safetensors")).unlink()
        file = "flax_model" if part == "text_encoder" else "diffusion_flax_model"
        (tmp_path / part / f"{file}.msgpack").write_bytes(to_bytes(params[part]))
    for file in ("model_index.json", "unet/config.json", "scheduler/scheduler_config.json"):
        text = (tmp_path / file).read_text()
        for name in ("StableDiffusionPipeline", "UNet2DConditionModel", "PNDMScheduler"):
            text = text.replace(f'"{name}"', f'"Flax{name}"')
        (tmp_path / file).write_text(text)
    again, loaded = FlaxStableDiffusionPipeline.from_pretrained(tmp_path)
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    images = again(again.prepare_inputs(["a cat"] * 8), loaded, keys, 4).images
    assert np.array_equal(images, expected)


def test_parts_that_are_given_are_not_read_and_their_parameters_are_the_callers(model):
    names = run(
        """
        import jax
        from sd_tpu import FlaxAutoencoderKL, FlaxStableDiffusionPipeline
        vae, vae_params = FlaxAutoencoderKL.from_pretrained(MODEL + "/vae")
        pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(MODEL, vae=vae)
        absent = "vae" not in params
        params["vae"] = vae_params
        params["vae"]["decoder"]["conv_out"]["bias"] += 0.25
        images = pipeline(pipeline.prepare_inputs("a cat"), params, jax.random.PRNGKey(0), 2).images
        """,
        MODEL=model,
    )
    assert names["absent"]
    assert names["pipeline"].vae is names["vae"]
    assert names["images"].shape == (1, 32, 32, 3)


@pytest.mark.slow("traces the bundled model")
def test_the_bundled_model_is_read_and_a_part_that_lacks_is_named(tmp_path):
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(BUNDLED_MODEL)
    ids = pipeline.prepare_inputs("a cat")
    generate = partial(pipeline._generate, num_inference_steps=2)
    assert jax.eval_shape(generate, ids, params, jax.random.PRNGKey(0)).shape == (1, 256, 256, 3)
    del params["unet"]["conv_in"]["bias"]
    with pytest.raises(CheckpointError, match=r"1 parameters are missing: conv_in\.bias"):
        pipeline(ids, params, jax.random.PRNGKey(0), 2)
    with pytest.raises(TypeError, match="missing \\['vae'\\]"):
        type(pipeline).__mro__[1].__init__(
            pipeline, **{name: part for name, part in pipeline.components.items() if name != "vae"}
        )
