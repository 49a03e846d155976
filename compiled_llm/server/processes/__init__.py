"""The processes of a server: the engine process, and API servers if there are several."""
