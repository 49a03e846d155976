"""Batch-invariant attention: the backend, and what it runs on a CPU."""
