"""Pages with a history, and what is handed in to them."""

import base64
from contextlib import contextmanager
from io import BytesIO

import httpx
import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Locator, Page

from sd_tpu.gallery.history import History
from sd_tpu.page import build, close, launch
from sd_tpu.pictures.images import read_png, to_png
from tests.support.asking import make_request
from tests.support.visitor import PATIENCE, figures


@contextmanager
def served(engine, folder, port=None):
    """Return the address of a page with the history in this folder, until the server ends."""
    kept = History(folder)
    page = build(engine, kept)
    assert engine.ready.wait(300)
    try:
        yield launch(page, port=port)
    finally:
        close(page)
        kept.close()


PHOTO = np.random.default_rng(0).integers(0, 256, (48, 32, 3), np.uint8)


def png(pixels: np.ndarray = PHOTO) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def hand_in(tab: Page, how: str, where: str, file: bytes, name: str = "photo.png") -> None:
    """Drop a file on an element, or pastes it there."""
    tab.locator(where).first.evaluate(
        """(element, [how, bytes, name]) => {
        const held = new DataTransfer(), raw = Uint8Array.from(atob(bytes), (c) => c.charCodeAt());
        held.items.add(new File([raw], name, { type: "image/png" }));
        element.dispatchEvent(how === "drop"
            ? new DragEvent("drop", { dataTransfer: held, bubbles: true })
            : new ClipboardEvent("paste", { clipboardData: held, bubbles: true }));
    }""",
        [how, base64.b64encode(file).decode(), name],
    )


def file_of(link: Locator) -> bytes:
    """Return the file that a link leads to.

    It is read over a connection of its own: the server may close one that Playwright has kept just
    when the next request is sent.
    """
    address = link.evaluate("link => link.href")
    return httpx.get(address, timeout=PATIENCE / 1000).raise_for_status().content


def picture_file(tab: Page, number: int) -> bytes:
    """Return the file of a card's picture."""
    return file_of(figures(tab).nth(number - 1).locator("a.icon"))


def made_from(tab: Page, number: int):
    """Return the picture's own text about itself."""
    return read_png(picture_file(tab, number)).pictures[0]


def slide(tab: Page, panel: str, value: float, name: str = "strength") -> None:
    """Move a slider of a panel."""
    tab.locator(f"#{panel}-panel [name={name}] + [type=range]").evaluate(
        """(slider, value) => {
        slider.value = value;
        slider.dispatchEvent(new Event("input", { bubbles: true }));
    }""",
        value,
    )


def settings_png(text: str | None = None) -> bytes:
    """A PNG file whose text has settings, or is this one."""
    pixels = np.zeros((16, 16, 3), np.uint8)
    if text is None:
        asked = make_request(
            prompts=("a fox", "a hen"),
            seed=31,
            steps=7,
            sampler="heun",
            spacing="karras",
            negative_prompt="blur",
            height=4096,
            width=4096,
        )
        return to_png(pixels, asked)
    info, file = PngInfo(), BytesIO()
    if text:
        info.add_text("parameters", text)
    Image.fromarray(pixels).save(file, "PNG", pnginfo=info)
    return file.getvalue()
