"""The Triton kernels of sampling and of log-probabilities."""
