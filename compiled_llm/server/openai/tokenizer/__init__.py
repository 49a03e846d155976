"""Prompts of texts and messages, text and bytes of tokens."""
