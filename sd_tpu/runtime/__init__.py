"""Slots, what is done to them, and the compiled programs over all devices."""
