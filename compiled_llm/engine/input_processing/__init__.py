"""Turns prompts and their settings into requests, or refuses them."""
