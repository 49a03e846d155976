"""Logits processors of the user's own, each called for its request alone."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.execution.threads.interrupts import allowed
from compiled_llm.requests.awaited_code import awaited
from compiled_llm.requests.users_code import described, raise_interrupt


def processed_logits(request: Request, logits: Tensor) -> Tensor:
    """Return logits ``[V]`` float32 after a request's processors, which may write into them, or raise RequestError."""
    assert request.constraint is not None, "it has processors"
    answer = list(request.tokens)
    for processor in request.constraint.processors:
        tokens = (request.prompt_ids.tolist(), answer) if processor.takes_prompt else (answer,)
        try:
            with torch.no_grad(), allowed(), awaited("logits processor", processor.function):
                found = processor.function(*tokens, logits)
        except BaseException as error:
            raise_interrupt(error)
            raise _error(processor.name, f"has failed: {described(error)}") from error
        if not isinstance(found, Tensor) or found.shape != logits.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise _error(processor.name, f"has returned {shape}, and it must return logits {list(logits.shape)}")
        if found.layout != logits.layout:
            raise _error(processor.name, f"has returned a tensor of layout {found.layout}, and it must be dense")
        if found.device != logits.device:
            raise _error(processor.name, f"has returned logits on {found.device}, and they were on {logits.device}")
        logits = found.float()
    return logits


def _error(name: str, what: str) -> RequestError:
    return RequestError(f"logits_processors: {name} {what}")
