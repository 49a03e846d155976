"""Decode steps that read the pages which rows share, such as those of a system prompt, once for all of these rows."""
