"""The runs of everybody who shares an engine, and who looks at which."""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator

from sd_tpu.page.files import Store
from sd_tpu.page.run import GRACE_SECONDS, Run, Snapshot
from sd_tpu.pictures.uploads import Inputs
from sd_tpu.request import Request
from sd_tpu.serving.client import EngineClient

MAX_KEPT = 256  # runs, for browsers that come back
KEEP_SECONDS = 24 * 3600  # how long its pictures' files are there


class Runs:
    """The runs of everybody who shares an engine; each is private to who has its key."""

    def __init__(self, engine: EngineClient, store: Store, inputs: Inputs):
        """Finished pictures go to the store; `inputs` are what they may begin with."""
        self._engine, self._store, self._inputs = engine, store, inputs
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, Run] = OrderedDict()  # by key, the oldest first
        self._latest: dict[str, str] = {}  # the key of each browser's last
        self._shown: dict[str, str] = {}  # the key of what each session sees

    def start(self, request: Request, *, browser: str = "", program: str = "",
              address: str = "", grace: float = GRACE_SECONDS, previews: bool = True,
              live: bool = False, seed: int | None = None, former: Run | None = None,
              keep: Collection[int] = ()) -> Run | None:
        """Submits a request of a browser or of a program, by their names: all that one of them asks
        for has one share of the devices. `address` is where it comes from.

        `grace` is how many seconds it may go on while nobody follows it, `live` whether it was
        begun by typing, `seed` what was given or drawn for all pictures, `former` the run whose
        pictures it takes the place of. What `former` has finished stays where `keep` says so, or
        where the same is asked for again. Returns None if that leaves nothing to draw.

        Raises:
            Busy: too much waits already.
            RequestError: it cannot be served.
        """
        request, drawn = carried(request, former, keep)
        if not drawn.places():
            return None
        job = self._engine.submit(drawn, previews=previews, client=browser or program,
                                  address=address,
                                  inputs=self._inputs.of(browser, drawn.inputs()))
        run = Run(job, self._engine, self._store, self._inputs, grace, browser, live=live,
                  seed=seed, former=former, request=request)
        with self._lock:
            self._runs[run.key] = run
            if browser:
                self._latest[browser] = run.key
            self._forget()
        return run

    def find(self, key: object) -> Run | None:
        """The run with this key, if it is still known."""
        return self._runs.get(key) if isinstance(key, str) else None

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


def carried(request: Request, former: Run | None, keep: Collection[int]) -> tuple[Request, Request]:
    """The request with what `former` has finished at the places to `keep`, and the part of it that
    is to be drawn: not what is kept, nor what is there as it is asked for."""
    drawn = request
    for place in range(len(former.request.pictures) if former else 0):
        asked = (*request.pictures, *[None] * len(former.request.pictures))[place]
        kept = former.finished(place)
        if kept and kept[0].picture.there and (place in keep or kept[1] == asked):
            request = request.replaced(place, kept[1])
            drawn = drawn.replaced(place, None)
    return request, drawn
