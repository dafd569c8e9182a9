"""The page in a browser: `python -m benchmarks.page`.

How long Chromium's main thread is busy while the page opens, while somebody types, and during a
run: the page answers keys and draws only in between. Then what a first visit shows: how soon, how
much of it moves, what can be reached. Debian's chromium-headless-shell must be installed; the page
is served by this process.
"""

import re
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from axe_core_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.report import add_model, add_rounds, parser, report
from sd_tpu import page as page_package
from sd_tpu.gallery.history import History
from sd_tpu.page import build, close, launch
from sd_tpu.serving.engine import Engine

TYPED = "a red house on a green hill"
READY, OPENING, TYPING, RUN, AGAIN = PARTS = (
    "from the address to a button that can be pressed",
    "busy while it opens",
    f"busy while {len(TYPED)} letters are typed",
    "busy during a run of eight pictures",
    "busy while they are typed after it",
)
GENERATE = "#generate:not([disabled])"
PATIENCE = 120_000  # ms
SETTLED = 1500  # ms after which nothing of what was done goes on
LAPTOP, SMALL_LAPTOP, PHONE = (1440, 900), (1366, 768), (390, 844)
TARGET = 44  # pixels: what a finger hits
# What has moved by itself since the last look, whether or not somebody has just pressed something;
# how long after a press something is painted; at which step a picture is seen to form.
WATCH = """
window.watched = { shift: 0, feedback: null, step: null };
new PerformanceObserver((list) => {
    for (const { value } of list.getEntries()) watched.shift += value;
}).observe({ type: "layout-shift", buffered: true });
document.addEventListener("click", ({ timeStamp }) => requestAnimationFrame(() => {
    const painted = new MessageChannel();
    painted.port1.onmessage = () => { watched.feedback = performance.now() - timeStamp; };
    painted.port2.postMessage(null);
}), true);
new MutationObserver(() => {
    if (watched.step === null && document.querySelector("figure.forming img")) {
        watched.step = document.querySelector("#line").textContent;
    }
}).observe(document, { subtree: true, childList: true });
"""
# Until a run is over. Playwright's own waiting would have a frame drawn for each of its looks.
OVER = """(patience) => new Promise((resolve, reject) => {
    const look = () => {
        if (!document.querySelector("#line .over")) return;
        observer.disconnect();
        resolve();
    };
    const observer = new MutationObserver(look);
    observer.observe(document.querySelector("#line"),
        { subtree: true, childList: true, attributeFilter: ["class"] });
    setTimeout(() => reject(new Error("The run did not end.")), patience);
    look();
})"""
WHOLE = """() => [...document.querySelectorAll("#cards figure > div")].filter((picture) => {
    const { top, bottom } = picture.getBoundingClientRect();
    return top >= 0 && bottom <= document.querySelector("#bar").getBoundingClientRect().top;
}).length"""
# The share of the window that is picture, in percent.
SHARE = """() => [...document.querySelectorAll("#cards figure > div")].reduce((sum, picture) => {
    const { width, height } = picture.getBoundingClientRect();
    return sum + width * height;
}, 0) / (innerWidth * innerHeight) * 100"""
# How often Tab is pressed before it is at the button that draws.
STOPS = """() => [...document.querySelectorAll(
        "a[href], button:enabled, input, select, textarea, summary, [tabindex]")]
    .filter((each) => each.tabIndex >= 0 && each.checkVisibility())
    .findIndex((each) => each.id === "generate")"""
SOURCES = "() => [...document.querySelectorAll('#cards img')].map((image) => image.src)"
SMALL = """(least) => [...document.querySelectorAll("button, a[href], summary, select, input")]
    .filter((each) => each.checkVisibility() && each.type !== "checkbox" && each.type !== "radio"
        && each.type !== "range" && !each.closest("footer"))
    .filter((each) => {
        const { width, height } = each.getBoundingClientRect();
        return width && (width < least - .5 || height < least - .5);
    }).map((each) => each.outerHTML.slice(0, 90))"""


