"""Paged attention: appending keys and values, prefill, decode."""
