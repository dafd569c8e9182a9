"""`python -m sd_tpu`."""

import os
import sys

from sd_tpu.cli import main

if __name__ == "__main__":
    code = main()
    if code:  # perhaps while something compiles, and Python's own way out crashes on that
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
