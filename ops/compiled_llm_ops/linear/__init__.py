"""Matmuls of few rows, and the norms around them."""
