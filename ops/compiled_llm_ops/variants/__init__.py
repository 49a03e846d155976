"""Attention as its user writes it: a function of logits, traced once, and kernels that are made of the trace."""
