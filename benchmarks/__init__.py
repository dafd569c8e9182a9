"""Commands that measure: each prints its tables and records them under `benchmarks/results/`."""
