"""The server's log: a record a line, in which what visitors have sent is quoted and cut.

An exception's message may hold whatever a browser has sent: lines that look like the log's own, and
as many megabytes as a request may have.
"""

import logging
import traceback
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

LONGEST = 500  # characters of a message
FRAMES = 40  # of a traceback


def quote_errors() -> None:
    """Has the process log through this module, unless it logs in some way already."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Quoting())
    logging.basicConfig(handlers=[handler])


def log_printed_errors(*modules: ModuleType) -> None:
    """Has modules that print the traceback of an exception log it instead."""
    def print_exc() -> None:
        logging.getLogger(__name__).error("an event failed", exc_info=True)

    for module in modules:
        module.traceback = SimpleNamespace(
            **{**vars(traceback), "print_exc": print_exc})


def quoted(text: str) -> str:
    """A text on one line, without control characters, LONGEST characters of it."""
    cut = text[:LONGEST]
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)
    return line if len(text) <= LONGEST else f"{line}… ({len(text)} characters)"


class _Quoting(logging.Formatter):
    """Writes a record's message as a line, and the frames of an exception below it."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record."""
        lines = [f"{record.levelname} {record.name}: {quoted(record.getMessage())}"]
        if record.exc_info and record.exc_info[1]:
            lines += _lines(record.exc_info[1])
        return "\n".join(lines)


def _lines(error: BaseException) -> Iterator[str]:
    """The frames of an exception and of what it came from, each with its message."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause:
        yield from _lines(cause)
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    yield from "".join(traceback.format_list(frames)).splitlines()
    yield f"  {type(error).__name__}: {quoted(str(error))}"
