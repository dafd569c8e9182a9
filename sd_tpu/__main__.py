"""`python -m sd_tpu`, and `sd-tpu` where it is installed."""

import sys

from sd_tpu import cli


def run() -> None:
    """Runs a command and ends the process with its exit code."""
    command, *arguments = sys.argv[1:] or [""]
    if command == "page":
        from sd_tpu import app  # Gradio takes seconds to import

        cli.leave(app.main(arguments))
    else:
        cli.leave(cli.main())


if __name__ == "__main__":
    run()
