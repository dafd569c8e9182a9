"""A checkpoint's files: found, checked, read and written."""
