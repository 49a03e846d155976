"""Logits processors of the user's own, each called for its request alone."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from compiled_llm.engine.grammars.constraint import Processor
from compiled_llm.engine.request import Request, RequestError

logger = logging.getLogger("compiled_llm.engine")


def edited_logits(request: Request, processors: Sequence[Processor], logits: Tensor) -> Tensor:
    """Return what processors make of a request's logits.

    Args:
        request: whose tokens before have all been read.
        processors: called one after the other.
        logits: ``[V]`` float32, nobody else's.

    Raises:
        RequestError: one has failed, or returns something else.
    """
    answer, prompt = list(request.tokens), request.prompt.tolist()
    for processor in processors:
        tokens = (prompt, answer) if _takes_the_prompt(processor) else (answer,)
        try:
            with torch.no_grad():
                found = processor(*tokens, logits)
        except Exception as error:
            raise _error(processor, f"has failed: {type(error).__name__}: {error}") from error
        if not isinstance(found, Tensor) or found.shape != logits.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise _error(processor, f"has returned {shape}, and it must return logits {list(logits.shape)}")
        if found.device != logits.device:
            raise _error(processor, f"has returned logits on {found.device}, and they were on {logits.device}")
        logits = found.float()
    return logits


def name_of(processor: Processor) -> str:
    """Return what a message calls it."""
    return getattr(processor, "__name__", None) or type(processor).__name__


def _error(processor: Processor, what: str) -> RequestError:
    return RequestError(f"logits_processors: {name_of(processor)} {what}")


@lru_cache(maxsize=256)
def _takes_the_prompt(processor: Callable[..., Tensor]) -> bool:
    """Whether it takes three arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([each for each in inspect.signature(processor).parameters.values() if each.kind in kinds]) > 2
