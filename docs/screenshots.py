"""Pictures of the page for README and docs: `python -m docs.screenshots` writes docs/images/*.webp.

Serves the bundled model on this machine and visits it in Chromium's headless shell, as somebody on
a computer and on a phone, in light and dark mode.
"""

import io
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
SEED = 45  # of the page's own examples
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
QUALITY = 75
PATIENCE = 120_000  # ms


def main() -> None:
    """Draw once on a computer and once on a phone, and take each picture in both schemes."""
    IMAGES.mkdir(exist_ok=True)
    with _served() as address, sync_playwright() as playwright:
        program = shutil.which("chromium-headless-shell")
        browser = playwright.chromium.launch(executable_path=program)
        _on_desktop(browser, address)
        _on_phone(browser, address)
        browser.close()


def _on_desktop(browser: Browser, address: str) -> None:
    with browser.new_context(viewport=DESKTOP) as context, context.new_page() as tab:
        _visit(tab, address)
        _draw(tab)
        _take(tab, "page")
        card = tab.locator("#cards figure").first
        card.locator("[popovertarget]").click()
        _take(tab, "card", card, card.locator("[popover]"))
        tab.keyboard.press("Escape")
        _unfold(tab, "Settings")
        _take(tab, "settings")
        _unfold(tab, "Compare")
        tab.locator("#compare-panel").get_by_label("Steps", exact=True).check()
        tab.locator("#compare-go").click()
        expect(tab.locator("#line .over")).to_contain_text("Done in", timeout=PATIENCE)
        _take(tab, "compare")
        _unfold(tab, "History")
        tab.locator("#history-panel section").nth(1).wait_for()
        _take(tab, "history")
        _unfold(tab, "History")
        _paint(tab)
        _take(tab, "mask")


def _paint(tab: Page) -> None:
    """Have the first box start from its picture, and paint a stroke of a mask on that."""
    card = tab.locator("#cards figure").first
    card.locator("[popovertarget]").click()
    card.locator("[data-do=begin]").click()
    expect(tab.locator(".below .overrides").first).to_contain_text("from a picture")
    if tab.locator(".below .fold").first.get_attribute("aria-expanded") == "false":
        tab.locator(".below .fold").first.click()
    tab.locator("#overrides-panel .handed").evaluate("start => { start.open = true }")
    tab.locator("#overrides-panel [data-do=paint]").click()
    tab.locator("#painter canvas").wait_for()
    spot = tab.locator("#painter canvas").bounding_box()
    x, y = spot["x"] + spot["width"] / 2, spot["y"] + spot["height"] / 3
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x + spot["width"] / 4, y)
    tab.mouse.up()


def _on_phone(browser: Browser, address: str) -> None:
    phone = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 1.5}
    with browser.new_context(**phone) as context, context.new_page() as tab:
        _visit(tab, address)
        _draw(tab)
        _take(tab, "phone")


def _visit(tab: Page, address: str) -> None:
    tab.set_default_timeout(PATIENCE)
    tab.goto(address)
    tab.wait_for_function("window.sdTpu?.arrived")
    expect(tab.locator("#generate")).to_be_enabled(timeout=PATIENCE)


def _draw(tab: Page) -> None:
    tab.locator("#seed input").fill(str(SEED))
    tab.locator("#generate").click()
    expect(tab.locator("#line .over")).to_contain_text("Done in", timeout=PATIENCE)


def _unfold(tab: Page, name: str) -> None:
    tab.locator(".fold").and_(tab.get_by_role("button", name=name, exact=True)).click()


def _take(tab: Page, name: str, *parts: Locator) -> None:
    """Write NAME-light.webp and NAME-dark.webp: what is seen, or what holds these parts."""
    clip = _around(parts) if parts else None
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        tab.wait_for_timeout(500)  # until colours have faded into each other
        file = IMAGES / f"{name}-{scheme}.webp"
        Image.open(io.BytesIO(tab.screenshot(clip=clip))).save(file, quality=QUALITY, method=6)
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


def _around(parts: tuple[Locator, ...], margin: int = 16) -> dict[str, float]:
    boxes = [part.bounding_box() for part in parts]
    left, top = (min(box[side] for box in boxes) - margin for side in ("x", "y"))
    right = max(box["x"] + box["width"] for box in boxes) + margin
    bottom = max(box["y"] + box["height"] for box in boxes) + margin
    return {
        "x": max(left, 0),
        "y": max(top, 0),
        "width": min(right, DESKTOP["width"]) - max(left, 0),
        "height": min(bottom, DESKTOP["height"]) - max(top, 0),
    }


@contextmanager
def _served() -> Iterator[str]:
    """Return the page's address while a server of its own runs, with a history of its own."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as history:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [sys.executable, "app.py", "--port", str(port), "--history", history]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            if not any(line.startswith("Ready") for line in server.stdout):
                raise RuntimeError("The server ended before it was ready.")
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
