"""Triton kernels of recurrent layers: packed rows of any lengths, and states by their entries, without a plan."""
