"""What the page costs a browser: `python -m benchmarks.page`.

How long Chromium's main thread is busy while the page opens, while somebody types, and during a
run; the page answers keys and draws only between. Chromium is to be installed; the page is served
by this process.
"""

import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.report import parser, report
from sd_tpu import BUNDLED_MODEL
from sd_tpu.engine import Engine
from sd_tpu.page import build, launch

TYPED = "a red house on a green hill"
READY, OPENING, TYPING, RUN, AGAIN = PARTS = (
    "from the address to a button that can be pressed", "busy while it opens",
    f"busy while {len(TYPED)} letters are typed", "busy during a run of eight pictures",
    "busy while they are typed after it",
)
GENERATE = "#generate:not([disabled])"
PATIENCE = 120_000  # ms
SETTLED = 1500  # ms after which nothing of what was done goes on


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
            tab.wait_for_selector("#line .over")  # the end of a run
            settle(RUN)
            prompt.press_sequentially(TYPED, delay=60)
            settle(AGAIN)
    return taken


def _open(tab: Page, address: str) -> None:
    tab.set_default_timeout(PATIENCE)
    tab.goto(address)
    tab.wait_for_selector(GENERATE)


def column(slowdown: float) -> str:
    """The heading of the figures with a processor that is so much slower."""
    return "this machine" if slowdown == 1 else f"a processor {slowdown:g} times slower"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures visits."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--model", default=BUNDLED_MODEL, metavar="DIR_OR_HUB_ID",
                       help="behind the page (default: the bundled model)")
    flags.add_argument("--slowdowns", type=float, nargs="+", default=[1, 4], metavar="TIMES",
                       help="how much slower than this machine's the browser's processor is "
                            "(%(default)s)")
    flags.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    args = flags.parse_args(arguments)

    taken = defaultdict(list)
    with ExitStack() as ends:
        engine = Engine.open(args.model)
        ends.callback(engine.close)
        engine.ready.wait()
        page = build(engine)
        address = launch(page, server_name="127.0.0.1")
        ends.callback(page.close, verbose=False)
        playwright = ends.enter_context(sync_playwright())
        browser = ends.enter_context(playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]))
        for _ in range(args.rounds):
            for slowdown in args.slowdowns:
                taken[slowdown].append(visit(browser, address, slowdown))
    rows = [{"seconds": part, **{column(slowdown): statistics.median(each[part] for each in visits)
                                 for slowdown, visits in taken.items()}} for part in PARTS]
    report(f"The page in a browser: {engine.pipeline.card.name}", rows, args.results, notes=[
        f"Medians of {args.rounds} visits side by side, of somebody who has been there before; "
        "the model's own number of steps. Busy is Chromium's main thread."])


if __name__ == "__main__":
    main()
