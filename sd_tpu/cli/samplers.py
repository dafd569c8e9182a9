"""`python -m sd_tpu samplers`."""

import argparse

from sd_tpu.sampling.samplers import FLOW_SAMPLERS, SAMPLERS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add no flags: the command has none."""
    parser.set_defaults(run=_samplers)


def _samplers(args: argparse.Namespace) -> int:
    rows = [("KEY", "NAME", "FLOW MATCHING", "SPACINGS")]
    rows += [
        (key, sampler.label, "yes" if key in FLOW_SAMPLERS else "no", ", ".join(sampler.spacings))
        for key, sampler in SAMPLERS.items()
    ]
    for key, label, flow, spacings in rows:
        print(f"{key:<17}{label:<17}{flow:<15}{spacings}")
    return 0
