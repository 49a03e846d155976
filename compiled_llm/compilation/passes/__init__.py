"""Rewrites of compiled graphs: traced operations become our ops."""
