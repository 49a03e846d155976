"""Copies of what steps emit, for taps."""
