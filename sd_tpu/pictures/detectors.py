"""Detectors of a photo's edges or lines, which a ControlNet follows.

Lines are white on black, as the published ControlNets were taught. Each detector takes a picture
uint8 [H, W, 3] and returns one uint8 [H, W].
"""

from collections.abc import Callable, Mapping

import lazy_loader
import numpy as np

cv2 = lazy_loader.load("cv2")  # for those who hand a photo in: it takes long to import

# Of the gradient, in levels of 255: stronger ones are edges, as are weaker ones from the lower
# bound on that touch these. They are what ControlNet's demonstrations take.
CANNY = 100, 200
# Deviations in pixels of the two Gaussians whose difference shows lines, and how many levels darker
# than its surroundings a line is at least.
SCRIBBLE, DARKER = (0.5, 5.0), 16
# The same of the one Gaussian beside which lines are told; a line of the usual strength has half
# of full white, and so much is no line yet.
LINEART, FAINT, USUAL = 6.0, 8.0, 16.0


def canny(pixels: np.ndarray, bounds: tuple[float, float] = CANNY) -> np.ndarray:
    """Edges one pixel wide (Canny 1986)."""
    return cv2.Canny(pixels, *bounds)


def scribble(pixels: np.ndarray) -> np.ndarray:
    """Coarse lines: where the picture is clearly darker than its wider surroundings, by a
    difference of Gaussians (Winnemoeller et al. 2012, XDoG)."""
    fine, coarse = (_blurred(pixels, deviation) for deviation in SCRIBBLE)
    return np.where((coarse - fine).max(axis=2) >= DARKER, np.uint8(255), np.uint8(0))


def lineart(pixels: np.ndarray) -> np.ndarray:
    """Lines in shades: how much darker the picture is than its surroundings, in all colours, told
    by the strength that its lines usually have."""
    darker = (_blurred(pixels, LINEART) - pixels).min(axis=2).clip(0, 255)
    lines = darker[darker > FAINT]
    usual = max(USUAL, float(np.median(lines))) if lines.size else USUAL
    return (127 * darker / usual).clip(0, 255).astype(np.uint8)


def _blurred(pixels: np.ndarray, deviation: float) -> np.ndarray:
    return cv2.GaussianBlur(pixels.astype(np.float32), (0, 0), deviation)


DETECT: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "canny": canny,
    "scribble": scribble,
    "lineart": lineart,
}


def detected(pixels: np.ndarray, detector: str) -> np.ndarray:
    """Return the lines of a picture, uint8 [H, W, 3] like it, by the detector of this key.

    "" returns the picture itself.
    """
    return in_colours(DETECT[detector](pixels)) if detector else pixels


def in_colours(lines: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 3] of uint8 [H, W]."""
    return np.repeat(lines[..., None], 3, axis=2)
