"""A dump of every stage between a line of Python and its kernels."""
