"""The compiled functions: a prefill and a decode step of a whole model, from token ids to the next tokens.

Both hand HuggingFace's own ``forward`` a batch of pages, which reaches each layer's attention
(``compiled_llm.model.attention``), and sample the next tokens inside the graph.

Shapes: B rows, T packed tokens, L tokens with logits, C of them with a sampled token, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs
from compiled_llm.compilation.sampling.sampling import SamplingTables, sample
from compiled_llm.model.attention import BATCH_ARGUMENT, AttentionSpec, NewestTokens, PackedTokens, PagedBatch
from compiled_llm.model.facts import Forward


def prefill_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[AttentionSpec, ...],
) -> tuple[Tensor, Tensor]:
    """Run packed tokens through the model, by ``forward`` of its class.

    Each layer has a memory in ``pages``, which its spec reads and writes.

    Returns:
        ``[L, V]`` logits in the model's dtype and ``[C]`` int64, the next tokens.
    """
    table = (inputs.indptr, inputs.indices, inputs.last_page_len)
    packed = PackedTokens(inputs.token_rows, inputs.token_positions, inputs.qo_indptr, *table, inputs.plans)
    batch = PagedBatch(pages, specs, packed)
    out = forward(
        model,
        position_ids=inputs.positions,
        use_cache=False,
        logits_to_keep=inputs.keep,
        **{"inputs_embeds" if inputs.ids.dim() == 3 else "input_ids": inputs.ids},
        **{BATCH_ARGUMENT: batch},
    )
    logits: Tensor = out.logits[0]
    sampled_at = inputs.positions[0, inputs.keep[inputs.sampled]] + 1
    return logits, sample(logits[inputs.sampled], inputs.slots, sampled_at, tables)


def decode_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: DecodeInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[AttentionSpec, ...],
) -> tuple[Tensor, Tensor]:
    """Run one token of each row through the model, sample the next, and advance the buffers of ``inputs`` in place.

    ``pages`` and ``specs`` as in ``prefill_step``; ``tables`` get the sampled tokens.

    Returns:
        ``[B, V]`` logits in the model's dtype and ``[B]`` int64, the next tokens, or ``NOT_A_TOKEN``.
    """
    batch = PagedBatch(pages, specs, _one_token_each(inputs))
    out = forward(
        model,
        input_ids=tables.next_token[inputs.slots][:, None],
        position_ids=inputs.positions[:, None],
        use_cache=False,
        **{BATCH_ARGUMENT: batch},
    )
    logits: Tensor = out.logits[:, -1]
    inputs.positions.add_(1)
    inputs.lengths.add_(1)  # after the layers: decode attention reads the table before it waits for them
    if inputs.planned is not None:
        inputs.planned.last_page_len.add_(1)
    return logits, sample(logits, inputs.slots, inputs.positions, tables)


def _one_token_each(inputs: DecodeInputs) -> PackedTokens | NewestTokens:
    """Return where the new token of each row goes, to its end, and how it attends."""
    planned = inputs.planned
    if planned is None:
        assert inputs.ops is not None, "decode steps are planned, or have ops"
        return NewestTokens(inputs.starts, inputs.lengths, inputs.indices, inputs.ops)
    table, each = (planned.indptr, planned.indices, planned.last_page_len), planned.qo_indptr
    return PackedTokens(each[:-1], inputs.lengths - 1, each, *table, planned.plans, one_a_row=True)
