"""Starts the page: `python app.py`, then open the address it prints."""

import sys

from sd_tpu.__main__ import run

if __name__ == "__main__":
    run(["page", *sys.argv[1:]])
