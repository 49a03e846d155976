"""Loads, fuses, moves and checks weights."""
