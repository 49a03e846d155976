"""The Triton kernels of drafts."""
