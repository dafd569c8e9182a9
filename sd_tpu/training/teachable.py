"""Which models can be taught, and what to use in place of those that cannot."""

import re

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.families.checkpoint import Checkpoint
from sd_tpu.families.clip_model import ClipModel
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
        CheckpointError: it cannot, in a sentence that says what to use instead.
    """
    model, card = checkpoint.model, checkpoint.card
    guides = model.cfg_scale(card.guidance) > 1
    if (
        getattr(model, "guidance_size", None)
        or checkpoint.schedule.scheduler == "LCMScheduler"
        or (card.steps <= FEW_STEPS and not guides)
        or DISTILLED.search(name.replace("\\", "/").rstrip("/").rpartition("/")[2])
    ):
        raise CheckpointError(
            f"{name} was distilled into a few steps, and teaching would undo that. Teach the model "
            "that it was distilled from (such as SDXL, Z-Image, FLUX.2 klein base, FLUX.1 dev), "
            "and draw with the LoRA on either."
        )
    if model.mask_channels:
        raise CheckpointError(
            f"{name} fills in pictures by masks, and cannot be taught. Teach the model that it was "
            "made from, and use the LoRA with either."
        )
    check_schedule(checkpoint.schedule)
    if text_encoders and not isinstance(model, ClipModel):
        raise CheckpointError(
            f"The text encoder of {name} is a language model, which is not taught: leave out "
            "--text-encoders."
        )
