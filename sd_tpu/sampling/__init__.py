"""Noise schedules and samplers, as tables of numbers (NumPy)."""
