"""Drafts of a row's next tokens: proposed from its text, kept as far as they are what is sampled."""
