"""The error of a model that ``wrap`` refuses; it names the user's own line and the call that tells more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compiled_llm.model.places import at_users_line, stack_of


class UnsupportedModelError(ValueError):
    """The model cannot run over paged attention; the message says why and what to do.

    Attributes:
        cause: the error of the model's forward when it was tried, with its traceback; None if that is not the reason.
    """

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause


@contextmanager
def leading_to_explain() -> Iterator[None]:
    """End refusals in the block with the line at fault, if it is the user's own, and a pointer to ``explain``.

    The error of the model's forward is the refusal's ``cause``, and is not printed with it: its traceback goes through
    dozens of lines of torch's.
    """
    try:
        yield
    except UnsupportedModelError as refusal:
        at = at_users_line(stack_of((refusal.cause or refusal).__traceback__))
        message = f"{refusal}{at}. compiled_llm.explain(model) says more, and what to do"
        raise UnsupportedModelError(message, refusal.cause) from None
