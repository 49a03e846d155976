"""Which thread runs the steps, what reaches it, and how answers leave it."""
