"""README and docs are true: links lead somewhere, flags and files exist, references are fresh."""

import argparse
import functools
import importlib.util
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from docs.generate import FOLDER, PNG_FIELDS, VARIABLES, pages
from sd_tpu import cli
from sd_tpu.app import make_parser
from sd_tpu.settings import SETTINGS

ROOT = Path(__file__).parent
while not (ROOT / "pyproject.toml").exists():
    ROOT = ROOT.parent
FILES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
)
WRITTEN = [file for file in FILES if file.parent != FOLDER]  # by people
READ = MarkdownIt("commonmark").enable("table")
SHELL = {"sh", "console", "bash"}
PATHS = re.compile(r"(?:sd_tpu|tests|deploy|benchmarks|training|assets|docs)/[\w./-]*")
OF_OTHERS = {  # flags of make, git, docker and hf
    "--depth",
    "--build-arg",
    "--gpus",
    "--net",
    "--privileged",
    "--time",
    "--target",
    "--repo-type",
    "--exclude",
    "--help",
    "--ff-only",
    "--strict",
}


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@functools.cache
def parsed(file: Path) -> list:
    """Return the tokens of a page's blocks."""
    return READ.parse(file.read_text("utf-8"))


def tokens(file: Path) -> Iterator:
    """Yield the tokens of a page, those within its lines too."""
    for token in parsed(file):
        yield token
        yield from token.children or ()


def commands(file: Path) -> Iterator[str]:
    """The commands of the page's blocks, each in one line."""
    for token in tokens(file):
        language = token.info.strip() if token.type == "fence" else ""
        if token.type == "code_block" or language in SHELL:
            text = token.content.replace("\\\n", " ")
            yield from (line.removeprefix("$ ").strip() for line in text.splitlines())


@functools.cache
def anchors(file: Path) -> set[str]:
    """Return the anchors of a page, as GitHub names its headings."""
    found = set()
    for token, text in itertools.pairwise(parsed(file)):
        if token.type == "heading_open":
            kept = re.sub(r"[^\w\- ]", "", text.content.lower().replace("`", ""))
            found.add(kept.replace(" ", "-"))
    return found


def parser_of(words: list[str]) -> tuple[argparse.ArgumentParser, list[str]] | None:
    """The parser of a command of ours, and what it is given."""
    match words:
        case [program, *rest] if program.endswith("app.py"):
            return make_parser(), rest
        case ["sd-tpu", "page", *rest]:
            return make_parser(), rest
        case ["sd-tpu", command, *rest] if command in cli.COMMANDS:
            parser = argparse.ArgumentParser(exit_on_error=False)
            importlib.import_module(f"sd_tpu.cli.{command}").add_flags(parser)
            return parser, rest
    return None


def ours(line: str) -> list[str]:
    """Return the arguments of a command of ours for `sd-tpu` or `app.py`; else none."""
    words = [
        word for word in shlex.split(line, comments=True) if not re.fullmatch(r"\w+=\S*", word)
    ]
    if not words:
        return []
    if words[0].endswith("python") and words[1:3] == ["-m", "sd_tpu"]:
        return ["sd-tpu", *words[3:]]
    return words[1:] if words[0].endswith("python") else words


def test_reference_pages_are_what_the_code_says():
    made = pages()
    stale = [name for name, text in made.items() if (FOLDER / name).read_text("utf-8") != text]
    assert not stale, "python -m docs.generate writes them"
    assert {file.name for file in FOLDER.glob("*.md")} == made.keys()


def test_each_setting_has_a_sentence_in_the_guide():
    guide = "\n".join(file.read_text("utf-8") for file in (ROOT / "docs/guide").glob("*.md"))
    missing = [
        setting.label
        for setting in SETTINGS.values()
        if f"**{setting.label}**" not in guide
        and setting.name not in {"prompt", "height", "width", "to_prompt", "to_seed", "share"}
    ]
    assert not missing
    assert "*Second prompt*" in guide and "*Second seed*" in guide and "*Share of the way*" in guide


