"""What becomes of every job, as a line of JSON: without its prompts, unless they are asked for."""

import hashlib
import json
import logging
import time
from datetime import UTC, datetime
from pathlib import Path

from sd_tpu.serving.job import Done, Failed, Job

log = logging.getLogger(__name__)


def note(job: Job) -> None:
    """Writes down a job that is over; of its client only a hash, as the name opens his pictures."""
    if not log.isEnabledFor(logging.INFO):
        return
    pictures = [job.request.pictures[index] for index in job.request.indices()]
    seconds = time.monotonic() - job.since
    drawn = job.end.seconds if isinstance(job.end, Done) else None
    log.info(
        "job",
        extra={
            "facts": {
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
        },
    )


def keep(file: Path, *, prompts: bool) -> None:
    """Appends a line for each job from now on; raises OSError if the file cannot be written."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(_Lines(prompts))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


class _Lines(logging.Formatter):
    """Records as JSON, one a line."""

    def __init__(self, prompts: bool):
        super().__init__()
        self._left_out = () if prompts else ("prompts",)

    def format(self, record: logging.LogRecord) -> str:
        """A record of `note`."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {
            name: value
            for name, value in record.facts.items()
            if name not in self._left_out and value is not None
        }
        return json.dumps({"time": when, **facts}, ensure_ascii=False)
