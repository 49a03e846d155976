"""Sweeps of what the rules of kernels were fitted to; `fit_tilings.py` runs them."""
