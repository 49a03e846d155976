"""Vectors of prompts, in an engine and in an API server."""
