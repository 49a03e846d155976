"""The form of an answer: JSON, a pattern, a grammar; and the bounds of these."""
