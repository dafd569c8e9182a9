"""Pictures that are handed in: read with care, fitted, and kept where a mask says so."""

import dataclasses
import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from sd_tpu.pictures.inputs import Canvas, Closeup, Input, extension, filled_in
from sd_tpu.settings import Picture, RequestError

RNG = np.random.default_rng(0)
PHOTO = RNG.integers(0, 256, (24, 40, 3), dtype=np.uint8)


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of_size(width: int, height: int) -> bytes:
    """A few bytes that claim to be so large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


def bomb(width: int = 5000, height: int = 5000) -> bytes:
    """A small file that is honest about how large it becomes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(height * (3 * width + 1))))
        + chunk(b"IEND", b"")
    )


WHOLE = Image.fromarray(PHOTO)
FRAMES = dict(save_all=True, append_images=[WHOLE.rotate(180)])
MOVING = file_of(WHOLE, "GIF", **FRAMES)
BAD = {
    "nothing": (b"", "no format that is read"),
    "text": (b"hello" * 30, "no format that is read"),
    "a drawing": (b'<?xml version="1.0"?><svg/>', "SVG"),
    "a TIFF": (file_of(WHOLE, "TIFF"), "no format that is read"),
    "a PNG cut off": (file_of(WHOLE)[:-40], "damaged"),
    "a PNG with wrong bytes": (file_of(WHOLE).replace(b"IDAT", b"IDAT\0", 1), "damaged"),
    "50,000x50,000": (png_of_size(50_000, 50_000), "pixels"),
    "6000x6000": (png_of_size(6000, 6000), "6000x6000 pixels; at most"),
    "1x33,000,000": (png_of_size(1, 33_000_000), "65536 in a row"),
    "33,000,000x1": (png_of_size(33_000_000, 1), "65536 in a row"),
    "a bomb": (bomb(6000, 6000), "6000x6000 pixels"),
    "a GIF that moves": (MOVING, "moves"),
    "a GIF that moves, cut off": (MOVING[: MOVING.rindex(b"!\xf9") + 3], "damaged"),
    "a WebP that moves": (file_of(WHOLE, "WEBP", **FRAMES), "moves"),
    "a PNG that moves": (file_of(WHOLE, "PNG", **FRAMES), "moves"),
    "the colours of print": (file_of(WHOLE.convert("CMYK"), "JPEG"), "CMYK"),
    "16 bits of grey": (file_of(Image.fromarray(np.zeros((8, 8), np.uint16))), "16 bits"),
    "too long a file": (bytes((1 << 26) + 1), "larger than 64 MiB"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_good_picture_is_refused_in_a_sentence_before_it_is_decoded(case, monkeypatch):
    file, complaint = BAD[case]
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(RequestError, match=complaint) as refused:
        Input(file, "a.png")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def test_16_bits_of_colour_are_refused():
    header = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    file = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(26)))
        + chunk(b"IEND", b"")
    )
    with pytest.raises(RequestError, match="16 bits"):
        Input(file)


