"""Backends whose kernels are ours, by Triton, and need no plan: for speed, and with the same bits in any batch."""
