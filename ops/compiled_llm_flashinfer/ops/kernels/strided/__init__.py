"""Triton kernels over keys and values that lie apart, in any layout."""
