"""Triton kernels of matmuls of few rows, and of what stands between them."""
