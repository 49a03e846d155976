"""Triton kernels that read weights of 4 and 8 bits."""
