"""Finished pictures: files with their metadata, and the history of each browser."""