def visit(browser: Browser, address: str, slowdown: float) -> dict[str, float]:
    """Seconds of each part of a visit, by somebody who has been there before."""
    with browser.new_context(viewport={"width": 1440, "height": 900}) as context:
        with context.new_page() as first:
            _open(first, address)
            first.wait_for_timeout(SETTLED)
        with context.new_page() as tab:
            devtools = context.new_cdp_session(tab)
            devtools.send("Performance.enable")
            devtools.send("Emulation.setCPUThrottlingRate", {"rate": slowdown})
            taken, busy = {}, 0.0

            def settle(part: str) -> None:
                nonlocal busy
                tab.wait_for_timeout(SETTLED)
                metrics = devtools.send("Performance.getMetrics")["metrics"]
                total = next(each["value"] for each in metrics if each["name"] == "TaskDuration")
                taken[part], busy = total - busy, total

            begun = time.perf_counter()
            _open(tab, address)
            taken[READY] = time.perf_counter() - begun
            settle(OPENING)
            prompt = tab.get_by_label("Prompt 1", exact=True)
            prompt.press_sequentially(TYPED, delay=60)
            settle(TYPING)
            tab.locator(GENERATE).click()
            tab.evaluate(OVER, PATIENCE)
            settle(RUN)
            prompt.press_sequentially(TYPED, delay=60)
            settle(AGAIN)
    return taken


def _open(tab: Page, address: str) -> None:
    tab.set_default_timeout(PATIENCE)
    tab.goto(address)
    tab.wait_for_function("window.sdTpu?.arrived")  # before that nothing can be pressed
    tab.wait_for_selector(GENERATE)


def look(browser: Browser, address: str) -> list[dict[str, object]]:
    """Measure a first visit; return rows with the goal for each figure."""
    rows: list[dict[str, object]] = []

    def note(what: str, value: object, goal: object) -> None:
        rows.append({"": what, "figure": value, "goal": goal})

    with browser.new_context(viewport=_size(LAPTOP)) as context:
        tab = context.new_page()
        tab.add_init_script(WATCH)
        devtools, sizes = context.new_cdp_session(tab), []
        devtools.send("Network.enable")
        # What the page holds itself, as data: addresses, is told of as well, as of no size.
        devtools.on(
            "Network.loadingFinished",
            lambda each: each["encodedDataLength"] and sizes.append(each["encodedDataLength"]),
        )
        begun = time.perf_counter()
        _open(tab, address)
        note("seconds until it is ready for input", time.perf_counter() - begun, 2.6)
        tab.wait_for_timeout(SETTLED)
        note("requests of a first load", len(sizes), 38)
        note("kB of a first load", sum(sizes) / 1000, 260)
        note("layout shift on load", _shift(tab), 0.05)
        for size, goal in ((LAPTOP, 8), (SMALL_LAPTOP, 8), (PHONE, 6)):
            tab.set_viewport_size(_size(size))
            tab.wait_for_timeout(200)
            note(f"pictures whole at {size[0]}x{size[1]}", tab.evaluate(WHOLE), goal)
        tab.set_viewport_size(_size(LAPTOP))
        tab.wait_for_timeout(200)
        note("pictures, % of the window", tab.evaluate(SHARE), 58)
        note("stops of Tab before Draw", tab.evaluate(STOPS), 12)
        _shift(tab)
        tab.locator(GENERATE).click()
        tab.wait_for_function("watched.feedback")
        note("ms from Draw to feedback", tab.evaluate("watched.feedback"), 50)
        tab.wait_for_selector("#line .over")
        tab.wait_for_timeout(200)
        step = re.search(r"\d+", tab.evaluate("watched.step") or "none")
        note("step of the first preview", step and int(step[0]), 2)
        note("layout shift during a run", _shift(tab), 0)
        before = tab.evaluate(SOURCES)
        tab.locator(".actions > [data-do=redraw]").nth(3).click()
        tab.wait_for_function(
            f"(before) => String(({SOURCES})()) !== before && "
            "document.querySelector('#line .over')",
            arg=",".join(before),
        )
        tab.wait_for_timeout(200)
        pairs = zip(before, tab.evaluate(SOURCES), strict=True)
        note("pictures changed by one click on Redraw", sum(a != b for a, b in pairs), 1)
        _shift(tab)
        folds = tab.locator("button.fold").count()
        note(
            "layout shift on opening any panel", max(_opened(tab, each) for each in range(folds)), 0
        )
        for name, size, scheme in (
            ("light", LAPTOP, "light"),
            ("dark", LAPTOP, "dark"),
            ("on a phone", PHONE, "light"),
        ):
            tab.set_viewport_size(_size(size))
            tab.emulate_media(color_scheme=scheme)
            tab.wait_for_function(
                "dark => document.body.classList.contains('dark') === dark", arg=scheme == "dark"
            )
            tab.wait_for_timeout(SETTLED)  # until colours have passed over
            tab.keyboard.press("Escape")
            # All at once, as nobody can have them.
            tab.evaluate("""() => {
                for (const panel of document.querySelectorAll(".panel, #sheet details")) {
                    panel.toggleAttribute("data-open", true);
                    panel.removeAttribute("name");  // or it would close the one before
                    panel.open = true;
                }
            }""")
            found = Axe().run(tab)["violations"]
            note(f"axe's violations with all panels open, {name}", len(found), 0)
            for violation in found:
                print(violation["id"], [node["html"] for node in violation["nodes"]][:3])
        small = tab.evaluate(SMALL, TARGET)
        print(*small, sep="\n")
        note(f"targets below {TARGET} px on a phone", len(small), 0)
    note(
        "lines of the page's Python",
        sum(
            len(file.read_text("utf-8").splitlines())
            for file in Path(page_package.__file__).parent.glob("*.py")
        ),
        1600,
    )
    return rows


