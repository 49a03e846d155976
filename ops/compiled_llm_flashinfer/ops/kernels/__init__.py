"""Triton kernels of the ops."""
