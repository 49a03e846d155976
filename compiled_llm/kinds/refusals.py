"""The error of a model that ``wrap`` refuses."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model cannot run over paged attention; the message says why and what to do.

    Attributes:
        cause: the error of the model's forward when it was tried, with its traceback; None if that is not the reason.
    """

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause
