"""A step that drafts: rows propose their next tokens on the device, run them, and keep what they would have sampled."""

# One graph has all of it: the drafter, the layers, one sampling of all tokens, and the acceptance, after which the
# buffers are those of the next step. A token is sampled with the random number of its position and by what stands
# before it, whether that was drafted or not: so a row gets the tokens that steps of one token give it.
# Shapes: B rows, k drafts, q = k + 1 new tokens of each row, X slots, L tokens of a text, V vocabulary.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.compilation.options import decode_options
from compiled_llm.compilation.program import Program, ProgramInputs
from compiled_llm.compilation.sampling.sampling import SamplingTables
from compiled_llm.compilation.steps import forward_of_rows, positions_of
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.facts import Forward
from compiled_llm_ops import (
    NOT_ACCEPTED as NOT_ACCEPTED,
    NOT_DRAFTED as NOT_DRAFTED,
    accept_drafts,
    sample_tokens,
    write_texts,
)

if TYPE_CHECKING:
    from compiled_llm.compilation import drafts as this
    from compiled_llm.compilation.program_list import ProgramsPart

    checked: ProgramsPart = this

NEW_TOKENS = 2, 4, 8
"""How many tokens a row may feed in, its drafts and one more; each number has programs of its own."""

BAD_COUNTS = -4
"""Stands for the first token of a row whose drafter says that it has proposed fewer than 0 tokens, or more than k."""


