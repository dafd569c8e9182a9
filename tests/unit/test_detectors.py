"""What a ControlNet follows of a photo."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sd_tpu.pictures.detectors import DETECT, detected
from sd_tpu.settings import DETECTORS

SIDE = 64
WHITE = np.full((SIDE, SIDE, 3), 255, np.uint8)


def with_line(shade: int) -> np.ndarray:
    """White, with an upright line of this shade three pixels wide in the middle."""
    image = Image.fromarray(WHITE)
    ImageDraw.Draw(image).line([(32, 0), (32, SIDE)], (shade,) * 3, 3)
    return np.asarray(image)


@pytest.mark.parametrize("detector", DETECT)
def test_a_line_is_white_and_what_has_none_is_black(detector):
    assert not detected(WHITE, detector).any()
    found = detected(with_line(0), detector)
    assert found.shape == WHITE.shape and found.dtype == np.uint8
    assert (found[:, 28:38] > 100).any(axis=1).all()
    assert not found[:, :16].any() and not found[:, 48:].any()
    assert (found == found[..., :1]).all()


def test_edges_are_one_pixel_wide_on_both_sides_of_a_line():
    found = detected(with_line(0), "canny")[32, :, 0]
    assert sorted(np.unique(found)) == [0, 255] and np.count_nonzero(found) == 2


def test_lines_are_as_bright_as_they_stand_out_and_faint_ones_are_no_scribble():
    both = np.where(np.arange(SIDE)[:, None, None] < 32, with_line(0), with_line(190))
    lines = detected(both.astype(np.uint8), "lineart")[..., 0]
    assert lines[8].max() > 1.5 * lines[56].max() > 0
    faint = detected(with_line(245), "scribble")
    assert not faint.any() and detected(with_line(0), "scribble").any()


def test_maps_are_taken_as_they_are_and_every_detector_is_a_setting():
    picture = with_line(90)
    assert detected(picture, "") is picture
    assert DETECTORS.keys() == {"", *DETECT}
