"""The compiled functions: a prefill and a decode step of a whole model, from token ids to the next tokens."""

# Both hand HuggingFace's own ``forward`` a batch of pages, which reaches each layer's attention
# (``compiled_llm.model.attention``), and sample the next tokens inside the graph.
# Shapes: B rows, T packed tokens, q new tokens of each row in decode, L tokens with logits, C of them with a sampled
# token, V vocabulary.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compilation.graphs.outputs import Emitted, StepOutputs
from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs, UnpagedInputs
from compiled_llm.compilation.sampling.sampling import SamplingTables, sample
from compiled_llm.kinds.rows import NewestTokens, PackedTokens, StateRows, UnpagedRows
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.attention import BATCH_ARGUMENT, PagedBatch
from compiled_llm.model.facts import Forward
from compiled_llm_ops.attention.decode import SharedPlaces


def prefill_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> StepOutputs:
    """Run packed tokens through the model: ``[L, V]`` logits in its dtype, ``[C]`` int64 next tokens, and more."""
    out = forward_of_prompts(
        model, forward, inputs, tables, pages, specs, logits_to_keep=inputs.keep, **asked_of(inputs)
    )
    return sampled_after(inputs, tables, out)


def sampled_after(inputs: PrefillInputs, tables: SamplingTables, out: Any) -> StepOutputs:
    """Sample the next tokens from what a model has returned for packed tokens."""
    logits: Tensor = out.logits[0]
    sampled_at = inputs.positions[0, inputs.keep[inputs.sampled]] + 1
    return StepOutputs(logits, sample(logits[inputs.sampled], inputs.slots, sampled_at, tables), emitted(inputs, out))


def forward_of_prompts(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
    **asked: Any,
) -> Any:
    """Run packed tokens through the model, let taps see them, and return the model's output."""
    ids = known_ids(inputs.ids, tables)
    read = {"input_ids": ids, "position_ids": inputs.positions, **asked}
    return forward_of_packed(model, forward, inputs, pages, specs, ids[0], **read)


def forward_of_packed(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
    tap_ids: Tensor,
    **read: Any,
) -> Any:
    """Run packed tokens; ``read`` are the arguments of ``forward``, ``tap_ids`` ``[T]`` the ids that taps see."""
    # Each layer has a memory in ``pages``, which its spec reads and writes.
    tokens = (inputs.token_rows, inputs.token_positions)
    table = (inputs.qo_indptr, inputs.indptr, inputs.indices, inputs.last_page_len)
    rows = PackedTokens(*tokens, *table, inputs.plans, alone=inputs.alone)
    states = None
    if inputs.read is not None and inputs.write is not None:
        states = StateRows(inputs.token_rows, inputs.qo_indptr, inputs.read, inputs.write)
    batch = PagedBatch(pages, specs, rows, states=states)
    out = forward(model, use_cache=False, **read, **{BATCH_ARGUMENT: batch})
    for tap in inputs.taps:
        tap.prefilled(inputs, tap_ids)
    return out


def unpaged_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: UnpagedInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> Tensor:
    """Run the packed tokens of new rows, and sample nothing: ``[L, V]`` logits in the model's dtype."""
    # Each layer leaves its keys and values in its one of ``pages``, which here are ``[2, T, K, D]``.
    ends = () if torch.compiler.is_dynamo_compiling() else inputs.ends
    batch = PagedBatch(pages, specs, UnpagedRows(inputs.qo_indptr, ends))
    out = forward(
        model,
        input_ids=inputs.ids,
        position_ids=inputs.positions,
        use_cache=False,
        logits_to_keep=inputs.keep,
        **{BATCH_ARGUMENT: batch},
    )
    logits: Tensor = out.logits[0]
    return logits


