"""What the ops and kernels of latent attention take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_llm_ops.contracts import Geometry


class AppendLatent(NamedTuple):
    latent: Tensor
    rope: Tensor
    pages: Tensor
    token_rows: Tensor
    token_positions: Tensor
    indptr: Tensor
    indices: Tensor


class LatentAttention(NamedTuple):
    query_latent: Tensor
    query_rope: Tensor
    pages: Tensor
    token_rows: Tensor
    token_positions: Tensor
    indptr: Tensor
    indices: Tensor
    scale: float
    chosen: Tensor | None = None
    invariant: bool = False


class PlannedLatentAttention(NamedTuple):
    query_latent: Tensor
    query_rope: Tensor
    pages: Tensor
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    plan: Tensor
    workspace: Tensor
    scale: float

    @property
    def geometry(self) -> Geometry:
        (_, heads, rank), size = self.query_latent.shape, self.query_rope.shape[2]
        return Geometry(heads, 1, rank, self.pages.shape[1], -1, 0.0, self.query_latent.dtype, self.pages.dtype, size)


class RaggedAttention(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    qo_indptr: Tensor
    scale: float


class LatentDecode(NamedTuple):
    query_latent: Tensor
    query_rope: Tensor
    latent: Tensor
    rope: Tensor
    pages: Tensor
    starts: Tensor
    lengths: Tensor
    indices: Tensor
    scale: float
    overlap: bool = False
    chosen: Tensor | None = None
    invariant: bool = False
