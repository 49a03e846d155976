"""Triton kernels of latent attention."""
