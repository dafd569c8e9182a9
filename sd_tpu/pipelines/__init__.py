"""The Flax pipelines of diffusers up to 0.39, on the compiled programs."""
