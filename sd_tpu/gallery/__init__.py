"""The gallery: runs and who follows them, the files of pictures, and each browser's history."""
