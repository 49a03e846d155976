"""Where the new tokens of a batch go, and where its rows' pages are: data, by which each kind of layer attends."""

# Shapes: T packed tokens (decode: q of each row), H query heads, D head dimension.

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention
from compiled_llm_ops.protocol import DecodeOps

NO_ENTRY = -1
"""In place of an entry with a row's states: the row begins with zeros, or its states are not kept."""

Places = tuple[Tensor, Tensor, Tensor, Tensor]
"""The row of each token, its index there, where each row's pages begin among page numbers, and these."""


class AttentionPlans(NamedTuple):
    """A backend's division of attention among thread blocks, decided on the host before the step."""

    tensors: tuple[Tensor, ...]  # one ``[bytes]`` uint8 for each attention group: layers of one geometry share a plan
    workspace: Tensor  # ``[bytes]`` uint8, scratch memory that all layers use in turn
    groups: tuple[int, ...]  # each layer's attention group; negative if it attends without a plan
    backend: str

    def of(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return a layer's plan, and the workspace; None if it has none."""
        group = self.groups[layer]
        return None if group < 0 else (self.tensors[group], self.workspace)


class StateRows(NamedTuple):
    """The places of a batch's states, which rows keep besides pages."""

    token_rows: Tensor  # ``[T]`` int32, the row of each new token
    qo_indptr: Tensor  # ``[B + 1]`` int32, where each row's tokens begin
    read: Tensor  # ``[B]`` int32, the entry that a row begins with; negative for none
    write: Tensor  # ``[B]`` int32, the entry that its new states are written to; negative to drop them

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.qo_indptr, self.read, self.write


class PackedTokens(NamedTuple):
    """Packed tokens of rows with any number of new ones, and the plans by which they attend."""

    token_rows: Tensor  # ``[T]`` int32, the row of each token
    token_positions: Tensor  # ``[T]`` int32, each token's index in its row's cache
    qo_indptr: Tensor  # ``[B + 1]`` int32, where each row's tokens begin
    indptr: Tensor  # ``[B + 1]`` int32, where each row's pages begin in ``indices``
    indices: Tensor  # ``[N]`` int32, page numbers
    last_page_len: Tensor  # ``[B]`` int32, tokens in each row's last page, the new ones included
    plans: AttentionPlans
    # 1 if each row has one token, so that the layers have ``[B, H, 1, D]`` for ``[1, H, T, D]``; else 0
    new_tokens: int = 0
    # whether rows have no other tokens than these, to whose keys and values a kind may attend directly
    alone: bool = False

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def places(self) -> Places:
        return self.token_rows, self.token_positions, self.indptr, self.indices


class JointAttention(Protocol):
    """A way in which all rows of a decode step attend, in place of the backend's ops."""

    def attend(self, arguments: DecodeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]: ...


class NewestTokens(NamedTuple):
    """Page table of rows with as many new tokens each, and the ops by which they attend without a plan."""

    starts: Tensor  # ``[B]`` int32, where each row's pages begin in ``indices``
    lengths: Tensor  # ``[B]`` int32, tokens of each row, the new ones included
    indices: Tensor  # ``[N]`` int32, page numbers
    ops: DecodeOps  # the backend's
    new_tokens: int = 1  # q
    shared: JointAttention | None = None  # by which layers attend in place of ``ops``; None if by those

    @property
    def places(self) -> Places:
        rows, new, device = len(self.starts), self.new_tokens, self.starts.device
        token_rows = torch.arange(rows * new, dtype=torch.int32, device=device) // new  # contiguous for one row, too
        positions = self.lengths[:, None] - new + torch.arange(new, dtype=torch.int32, device=device)
        return token_rows, positions.flatten(), self.starts, self.indices


class UnpagedRows(NamedTuple):
    """The places where packed tokens begin of rows that have no others, and are not in pages."""

    # On a CPU a batch of them is one call of attention, and nothing is written twice.

    qo_indptr: Tensor  # ``[B + 1]`` int32
    # its numbers, in a forward that runs uncompiled on a CPU, where no layer asks for them; empty in others
    ends: tuple[int, ...] = ()

    @property
    def new_tokens(self) -> int:
        """0: rows may differ in length, as those of ``PackedTokens``."""
        return 0


PagedRows = PackedTokens | NewestTokens
Rows = PagedRows | UnpagedRows


def packed(states: Tensor, new_tokens: int) -> Tensor:
    """``[1, H, T, D]``, or ``[B, H, q, D]`` if each row has q tokens, to ``[T, H, D]``; a view if q is 0 or 1."""
    states = states.transpose(1, 2)
    if new_tokens > 1:
        return states.flatten(0, 1)
    return states.squeeze(1 if new_tokens else 0)
