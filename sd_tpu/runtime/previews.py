"""Previews that need no decoder: a linear map from latents to the pixels of a small picture.

An autoencoder's latents are nearly a picture already: what a place looks like follows linearly from
the latents there and around it. The map is fitted to what the decoder makes of a few samples, so
each autoencoder has its own.
"""

import numpy as np
from jaxtyping import Float, UInt8

SHRINK = 4  # times that a preview's sides are shorter than the picture's, if not more
SAMPLES = 512  # latents that a map is fitted to: some times the 9 * 16 + 1 that determine a pixel
AROUND = 32  # channels of latents up to which a pixel depends on the neighbours, too
RIDGE = 1e-2  # of the unit variance of latents: as much noise is taken to be in them


def sample_latents(count: int, shape: tuple[int, int, int]) -> Float[np.ndarray, "n h w C"]:
    """Latents that are like those of pictures, always the same: of unit variance, with amplitudes
    that fall with the frequency as those of natural images do (Field 1987)."""
    draw, (h, w, channels) = np.random.default_rng(0), shape
    frequency = np.hypot(np.fft.fftfreq(h)[:, None], np.fft.fftfreq(w))
    amplitude = 1 / np.maximum(frequency, 1 / max(h, w))[..., None]
    amplitude /= np.sqrt((amplitude**2).mean())
    noise = np.fft.fft2(draw.standard_normal((count, h, w, channels)), axes=(1, 2))
    return np.fft.ifft2(noise * amplitude, axes=(1, 2)).real.astype(np.float32)


class LatentPreview:
    """A map from latents [h, w, C] to a small picture.

    Each latent with its neighbours becomes a square patch; those of many channels, which are
    patches already, alone.
    """

    def __init__(self, weights: Float[np.ndarray, "features pixels"]):
        """Take the weights that `fit` found."""
        self._weights = weights.astype(np.float32)

    @classmethod
    def fit(
        cls, latents: Float[np.ndarray, "n h w C"], pictures: UInt8[np.ndarray, "n H W 3"]
    ) -> "LatentPreview":
        """Fit the map to pictures that the decoder made of latents, by ridge regression."""
        count, h, w, _ = latents.shape
        side = max(1, pictures.shape[1] // h // SHRINK)
        within = pictures.shape[1] // (h * side)  # pixels of the picture along one of a preview's
        pixels = pictures.reshape(count, h, side, within, w, side, within, 3).mean((3, 6))
        pixels = pixels.transpose(0, 1, 3, 2, 4, 5).reshape(count * h * w, -1)
        features = np.concatenate([_features(of) for of in latents]).astype(np.float64)
        square = features.T @ features + RIDGE * len(features) * np.eye(features.shape[1])
        return cls(np.linalg.solve(square, features.T @ pixels))

    def __call__(self, latents: Float[np.ndarray, "h w C"]) -> UInt8[np.ndarray, "H W 3"]:
        """Return the preview of latents; NaNs are black."""
        h, w, _ = latents.shape
        side = round((self._weights.shape[1] / 3) ** 0.5)
        pixels = np.nan_to_num(_features(latents) @ self._weights).clip(0, 255).round()
        patches = pixels.astype(np.uint8).reshape(h, w, side, side, 3)
        return patches.transpose(0, 2, 1, 3, 4).reshape(h * side, w * side, 3)


def _features(latents: Float[np.ndarray, "h w C"]) -> Float[np.ndarray, "hw features"]:
    """Return each latent with its eight neighbours, or alone if it has many channels, and a 1."""
    h, w, channels = latents.shape
    one = np.ones((h * w, 1), np.float32)
    if channels > AROUND:
        return np.concatenate([latents.reshape(h * w, channels), one], axis=1)
    around = np.pad(latents, ((1, 1), (1, 1), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(around, (3, 3), axis=(0, 1))
    return np.concatenate([windows.reshape(h * w, 9 * channels), one], axis=1)