class Drafter(Protocol):
    """A guess at what rows sample next, made on the device; compiled, and captured in CUDA graphs."""

    def propose(self, slots: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Propose up to ``k`` tokens that come after each row's text.

        Args:
            slots: ``[B]`` int64, the slot of each row.
            lengths: ``[B]`` int32, how many tokens its text has, with the one that it feeds in; 0 if it wants none.
            k: 1 or more.

        Returns:
            ``[B, k]`` integers, any where there is no proposal, and ``[B]`` int32, how many there are, from 0 to k.
        """
        ...


class DrafterError(RuntimeError):
    """A drafter has raised; the message names it."""


class DraftInputs(NamedTuple):
    """The inputs of a step that drafts, besides those of other decode steps."""

    drafter: Drafter
    # ``[X, L]`` int32, the tokens of each slot's row; the step writes those that it feeds in. It reads nothing of a
    # text from the row's length on
    texts: Tensor
    limits: Tensor  # ``[X]`` int32, how many drafts of each slot's row may count; 0 for padding
    new_tokens: int  # q


def drafted_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: DecodeInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> StepOutputs:
    """Run the next token of each row and drafts after it, sample after each, and advance by the tokens that count.

    Returns:
        ``[T, V]`` logits in the model's dtype, ``[T]`` int64, the sampled tokens, or what ``accept_drafts`` has in
            place of those that do not count; T = B * q, the tokens of a row next to each other. The first token of each
            row counts; it is ``BAD_COUNTS`` if its drafter is wrong about how many it has proposed.
    """
    assert inputs.planned is None, "backends that plan are refused beforehand"
    assert inputs.states is None, "rows with states are refused beforehand"
    fed, offered, good = _drafted(inputs, tables)
    new = fed.shape[1]
    out = forward_of_rows(model, forward, inputs, fed, pages, specs)
    logits: Tensor = out.logits.flatten(0, 1)
    positions = positions_of(inputs, fed) + 1
    sampled = _sample(logits, fed, positions, inputs.slots, tables)
    ours = tables.next_token, tables.counts, tables.recent
    adjustments = tables.arguments(logits, positions, inputs.slots, positions).adjustments
    first = positions[:, 0].contiguous()
    tokens = accept_drafts(sampled, fed[:, 1:].contiguous(), offered, inputs.slots, first, adjustments, *ours)
    accepted = (tokens > NOT_ACCEPTED).sum(dim=1)
    for tap in inputs.taps:
        tap.went_back(inputs.slots, fed, accepted, inputs.lengths + new)
    inputs.positions.add_(accepted)
    inputs.lengths.add_(accepted)
    tokens = torch.cat([torch.where(good, tokens[:, :1], BAD_COUNTS), tokens[:, 1:]], dim=1)
    return StepOutputs(logits, tokens.flatten(), {})


def _drafted(inputs: DecodeInputs, tables: SamplingTables) -> tuple[Tensor, Tensor, Tensor]:
    """Return what rows feed in ``[B, q]`` int64, how many drafts may count ``[B]`` int32, and if they were counted."""
    drafts: DraftInputs = inputs.drafts
    slots, k = inputs.slots, drafts.new_tokens - 1
    following = tables.next_token[slots][:, None]
    starts = inputs.lengths - drafts.new_tokens
    write_texts(drafts.texts, slots, starts, following)
    limits = drafts.limits[slots]
    tokens, counts = _proposed(drafts.drafter, slots, torch.where(limits > 0, starts + 1, 0), k)
    good = (counts >= 0) & (counts <= k)
    offered = torch.where(good, torch.minimum(counts, limits), 0).int()
    proposed = torch.arange(k, device=slots.device) < offered[:, None]
    tokens = torch.where(proposed, tokens, 0).long().clamp(0, tables.counts.shape[1] - 1)
    write_texts(drafts.texts, slots, starts + 1, tokens)
    return torch.cat([following, tokens], dim=1), offered, good[:, None]


def _proposed(drafter: Drafter, slots: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what a drafter proposes; DrafterError if it raises."""
    if torch.compiler.is_dynamo_compiling():  # the error of a program that cannot be traced names the line
        return drafter.propose(slots, lengths, k)
    try:
        return drafter.propose(slots, lengths, k)
    except Exception as error:
        name = type(drafter).__name__
        raise DrafterError(f"drafts: the drafter {name} has raised {type(error).__name__}: {error}") from error


def _sample(logits: Tensor, fed: Tensor, positions: Tensor, slots: Tensor, tables: SamplingTables) -> Tensor:
    """Sample the token after each of ``fed`` ``[B, q]`` in one launch: ``[B, q]`` int64, counted nowhere yet."""
    rows = slots[:, None].expand_as(fed).flatten().contiguous()  # of one row, it is a view
    given = tables.arguments(logits, tables.seed[rows], rows, positions.flatten(), before=_before(fed))
    return sample_tokens(*given).view_as(fed)


def _before(fed: Tensor) -> Tensor:
    """Return ``[B * q, q - 1]`` int64, the drafts before what is sampled after each of ``fed``, the latest first."""
    rows, new = fed.shape
    at = torch.arange(new, device=fed.device)
    place = at[:, None] - at[:-1]
    before = torch.where(place > 0, fed[:, place.clamp(min=0)], -1)
    return before.view(rows * new, new - 1)


# ---- programs


def _drafts(inputs: ProgramInputs, one_row: bool, new_tokens: int) -> bool:
    if not isinstance(inputs, DecodeInputs) or inputs.drafts is None or inputs.shared is not None:
        return False
    return (inputs.slots.shape[0] == 1) is one_row and inputs.drafts.new_tokens == new_tokens


_AHEAD = f"""--speculative-config '{{"method": "ngram", "num_speculative_tokens": {NEW_TOKENS[-1] - 1}}}'"""


def _programs() -> Iterator[Program]:
    for one_row, rows in ((True, "batch 1"), (False, "larger batches")):
        for new in NEW_TOKENS:
            serves = partial(_drafts, one_row=one_row, new_tokens=new)
            options = partial(decode_options, one_row=one_row)
            name = f"decode, {rows}, {new} tokens with drafts"
            yield Program(name, serves, drafted_step, options, decodes=True, on_demand=True, ahead=_AHEAD)


PROGRAMS: Sequence[Program] = tuple(_programs())
