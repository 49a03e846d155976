"""Reads thinking, tool calls and JSON out of the text of an answer."""
