"""The platform that a program is traced for, by which code picks its way."""

import jax


def platform() -> str:
    """That of the mesh the program is for: compiling for a TPU needs no TPU on the host."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
