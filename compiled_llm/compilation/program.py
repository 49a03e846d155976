"""What a program of a model is: one of its compiled functions, and which steps it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from compiled_llm.compilation.inputs import DecodeInputs, OwnInputs, PrefillInputs, UnpagedInputs
from compiled_llm.config import WrapConfig

PREFILL, PREFILL_ALONE = "prefill", "prefill of rows without cached tokens"
"""Names of programs that parts have others of, too, for steps with outputs that these do not give."""
PREFILL_EMBEDDED = "prefill from embeddings"
"""The name of the program of rows that bring embeddings in place of ids."""

ProgramInputs: TypeAlias = PrefillInputs | DecodeInputs | UnpagedInputs | OwnInputs


class Program(NamedTuple):
    """One compiled function of a model."""

    name: str  # its name in reports
    # whether it runs a step with these inputs; of several programs, the first in ``PROGRAMS`` does
    serves: Callable[[ProgramInputs], bool]
    step: Callable[..., Any]  # the function that is traced
    options: Callable[[WrapConfig, torch.device], dict[str, Any]]  # Inductor's options for it
    decodes: bool = False  # whether each row has one new token, or as many as the others
    on_demand: bool = False  # whether it is compiled only for calls that need it, so that reports leave it out before
    ahead: str = ""  # what `compiled-llm compile` is given to have it in artifacts, if it is left out otherwise


def with_outputs(name: str, wants: tuple[str, ...]) -> str:
    """Return the name of what also gives these outputs."""
    return f"{name}, with {' and '.join(wants).replace('_', ' ')}" if wants else name
