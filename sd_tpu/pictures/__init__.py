"""Pictures as bytes: PNG and its metadata, start pictures, masks, pictures of lines, and movies."""
