"""The Python that README and docs show runs as it is printed there."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from markdown_it import MarkdownIt
from safetensors.numpy import load_file

from sd_tpu import Engine
from tests.support.reference import LEAST, make_torch_pipeline

ROOT = Path(__file__).parent
while not (ROOT / "pyproject.toml").exists():
    ROOT = ROOT.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODEL = "CompVis/stable-diffusion-v1-4"
EXCERPT = re.compile(r"<!-- excerpt: (\S+) -->")
PORT = re.compile(r"(?<=127\.0\.0\.1:)7860|(?<=port=)7860")

pytestmark = pytest.mark.slow("compiles what the programs draw with, for sizes of their own")


def blocks(*languages: str) -> Iterator:
    """The blocks in these languages, each with the comment before it."""
    for file in FILES:
        before, number = "", 0
        for token in MarkdownIt("commonmark").parse(file.read_text("utf-8")):
            if token.type == "fence" and token.info in languages:
                number += 1
                name = f"{file.relative_to(ROOT)}-{number}"
                yield pytest.param(token.content, before.strip(), id=name)
            if token.type in ("fence", "html_block", "inline"):
                before = token.content if token.type == "html_block" else ""


PYTHON = [each for each in blocks("python") if not EXCERPT.match(each.values[1])]
EXCERPTS = [each for each in blocks("python", "text") if EXCERPT.match(each.values[1])]
OF_CLIENTS = [each for each in PYTHON if PORT.search(each.values[0])]
OTHERS = [each for each in PYTHON if each not in OF_CLIENTS]


def run(code: str, folder: Path) -> None:
    exec(compile(code, str(folder), "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def bundled() -> Iterator[Engine]:
    """The engine that programs which open the bundled model share."""
    engine = Engine.open(devices=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """`app.py --api`, started as the docs say, with a ControlNet; 256x256 has 16x16 latents."""
    import diffusers

    folder = tmp_path_factory.mktemp("server")
    pipeline = make_torch_pipeline("sd1", levels=5, **LEAST)
    pipeline.save_pretrained(folder / "model")
    diffusers.ControlNetModel.from_unet(
        pipeline.unet, conditioning_embedding_out_channels=(8, *[16] * 4)
    ).save_pretrained(folder / "lines")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--api --port {port} --no-history --size 256x256 --max-pixels 262144 --devices 1"
    paths = ["--model", folder / "model", "--controlnet", folder / "lines"]
    process = subprocess.Popen(
        [sys.executable, "app.py", *flags.split(), *paths],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("Ready") for line in process.stdout)
    yield SimpleNamespace(port=port)
    process.terminate()
    process.wait()


@pytest.mark.parametrize(("code", "needs"), OTHERS)
def test_programs_run(code, needs, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loras").mkdir()
    if needs == "<!-- needs: checkpoint -->":
        assert MODEL in code
        code = code.replace(MODEL, str(request.getfixturevalue("least")))
    else:
        shared = request.getfixturevalue("bundled")
        monkeypatch.setattr(Engine, "open", lambda: shared)
        monkeypatch.setattr(shared, "close", lambda: None)
    run(code, tmp_path)
    if "teach(" in code:  # a LoRA of the bundled model
        files = [*tmp_path.rglob("*.safetensors")]
        assert files
        for file in files:
            assert all(np.isfinite(each).all() for each in load_file(file).values())


@pytest.mark.parametrize(("code", "needs"), OF_CLIENTS)
def test_programs_of_the_servers_clients_run(code, needs, server, tmp_path):
    code = PORT.sub(str(server.port), code)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize(("code", "of"), EXCERPTS)
def test_excerpts_are_in_their_files(code, of):
    assert code.strip() in (ROOT / EXCERPT.match(of)[1]).read_text("utf-8")


def test_all_blocks_are_found():
    assert len(OF_CLIENTS) >= 4 and len(OTHERS) >= 7 and len(EXCERPTS) >= 3
