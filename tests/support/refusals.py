"""Sentences by which files are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sd_tpu.checkpoint.config import CheckpointError


def refusal(action: Callable, file: Path, *arguments, **options) -> str:
    """Return the sentence by which a file is refused, which names it."""
    with pytest.raises(CheckpointError) as caught:
        action(file, *arguments, **options)
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
    return message
