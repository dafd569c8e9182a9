"""The code of the diffusers guide "JAX/Flax" runs as it is printed there.

What differs: the import line and the model's name; `jax.tools.colab_tpu`, which JAX has removed;
and the notebook's %%time lines.
https://huggingface.co/docs/diffusers/v0.32.1/en/using-diffusers/stable_diffusion_jax_how_to
"""

from collections.abc import Iterator

import numpy as np
import pytest

from sd_tpu import FlaxStableDiffusionPipeline

SET_UP = """
import jax

num_devices = jax.device_count()
device_type = jax.devices()[0].device_kind

print(f"Found {num_devices} JAX devices of type {device_type}.")

import jax.numpy as jnp
from jax import pmap
from flax.jax_utils import replicate
from flax.training.common_utils import shard

from sd_tpu import FlaxStableDiffusionPipeline

dtype = jnp.bfloat16
pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
    MODEL,
    variant="bf16",
    dtype=dtype,
)
"""
SAME_PROMPT = """
prompt = "A cinematic film still of Morgan Freeman starring as Jimi Hendrix, portrait, 40mm lens, shallow depth of field, close up, split lighting, cinematic"
prompt = [prompt] * jax.device_count()
prompt_ids = pipeline.prepare_inputs(prompt)
first_shape = prompt_ids.shape

# parameters
p_params = replicate(params)

# arrays
prompt_ids = shard(prompt_ids)
second_shape = prompt_ids.shape

def create_key(seed=0):
    return jax.random.PRNGKey(seed)

rng = create_key(0)
rng = jax.random.split(rng, jax.device_count())

images = pipeline(prompt_ids, p_params, rng, jit=True)[0]
image_shape = images.shape

from diffusers.utils import make_image_grid

images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
same = images
images = pipeline.numpy_to_pil(images)
grid = make_image_grid(images, rows=2, cols=4)
"""  # noqa: E501
EIGHT_PROMPTS = """
prompts = [
    "Labrador in the style of Hokusai",
    "Painting of a squirrel skating in New York",
    "HAL-9000 in the style of Van Gogh",
    "Times Square under water, with fish and a dolphin swimming around",
    "Ancient Roman fresco showing a man working on his laptop",
    "Close-up photograph of young black woman against urban background, high quality, bokeh",
    "Armchair in the shape of an avocado",
    "Clown astronaut in space, with Earth in the background",
]

prompt_ids = pipeline.prepare_inputs(prompts)
prompt_ids = shard(prompt_ids)

images = pipeline(prompt_ids, p_params, rng, jit=True).images
images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
eight = images
images = pipeline.numpy_to_pil(images)

eight_grid = make_image_grid(images, 2, 4)
"""
MAPPED = """
p_generate = pmap(pipeline._generate)

images = p_generate(prompt_ids, p_params, rng)
images = images.block_until_ready()
"""
TWICE_TWO = """
prompts = ["a cat"] * 4 + ["a rocket"] * 4
images = pipeline(shard(pipeline.prepare_inputs(prompts)), p_params, rng, jit=True).images
"""


@pytest.fixture(scope="module")
def _few_steps() -> Iterator[None]:
    """The guide's pictures have 50, which it leaves to the pipeline; a few tell as much."""
    with pytest.MonkeyPatch.context() as patch:
        for method in (FlaxStableDiffusionPipeline.__call__, FlaxStableDiffusionPipeline._generate):
            steps, *others = method.__defaults__
            assert steps == 50
            patch.setattr(method, "__defaults__", (4, *others))
        yield


@pytest.fixture(scope="module")
def guide(least, _few_steps) -> dict:
    """The guide's names after its first blocks."""
    names = {"MODEL": least}
    with pytest.warns(UserWarning, match="no 'bf16' files"):
        exec(SET_UP, names)
    exec(SAME_PROMPT, names)
    return names


def test_one_prompt_eight_times_gives_eight_pictures_in_a_grid(guide, capsys):
    side = guide["pipeline"].default_size[0]
    assert guide["first_shape"] == (8, 77)
    assert guide["second_shape"] == (8, 1, 77)
    assert guide["image_shape"] == (8, 1, side, side, 3)
    assert guide["grid"].size == (4 * side, 2 * side)
    same = np.asarray(guide["same"])
    assert same.min() >= 0 and same.max() <= 1
    assert len({image.tobytes() for image in same}) == 8


@pytest.mark.slow("compiles for eight devices")
def test_eight_prompts_and_the_mapped_private_method_give_the_same_pictures(guide):
    exec(EIGHT_PROMPTS, guide)
    exec(MAPPED, guide)
    side = guide["pipeline"].default_size[0]
    assert guide["eight_grid"].size == (4 * side, 2 * side)
    assert guide["images"].shape == (8, 1, side, side, 3)
    # The same arithmetic compiled twice, in bfloat16, which rounds at different places.
    difference = np.abs(np.asarray(guide["images"])[:, 0] - np.asarray(guide["eight"]))
    assert np.mean(difference > 0.05) < 0.01, np.mean(difference > 0.05)


def test_two_prompts_four_times_each(guide):
    exec(TWICE_TWO, guide)
    images = np.asarray(guide["images"])
    assert len({image.tobytes() for image in images}) == 8
