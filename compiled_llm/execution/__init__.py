"""Rows in, tokens out: what runs in a step, the state it runs on, and the threads it runs in."""
