"""The training recipe: the three networks' configurations, the noise schedule and the runs."""

import enum
import functools

import numpy as np

from sd_tpu.checkpoint.card import split_words
from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.families.tokenizer import Tokenizer
from training.captions import caption
from training.compose import Composer, Mix
from training.concepts import CONCEPTS
from training.sprites import Sprites, render, training_folder
from training.trainer import Schedule

CACHE = training_folder()
IMAGE_SIZE = 256
FIRST_SIZE = IMAGE_SIZE // 2  # of the pictures whose latents are learned first
SPRITE_SIZE = 448  # the largest things but one are drawn at half of it
MIX = Mix(
    single=0.34,
    small=0.04,
    big=0.04,
    beside=0.18,
    stacked=0.20,
    copies=0.17,
    upside_down=0.03,
    gradient=0.05,
    recoloured=0.60,
    default_background=0.20,
)


def _autoencoder(size: int, widths: list[int]) -> dict:
    return dict(
        in_channels=3,
        out_channels=3,
        latent_channels=32,
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D"] * len(widths),
        up_block_types=["UpDecoderBlock2D"] * len(widths),
        act_fn="silu",
        sample_size=size,
    )


FIRST_VAE = _autoencoder(FIRST_SIZE, [16, 32, 64, 128, 256])
VAE = _autoencoder(IMAGE_SIZE, [16, 32, 64, 64, 128, 256])
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
    sample_size=8,
    in_channels=VAE["latent_channels"],
    out_channels=VAE["latent_channels"],
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

AUTOENCODER_RUN = Schedule(steps=4700, batch=64, learning_rate=1e-3, decay=0.5, ema=0.995)
GROWING_RUN = Schedule(steps=4500, batch=64, learning_rate=1e-3, decay=0.5, ema=0.995)
SHARPENING_RUN = Schedule(steps=1500, batch=64, learning_rate=2e-4, decay=0.5, ema=0.995)
JUDGE_RUN = Schedule(steps=5000, batch=32, learning_rate=1e-3, ema=0.99)
DIFFUSION_RUN = Schedule(steps=5350, batch=256, learning_rate=1e-3, warmup=500, decay=0.4)


class Stream(enum.IntEnum):
    """Purposes of random numbers: with [stream, step] as a seed no two share any."""

    AUTOENCODER = 0
    POOL = 1
    DIFFUSION = 2
    JUDGE = 3
    EVALUATION = 4
    MEASURING = 5
    SHARPENING = 7
    RESTORING = 8
    HELD_OUT = 9
    WORDS = 10
    GROWING = 11


@functools.cache
def _sprites() -> Sprites:
    return render(CACHE, CONCEPTS, SPRITE_SIZE)


@functools.cache
def composer(mix: Mix = MIX, unseen: bool | None = False, size: int = IMAGE_SIZE) -> Composer:
    """Draw the captioned pictures that the networks are trained on, or others of their kind."""
    return Composer(_sprites(), size, mix, unseen)


@functools.cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer of captions."""
    return Tokenizer.from_folder(BUNDLED_MODEL / "tokenizer")


def pictures(stream: Stream, size: int, count: int, step: int) -> np.ndarray:
    """Pictures [count, size, size, 3] u8, others for each stream and step."""
    return composer(size=size).batch(np.random.default_rng([stream, step]), count)[0]


def captioned(stream: Stream, count: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a stream's pictures, and their captions' token ids [count, 77] i32."""
    drawn, texts = composer().batch(np.random.default_rng([stream, step]), count)
    return drawn, tokenizer()(texts)


def held_out(size: int, count: int) -> np.ndarray:
    """Pictures [count, size, size, 3] u8 of combinations that are never trained on."""
    return composer(unseen=True, size=size).batch(
        np.random.default_rng([Stream.HELD_OUT, 0]), count
    )[0]


def vocabulary(captions: int = 100_000) -> tuple[str, ...]:
    """Return the words of training captions, by composing so many captions.

    In 20,000 a rare plural of another name for a thing may be missing.
    """
    teller, rng = composer(), np.random.default_rng([Stream.WORDS, 0])
    texts = (caption(teller.scene(rng), rng) for _ in range(captions))
    return tuple(sorted({word for text in texts for word in split_words(text)}))
