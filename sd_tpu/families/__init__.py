"""Families: the differences between kinds of model, one file a kind, and a registry of them."""

from typing import Any

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.anima import Anima
from sd_tpu.families.flux import Flux
from sd_tpu.families.flux2_klein import Flux2Klein
from sd_tpu.families.krea2 import Krea2
from sd_tpu.families.stable_diffusion import StableDiffusion
from sd_tpu.families.stable_diffusion_3 import StableDiffusion3
from sd_tpu.families.stable_diffusion_xl import StableDiffusionXL
from sd_tpu.families.z_image import ZImage

FamilyModel = (
    StableDiffusion
    | StableDiffusionXL
    | StableDiffusion3
    | ZImage
    | Flux
    | Flux2Klein
    | Anima
    | Krea2
)
Family = type[FamilyModel]
FAMILIES: tuple[Family, ...] = (
    StableDiffusion,
    StableDiffusionXL,
    StableDiffusion3,
    ZImage,
    Flux,
    Flux2Klein,
    Anima,
    Krea2,
)

# A part of a pipeline's name -> what its checkpoints hold. The first that is there counts.
OTHERS = {
    "InstructPix2Pix": "a model that edits pictures",
    "XLImg2Img": "the refiner of SDXL",
    "FluxKontext": "FLUX.1 Kontext, which edits pictures",
    "FluxFill": "FLUX.1 Fill, which fills in pictures",
    "FluxPriorRedux": "FLUX.1 Redux, which varies pictures",
    "FluxControlNet": "FLUX.1 with a ControlNet",
    "FluxControl": "FLUX.1 that takes control pictures",
    "Flux2Pipeline": "FLUX.2 [dev]",
    "Flux": "another kind of FLUX",
}


def find_family(model_index: dict[str, Any]) -> Family:
    """Return the family of a checkpoint in the diffusers layout, by the pipeline it was made for.

    Args:
        model_index: the contents of its model_index.json.

    Raises:
        CheckpointError: no family here draws with such a checkpoint.
    """
    name = model_index.get("_class_name")
    # SDXL itself may have been saved by the same pipeline; the refiner lacks a text encoder.
    refines = "XLImg2Img" in str(name) and not (model_index.get("text_encoder") or [None])[-1]
    for family in FAMILIES:
        if name in family.pipelines and not refines:
            return family
    *most, last = (family.pipelines[0] for family in FAMILIES)
    supported = f"{', '.join(most)} and {last}"
    what = next(
        (f"{what} ({name})" for mark, what in OTHERS.items() if mark in str(name)),
        f"for {name or 'no pipeline that it names'}",
    )
    raise CheckpointError(f"This checkpoint is {what}; those for {supported} are supported.")
