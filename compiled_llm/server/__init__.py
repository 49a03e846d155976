"""The generator: an engine in a process of its own, with its clients; the front, which answers HTTP."""
