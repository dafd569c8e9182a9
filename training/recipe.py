"""What is trained: the three networks' configurations, the noise schedule and the runs."""

from collections.abc import Iterable

import numpy as np

from sd_tpu.config import split_words
from training.captions import BACKGROUNDS, PAINTS, caption
from training.compose import Composer, Mix
from training.concepts import COMMON
from training.sprites import Sprites, render, training_folder
from training.trainer import Schedule

CACHE = training_folder()
IMAGE_SIZE = 64
STYLES = ("flat", "3d")  # the same drawings, with and without shading
MIX = Mix(
    single=0.40, small=0.06, big=0.06, beside=0.19, stacked=0.14, copies=0.11, upside_down=0.04,
    gradient=0.05, recoloured=0.25, default_background=0.20,
)

VAE = dict(
    in_channels=3,
    out_channels=3,
    latent_channels=16,
    block_out_channels=[16, 32, 64, 128],
    layers_per_block=1,
    norm_num_groups=4,
    down_block_types=["DownEncoderBlock2D"] * 4,
    up_block_types=["UpDecoderBlock2D"] * 4,
    act_fn="silu",
    sample_size=IMAGE_SIZE,
)
TEXT_ENCODER = dict(
    vocab_size=49408,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=77,
    hidden_act="quick_gelu",
    layer_norm_eps=1e-5,
)
UNET = dict(
    sample_size=IMAGE_SIZE // 8,
    in_channels=16,
    out_channels=16,
    down_block_types=["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    mid_block_type="UNetMidBlock2DCrossAttn",
    up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    block_out_channels=[96, 192],
    layers_per_block=1,
    cross_attention_dim=128,
    attention_head_dim=[3, 6],
    norm_num_groups=8,
    use_linear_projection=True,
)

# alphas_cumprod ends at zero, so that pure noise says nothing of the picture's mean colour
# (Lin et al. 2023, arXiv:2305.08891).
SCHEDULER = dict(
    _class_name="DDIMScheduler",
    num_train_timesteps=1000,
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    prediction_type="v_prediction",
    rescale_betas_zero_snr=True,
    timestep_spacing="trailing",
    clip_sample=False,
    set_alpha_to_one=True,
    steps_offset=1,  # without effect on trailing spacing; diffusers warns of anything else
)

CARD = dict(
    name="sd_tpu emoji 64",
    hint="This small model draws emoji-like pictures: name a thing, a colour, a style.",
    prompts=(
        "a cat on a blue background",
        "a 3d rocket on a black background",
        "a green car on a yellow background",
        "a penguin and a snowman on a light blue background",
        "a star above a house on a purple background",
        "three strawberries",
        "a castle on a pink background",
        "an owl to the left of a tree",
    ),
    more_prompts=(
        "a fox on a green background",
        "a big strawberry on a pink background",
        "an octopus on a light blue background",
        "a cup of coffee",
        "two bees on a yellow background",
        "a dog next to a ball",
        "a moon above a castle on a black background",
        "a flat guitar on an orange background",
        "an ice cream on a light blue background",
        "a blue umbrella on a white background",
        "three donuts on a purple background",
        "a 3d robot",
        "a whale below a sailboat on a light blue background",
        "a sunflower to the right of a bee",
        "a ghost on a black background",
        "a cupcake on a pink to yellow background",
    ),
    steps=20,
    guidance=3.0,
)

AUTOENCODER_RUN = Schedule(steps=6000, batch=8, learning_rate=1e-3, ema=0.995)
JUDGE_RUN = Schedule(steps=2500, batch=32, learning_rate=1e-3, ema=0.99)
DIFFUSION_RUN = Schedule(steps=25600, batch=16, learning_rate=5e-4, decay=0.12)


def composer(mix: Mix = MIX, unseen: bool | None = False) -> Composer:
    """Draws the captioned pictures that the networks are trained on, or others of their kind."""
    all_styles = render(CACHE, COMMON)
    kept = [i for i, style in enumerate(all_styles.styles) if style in STYLES]
    sprites = Sprites(
        rgba=all_styles.rgba[kept],
        concepts=[all_styles.concepts[i] for i in kept],
        styles=[all_styles.styles[i] for i in kept],
    )
    return Composer(sprites, IMAGE_SIZE, mix, unseen)


def vocabulary(captions: int = 20_000) -> tuple[str, ...]:
    """The words that training captions are made of, by composing as many of them."""
    teller, rng = composer(), np.random.default_rng(5)
    texts = (caption(teller.scene(rng), rng) for _ in range(captions))
    return tuple(sorted({word for text in texts for word in split_words(text)}))


def details() -> str:
    """What the trained model can draw, in words."""
    return (
        f"It knows {len(COMMON)} things: {', '.join(COMMON)}. "
        f"On a background of {_or(BACKGROUNDS)}, or a gradient from one to another. "
        f"A single thing may be small, big or upside down, and be painted {_or(PAINTS)}. "
        f"There may be two things, side by side or one above the other, or two or three of a kind. "
        f"The style is {_or(STYLES)}."
    )


def _or(options: Iterable[str]) -> str:
    *most, last = options
    return f"{', '.join(most)} or {last}"
