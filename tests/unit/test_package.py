"""How the package is put together: its modules import downwards only, and reading waits for use."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import sd_tpu
from tests.support.processes import told_by

ROOT = Path(sd_tpu.__file__).parent
UNREAD = """
from sd_tpu.language import LANGUAGES
assert not any("messages" in vars(language) for language in LANGUAGES.values())
assert LANGUAGES["ko"].say("Steps") != "Steps" == LANGUAGES["en"].say("Steps")
"""


def modules() -> dict[str, Path]:
    """The package's modules by name."""
    files = {file.relative_to(ROOT.parent).with_suffix(""): file for file in ROOT.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): file for name, file in files.items()}


def imports(file: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, wherever in it, but for type checkers."""
    found, left = set(), [ast.parse(file.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        if isinstance(node, ast.ImportFrom):
            paths = {f"{node.module}.{each.name}" for each in node.names}
            found |= {path if path in known else node.module for path in paths}
        left += ast.iter_child_nodes(node)
    return found & known.keys()


def test_no_modules_import_one_another():
    known = modules()
    graph = {name: imports(file, known) for name, file in known.items()}
    assert "sd_tpu.settings" in graph["sd_tpu.request"]
    assert [*TopologicalSorter(graph).static_order()]  # raises CycleError for a circle


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The folders and files of the package, and which others each imports."""
    found: dict[str, set[str]] = {}
    for module, imported in graph.items():
        for room in module.split(".")[1:2]:
            others = {other.split(".")[1] for other in imported if "." in other}
            found.setdefault(room, set()).update(others - {room})
    return found


def reached(room: str, graph: dict[str, set[str]]) -> set[str]:
    """The rooms that are imported by way of others too."""
    found, left = set(), [room]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def test_the_diagram_of_rooms_is_what_the_code_imports():
    known = modules()
    code = rooms({name: imports(file, known) for name, file in known.items()})
    text = (ROOT.parent / "docs/architecture.md").read_text("utf-8")
    drawn: dict[str, set[str]] = {}
    for room, other in re.findall(r"^    (\w+)(?:\[.*?\])? --> (\w+)", text, re.MULTILINE):
        drawn.setdefault(room, set()).add(other)
    drawn = {room: others for room, others in drawn.items() if room in code}
    assert len(drawn) >= 10
    assert all(others <= code[room] for room, others in drawn.items())
    shown = {*drawn, *(other for others in drawn.values() for other in others)}
    back = {("checkpoint", "settings")}
    for room in shown:
        follows = reached(room, drawn) | {other for of, other in back if of == room}
        assert code[room] & shown <= follows, room


def test_translations_are_read_when_something_is_said():
    told_by(UNREAD)


def test_what_draws_knows_nothing_of_the_gallery_the_page_or_the_apis():
    known = modules()
    code = rooms({name: imports(file, known) for name, file in known.items()})
    assert not reached("serving", code) & {"gallery", "page", "http", "cli", "pipelines"}
    assert code["gallery"] >= {"serving"} and not code["gallery"] & {"page", "http", "cli"}
