"""Kinds of a family, which a class of tests is run with one after another."""

from collections.abc import Callable


def once(test: Callable) -> Callable:
    """Say of a test that the first kind is enough for it."""
    test.once = True
    return test


def kinds_of(metafunc) -> list[str]:
    """Return the kinds of its class that a test is run with."""
    kinds = [*metafunc.cls.kinds]
    return kinds[:1] if hasattr(metafunc.function, "once") else kinds
