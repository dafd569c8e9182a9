"""Actions on the page, for the browser tests."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import BrowserContext, Locator, Page, expect

PATIENCE = 30_000  # ms: what a step of a test may take on a busy machine
PROMPTS = [f"picture number {i} <b>&" for i in range(1, 9)]
LONG = 200  # steps


def visit(tab: Page, address: str) -> Page:
    """Open the page and waits until it knows this browser."""
    tab.set_default_timeout(PATIENCE)
    tab.goto(address)
    tab.wait_for_function("window.sdTpu?.arrived")
    expect(generate(tab)).to_be_enabled(timeout=PATIENCE)
    return tab


@contextmanager
def newcomer(
    visitor: BrowserContext, address: str, scheme: str | None = None, *, phone: bool = False
) -> Iterator[Page]:
    """Yield the page for somebody who was never there, but whose browser has its files."""
    with visitor.new_page() as tab:
        if phone:
            tab.set_viewport_size({"width": 390, "height": 844})
        tab.emulate_media(color_scheme=scheme)
        tab.goto(f"{address}robots.txt")  # where nothing is kept anew
        tab.evaluate("localStorage.clear()")
        yield visit(tab, address)


def generate(tab: Page) -> Locator:
    return tab.locator("#generate")


def stop(tab: Page) -> Locator:
    return tab.locator("#stop")


def box(tab: Page, number: int) -> Locator:
    return tab.get_by_label(f"Prompt {number}", exact=True)


def setting(tab: Page, name: str) -> Locator:
    """Return a field of the settings for all, or the seed; the first whose name begins so."""
    if name != "Seed":
        unfold(tab, "Settings")
        tab.locator("#settings-panel .expert").evaluate("expert => { expert.open = true }")
    fields = tab.locator("#settings-panel, #seed")
    return fields.get_by_label(re.compile(rf"^\s*{re.escape(name)}")).first


def seed_box(tab: Page) -> Locator:
    return tab.locator("#seed input")


def choose(field: Locator, name: str) -> None:
    """Chooses from a list by what is shown."""
    field.select_option(label=name)


def prompts(tab: Page) -> list[str]:
    return [box(tab, number).input_value() for number in range(1, 9)]


def figures(tab: Page) -> Locator:
    return tab.locator("#cards figure")


def more(tab: Page, number: int) -> Locator:
    """Open what else can be done with a picture."""
    card = figures(tab).nth(number - 1)
    card.locator("[popovertarget]").click()
    return card.locator("[popover]")


def says(tab: Page, text: str | re.Pattern) -> None:
    """Wait for this in the progress line."""
    expect(tab.locator("#line")).to_contain_text(text, timeout=PATIENCE)


def tools(tab: Page) -> Locator:
    """Open the menu of tools."""
    menu = tab.locator("#more-tools")
    if not menu.is_visible():
        tab.locator("[popovertarget=more-tools]").click()
    return menu


def tool(tab: Page, name: str) -> Locator:
    """Return a tool of the menu, which is open then."""
    return tools(tab).get_by_role("button", name=name, exact=True)


def of_all(tab: Page) -> Locator:
    """Return what the page knows of all pictures of the run that is shown."""
    return tab.locator("#collection [data-run]")


def unfold(tab: Page, name: str) -> None:
    """Open a panel, which closes whichever is open."""
    named = tab.get_by_role("button", name=name, exact=True, include_hidden=True)
    fold = tab.locator(".fold").and_(named)
    if fold.get_attribute("aria-expanded") == "false":
        if fold.and_(tab.locator("#more-tools *")).count():
            tools(tab)
        fold.click()


def fill(tab: Page, prompts: list[str], seed: int | None = None, steps: int = 2) -> None:
    for number, prompt in enumerate(prompts, start=1):
        if box(tab, number).input_value() != prompt:  # each that is filled asks the server
            box(tab, number).fill(prompt)
    if seed is not None:
        seed_box(tab).fill(str(seed))
    setting(tab, "Steps").fill(str(steps))
    setting(tab, "Steps").blur()


def press(tab: Page, button: Locator) -> None:
    """Presses a button; what the progress line says from then on is not of before."""
    tab.locator("#line p").evaluate("line => { line.textContent = '' }")
    button.click()


def make(tab: Page) -> None:
    press(tab, generate(tab))
    says(tab, "Done in")


def alts(tab: Page) -> list[str]:
    return tab.locator("#cards img").evaluate_all("all => all.map(image => image.alt)")


def corners(tab: Page) -> list[list[float]]:
    return figures(tab).evaluate_all("""figures => figures.map(figure => {
        const box = figure.getBoundingClientRect();
        return [box.x, box.y + scrollY, box.width, box.height];
    })""")
