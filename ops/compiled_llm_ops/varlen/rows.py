"""What backends share that prefill by other packages' kernels, which take packed queries and a block table."""

# Such kernels have one interface, flash-attn's: queries ``[T, H, D]``, keys and values ``[P, S, K, D]`` in pages, and a
# table with a line of page numbers for each row. Keys and values are views of our pages ``[P, 2, K, S, D]``: nothing is
# copied. Our page table is packed, so each launch first writes it as lines, with one kernel of ours.
# Nothing is decided on the host but how many new tokens the longest row has, from which grids follow. Captured launches
# take all of their tokens for it, and are good for any batch of their tokens and rows.
# Decode is our own kernel's: it reads the packed table at each launch, norms, rotates and appends in the same launch,
# and takes pages of any size. Since what is chosen is another package's attention, nothing else of ours stands in for
# it: layers of other kinds are refused, and pages that rows share are read for each row.
# Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension as stored, P pages, S page size, N
# entries of the page table.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PagedAttention, PlannedBatch
from compiled_llm_ops.protocol import DecodeOps, EmptyPlan, EmptyWorkspace, PagedKernels, own_decode_ops

LARGEST_HEAD = 256  # of flash-attn's kernels, and of those that PyTorch has taken over from it

PAGE_TOKENS = 256
"""Page sizes of flash-attn 2's kernels are multiples of this: ``page_block_size % 256 == 0``."""
# ``mha_varlen_fwd`` in its ``csrc/flash_attn/flash_api.cpp``, and in PyTorch's
# ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``.


class BlockTables(NamedTuple):
    """The rows of a packed page table as lines."""

    lengths: Tensor  # ``[B]`` int32, tokens of each row
    starts: Tensor  # ``[B + 1]`` int32, tokens of all rows before each
    table: Tensor  # ``[B, N]`` int32, page numbers; what comes after a row's own is not written

    @classmethod
    def of(cls, args: PagedAttention) -> BlockTables:
        """Write them, without waiting for the device."""
        rows, device, page_size = len(args.last_page_len), args.query.device, args.pages.shape[3]
        tables = cls(
            *(
                torch.empty(size, dtype=torch.int32, device=device)
                for size in (rows, rows + 1, (rows, len(args.indices)))
            )
        )
        packed = (args.indptr, args.indices, args.last_page_len)
        if device.type == "cuda":
            from compiled_llm_ops.kernels.attention.block_tables import write_block_tables

            with torch.cuda.device(device):  # Triton launches on the current one
                write_block_tables(*packed, page_size, *tables)
        else:
            _write_block_tables(*packed, page_size, tables)
        return tables


def _write_block_tables(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, tables: BlockTables
) -> None:
    counts = indptr.diff()
    tables.lengths.copy_(((counts - 1) * page_size + last_page_len).where(counts > 0, 0))
    tables.starts[0] = 0
    tables.starts[1:] = tables.lengths.cumsum(0)
    for row, (start, count) in enumerate(zip(indptr.tolist(), counts.tolist(), strict=False)):
        tables.table[row, :count] = indices[start : start + count]


class PackedRows(NamedTuple):
    """What the packages' functions take."""

    query: Tensor  # ``[T, H, D]``, contiguous
    # ``[P, S, K, D]``, a view of our pages. Kernels take its strides, and ask for contiguous columns alone:
    # ``set_params_fprop`` and ``k.stride(-1) == 1`` in flash-attn's ``flash_api.cpp``; so do flash-attn 3's
    keys: Tensor
    values: Tensor
    query_starts: Tensor  # ``[B + 1]`` int32, where each row's queries begin
    keys_of: BlockTables
    most_queries: int  # new tokens that a row has at most
    scale: float
    # tokens that a query sees to its left, -1 for all, and to its right: none. Were that -1, flash-attn 2 would take it
    # of a longest row with one new token that all rows have one (``seqlenq_ngroups_swapped``), and those of a captured
    # batch may have none
    window: tuple[int, int]
    soft_cap: float  # ``cap * tanh(logits / cap)`` after scaling; 0.0 for none

    @classmethod
    def of(cls, args: PagedAttention, most_queries: int) -> PackedRows:
        keys, values = args.pages.transpose(2, 3).unbind(1)
        return cls(
            args.query,
            keys,
            values,
            args.qo_indptr,
            BlockTables.of(args),
            most_queries,
            args.scale,
            (args.window_left, 0),
            args.logits_soft_cap,
        )

    @property
    def most_keys(self) -> int:
        """A bound of any row's keys, from which kernels conclude only whether a window hides some."""
        return self.keys_of.table.shape[1] * self.keys.shape[1]


Attend = Callable[[PackedRows, Tensor, bool], Tensor | None]
"""Attends into ``out`` ``[T, H, D]``, and returns the natural log-sum-exp ``[H, T]`` float32 if it is wanted."""


class VarlenPlan(EmptyPlan):
    """The new tokens that a batch's longest row has; see ``protocol.Plan``."""

    def __init__(self, device: torch.device, attend: Attend) -> None:
        super().__init__(device)
        self._attend = attend
        self._most_queries: int | None = None

    def decide(self, batch: PlannedBatch) -> None:
        starts = batch.qo_indptr
        self._most_queries = None if batch.captured_tokens >= 0 else int((starts[1:] - starts[:-1]).max(initial=0))

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        tokens = len(args.query)
        if not tokens or not len(args.last_page_len):
            return
        most = tokens if self._most_queries is None else self._most_queries
        found = self._attend(PackedRows.of(args, max(most, 1)), out, lse is not None)
        if lse is not None and found is not None:
            # A query sees itself at least, so there is none without keys, for which these kernels say infinity.
            torch.mul(found.T, math.log2(math.e), out=lse)


class VarlenKernels(PagedKernels):
    """The part of ``protocol.Backend`` that does not depend on the package."""

    devices: tuple[str, ...] = ("cuda",)
    dtypes = frozenset({torch.float16, torch.bfloat16})
    kv_dtypes = frozenset[torch.dtype]()

    def missing_kernel(self, geometry: Geometry) -> str | None:
        if geometry.query_heads % geometry.kv_heads:
            return f"{geometry.query_heads} query heads are no multiple of {geometry.kv_heads} kv heads"
        if geometry.head_dim > LARGEST_HEAD:
            return f"there is no kernel for heads of size {geometry.head_dim}: the largest is {LARGEST_HEAD}"
        if geometry.dtype not in self.dtypes:
            return f"there is no kernel for {geometry.dtype} queries; use torch.bfloat16 or torch.float16"
        if geometry.kv_dtype != geometry.dtype:
            return f"there is no kernel for {geometry.dtype} queries and pages of {geometry.kv_dtype}"
        return None

    def attend(self, rows: PackedRows, out: Tensor, wants_lse: bool) -> Tensor | None:
        """See ``Attend``."""
        raise NotImplementedError

    def new_plan(self, workspace: EmptyWorkspace, nbytes: int) -> VarlenPlan:
        return VarlenPlan(workspace.buffer.device, self.attend)

    def decode_ops(self, device: str) -> DecodeOps:
        return own_decode_ops()._replace(joint=())


def wrong_page_size(geometry: Geometry) -> str | None:
    """Return why flash-attn 2's kernels cannot read pages of this size; None if they can."""
    if not geometry.page_size % PAGE_TOKENS:
        return None
    return f"pages have multiples of {PAGE_TOKENS} tokens there, and page_size={geometry.page_size}"
