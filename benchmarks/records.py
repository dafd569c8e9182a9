"""Records of benchmark runs: one JSON file a table, under `benchmarks/results/<benchmark>/`."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.machine import slug

RESULTS = Path(__file__).parent / "results"
DIGITS = 6  # significant ones that a record keeps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One table of one run, with what it was measured on.

    `commit` is None where it is not known; `superseded` says why the figures no longer count, as
    when the model they are of is gone. A cell without a figure is None.
    """

    benchmark: str
    title: str
    date: str  # ISO 8601
    commit: str | None
    machine: str  # benchmarks.machine.key
    host: str
    versions: Mapping[str, str]
    flags: Mapping[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()
    superseded: str | None = None

    @classmethod
    def read(cls, file: Path) -> "Record":
        """Read a record; raises TypeError if a field is missing or unknown."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def write(self, results: Path) -> Path:
        """Write the record below the folder of results and return its file."""
        when = self.date.replace(":", "").replace("T", "-")
        file = results / self.benchmark / f"{when}-{self.machine}-{slug(self.title)}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.text(), encoding="utf-8")
        return file

    def text(self) -> str:
        """Return the record as JSON, each row and each note on a line of its own."""
        fields = []
        for field, value in dataclasses.asdict(self).items():
            written = _json(value)
            if field in ("rows", "notes") and value:
                written = "[\n" + ",\n".join(f"    {_json(each)}" for each in value) + "\n  ]"
            fields.append(f"  {_json(field)}: {written}")
        return "{\n" + ",\n".join(fields) + "\n}\n"

    def by_column(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def markdown(self) -> str:
        """Return the table in Markdown, numbers with four significant digits."""
        return table(self.columns, self.rows)


def read_all(results: Path, benchmark: str = "*") -> list[Record]:
    """Return the records of a benchmark, or of all, the oldest first."""
    found = [Record.read(file) for file in sorted(results.glob(f"{benchmark}/*.json"))]
    return sorted(found, key=lambda record: record.date)


def newest(records: Iterable[Record], title: str) -> Iterator[Record]:
    """Yield the newest record with this title of each machine, in the order of machines."""
    found = {
        record.machine: record
        for record in records
        if record.title == title and record.superseded is None
    }
    yield from (found[machine] for machine in sorted(found))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown, numbers with four significant digits."""
    return tabulate(rows, headers=columns, tablefmt="github", floatfmt=".4g")


def cell(value: Any) -> Any:
    """Return a cell as it is recorded: numbers with six significant digits, "" as None."""
    if isinstance(value, bool | str | int) or value is None:
        return None if value == "" else value
    return float(f"{value:.{DIGITS}g}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
