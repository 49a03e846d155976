"""``explain``: why a model does not run as one graph, line by line, and what to do about it."""
