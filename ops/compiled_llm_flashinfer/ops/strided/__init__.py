"""Attention over keys and values that lie apart, in any layout, and their writing."""
