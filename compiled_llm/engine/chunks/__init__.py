"""Policies of chunks: how many tokens of prompts run in the next step. Host facts alone, and no requests."""
