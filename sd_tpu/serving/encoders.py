"""Compiled encoders of pictures that others begin with or refer to."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from sd_tpu.runtime.programs import ImageEncoder
from sd_tpu.serving.worker import reason_of
from sd_tpu.settings import RequestError

log = logging.getLogger(__name__)

Key = tuple[str, int, int]  # a kind of networks, height and width
MAX_SPARE = 16  # encoders that no job needs


class Encoders:
    """Encoders by kinds of networks and sizes; those that jobs need stay, of others MAX_SPARE."""

    def __init__(self):
        """Begin with none."""
        self._lock = threading.Lock()  # held for no compilation
        self._found: OrderedDict[Key, Future[ImageEncoder]] = OrderedDict()  # last used, last
        self._jobs: dict[Key, set[int]] = {}

    def get(
        self, key: Key, make: Callable[[], ImageEncoder], job: int | None = None
    ) -> ImageEncoder:
        """Return an encoder. The first caller makes it; callers with the same key wait for that.

        Args:
            key: a kind of networks, height and width.
            make: compiles it.
            job: the number of the job that needs it until `release`; None if one does already.

        Raises:
            RequestError: it could not be compiled; all waiting callers get this error.
        """
        with self._lock:
            is_new = self._found.setdefault(key, future := Future()) is future
            encoder = self._found[key]
            self._found.move_to_end(key)
            if job is not None:
                self._jobs.setdefault(key, set()).add(job)
            self._forget()
        if is_new:
            self._make(key, encoder, make)
        return encoder.result()

    def release(self, job: int) -> None:
        """Record that a job needs no encoder any more."""
        with self._lock:
            for key, jobs in list(self._jobs.items()):
                jobs.discard(job)
                if not jobs:
                    del self._jobs[key]
            self._forget()

    def _forget(self) -> None:
        spare = [key for key in self._found if key not in self._jobs]
        for key in spare[:-MAX_SPARE]:
            del self._found[key]

    def _make(self, key: Key, found: Future, make: Callable[[], ImageEncoder]) -> None:
        try:
            found.set_result(make())
        except Exception as error:
            log.exception("compiling an encoder failed")
            with self._lock:
                if self._found.get(key) is found:
                    del self._found[key]  # it is tried again when it is next asked for
            found.set_exception(RequestError("Compiling failed: {reason}", reason=reason_of(error)))
