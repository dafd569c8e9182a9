"""Units are tested without PyTorch, Gradio or a browser."""

import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "gradio", "playwright"}


@pytest.fixture(autouse=True, scope="module")
def nothing_heavy(request):
    """Fails where a module has imported what its tests should not need."""
    yield
    here = Path(__file__).parent
    if all(item.path.is_relative_to(here) for item in request.session.items):
        assert not HEAVY & sys.modules.keys()
