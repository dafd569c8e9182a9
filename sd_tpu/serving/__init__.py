"""Serving: a scheduler that decides, a worker that draws, and a model of latencies."""
