"""Which calls that HuggingFace serves a wrapped model may refuse: with one of these messages, each for its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from support.fuzzing.calls import Forward, Generate, InThreads
from support.fuzzing.changes import Select
from support.fuzzing.data import Step
from support.fuzzing.side import OPTIONS, Raised, Side

Holds = Callable[[Any, Side], bool]


def _rows(step: Any, side: Side) -> int:
    if not isinstance(step, Generate):
        return len(step.prompt.lengths)
    copies = max(step.beams(side), step.settings.get("num_return_sequences") or 1)
    return len(step.prompt.lengths) * copies


def _more_rows(step: Any, side: Side) -> bool:
    return _rows(step, side) > (side.options or {}).get("max_batch_size", 64)


def _longest(step: Any, side: Side) -> int:
    """Tokens of a row at the end of a call."""
    columns = step.prompt.columns + (side.chat.text.shape[1] if step.goes_on and side.chat else 0)
    new = step.settings.get("max_new_tokens") or max(step.settings.get("max_length", 0) - columns, 20)
    return int(columns + new + step.settings.get("prompt_lookup_num_tokens", 1) + 1)


def _few_pages(step: Any, side: Side) -> bool:
    """Whether a call may need more pages than there are, those of a conversation beside it included."""
    options = {**OPTIONS, **(side.options or {})}
    size, tokens = options.get("page_size", 16), int(str(options.get("kv_memory", "100000 tokens")).split()[0])
    guided = 2 if "guidance_scale" in step.settings else 1  # it computes the text without its prompt as well
    rows = _rows(step, side) * guided + (0 if side.chat is None else len(side.chat.text))
    longest = max(_longest(step, side), 0 if side.chat is None else side.chat.text.shape[1])
    return rows * (-(-longest // size) + 1) * size > tokens


def _long(step: Any, side: Side) -> bool:
    if "guidance_scale" in step.settings and step.drafts:
        return True  # without the prompt it computes rejected drafts too, and keeps them
    return _longest(step, side) > side.model.config.get_text_config(decoder=True).max_position_embeddings


def _over_a_cache(step: Any, side: Side) -> bool:
    return bool(step.goes_on or step.cache == "new")


def _all_hidden(step: Any) -> bool:
    return not step.prompt.mask().any()


REFUSALS: tuple[tuple[str, Holds], ...] = (
    (r"(rows|beams \(num_beams=\d+\)) are more than max_batch_size=", _more_rows),
    (r"(rows|beams \(num_beams=\d+\)) of up to .* tokens need .* pages", _few_pages),
    (r"pages are needed and .* are available", _few_pages),
    (r"and the model has \d+ positions", _long),
    (r"input_ids: (must be|dtype is|shape|token id)", lambda step, side: bool(step.prompt.wrong)),
    (r"attention_mask: row \d+ is all padding", lambda step, side: not step.prompt.mask().any(dim=1).all()),
    (r"no token can be drawn", lambda step, side: isinstance(step, Generate) and step.changed_logits),
    (r"takes HuggingFace's own forward", _over_a_cache),
    (r"attention_mask: row \d+ needs token", _over_a_cache),
    (r"attention_mask: row \d+ has hidden tokens between others, which attention windows", _over_a_cache),
    (r"attention_mask hides every new token", lambda step, side: _over_a_cache(step, side) or _all_hidden(step)),
    (r"attention_mask: .* does not fit input_ids", lambda step, side: bool(step.prompt.wrong)),
    (r"a PagedCache cannot be pickled", lambda step, side: False),
    (r"the wrapped model is in training mode", lambda step, side: bool(step.training and step.cache == "new")),
    (r"this PagedCache belongs to another model", _over_a_cache),
    (r"rows do not fit a cache of", _over_a_cache),
    (r"more rows cannot be sampled", lambda step, side: False),
)


def may_refuse(step: Step, side: Side, raised: Raised) -> bool:
    """Whether the wrapped model may refuse a step that HuggingFace serves."""
    if isinstance(step, InThreads):
        return any(may_refuse(call, side, raised) for call in step.calls)
    if isinstance(step, Select):
        return "more than max_batch_size" in raised.message
    calls = isinstance(step, (Generate, Forward))
    return calls and any(re.search(pattern, raised.message) and holds(step, side) for pattern, holds in REFUSALS)


SERVED: tuple[tuple[str, str], ...] = (
    (r"`crop` was called, but the current layer does not track past states", "pages keep what a window has left"),
    (r"Can't pickle local object 'install_output_capuring_hook", "a refused call has left no hooks of HuggingFace's"),
    (r"meta tensor", "tensors are made on the model's device, whatever the default device is"),
)
"""What HuggingFace raises for and a wrapped model may serve, and why."""


def may_serve(raised: Raised) -> bool:
    """Whether a wrapped model may serve a step that HuggingFace raises for."""
    return any(re.search(pattern, raised.message) for pattern, _ in SERVED)