def _size(size: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("width", "height"), size, strict=True))


def _shift(tab: Page) -> float:
    """Return the layout shift since the last call."""
    shift = tab.evaluate("watched.shift")
    tab.evaluate("() => { watched.shift = 0; }")
    return shift


def _opened(tab: Page, place: int) -> float:
    tab.keyboard.press("Escape")
    tab.locator("button.fold").nth(place).dispatch_event("click")
    tab.wait_for_timeout(300)
    return _shift(tab)


def column(slowdown: float) -> str:
    """Return the heading of the figures with a processor that is so much slower."""
    return "this machine" if slowdown == 1 else f"a processor {slowdown:g} times slower"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure visits."""
    flags = parser("page", __doc__.splitlines()[0])
    add_model(flags)
    flags.add_argument(
        "--slowdowns",
        type=float,
        nargs="+",
        default=[1, 4],
        metavar="TIMES",
        help="how much slower than this machine's the browser's processor is (%(default)s)",
    )
    add_rounds(flags, 3)
    args = flags.parse_args(arguments)

    taken = defaultdict(list)
    with ExitStack() as ends:
        engine = Engine.open(args.model)
        ends.callback(engine.close)
        engine.ready.wait()
        history = History(ends.enter_context(tempfile.TemporaryDirectory()))
        ends.callback(history.close)
        page = build(engine, history)
        address = launch(page)
        ends.callback(close, page)
        playwright = ends.enter_context(sync_playwright())
        browser = ends.enter_context(
            playwright.chromium.launch(
                executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
            )
        )
        seen = look(browser, address)
        for _ in range(args.rounds):
            for slowdown in args.slowdowns:
                taken[slowdown].append(visit(browser, address, slowdown))
    rows = [
        {
            "seconds": part,
            **{
                column(slowdown): statistics.median(each[part] for each in visits)
                for slowdown, visits in taken.items()
            },
        }
        for part in PARTS
    ]
    report(
        f"The page in a browser: {engine.checkpoint.card.name}",
        rows,
        args,
        notes=[
            f"Medians of {args.rounds} visits, in turn, by somebody who has been there before; "
            "the model's own number of steps. Busy is Chromium's main thread."
        ],
    )
    report("First visit", seen, args)


if __name__ == "__main__":
    main()
