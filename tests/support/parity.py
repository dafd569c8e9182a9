"""How near arrays come to PyTorch's."""

import jax
import numpy as np
from flax import nnx

TOLERANCE = 1e-5


def relative(ours, theirs) -> float:
    """||ours - theirs|| / ||theirs|| of two arrays of one shape; ||ours|| where theirs is zero."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1))


def assert_agrees(name: str, ours, theirs, tolerance: float = TOLERANCE) -> None:
    """Print the relative error and check it; `pytest -rP ... | grep parity` lists them."""
    error = relative(ours, theirs)
    print(f"parity | {name} | {error:.1e} |")
    assert error <= tolerance, f"{name}: relative error {error:.1e}"


def compiled(method, module: nnx.Module, *inputs):
    """`method(module, *inputs)` as one program; layer by layer compiles more."""
    graph, state = nnx.split(module)
    return jax.jit(lambda state, *inputs: method(nnx.merge(graph, state), *inputs))(state, *inputs)
