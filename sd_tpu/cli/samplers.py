"""`python -m sd_tpu samplers`."""

import argparse

from sd_tpu.sampling.samplers import SAMPLERS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add no flags: the command has none."""
    parser.set_defaults(run=_samplers)


def _samplers(args: argparse.Namespace) -> int:
    rows = [("KEY", "NAME", "SPACINGS")]
    rows += [(key, s.label, ", ".join(s.spacings)) for key, s in SAMPLERS.items()]
    for key, label, spacings in rows:
        print(f"{key:<17}{label:<17}{spacings}")
    return 0