def test_a_jpeg_that_ends_early_is_refused_when_it_is_drawn_on():
    file = file_of(Image.fromarray(RNG.integers(0, 256, (200, 200, 3), dtype=np.uint8)), "JPEG")
    given = Input(file[: len(file) // 2])
    with pytest.raises(RequestError, match="damaged"):
        given.on_white()


def picture(start: Input, mask: Input | None = None, **values) -> Picture:
    values = {"width": start.size[0], "height": start.size[1], **values}
    return Picture(init_image=start.name, mask=mask.name if mask else "", **values)


def canvas(start, mask=None, **values) -> Canvas:
    """Of images."""
    start, mask = (image and Input(file_of(image)) for image in (start, mask))
    given = {each.name: each for each in (start, mask) if each}
    return Canvas.of(picture(start, mask, **values), given)


def test_without_a_start_picture_there_is_no_canvas():
    assert Canvas.of(Picture(), {}) is None


def test_a_picture_of_the_right_size_stays_as_it_is_whatever_the_fit():
    for fit in ("cover", "contain", "stretch"):
        made = canvas(WHOLE, fit=fit)
        assert np.array_equal(made.pixels, PHOTO) and made.mask is None


def test_a_picture_lies_as_its_exif_says_and_is_white_where_it_is_transparent():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    for kind in ("PNG", "JPEG"):
        turned = Input(file_of(WHOLE, kind, exif=exif))
        assert turned.size == (24, 40) == turned.on_white().size
    assert np.array_equal(Input(file_of(WHOLE, exif=exif)).on_white(), np.rot90(PHOTO, -1))
    clear = np.dstack([PHOTO, np.where(np.arange(40) < 9, 0, 255) * np.ones((24, 1))])
    given = Input(file_of(Image.fromarray(clear.astype(np.uint8))))
    assert np.all(np.asarray(given.on_white())[:, :9] == 255)
    assert np.array_equal(np.asarray(given.on_white())[:, 9:], PHOTO[:, 9:])
    assert np.all(np.asarray(given.as_mask())[:, :9] == 0)


def test_of_a_cameras_jpeg_the_photo_is_taken_whatever_stands_behind_it():
    exif = Image.Exif()
    exif[0x0112] = 6
    given, alone = (
        Input(file_of(WHOLE, kind, exif=exif, **more))
        for kind, more in (("MPO", FRAMES), ("JPEG", {}))
    )
    assert given.size == (24, 40) and np.array_equal(given.on_white(), alone.on_white())


def test_what_a_png_says_after_its_pixels_of_how_it_lies_counts_neither_before_nor_after_decoding():
    exif = Image.Exif()
    exif[0x0112] = 6
    file, said = file_of(WHOLE), chunk(b"eXIf", exif.tobytes()[6:])
    given = Input(file[:-12] + said + file[-12:])
    assert given.size == (40, 24) == given.on_white().size


def test_the_name_is_that_of_the_content():
    assert Input(file_of(WHOLE)).name == Input(file_of(WHOLE)).name
    assert Input(file_of(WHOLE)).name != Input(file_of(WHOLE.rotate(180))).name


@pytest.mark.parametrize(
    "fit, left, middle",
    [("cover", [24, 0, 0], [25, 0, 0]), ("stretch", [0, 0, 0], None), ("contain", [0, 0, 0], None)],
)
def test_a_picture_of_another_ratio_is_cut_stretched_or_framed(fit, left, middle):
    ramp = np.zeros((16, 64, 3), np.uint8)
    ramp[..., 0] = np.arange(64)
    made = canvas(Image.fromarray(ramp), fit=fit, width=16, height=16).pixels
    assert made.shape == (16, 16, 3)
    assert np.array_equal(made[8, 0], left) or abs(int(made[8, 0, 0]) - left[0]) <= 2
    if middle:
        assert np.array_equal(made[:, 1:2], np.full((16, 1, 3), middle))
    if fit == "contain":
        assert np.array_equal(made[0], made[6]), "the border continues the edge"


def test_what_surrounds_an_extended_picture_is_drawn_and_the_picture_is_kept():
    made = canvas(WHOLE, fit="extend", width=64, height=32, mask_blur=0)
    inside = np.zeros((32, 64), bool)
    inside[4:28, 12:52] = True
    assert np.array_equal(made.mask, ~inside)
    assert np.array_equal(made.pixels[4:28, 12:52], PHOTO)
    drawn = made.composed(np.full((32, 64, 3), 7, np.uint8))
    assert np.array_equal(drawn[4:28, 12:52], PHOTO) and np.all(drawn[~inside] == 7)
    smaller = canvas(WHOLE, fit="extend", width=32, height=32)
    assert np.count_nonzero(smaller.mask == 0) == 32 * 19, "one that is too large is made smaller"


@pytest.mark.parametrize("colour", ["white", "black", "red"])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_painted_on_a_clear_mask_is_drawn_anew_in_whatever_colour(mode, colour):
    mask = Image.new("RGBA", (40, 24))
    mask.paste(colour, (20, 0, 40, 24))
    made = canvas(WHOLE, mask.convert(mode), mask_blur=0)
    assert np.all(made.mask[:, :20] == 0) and np.all(made.mask[:, 20:] == 1)


def test_a_mask_with_two_colours_and_soft_strokes_keep_what_they_say():
    mask = Image.new("RGBA", (40, 24), "black")
    mask.paste("white", (20, 0, 40, 24))
    mask.putpixel((0, 0), (0, 0, 0, 254))
    assert np.asarray(Input(file_of(mask)).as_mask())[:, [0, 19, 20]].tolist() == [[0, 0, 255]] * 24
    mask.putpixel((0, 0), (0, 0, 0, 0))
    assert np.asarray(Input(file_of(mask)).as_mask())[:, [0, 19, 20]].tolist() == [[0, 0, 255]] * 24
    for colour in ("white", "black"):
        soft = Image.new("RGBA", (40, 24), colour)
        soft.putalpha(Image.linear_gradient("L").resize((40, 24)))
        assert np.array_equal(Input(file_of(soft)).as_mask(), soft.getchannel("A"))


def test_a_mask_of_a1111_is_what_is_more_than_half_opaque():
    mask = Image.new("RGBA", (4, 1), "red")
    mask.putalpha(Image.fromarray(np.array([[0, 128, 129, 255]], np.uint8)))
    assert np.asarray(Input(file_of(mask)).as_a1111_mask()).tolist() == [[0, 0, 255, 255]]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_picture_with_much_exif_lies_as_that_says(kind):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "w" * 1_000_000
    photo = Input(file_of(Image.fromarray(PHOTO), kind, exif=exif))
    assert photo.size == PHOTO.shape[:2] == photo.on_white().size


def test_what_is_black_in_a_mask_comes_back_as_it_was_given_and_what_is_new_fades_in_beside_it():
    mask = np.zeros((24, 40), np.uint8)
    mask[4:20, 8:32] = 255
    for blur in (0, 3):
        made = canvas(WHOLE, Image.fromarray(mask), mask_blur=blur)
        new = np.full_like(PHOTO, 200)
        drawn = made.composed(new)
        assert np.array_equal(drawn[mask == 0], PHOTO[mask == 0])
        assert np.array_equal(
            drawn[4 + blur : 20 - blur, 8 + blur : 32 - blur],
            new[4 + blur : 20 - blur, 8 + blur : 32 - blur],
        )
    share = (drawn[12, 8:13].astype(float) - PHOTO[12, 8:13]) / (200.0 - PHOTO[12, 8:13])
    np.testing.assert_allclose(share.mean(axis=1), [0.25, 0.5, 0.75, 1, 1], atol=0.05)


@pytest.mark.parametrize("fit", ["cover", "contain", "stretch"])
@pytest.mark.parametrize("scale", [0.5, 2.5])
def test_what_is_black_in_a_mask_of_another_size_stays_black(fit, scale):
    mask = np.zeros((24, 40), np.uint8)
    mask[:, 20:] = 255
    made = canvas(
        WHOLE, Image.fromarray(mask), fit=fit, width=round(40 * scale), height=round(24 * scale)
    )
    edge, near = round(20 * scale), round(max(1, scale))  # nothing else mixes black and white
    assert np.all(made.mask[:, : edge - near] == 0) and np.all(made.mask[:, edge + near :] == 1)


@pytest.mark.parametrize("fit", ["cover", "contain", "stretch", "extend"])
def test_a_strip_of_a_pixel_fits_as_well(fit):
    for size in ((3000, 1), (1, 3000)):
        assert canvas(Image.new("RGB", size, "red"), fit=fit, width=64, height=64).pixels.shape == (
            64,
            64,
            3,
        )


def test_a_soft_mask_mixes_and_one_to_the_border_of_the_picture_does_not_fade_there():
    made = canvas(WHOLE, Image.new("L", (40, 24), 51), mask_blur=4)
    np.testing.assert_allclose(made.composed(np.zeros_like(PHOTO)), 0.8 * PHOTO, atol=0.51)
    half = np.zeros((24, 40), np.uint8)
    half[:, 20:] = 255
    made = canvas(WHOLE, Image.fromarray(half), mask_blur=2)
    assert np.all(made.composed(np.zeros_like(PHOTO))[:, 22:] == 0)


@pytest.mark.parametrize(
    "mask, values, complaint",
    [
        (Image.new("L", (40, 25), 255), {}, "The mask has 40x25 pixels and the picture 40x24"),
        (Image.new("L", (40, 24), 0), {}, "black everywhere"),
        (None, {"fit": "extend"}, "nothing to draw"),
    ],
)
def test_what_leaves_nothing_to_draw_is_refused(mask, values, complaint):
    with pytest.raises(RequestError, match=complaint):
        canvas(WHOLE, mask, **values)


def test_a_mask_whose_white_is_cut_away_is_told_apart_from_none():
    mask = Image.new("L", (40, 24), 0)
    mask.paste(255, (0, 0, 4, 24))
    with pytest.raises(RequestError, match="nothing that is white in the mask is left"):
        canvas(WHOLE, mask, width=24, height=24)


def test_a_picture_that_is_not_here_is_asked_for():
    start = Input(file_of(WHOLE))
    with pytest.raises(RequestError, match="hand it in again"):
        Canvas.of(picture(start), {})
    with pytest.raises(RequestError, match="hand it in again"):
        Canvas.of(dataclasses.replace(picture(start), mask="0" * 64), {start.name: start})


@pytest.mark.parametrize("ratio", [0.5, 1, 3])
@pytest.mark.parametrize("box", [(10, 20, 4, 7), (0, 3, 0, 40), (22, 24, 38, 40)])
def test_a_closeup_shows_the_mask_in_its_ratio_and_goes_back_where_it_was(box, ratio):
    mask = np.zeros((24, 40), np.uint8)
    mask[box[0] : box[1], box[2] : box[3]] = 255
    closeup = Closeup.of(PHOTO, mask, ratio, padding=2)
    pixels, shown = closeup.part()
    height, width = shown.shape
    assert abs(width - ratio * height) <= 1 + ratio
    assert (shown > 0).sum() >= (mask > 0).sum() and pixels.shape == (*shown.shape, 3)
    larger = np.full((64, 64, 3), 7, np.uint8)
    made = closeup.with_part(larger)
    assert np.all(made[mask > 0] == 7) and np.array_equal(made[mask == 0], PHOTO[mask == 0])
    assert np.array_equal(closeup.with_part(pixels), PHOTO)


def test_a_closeup_that_would_become_far_larger_than_its_picture_is_refused():
    mask = np.zeros((4, 40_000), np.uint8)
    mask[0, 0] = mask[-1, -1] = 255
    with pytest.raises(RequestError, match="too long and narrow to be drawn alone"):
        Closeup.of(np.zeros((4, 40_000, 3), np.uint8), mask, 1.0, padding=0)


def test_what_surrounds_a_hole_is_blurred_into_it():
    halves = np.zeros((40, 40, 3), np.uint8)
    halves[:, 20:] = 200
    mask = np.zeros((40, 40), np.uint8)
    mask[10:30, 2:38] = 255
    made = filled_in(halves + np.uint8(9) * (mask[..., None] > 0), mask)
    assert np.array_equal(made[mask == 0], halves[mask == 0])
    assert made[20, 4, 0] < 20 < 180 < made[20, 35, 0] and 60 < made[20, 19, 0] < 140
    full = np.full((24, 40), 255, np.uint8)
    assert np.array_equal(filled_in(PHOTO, full), PHOTO), "nothing surrounds it"


def test_an_extension_keeps_the_picture_and_masks_what_is_new():
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    canvas, mask = extension(pixels, (1, 2, 3, 0))
    assert canvas.size == mask.size == (10, 6)
    np.testing.assert_array_equal(np.asarray(canvas.on_white())[2:, 1:7], pixels)
    white = np.asarray(mask.as_mask()) == 255
    assert white.sum() == 60 - 24 and not white[2:, 1:7].any()
