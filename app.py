"""Starts the page: `python app.py`, then open the address it prints."""

from sd_tpu.app import main
from sd_tpu.cli import leave

if __name__ == "__main__":
    leave(main())
