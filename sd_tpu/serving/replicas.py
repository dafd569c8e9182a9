"""How many chips make a replica."""

from collections.abc import Callable

from sd_tpu.checkpoint.division import CHIPS
from sd_tpu.families.checkpoint import Checkpoint


def fewest_chips(
    checkpoint: Checkpoint, devices: int, room: int, beside: Callable[[int], int] = lambda chips: 0
) -> int:
    """Return the fewest chips that together hold a model; those that hold least each, if none can.

    Args:
        checkpoint: the model.
        devices: that replicas are made of.
        room: bytes of each for what stays there.
        beside: gives the bytes of each beside the parameters, by the chips of a replica.
    """
    needed = {
        chips: checkpoint.memory_on(chips) + beside(chips)
        for chips in CHIPS
        if devices % chips == 0
    }
    fitting = (chips for chips, memory in needed.items() if memory <= room)
    return next(fitting, min(needed, key=lambda chips: needed[chips]))
