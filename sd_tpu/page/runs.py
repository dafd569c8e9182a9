"""The runs of everybody who shares an engine, and who looks at which."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from sd_tpu.engine import Engine
from sd_tpu.page.keeping import Keeper
from sd_tpu.page.run import GRACE_SECONDS, Run
from sd_tpu.page.snapshot import Snapshot
from sd_tpu.page.works import Works
from sd_tpu.request import Request

MAX_KEPT = 256  # runs, for browsers that come back
KEEP_SECONDS = 24 * 3600  # how long its pictures' files are there


class Runs:
    """The runs of everybody who shares an engine; each is private to who has its key."""

    def __init__(self, engine: Engine, keeper: Keeper):
        """Finished pictures go to the keeper."""
        self._engine, self._keeper, self._works = engine, keeper, Works()
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, Run] = OrderedDict()  # by key, the oldest first
        self._latest: dict[str, str] = {}  # the key of each browser's last
        self._shown: dict[str, str] = {}  # the key of what each session sees

    def start(self, request: Request, *, browser: str = "", grace: float = GRACE_SECONDS,
              previews: bool = True, live: bool = False) -> Run:
        """Submits a request of a browser, or of a program, which is called ""; raises RequestError.

        `grace` is how many seconds it may go on while nobody follows it, `live` whether it was
        begun by typing.
        """
        job = self._engine.submit(request, previews=previews)
        run = Run(job, self._engine, self._keeper, self._works, grace, browser, live=live)
        with self._lock:
            self._runs[run.key] = run
            if browser:
                self._latest[browser] = run.key
            self._forget()
        return run

    def find(self, key: str | None) -> Run | None:
        """The run with this key, if it is still known."""
        return self._runs.get(key)

    def follow(self, run: Run, session: str, seen: int = 0) -> Iterator[Snapshot]:
        """Shows a run to a session, as `Run.follow` yields it."""
        self.show(session, run)
        yield from run.follow(session, seen)

    def show(self, session: str, run: Run) -> None:
        """Takes down that a session sees this run from now on, or is about to."""
        with self._lock:
            self._shown[session] = run.key

    def shown(self, session: str) -> Run | None:
        """What a session sees, though its page may not have been told of it yet."""
        return self.find(self._shown.get(session))

    def latest(self, browser: str) -> Run | None:
        """What this browser began last, if its pictures are still there."""
        run = self.find(self._latest.get(browser))
        return run if run and time.time() - run.begun < KEEP_SECONDS else None

    def leave(self, session: str) -> None:
        """Ends what a session follows that is gone."""
        with self._lock:
            runs = list(self._runs.values())
            self._shown.pop(session, None)
        for run in runs:
            run.leave(session)

    def _forget(self) -> None:
        needed = set(self._latest.values())  # which a browser that comes back will ask for
        over = sorted((key for key, run in self._runs.items() if run.over), key=needed.__contains__)
        for key in over[:max(0, len(self._runs) - MAX_KEPT)]:
            del self._runs[key]
        self._latest, self._shown = ({who: key for who, key in of.items() if key in self._runs}
                                     for of in (self._latest, self._shown))
