"""What an answer has to look like: JSON, a pattern, a grammar; and the bounds of these."""