def decode_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: DecodeInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> StepOutputs:
    """Run the next token of each row, sample the one after it, and advance the buffers of ``inputs`` in place.

    Returns:
        ``[B, V]`` logits in the model's dtype, ``[B]`` int64, the next tokens, or ``NOT_A_TOKEN``, and what was asked
            for besides.
    """
    ids = tables.next_token[inputs.slots][:, None]
    out = forward_of_rows(model, forward, inputs, ids, pages, specs)
    inputs.positions.add_(1)
    inputs.lengths.add_(1)  # after the layers: decode attention reads the table before it waits for them
    if inputs.planned is not None:
        inputs.planned.last_page_len.add_(1)
    logits: Tensor = out.logits[:, -1]
    return StepOutputs(logits, sample(logits, inputs.slots, inputs.positions, tables), emitted(inputs, out))


def positions_of(inputs: DecodeInputs, ids: Tensor) -> Tensor:
    """Return ``[B, q]`` int64, the rotary positions of new tokens ``ids`` ``[B, q]``."""
    positions, new = inputs.positions[:, None], ids.shape[1]
    return positions if new == 1 else positions + torch.arange(new, device=ids.device)


def forward_of_rows(
    model: PreTrainedModel,
    forward: Forward,
    inputs: DecodeInputs,
    ids: Tensor,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> Any:
    """Run new tokens ``[B, q]`` of rows through the model, let taps see them, and return the model's output."""
    batch = PagedBatch(pages, specs, _rows(inputs, ids.shape[1]), states=_states(inputs))
    asked = {**asked_of(inputs), BATCH_ARGUMENT: batch}
    out = forward(model, input_ids=ids, position_ids=positions_of(inputs, ids), use_cache=False, **asked)
    for tap in inputs.taps:
        tap.decoded(inputs, ids)
    return out


def asked_of(inputs: PrefillInputs | DecodeInputs) -> dict[str, bool]:
    """Return the outputs that HuggingFace's forward is asked for; not every forward takes the question."""
    return {f"output_{name}": True for name in inputs.wants}


def emitted(inputs: PrefillInputs | DecodeInputs, out: Any) -> Emitted:
    """Return the wanted outputs of layers ``[T, ...]``, of a model that has them, and what hooks have emitted."""
    layers = [layer for name in inputs.wants for layer in getattr(out, name, None) or ()]
    return {**{number: layer.flatten(0, 1) for number, layer in enumerate(layers)}, **getattr(out, "emitted", {})}


def known_ids(ids: Tensor, tables: SamplingTables) -> Tensor:
    """Return token ids: in place of a negative one, which the host did not know, what the slot ``-1 - id`` has next."""
    return torch.where(ids < 0, tables.next_token[(-1 - ids).clamp(min=0)], ids)


def _states(inputs: DecodeInputs) -> StateRows | None:
    """Return where states of rows with a new token lie: after n tokens in place n % 2 (``kvcache/state_pool.py``)."""
    if inputs.states is None:
        return None
    even, odd = (entries[inputs.slots] for entries in inputs.states)
    ends_odd = inputs.lengths % 2 == 1
    numbers = torch.arange(inputs.slots.shape[0] + 1, dtype=torch.int32, device=inputs.slots.device)
    return StateRows(numbers[:-1], numbers, torch.where(ends_odd, even, odd), torch.where(ends_odd, odd, even))


def _rows(inputs: DecodeInputs, new: int) -> PackedTokens | NewestTokens:
    """Return where the ``new`` tokens of each row go, to its end, and how they attend."""
    planned = inputs.planned
    if planned is None:
        ops = inputs.ops
        assert ops is not None, "decode steps are planned, or have ops"
        newest = NewestTokens(inputs.starts, inputs.lengths, inputs.indices, ops, new, shared=inputs.shared)
        if inputs.shares_places and inputs.shared is None and not torch.compiler.is_dynamo_compiling():
            return newest._replace(shared=SharedPlaces())  # explain traces such steps without
        return newest
    assert new == 1, "a step of several tokens of a row is never planned"
    table = (planned.qo_indptr, planned.indptr, planned.indices, planned.last_page_len)
    return PackedTokens(planned.qo_indptr[:-1], inputs.lengths - 1, *table, planned.plans, new_tokens=1)
