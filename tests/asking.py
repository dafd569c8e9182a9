"""Requests for tests that need no model."""

from sd_tpu.request import Request
from sd_tpu.settings import Picture


def make_request(prompts: list[str] | tuple[str, ...], *, height: int = 512, width: int = 512,
                 model: str = "m", **values) -> Request:
    """What somebody asks of a model that has the table's defaults and makes this size."""
    return Request.check({"prompts": prompts, **values},
                         Picture(model=model, height=height, width=width))
