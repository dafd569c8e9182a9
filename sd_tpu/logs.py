"""The server's log: a record a line, in which what visitors have sent is quoted and cut.

An exception's message may hold whatever a browser has sent: lines that look like the log's own, and
as many megabytes as a request may have.
"""

import logging
import traceback
from types import ModuleType, SimpleNamespace

LONGEST = 500  # characters of a message
FRAMES, CAUSES = 40, 10  # of a traceback, and exceptions that one came from


def quote_errors() -> None:
    """Have the process log through this module, unless it logs in some way already."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Quoting())
    logging.basicConfig(handlers=[handler])


def log_printed_errors(*modules: ModuleType) -> None:
    """Have modules log the tracebacks that they would print."""

    def print_exc() -> None:
        logging.getLogger(__name__).error("an event failed", exc_info=True)

    for module in modules:
        module.traceback = SimpleNamespace(**{**vars(traceback), "print_exc": print_exc})  # ty: ignore[missing-attribute]


def quoted(text: str) -> str:
    """Return a text on one line, without control characters, at most LONGEST characters of it."""
    cut = text[:LONGEST]
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)
    return line if len(text) <= LONGEST else f"{line}… ({len(text)} characters)"


class _Quoting(logging.Formatter):
    """Formatter: a record's message as a line, and the frames of an exception below it."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        lines = [f"{record.levelname} {record.name}: {quoted(record.getMessage())}"]
        if record.exc_info and record.exc_info[1]:
            for error in _causes(record.exc_info[1]):
                frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
                lines += "".join(traceback.format_list(frames)).splitlines()
                lines.append(f"  {type(error).__name__}: {quoted(str(error))}")
        return "\n".join(lines)


def _causes(error: BaseException) -> list[BaseException]:
    """Return an exception and its causes, the first cause first."""
    causes = [error]
    while len(causes) < CAUSES:
        last = causes[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None:
            break
        causes.append(cause)
    return causes[::-1]