def test_each_flag_of_the_server_has_a_sentence_in_the_docs():
    told = "\n".join(file.read_text("utf-8") for file in WRITTEN)
    flags = [action.option_strings for action in make_parser()._actions]
    missing = [
        names
        for names in flags
        if not any(re.search(rf"{re.escape(name)}(?![\w-])", told) for name in names)
    ]
    assert not missing


def test_environment_variables_of_the_code_are_in_the_reference():
    told = {name for variables in VARIABLES.values() for name in variables}
    code = [*(ROOT / "sd_tpu").rglob("*.py"), *(ROOT / "training").glob("*.py")]
    read = set()
    for file in code:
        text = file.read_text("utf-8")
        constants = dict(re.findall(r'^(\w+) = "([A-Z][A-Z_]+)"', text, re.MULTILINE))
        for name in re.findall(r'environ(?:\.get)?[\[(]"?(\w+)', text):
            read.add(constants.get(name, name))
    read = {name for name in read if name.isupper()}
    assert {"SD_TPU_FLAGS", "GRADIO_SERVER_PORT"} <= read <= told


def test_png_fields_that_are_told_are_written():
    text = (FOLDER / "png-fields.md").read_text("utf-8")
    # A negative prompt that looks like a field, which the example has not.
    assert all(f"| {name} |" in text for name in PNG_FIELDS if name != "Negative")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_links_lead_to_what_is_there(file):
    for token in tokens(file):
        if token.type == "html_inline" or token.type == "html_block":
            links = re.findall(r'(?:src|srcset|href)="([^"]*)"', token.content)
        else:
            links = [token.attrGet("href") or token.attrGet("src")]
        for link in filter(None, links):
            path, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            target = file.parent / path if path else file
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("file", WRITTEN, ids=name_of)
def test_files_that_are_named_are_there(file):
    for token in tokens(file):
        if token.type == "code_inline":
            for path in PATHS.findall(token.content):
                there = "XX" in path or "~" in token.content or "$" in token.content
                assert there or (ROOT / path.rstrip("/.")).exists(), token.content


@pytest.mark.parametrize("file", WRITTEN, ids=name_of)
def test_commands_are_taken_by_their_parsers(file, capsys):
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for line in commands(file):
        words = ours(line)
        if words[:1] == ["make"]:
            target = next(word for word in words[1:] if "=" not in word)
            assert re.search(
                rf"^{re.escape(target)}:|^\$\(VENV\){target[5:]}:", makefile, re.MULTILINE
            )
            flags = re.search(r'ARGS="([^"]*)"', line)
            if flags and target == "app":
                make_parser().parse_args(shlex.split(flags[1]))
        elif words[:1] == ["-m"]:
            assert importlib.util.find_spec(words[1]), line
        elif found := parser_of(words):
            parser, given = found
            parser.parse_args(given)
        elif words[:1] == ["sd-tpu"]:
            pytest.fail(f"There is no such command: {line}")


def test_json_that_is_shown_can_be_read():
    shown = [each for file in WRITTEN for each in tokens(file) if each.info.strip() == "json"]
    assert shown and all(json.loads(each.content) for each in shown)


@pytest.mark.parametrize("file", WRITTEN, ids=name_of)
def test_flags_that_are_named_are_there(file):
    known = {flag for action in make_parser()._actions for flag in action.option_strings}
    for name in cli.COMMANDS:
        known |= {
            flag
            for action in parser_of(["sd-tpu", name])[0]._actions
            for flag in action.option_strings
        }
    if file.parent.name in {"performance", "decisions"}:
        sources = [source.read_text("utf-8") for source in (ROOT / "benchmarks").glob("*.py")]
        known |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', "".join(sources)))
    for token in tokens(file):
        if token.type == "code_inline":
            flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", token.content))
            assert flags <= known | OF_OTHERS, token.content


@pytest.mark.slow("builds the site")
def test_the_site_is_built_without_a_dead_link(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    program = Path(sys.executable).with_name("zensical")
    built = subprocess.run(
        [program, "build", "--strict", "--clean"], cwd=tmp_path, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "index.html").exists()


def test_each_page_of_the_docs_is_in_the_sites_navigation():
    listed = set(re.findall(r'"([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text("utf-8")))
    there = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert there == listed


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
