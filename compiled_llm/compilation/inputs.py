"""Inputs of compiled programs, besides the pages."""

# Shapes: B rows, T packed tokens, q new tokens of each row in decode, L tokens with logits, C of them with a sampled
# token, N entries of the page table.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from compiled_llm.kinds.rows import AttentionPlans, JointAttention
from compiled_llm_ops.protocol import DecodeOps

Pooling = Literal["", "state", "scores"]
"""In place of logits and tokens: nothing, each prompt's last hidden state, or the scores of a classifier's head."""


class ExtraTensors(Protocol):
    """Inputs that rows of a prefill have besides ids, such as embeddings; they name the program that reads them."""

    @property
    def program(self) -> Any:
        """The ``Program`` that runs the step."""
        ...

    @property
    def sizes(self) -> Sequence[tuple[Tensor, int]]:
        """Its tensors, each with the dimension whose size changes from call to call."""
        ...

    def over(self, tensors: Sequence[Tensor]) -> ExtraTensors:
        """Return the same with other tensors, in the order of ``sizes``."""
        ...


class OwnInputs(Protocol):
    """The inputs of a launch by a program of its own, which reads no tokens: a NamedTuple, sizes in first places."""

    @property
    def program(self) -> Any:
        """The ``Program`` that runs it."""
        ...

    @property
    def wants(self) -> tuple[str, ...]:
        """Outputs that it gives besides its own."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


class StepTap(Protocol):
    """The tensors that a step is given of a tap, which calls it after its layers."""

    def prefilled(self, inputs: PrefillInputs, ids: Tensor) -> None:
        """Look at a prefill of tokens ``[T]``."""

    def decoded(self, inputs: DecodeInputs, ids: Tensor) -> None:
        """Look at a decode step, which feeds in tokens ``[B, q]`` and has not advanced yet."""

    def went_back(self, slots: Tensor, tokens: Tensor, counts: Tensor, lengths: Tensor) -> None:
        """Let rows forget all but ``counts`` of the ``tokens`` ``[B, q]`` of a step, on the device."""
        # ``lengths`` ``[B]`` are with the next tokens and none forgotten.


class PrefillInputs(NamedTuple):
    """The inputs of a prefill, besides the pages."""

    ids: Tensor  # ``[1, T]`` int64
    positions: Tensor  # ``[1, T]`` int64, rotary positions
    keep: Tensor  # ``[L]`` int64, the tokens whose logits are returned
    sampled: Tensor  # ``[C]`` int64, the entries of ``keep`` after which a token is sampled
    slots: Tensor  # ``[C]`` int64, of those rows: their settings, and the place of the sampled token
    token_rows: Tensor  # ``[T]`` int32, each token's row
    token_positions: Tensor  # ``[T]`` int32, its place in the row
    qo_indptr: Tensor  # ``[B + 1]`` int32, where each row's tokens begin
    indptr: Tensor  # ``[B + 1]`` int32, where each row's pages begin in ``indices``
    indices: Tensor  # ``[N]`` int32, page numbers
    last_page_len: Tensor  # ``[B]`` int32, tokens in the row's last page
    plans: AttentionPlans
    taps: tuple[StepTap, ...] = ()  # watch the step
    places: Tensor | None = None  # ``[B]`` int64, where each row's entries lie that taps have; None without
    alone: bool = False  # whether rows have no other tokens, to which layers attend directly
    read: Tensor | None = None  # ``[B]`` int32, the entry of each row's states; None if rows have none
    write: Tensor | None = None  # ``[B]`` int32, the entry of those that it has afterwards; None likewise
    wants: tuple[str, ...] = ()  # outputs of the model that the step gives besides logits, by HuggingFace's names
    pooling: Pooling = ""  # what it gives in place of logits and tokens
    extra: ExtraTensors | None = None  # of rows that have more than ids, which another program reads


class UnpagedInputs(NamedTuple):
    """The inputs of a forward of new rows, whose keys and values it leaves packed instead of in pages."""

    ids: Tensor  # ``[1, T]`` int64
    positions: Tensor  # ``[1, T]`` int64, rotary positions
    keep: Tensor  # ``[L]`` int64, the tokens whose logits are returned
    qo_indptr: Tensor  # ``[B + 1]`` int32, where each row's tokens begin
    ends: tuple[int, ...] = ()  # its numbers, if the forward runs uncompiled on a CPU; empty if not

    @property
    def wants(self) -> tuple[str, ...]:
        """Nothing: calls that ask for more than logits run over pages."""
        return ()


class PlannedRows(NamedTuple):
    """The page table of a decode step for a backend that plans it."""

    indptr: Tensor  # ``[B + 1]`` int32, where each row's pages begin in ``indices``
    indices: Tensor  # ``[N]`` int32, page numbers
    # ``[B]`` int32, tokens in the row's last page with those it feeds in; with the next ones afterwards
    last_page_len: Tensor
    qo_indptr: Tensor  # ``[B + 1]`` int32, each row has one query: 0, 1, 2, ..
    plans: AttentionPlans


class DecodeInputs(NamedTuple):
    """The inputs of the compiled decode step, which advances them, cut to a padded batch size; rows in any order."""

    slots: Tensor  # ``[B]`` int64, each row's slot, where the token that it feeds in lies
    positions: Tensor  # ``[B]`` int64, the rotary position of its first new token; q more afterwards
    lengths: Tensor  # ``[B]`` int32, tokens of the row with its new ones; with the next ones afterwards
    starts: Tensor  # ``[B]`` int32, where the row's pages begin in ``indices``
    indices: Tensor  # ``[N]`` int32, page numbers, a region for each slot
    ops: DecodeOps | None = None  # those of the backend by which layers attend; None if it plans decode
    # in place of ``starts`` and ``indices`` for a backend that plans decode, else None
    planned: PlannedRows | None = None
    # by which rows read pages that they share once; None if each row reads all of its own
    shared: JointAttention | None = None
    taps: tuple[StepTap, ...] = ()  # as of ``PrefillInputs``; rows' entries lie in their slots
    # ``[X]`` int32 twice, the entries of each slot's row after an even and an odd number of tokens; None if rows have
    # no states
    states: tuple[Tensor, Tensor] | None = None
    wants: tuple[str, ...] = ()  # as of ``PrefillInputs``
    # whether layers attend together where they find their rows: the step runs uncompiled on a CPU
    shares_places: bool = False
    # what a step drafts with that feeds in drafts besides the tokens in its slots, ``compilation/drafts.py``; None if
    # it drafts nothing
    drafts: Any = None
