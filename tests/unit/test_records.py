"""Records of benchmarks, the goals they are held to, and the pages and decisions made of them."""

import re
from pathlib import Path

import pytest

from benchmarks import goals, machine, pages
from benchmarks.records import RESULTS, Record, newest, read_all

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"
ANSWERS = ["Question", "Expected", "Came", "Decision", "In the code", "Look again"]


def record(**fields) -> Record:
    """A record of two rows of which fields can be set."""
    fields = {
        "benchmark": "start",
        "title": "Start-up: a model",
        "date": "2026-01-02",
        "commit": None,
        "machine": "zen4-2c",
        "host": "a host",
        "versions": {},
        "flags": {},
        "columns": ["seconds", "second start", "second / first"],
        "rows": [["ready", 25.0, 0.5], ["first picture there", 9.0, 0.3]],
        **fields,
    }
    return Record(**fields)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/*.json")), ids=lambda file: file.stem)
def test_each_record_is_as_it_would_be_written(file, tmp_path):
    one = Record.read(file)
    assert all(len(row) == len(one.columns) for row in one.rows)
    assert one.write(tmp_path).relative_to(tmp_path) == file.relative_to(RESULTS)
    assert one.text() == file.read_text(encoding="utf-8")


def test_the_newest_record_of_each_machine_counts_unless_it_is_superseded():
    old, new = record(), record(date="2026-01-03T10:00:00")
    gone = record(date="2026-01-04", superseded="the model is gone")
    other = record(machine="zen3-2c")
    assert [*newest([old, other, new, gone], old.title)] == [other, new]


def test_records_are_read_from_the_oldest_to_the_newest(tmp_path):
    for date in ("2026-01-03", "2026-01-02T09:00:00", "2026-01-02"):
        record(date=date).write(tmp_path)
    assert [one.date for one in read_all(tmp_path, "start")] == [
        "2026-01-02",
        "2026-01-02T09:00:00",
        "2026-01-03",
    ]


def test_a_record_is_held_to_its_goals():
    found = {check.what: (check.goal, check.met) for check in goals.check(record())}
    assert found == {
        "second start, s: ready": ("≤ 5", False),
        "second start / first: first picture there": ("≤ 0.4", True),
    }


def test_a_goal_may_be_a_column_and_may_be_a_least_number():
    rows = [["pictures whole at 1x1", 7, 8], ["requests of a first load", 7, 8]]
    visit = record(title="First visit", columns=["", "figure", "goal"], rows=rows)
    assert [(check.goal, check.met) for check in goals.check(visit)] == [
        ("≤ 8", True),
        ("≥ 8", False),
    ]


def test_every_goal_is_held_against_a_figure():
    records = read_all(RESULTS)
    for goal in goals.GOALS:
        held = [one for one in records if one.title.startswith(goal.title)]
        assert any(filter(goal.rows, one.by_column()) for one in held), goal
        assert any(goal.column in one.columns for one in held), goal


@pytest.mark.parametrize(
    "vendor, family, model, flags, expected",
    [
        ("AuthenticAMD", "25", "1", "avx2", "zen3"),
        ("AuthenticAMD", "25", "17", "avx2 avx512f", "zen4"),
        ("AuthenticAMD", "26", "2", "avx2 avx512f", "zen5"),
        ("GenuineIntel", "6", "207", "avx512f", "emeraldrapids"),
        ("GenuineIntel", "6", "1", "", None),
        ("other", "25", "1", "", None),
    ],
)
def test_processors_are_told_apart_by_generation(vendor, family, model, flags, expected):
    text = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: x\n"
    assert machine.generation(f"{text}flags\t\t: {flags}\n") == expected


def test_the_pages_of_docs_performance_are_as_the_records_say():
    for file, text in pages.pages(read_all(RESULTS)).items():
        written = (pages.DOCS / file).read_text(encoding="utf-8")
        assert written == text, f"{file} is stale: run `python -m benchmarks.pages`"


def test_each_decision_answers_the_same_questions_and_is_in_the_index():
    index = (DECISIONS / "index.md").read_text(encoding="utf-8")
    files = sorted(DECISIONS.glob("[0-9]*.md"))
    assert re.findall(r"\]\((\d{4}-.*?\.md)\)", index) == [file.name for file in files]
    for number, file in enumerate(files, 1):
        text = file.read_text(encoding="utf-8")
        assert text.startswith(f"# {number:04}: "), file
        assert re.findall(r"^## (.*)", text, re.M) == ANSWERS, file


def test_decisions_that_are_cited_exist_and_name_code_that_exists():
    numbers = {file.name[:4] for file in DECISIONS.glob("[0-9]*.md")}
    sources = [
        file
        for folder in ("sd_tpu", "tests", "benchmarks", "training", "deploy", "docs")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".md", ".json")
    ]
    cited = {
        number
        for file in sources
        for number in re.findall(r"[Dd]ecision (\d{4})", file.read_text(encoding="utf-8"))
    }
    assert cited and cited <= numbers
    for file in DECISIONS.glob("[0-9]*.md"):
        code = file.read_text(encoding="utf-8").split("## In the code")[1].split("\n## ")[0]
        for path in re.findall(r"`([\w./]+/[\w.]+)`", code):
            assert (ROOT / path).exists(), f"{file.name}: {path}"
