"""Its Triton kernels, and how their work is divided."""
