"""The command line, called in this process."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from sd_tpu import cli


def run(*arguments) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's way out
            code = stop.code
    return code, out.getvalue(), err.getvalue()
