"""Counts of what an engine has done since it began, for those who watch over it."""

import dataclasses
from collections import Counter
from typing import Any

from sd_tpu.serving.plan import Plan, Report


@dataclasses.dataclass
class Tally:
    """Counters that only grow.

    Attributes:
        pictures: that were finished.
        rows: of tables that slots have taken, with those of forecasts.
        refused: requests, because too much waited.
        ended: jobs, by how.
        seconds: by what the devices or the host did: encode, advance, decode, preview, train,
            compile, load.
    """

    pictures: int = 0
    rows: int = 0
    refused: int = 0
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: Any = dataclasses.field(default_factory=Counter)  # a Counter, of floats

    def record(self, plan: Plan, report: Report) -> None:
        """Add the results of a plan."""
        self.pictures += len(report.pictures)
        if not (report.error or report.unread):
            self.rows += sum(plan.rows.values())
        self.seconds["encode"] += report.encode_seconds
        self.seconds["advance"] += report.advance_seconds
        self.seconds["decode"] += report.decode_seconds
        self.seconds["preview"] += report.preview_seconds
        self.seconds["train"] += report.train_seconds or 0.0
        self.seconds["compile"] += sum(each.seconds for each in report.compiled.values())
        # What came to several devices was read once.
        self.seconds["load"] += sum(
            {weights: seconds for (_, weights), seconds in report.loaded.items()}.values()
        )
