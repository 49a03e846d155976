"""What `attention.py` measures: cases, those that compute them, how they are checked and timed, and the tables.

Shapes: B rows, T packed new tokens, H query heads, K kv heads, D head dimension, P pages, S page size.
"""
