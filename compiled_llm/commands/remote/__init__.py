"""Servers that answer for a command: an engine process at its socket, or OpenAI's API at a URL."""
