"""The generator: an engine in a process of its own, and the connections of its clients."""
