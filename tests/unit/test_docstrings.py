"""The beginnings of docstrings, as far as the linter (D401) does not know them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("sd_tpu", "deploy", "benchmarks", "training", "docs")
# None of them begins a sentence that says what something is or does.
REFUSED = {"What", "As", "Of", "Those", "Whose", "Whom", "That", "Their", "Its"}
# An argument's line stands for itself.
EMPTY = ("see there", "likewise")


def docstrings(file: Path):
    """Yield the line and the docstring of everything in a file that has one."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(file)
        if text.split()[0] in REFUSED
        or text.startswith("The same")
        or any(each in text for each in EMPTY)
    ]
    assert not wrong, "\n".join(wrong)
