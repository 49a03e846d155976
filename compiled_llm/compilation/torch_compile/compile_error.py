"""The error of a program that torch cannot compile whole: the user's own line, and the call that tells more."""

from __future__ import annotations

from compiled_llm.model.places import at_users_line, stack_in


class CompileError(RuntimeError):
    """The model's forward has a part that torch cannot compile; the message names the line.

    Attributes:
        cause: torch's own error, with its traceback; None in a copy that came from another process.
    """

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause

    @classmethod
    def of(cls, program: str, error: Exception) -> CompileError:
        """Return the error for Dynamo's error while it traced a program."""
        said = str(error)
        return cls(
            f"{program} cannot be compiled as one graph: {said.strip().partition(chr(10))[0]}"
            f"{at_users_line(stack_in(said))}. compiled_llm.explain(model) names the lines and says what to do",
            error,
        )
