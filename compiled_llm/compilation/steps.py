"""What is compiled: a prefill and a decode step of a whole model, from token ids to the next tokens.

Both hand HuggingFace's own ``forward`` a batch of pages, which reaches each layer's attention
(``compiled_llm.model.attention``), and choose the next tokens inside the graph.

Shapes: B rows, T packed tokens, L tokens whose logits are wanted, C of them after which a token is chosen, V
vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs
from compiled_llm.compilation.sampling import SamplingTables, choose
from compiled_llm.model.attention import BATCH_ARGUMENT, AttentionPlans, PackedTokens, PagedBatch
from compiled_llm.model.facts import Forward


def prefill_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    tables: SamplingTables,
    pages: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Run packed tokens through the model.

    Args:
        model: the model.
        forward: its class's own ``forward``.
        inputs: the tokens.
        tables: how rows choose tokens.
        pages: one ``[P, 2, K, S, D]`` a layer.

    Returns:
        ``[L, V]`` logits in the model's dtype and ``[C]`` int64, the next tokens.
    """
    batch = PagedBatch(
        pages=pages,
        indptr=inputs.indptr,
        indices=inputs.indices,
        last_page_len=inputs.last_page_len,
        packed=PackedTokens(inputs.token_rows, inputs.token_positions, inputs.qo_indptr, inputs.plans),
    )
    out = forward(
        model,
        position_ids=inputs.positions,
        use_cache=False,
        logits_to_keep=inputs.keep,
        **{"inputs_embeds" if inputs.ids.dim() == 3 else "input_ids": inputs.ids},
        **{BATCH_ARGUMENT: batch},
    )
    logits: Tensor = out.logits[0]
    chosen_at = inputs.positions[0, inputs.keep[inputs.ends]] + 1
    return logits, choose(logits[inputs.ends], inputs.slots, chosen_at, tables)


def decode_step(
    model: PreTrainedModel, forward: Forward, inputs: DecodeInputs, tables: SamplingTables, pages: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run one token of each row through the model, choose the next, and advance the buffers in place.

    Args:
        model: the model.
        forward: its class's own ``forward``.
        inputs: the bucket's buffers; ``tokens``, ``positions`` and ``last_page_len`` advance.
        tables: how rows choose tokens.
        pages: one ``[P, 2, K, S, D]`` a layer.

    Returns:
        ``[B, V]`` logits in the model's dtype and ``[B]`` int64, the next tokens, or ``NOT_A_TOKEN``.
    """
    packed = None if inputs.plans is None else _one_token_each(inputs, inputs.plans, page_size=pages[0].shape[3])
    batch = PagedBatch(pages, inputs.indptr, inputs.indices, inputs.last_page_len, packed)
    out = forward(
        model,
        input_ids=inputs.tokens[:, None],
        position_ids=inputs.positions[:, None],
        use_cache=False,
        **{BATCH_ARGUMENT: batch},
    )
    logits: Tensor = out.logits[:, -1]
    inputs.positions.add_(1)
    inputs.last_page_len.add_(1)  # after the layers: decode attention reads the table before it waits for them
    chosen = choose(logits, inputs.slots, inputs.positions, tables)
    inputs.tokens.copy_(chosen.clamp(min=0))
    return logits, chosen


def _one_token_each(inputs: DecodeInputs, plans: AttentionPlans, page_size: int) -> PackedTokens:
    """Return where the new token of each row goes: to the end of its last page."""
    full_pages = inputs.indptr[1:] - inputs.indptr[:-1] - 1
    positions = full_pages * page_size + inputs.last_page_len - 1
    return PackedTokens(inputs.qo_indptr[:-1], positions, inputs.qo_indptr, plans, one_a_row=True)
