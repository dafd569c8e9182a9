"""Which models can be taught, and what to use in place of those that cannot."""

import re

from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.clip_model import ClipModel
from sd_tpu.settings import RequestError
from sd_tpu.training.losses import check_schedule

FEW_STEPS = 10  # at most, without guidance: what models do that were distilled into few steps
DISTILLED = re.compile(
    r"turbo|lightning|schnell|hyper-?sd|dmd2|(?<![a-z])lcm(?![a-z])", re.IGNORECASE
)


def check_teachable(checkpoint: Checkpoint, name: str, *, text_encoders: bool) -> None:
    """Check that a model can be taught.

    Args:
        checkpoint: the model's.
        name: by which it was asked for.
        text_encoders: whether its text encoders should be taught too.

    Raises:
        RequestError: it cannot, in a sentence that says what to use instead.
    """
    model, card = checkpoint.model, checkpoint.card
    guides = model.cfg_scale(card.guidance) > 1
    if (
        getattr(model, "guidance_size", None)
        or checkpoint.schedule.scheduler == "LCMScheduler"
        or (card.steps <= FEW_STEPS and not guides)
        or DISTILLED.search(name.replace("\\", "/").rstrip("/").rpartition("/")[2])
    ):
        raise RequestError(
            "{name} was distilled into a few steps, and teaching would undo that. Teach the model "
            "that it was distilled from (such as SDXL, Z-Image, FLUX.2 klein base, FLUX.1 dev), "
            "and draw with the LoRA on either.",
            name=name,
        )
    if model.mask_channels:
        raise RequestError(
            "{name} fills in pictures by masks, and cannot be taught. Teach the model that it was "
            "made from, and use the LoRA with either.",
            name=name,
        )
    if model.weights:
        raise RequestError(
            "{name} was read in int8, which cannot be taught: read it without --weights.", name=name
        )
    if checkpoint.parameters.is_divided:
        raise RequestError(
            "{name} is divided over several chips, and cannot be taught: start with "
            "--tensor-parallel-size 1.",
            name=name,
        )
    check_schedule(checkpoint.schedule)
    if text_encoders and not isinstance(model, ClipModel):
        raise RequestError(
            "The text encoder of {name} is a language model, which is not taught: leave out "
            "--text-encoders.",
            name=name,
        )
