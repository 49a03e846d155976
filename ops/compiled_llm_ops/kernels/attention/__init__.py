"""Triton kernels of attention in decode, and of what comes before attention."""
