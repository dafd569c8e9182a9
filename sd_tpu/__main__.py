"""`python -m sd_tpu`, and `sd-tpu` where it is installed."""

import gc
import sys
from collections.abc import Sequence

from sd_tpu import cli

OBJECTS = 50_000  # more than before, after which Python looks for garbage; 700 by default


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process with its exit code."""
    # What importing and compiling make is there to stay: looking through it again and again took a
    # seventh of the time until the page is ready.
    gc.set_threshold(OBJECTS)
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["page"]:
        from sd_tpu import app  # takes seconds to import

        cli.leave(app.main(arguments[1:]))
    else:
        cli.leave(cli.main(arguments))


if __name__ == "__main__":
    run()
