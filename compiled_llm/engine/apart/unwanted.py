"""The error of an answer that nobody wants any more; without msgspec, which only a server needs."""


class UnwantedError(Exception):
    """The end of a task whose answer nobody waits for any more."""
