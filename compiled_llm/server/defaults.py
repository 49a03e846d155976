"""How many requests a server takes, unless it is told otherwise."""

MAX_ROWS = 256
"""That run at once."""
MAX_QUEUE = 2048
"""That wait behind a front, before others are refused."""
