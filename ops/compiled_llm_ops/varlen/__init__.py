"""Backends that prefill by other packages' kernels over packed queries and block tables."""
