"""Checks what a user asks of a request's tokens besides logits, and that there is room for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

import torch
from transformers import PreTrainedModel

from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.request_emitted import WantedEmitted
from compiled_llm.kvcache.memory import free_bytes
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.traced_hooks import TracedHooks

_HOST = torch.device("cpu")


def wanted_of(
    hidden_states: Sequence[int] | None, emitted: Sequence[str] | None, facts: ModelFacts
) -> WantedEmitted | None:
    """Return what a request wants; None if it wants nothing.

    Raises:
        ValueError: ``hidden_states`` is no list of layers of the model, whose layers may give several of a token;
            ``emitted`` is no list of names, or there is no hook that could emit any.
    """
    if hidden_states is None and emitted is None:
        return None
    model = facts.model
    if hidden_states is not None and facts.stacks_hidden_states:
        raise ValueError(
            "hidden_states: layers of this model have several of each token, stacked, and steps give one; ask "
            "model.generate(output_hidden_states=True), or emit what you need from a traced hook"
        )
    layers = None if hidden_states is None else _layers(hidden_states, model)
    names = None if emitted is None else _names(emitted, facts.hooks)
    return WantedEmitted(layers, names, model.config.get_text_config(decoder=True).hidden_size, model.dtype)


def _layers(asked: Sequence[int], model: PreTrainedModel) -> Mapping[int, int]:
    last = model.config.get_text_config(decoder=True).num_hidden_layers
    all_of_them = f"0 for the embeddings to {last} for the last layer, or from the end, -1 to {-last - 1}"
    if not isinstance(asked, Sequence) or isinstance(asked, str) or not asked:
        raise ValueError(f"hidden_states={asked!r}: give a list of layers, {all_of_them}; None for none")
    for number in asked:
        if not isinstance(number, Integral) or isinstance(number, bool) or not -last - 1 <= number <= last:
            raise ValueError(f"hidden_states={asked!r}: {number!r} is no layer; give {all_of_them}")
    return {int(number): int(number) % (last + 1) for number in asked}


def _names(asked: Sequence[str], hooks: TracedHooks) -> Sequence[str]:
    if not isinstance(asked, Sequence) or isinstance(asked, str) or not asked:
        raise ValueError(f"emitted={asked!r}: give a list of the names that traced hooks emit; None for none")
    if wrong := [name for name in asked if not isinstance(name, str)]:
        raise ValueError(f"emitted={asked!r}: {wrong[0]!r} is no name; give those that traced hooks emit")
    if not hooks:
        raise ValueError(
            f"emitted={asked!r}: the model has no traced hooks; add one by compiled_llm.traced_hook(module, function)"
        )
    return list(asked)


def check_room(asked: Iterable[Request], unfinished: Iterable[Request]) -> None:
    """Check that the host has memory for the hidden states of requests, with what unfinished ones may still keep.

    Of a request that may end early, its prompt's count: its answer takes memory as it goes.

    Raises:
        ValueError: there is too little; the message has the numbers.
    """
    if not (new := sum(map(_bytes_left, asked))):
        return
    needed, free = new + sum(map(_bytes_left, unfinished)), free_bytes(_HOST)
    if needed > free:
        raise ValueError(
            f"hidden_states: those of the prompts and answers take {needed / 2**30:.1f} GiB of the host's memory, and "
            f"{free / 2**30:.1f} GiB are free; give fewer layers, prompts or max_tokens at once"
        )


def _bytes_left(request: Request) -> int:
    """Return what the hidden states of a request are known to take beyond those that the host has."""
    if request.emitted is None:
        return 0
    emitted = request.emitted
    known = max(len(request.prompt), emitted.tokens) if request.stop_token_ids else request.stored
    return max(0, known - emitted.copied) * emitted.wanted.token_bytes
