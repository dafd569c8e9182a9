"""The notebooks of notebooks/, which share most cells: `python -m docs.notebooks` writes them."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
PARAMETERS = "parameters"  # the tag of the cell that names models, which tests replace

SAVED = """
The notebook shows pictures as they come. What you want to keep: `pictures[0].save("cat.png")`; the
file carries its settings, and the page reads them back."""

INSTALL = """
#@title Install: a minute or two
REPOSITORY = "https://github.com/OWNER/sd_tpu"  # the address that this notebook comes from
import importlib.util

if importlib.util.find_spec("sd_tpu") is None:
    # The JAX of this machine, with its TPU support, stays as it is.
    !pip freeze | grep -E "^(jax|jaxlib|libtpu)==" > kept.txt
    !git clone --quiet --depth 1 {REPOSITORY} sd_tpu_source
    !pip install --quiet ./sd_tpu_source -c kept.txt
"""
DOCTOR = """
!python -m sd_tpu doctor  # which devices there are, and what is wrong if there are none
"""
NAMES = """
MODEL = "CompVis/stable-diffusion-v1-4"  # a hub id, a folder or a file
LORA = "latent-consistency/lcm-lora-sdv1-5/pytorch_lora_weights.safetensors"
EDITOR = "black-forest-labs/FLUX.2-klein-4B"  # a model that changes pictures by words
"""
BUNDLED = """
from diffusers.utils import make_image_grid
from sd_tpu import Engine

prompts = [
    "a red apple", "a cat", "a castle", "a rocket",
    "a sunflower", "an owl", "a sailboat", "two stars",
]
engine = Engine.open()  # the bundled model
pictures = engine.draw(prompts, seed=7)
make_image_grid(pictures, rows=2, cols=4)
"""
CHECKPOINT = """
import shutil
from pathlib import Path
from huggingface_hub import hf_hub_download

loras = Path("loras")
loras.mkdir(exist_ok=True)
file = LORA if Path(LORA).is_file() else hf_hub_download(*LORA.rsplit("/", 1))
shutil.copy(file, loras / "lcm.safetensors")

engine.close()
del engine  # one model at a time has the memory
engine = Engine.open(MODEL, lora_dir=loras, safety_checker=True)  # as others will see the page
prompts = [
    "Labrador in the style of Hokusai",
    "Painting of a squirrel skating in New York",
    "HAL-9000 in the style of Van Gogh",
    "Times Square under water, with fish and a dolphin swimming around",
    "Ancient Roman fresco showing a man working on his laptop",
    "Armchair in the shape of an avocado",
    "Clown astronaut in space, with Earth in the background",
    "A castle in the clouds, watercolour",
]
pictures = engine.draw(prompts, seed=0)
make_image_grid(pictures, rows=2, cols=4)
"""
WITH_LORA = """
fast = [f"{prompt} <lora:lcm:1>" for prompt in prompts]
pictures = engine.draw(fast, seed=0, steps=4, guidance=1, sampler="lcm")
make_image_grid(pictures, rows=2, cols=4)
"""
MEASURE = """
import time

def seconds(prompts, **settings):
    begun = time.perf_counter()
    engine.draw(prompts, **settings)
    return time.perf_counter() - begun

found = engine.diagnose()
print(f"| {engine.checkpoint.card.name} on {found.hardware} | seconds |")
print("|---|---|")
for what, count in (("one picture", 1), ("eight pictures", 8)):
    times = sorted(seconds(prompts[:count], seed=seed) for seed in range(4))
    print(f"| {what}, median of four | {(times[1] + times[2]) / 2:.2f} |")
print(f"\\n{found.packages}; {found.system}")
"""
PAGE = """
from sd_tpu import serve

page = serve(engine)  # with a public link on Colab and Kaggle; share=False makes none
page
"""
EDIT = """
page.close()
engine.close()
del engine, page
engine = Engine.open(EDITOR, weights="int8")  # in bfloat16 it would not fit 16 GB
(cat,) = engine.draw("a photograph of a ginger cat on a wooden chair", seed=7)
(night,) = engine.draw("the same cat at night, under a red lamp", reference=cat, seed=7)
make_image_grid([cat, night], rows=1, cols=2)
"""
EDIT_ON_THE_PAGE = """
page = serve(engine)  # the same model on the page: give a card a reference picture
page
"""

COMMON: list[tuple[str, str]] = [
    ("md", "## Install"),
    ("code", INSTALL),
    ("md", "## Devices"),
    ("code", DOCTOR),
    (
        "md",
        """
## Eight pictures

The bundled model is small and draws emoji-like pictures. Programs are compiled once; other prompts,
seeds and settings compile nothing.""",
    ),
    ("code", BUNDLED),
    ("md", SAVED),
    (
        "md",
        """
