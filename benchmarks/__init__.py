"""Commands that measure: each prints a table and appends it to RESULTS.md."""
