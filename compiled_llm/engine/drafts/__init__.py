"""Speculation: the engine's part of steps that guess tokens, and check them together."""
