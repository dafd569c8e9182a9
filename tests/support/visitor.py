"""Actions on the page, for the browser tests."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import playwright.sync_api
from axe_core_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Locator, Page

PATIENCE = 30_000  # ms: what a step of a test may take on a busy machine
FREQUENT = 2_000  # ms: Playwright looks each 100 ms where it has up to this, else each 500 ms
COLOURS = ["color-contrast", "link-in-text-block"]  # axe's rules that look at colours
PROMPTS = [f"picture number {i} <b>&" for i in range(1, 9)]
LONG = 200  # steps
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}

# What a browser has kept of others goes before a tab shows its first page, and stays from then on.
FORGET = """try {
    if (!sessionStorage.getItem("known")) localStorage.clear();
    sessionStorage.setItem("known", "yes");
} catch {}  // there is none on an empty page"""


class Expectation:
    """Playwright's expectations of an element or a page, which are looked at often."""

    def __init__(self, of: Locator | Page):
        self._of = of

    def __getattr__(self, name: str) -> Callable[..., None]:
        def check(*given: Any, timeout: float = 5_000, **options: Any) -> None:
            end = time.monotonic() + timeout / 1000
            while True:
                left = 1000 * (end - time.monotonic())
                expected = getattr(playwright.sync_api.expect(self._of), name)
                try:
                    return expected(*given, timeout=min(max(left, 1), FREQUENT), **options)
                except AssertionError:
                    if left <= FREQUENT:
                        raise

        return check


def expect(of: Locator | Page) -> Expectation:
    """Take the place of Playwright's function, half of whose waiting is for its next look."""
    return Expectation(of)


def violations(tab: Page, where: str | None = None, *, rules: list[str] | None = None) -> list[str]:
    """Return what axe finds that keeps people out.

    Args:
        tab: the page.
        where: a selector of the part that is looked at, by default the whole page.
        rules: of axe, by default all that are for everybody.
    """
    options = {"resultTypes": ["violations"]}  # what it finds in order would be described as well
    if rules:
        options["runOnly"] = rules
    found = Axe().run(tab, where, options)["violations"]
    return [f"{rule['id']}: {node['target']}" for rule in found for node in rule["nodes"]]


def keeps_nobody_out(tab: Page, where: str | None = None) -> None:
    """Assert that axe finds nothing in the light scheme, and no wrong colours in the dark one."""
    assert violations(tab, where) == []
    dark = tab.locator("body.dark")
    tab.emulate_media(color_scheme="dark")
    expect(dark).to_have_count(1)
    # Colours on their way from one scheme to the other are of neither.
    tab.evaluate("""() => Promise.allSettled(document.getAnimations()
        .filter((each) => each instanceof CSSTransition).map((each) => each.finished))""")
    assert violations(tab, where, rules=COLOURS) == []
    tab.emulate_media(color_scheme="light")
    expect(dark).to_have_count(0)  # or the next look might take this scheme for its own
    expect(dark).to_have_count(0)


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
            tab.set_viewport_size(PHONE)
        tab.emulate_media(color_scheme=scheme)
        tab.add_init_script(FORGET)
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
    """Fill in prompts, a seed and how many steps, which leaves the settings open."""
    tab.wait_for_function("window.sdTpu?.arrived")  # before that it would be overwritten
    tab.locator(".prompt textarea").evaluate_all(
        """(boxes, prompts) => prompts.forEach((prompt, index) => {
            if (boxes[index].value === prompt) return;
            boxes[index].value = prompt;
            boxes[index].dispatchEvent(new Event("input", { bubbles: true }));
        })""",
        prompts,
    )
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
    expect(stop(tab)).to_be_disabled(timeout=PATIENCE)  # its answer may come after its end


def alts(tab: Page) -> list[str]:
    return tab.locator("#cards img").evaluate_all("all => all.map(image => image.alt)")


def corners(tab: Page) -> list[list[float]]:
    return figures(tab).evaluate_all("""figures => figures.map(figure => {
        const box = figure.getBoundingClientRect();
        return [box.x, box.y + scrollY, box.width, box.height];
    })""")
