"""A journal of jobs as lines of JSON, without their prompts unless they are asked for."""

import hashlib
import json
import logging
import queue
import time
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Any

from sd_tpu.serving.job import Done, Failed, Job

log = logging.getLogger(__name__)


def note(job: Job) -> None:
    """Write a line about a job that is over, in a thread of the journal's."""
    log.info("job", extra={"job": job, "seconds": time.monotonic() - job.since})


def keep(file: Path, *, prompts: bool) -> None:
    """Append a line for each job from now on; raises OSError if the file cannot be written.

    The last lines are written when logging is shut down.
    """
    writer = logging.FileHandler(file, encoding="utf-8")
    writer.setFormatter(_Lines(prompts))
    log.addHandler(_Handler(writer))
    log.setLevel(logging.INFO)
    log.propagate = False


class _Handler(QueueHandler):
    """Hands records to a handler in a thread, which ends when this is closed."""

    def __init__(self, writer: logging.Handler):
        super().__init__(queue.SimpleQueue())
        self._writer, self._listener = writer, QueueListener(self.queue, writer)
        self._open = True
        self._listener.start()

    def close(self) -> None:
        """Wait until all is written; closing again changes nothing."""
        if self._open:
            self._open = False
            self._listener.stop()
            self._writer.close()
        super().close()


class _Lines(logging.Formatter):
    """Records as JSON, one a line."""

    def __init__(self, prompts: bool):
        super().__init__()
        self._left_out = () if prompts else ("prompts",)

    def format(self, record: logging.LogRecord) -> str:
        """Format a record of `note`."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {
            name: value
            for name, value in _facts(record.job, record.seconds).items()  # ty: ignore[missing-attribute]
            if name not in self._left_out and value is not None
        }
        return json.dumps({"time": when, **facts}, ensure_ascii=False)


def _facts(job: Job, seconds: float) -> dict[str, Any]:
    """Return the facts about a job; of its client only a hash, as the name opens their pictures."""
    pictures = [job.request.picture(index) for index in job.request.indices()]
    drawn = job.end.seconds if isinstance(job.end, Done) else None
    return {
        "job": job.number,
        "client": hashlib.sha256(job.client.encode()).hexdigest()[:12],
        "end": type(job.end).__name__.lower(),
        "reason": str(job.end.message) if isinstance(job.end, Failed) else None,
        "seconds": round(seconds, 3),
        "waited": drawn and round(seconds - drawn, 3),
        "pictures": len(pictures),
        "steps": [picture.steps for picture in pictures],
        "samplers": [picture.sampler for picture in pictures],
        "models": [picture.model for picture in pictures],
        "size": f"{pictures[0].width}x{pictures[0].height}",
        "prompts": [picture.prompt for picture in pictures],
    }
