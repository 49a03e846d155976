"""The inputs of compiled programs, besides the pages.

Shapes: B rows, T packed tokens, q new tokens of each row in decode, L tokens with logits, C of them with a sampled
token, N entries of the page table.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from compiled_llm.kinds.rows import AttentionPlans, JointAttention
from compiled_llm_ops.protocol import DecodeOps


class StepTap(Protocol):
    """The tensors that a step is given of a tap, which calls it after its layers."""

    def prefilled(self, inputs: PrefillInputs, ids: Tensor) -> None:
        """Look at a prefill of tokens ``[T]``."""

    def decoded(self, inputs: DecodeInputs, ids: Tensor) -> None:
        """Look at a decode step, which feeds in tokens ``[B, q]`` and has not advanced yet."""


class PrefillInputs(NamedTuple):
    """The inputs of a prefill, besides the pages.

    Attributes:
        ids: ``[1, T]`` int64; ``[1, T, hidden]`` in the model's dtype if it starts from embeddings.
        positions: ``[1, T]`` int64, rotary positions.
        keep: ``[L]`` int64, the tokens whose logits are returned.
        sampled: ``[C]`` int64, the entries of ``keep`` after which a token is sampled.
        slots: ``[C]`` int64, of those rows: their settings, and the place of the sampled token.
        token_rows: ``[T]`` int32, each token's row.
        token_positions: ``[T]`` int32, its place in the row.
        qo_indptr: ``[B + 1]`` int32, where each row's tokens begin.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in the row's last page.
        taps: watch the step.
        places: ``[B]`` int64, where each row's entries lie that taps have; None without.
        alone: whether rows have no other tokens, and layers with latents attend to expanded keys and values.
        read: ``[B]`` int32, the entry of each row's state; None without recurrent layers.
        write: ``[B]`` int32, the entry of the state that it has afterwards; None without.
        wants: outputs of the model that the step gives besides logits, by HuggingFace's names.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    sampled: Tensor
    slots: Tensor
    token_rows: Tensor
    token_positions: Tensor
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    plans: AttentionPlans
    taps: tuple[StepTap, ...] = ()
    places: Tensor | None = None
    alone: bool = False
    read: Tensor | None = None
    write: Tensor | None = None
    wants: tuple[str, ...] = ()


class UnpagedInputs(NamedTuple):
    """The inputs of a forward of new rows, whose keys and values it leaves packed instead of in pages.

    Attributes:
        ids: ``[1, T]`` int64.
        positions: ``[1, T]`` int64, rotary positions.
        keep: ``[L]`` int64, the tokens whose logits are returned.
        qo_indptr: ``[B + 1]`` int32, where each row's tokens begin.
        ends: its numbers, if the forward runs uncompiled on a CPU; empty if not.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    qo_indptr: Tensor
    ends: tuple[int, ...] = ()

    @property
    def wants(self) -> tuple[str, ...]:
        """Nothing: calls that ask for more than logits run over pages."""
        return ()


class PlannedRows(NamedTuple):
    """The page table of a decode step for a backend that plans it.

    Attributes:
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in the row's last page with those it feeds in; with the next ones
            afterwards.
        qo_indptr: ``[B + 1]`` int32, each row has q queries: 0, q, 2q, ...
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    qo_indptr: Tensor
    plans: AttentionPlans


class DecodeInputs(NamedTuple):
    """The inputs of the compiled decode step, which advances them, cut to one padded batch size; rows are in any order.

    Attributes:
        slots: ``[B]`` int64, each row's slot, where the token that it feeds in lies, unless ``fed`` has it.
        positions: ``[B]`` int64, the rotary position of its first new token; q more afterwards.
        lengths: ``[B]`` int32, tokens of the row with its new ones; with the next ones afterwards.
        starts: ``[B]`` int32, where the row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers, a region for each slot.
        ops: those of the backend by which layers attend; None if it plans decode.
        planned: in place of ``starts`` and ``indices`` for a backend that plans decode, else None.
        fed: ``[B, q]`` int64, known tokens that the rows feed in; None if each feeds in the one in its slot, q = 1.
        shared: by which rows read pages that they share once; None if each row reads all of its own.
        taps: as of ``PrefillInputs``; rows' entries lie in their slots.
        states: ``[X]`` int32 twice, the entries of each slot's row after an even and an odd number of tokens; None
            without recurrent layers.
        wants: as of ``PrefillInputs``.
        shares_places: whether layers attend together where they find their rows: the step runs uncompiled on a CPU.
    """

    slots: Tensor
    positions: Tensor
    lengths: Tensor
    starts: Tensor
    indices: Tensor
    ops: DecodeOps | None = None
    planned: PlannedRows | None = None
    fed: Tensor | None = None
    shared: JointAttention | None = None
    taps: tuple[StepTap, ...] = ()
    states: tuple[Tensor, Tensor] | None = None
    wants: tuple[str, ...] = ()
    shares_places: bool = False
