"""`python -m sd_tpu`."""

from sd_tpu.cli import leave, main

if __name__ == "__main__":
    leave(main())
