"""Linear layers whose weights have 4 or 8 bits, multiplied as they lie in memory."""
