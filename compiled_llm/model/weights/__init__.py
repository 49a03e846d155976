"""Weights: fused, changed, moved, and those that are refused."""