## A real checkpoint

It is downloaded once, about 4 GB. Any Stable Diffusion 1, 2, XL or 3, FLUX.1, FLUX.2 klein,
Z-Image, Anima or Krea 2 will do, as far as the devices' memory goes.""",
    ),
    (PARAMETERS, NAMES),
    ("code", CHECKPOINT),
    ("md", "## With a LoRA\n\nHere one that makes four steps enough. It compiles nothing."),
    ("code", WITH_LORA),
    (
        "md",
        "## How fast is it?\n\nPlease send us what this prints, in an issue: no TPU has been at "
        "hand yet.",
    ),
    ("code", MEASURE),
    (
        "md",
        """
## The page

Eight prompt boxes and a seed, in the browser. Whoever has the link can draw as long as this
notebook runs.""",
    ),
    ("code", PAGE),
    (
        "md",
        """
## Change a picture by words

FLUX.2 klein takes up to ten reference pictures. It is downloaded once, about 16 GB, and its weights
are rounded to int8 while they are read.""",
    ),
    ("code", EDIT),
    ("code", EDIT_ON_THE_PAGE),
]
COLAB = """
# sd_tpu on Colab

Stable Diffusion on JAX, with a page of eight prompt boxes. Choose **Runtime → Change runtime type →
v5e-1 TPU** and run the cells from top to bottom. It runs on a GPU and a CPU as well, at their
speed."""
KAGGLE = """
# sd_tpu on Kaggle

Stable Diffusion on JAX, with a page of eight prompt boxes. Choose **Settings → Accelerator → TPU
v5e-8** and **Internet on**, and run the cells from top to bottom. Each of the eight chips draws a
picture of its own."""
GUIDE = """
# Eight pictures at once, on a TPU

The guide to `FlaxStableDiffusionPipeline` taught this with diffusers, which has no Flax any more.
This is how it is done today: the same checkpoints, today's JAX."""
HOW = """
## How does it work?

- Slots are divided over the devices; each device has the weights whole, and steps its own pictures.
- Three programs are compiled for a model and a size: encode, advance by some steps, decode.
  Prompts, seeds, samplers, numbers of steps and LoRAs are data.
- A picture depends on its own request alone. Picture i has the seed `seed + i`.

A program that calls diffusers' Flax classes runs on with another import:
`from sd_tpu import FlaxStableDiffusionPipeline`."""
OWN_SETTINGS = """
(cat, fox) = engine.draw(
    [prompts[0], {"prompt": prompts[1], "steps": 30, "guidance": 5, "seed": 3}], seed=0
)
make_image_grid([cat, fox], rows=1, cols=2)
"""

NOTEBOOKS: dict[str, list[tuple[str, str]]] = {
    "colab": [("md", COLAB), *COMMON],
    "kaggle": [("md", KAGGLE), *COMMON],
    "guide": [
        ("md", GUIDE),
        *COMMON[:4],
        ("md", "## Eight prompts, a 2x4 grid"),
        (PARAMETERS, NAMES.split("LORA")[0]),
        (
            "code",
            "from diffusers.utils import make_image_grid\nfrom sd_tpu import Engine\n\n"
            "engine = Engine.open(MODEL, safety_checker=True)  # as others will see the page\n"
            + CHECKPOINT[CHECKPOINT.index("prompts =") :],
        ),
        ("md", "## Settings of a single picture\n\nThey share the batch, and compile nothing."),
        ("code", OWN_SETTINGS),
        ("md", HOW),
        ("md", "## The page\n\nThe same engine in the browser."),
        ("code", PAGE),
    ],
}


def notebook(cells: list[tuple[str, str]]) -> dict[str, Any]:
    """Return a notebook without outputs, as nbformat 4.5 has it.

    Args:
        cells: kind and source of each: "md", "code", or a tag of a cell with code.
    """

    def cell(number: int, kind: str, source: str) -> dict[str, Any]:
        lines = source.strip("\n").splitlines(keepends=True)
        tags = {} if kind in ("md", "code") else {"tags": [kind]}
        about: dict[str, Any] = {"id": f"cell-{number}", "metadata": tags, "source": lines}
        if kind == "md":
            return {"cell_type": "markdown", **about}
        return {"cell_type": "code", "execution_count": None, "outputs": [], **about}

    return {
        "cells": [cell(number, *each) for number, each in enumerate(cells, 1)],
        "metadata": {
            "accelerator": "TPU",
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def files() -> dict[str, str]:
    """Return the notebooks by their files' names, as they should be."""
    return {
        f"{name}.ipynb": json.dumps(notebook(cells), indent=1, ensure_ascii=False) + "\n"
        for name, cells in NOTEBOOKS.items()
    }


def main() -> None:
    """Write the notebooks."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
