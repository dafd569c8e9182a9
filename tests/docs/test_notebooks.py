"""The notebooks run whole, with tiny checkpoints in place of the hub's."""

import os
import re
import sys

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import save_file

from docs.notebooks import FOLDER, PARAMETERS, files
from tests.support.flux2 import make_pipeline

ROOT = FOLDER.parent
SECONDS = 600  # that a cell may take


def test_notebooks_are_what_the_code_says():
    found = {file.name: file.read_text("utf-8") for file in FOLDER.glob("*.ipynb")}
    assert found == files(), "run `python -m docs.notebooks`"


@pytest.fixture(scope="module")
def names(checkpoints, tmp_path_factory) -> dict[str, str]:
    """Tiny stand-ins for the models that the notebooks name."""
    folder = tmp_path_factory.mktemp("models")
    make_pipeline(folder / "words", distilled=True).save_pretrained(folder / "klein")
    factors = torch.zeros(4, 16), torch.zeros(16, 4)
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    keys = (f"{name}.lora_down.weight", f"{name}.lora_up.weight")
    save_file(dict(zip(keys, factors, strict=True)), folder / "lcm.safetensors")
    return {
        "MODEL": str(checkpoints["sd1"]),
        "LORA": str(folder / "lcm.safetensors"),
        "EDITOR": str(folder / "klein"),
    }


@pytest.mark.long("opens three models in a process of its own, and measures")
@pytest.mark.parametrize("name", ["colab", "kaggle", "guide"])
def test_a_notebook_runs_from_top_to_bottom(name, names, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(
        "PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if PARAMETERS in cell.metadata.get("tags", ()):
            cell.source = "\n".join(f"{key} = {value!r}" for key, value in names.items())
    NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [
        output.get("data", {})
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert sum("image/png" in data for data in shown) >= 2
    links = [data["text/html"] for data in shown if "127.0.0.1" in data.get("text/html", "")]
    assert links and all(link.startswith("<a href=") for link in links)
    told = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert re.search(r"^Devices +\d × CPU\s*$", told, re.M)
