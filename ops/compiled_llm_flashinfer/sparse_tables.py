"""What FlashInfer's wrappers of block-sparse attention have in common: tables that plans write, on the host first."""

# Shapes: M queries, H query heads, K kv heads, D head dimension, R queries of a block, C keys of a block, MB rows and
# NB columns of blocks, X blocks.

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_flashinfer.arguments import Scale, check_backend
from compiled_llm_flashinfer.attend import BatchTable, Logits, logits
from compiled_llm_flashinfer.masks import packed_mask
from compiled_llm_flashinfer.workspace import Planned
from compiled_llm_ops.contracts.devices import device_of

PARTS = 1024  # partial results that there is room for, of each kv head


class SparseWrapper(Planned):
    """Tables that ``plan`` writes and ``run`` reads, on the device."""

    _how: Logits
    _mode: str

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        backend: str = "auto",
        *,
        max_items: int | None = None,
        max_parts: int = PARTS,
        max_entries: int | None = None,
    ) -> None:
        """Make a wrapper for a device, with room for ``max_items`` and ``max_entries``, both or neither.

        Args:
            max_items: work items that plans may make; None for any.
            max_parts: partial results that plans may make, of each kv head; with fewer, long rows are shared by fewer
                programs.
            max_entries: blocks that plans may have; where blocks have any sizes, pieces of up to 64 keys, or keys where
                ``strided_attention`` runs, of all rows and kv heads. None for any.
        """
        check_backend(backend)
        if (max_items is None) != (max_entries is None):
            raise ValueError(
                f"max_items={max_items} and max_entries={max_entries}: give both, for tables of fixed sizes, or none"
            )
        super().__init__(float_workspace_buffer, use_cuda_graph=False)
        self._max_items = max_items
        self._max_parts = max_parts
        self._max_entries = max_entries
        self._arguments: tuple[Any, ...] | None = None
        self._table: BatchTable | None = None
        self._shape = (0, 0, 0)
        self._held: dict[str, Tensor] = {}

    @property
    def _processors(self) -> int:
        return device_of(self.device).processors if self.device.type == "cuda" else 1

    def _room_for_items(self, most: int) -> int:
        return most + self._max_parts if self._max_items is None else self._max_items

    def _write(self, **tables: tuple[Tensor, int | None]) -> list[Tensor]:
        """Tensors that begin with these rows, of a given size the same ones each time; ValueError without room."""
        held = [self._held_for(name, rows, size) for name, (rows, size) in tables.items()]
        for (rows, _), own in zip(tables.values(), held, strict=True):
            if own is not None:
                own[: len(rows)].copy_(rows)
        pairs = zip(tables.values(), held, strict=True)
        return [rows.to(self.device) if own is None else own for (rows, _), own in pairs]

    def _held_for(self, name: str, rows: Tensor, size: int | None) -> Tensor | None:
        if size is None or self._max_entries is None:
            return None
        held = self._held.setdefault(name, torch.zeros((size, *rows.shape[1:]), dtype=rows.dtype, device=self.device))
        if len(rows) > len(held) or rows.shape[1:] != held.shape[1:]:
            raise ValueError(f"{name}: there is room for {tuple(held.shape)}; got {tuple(rows.shape)}")
        return held

    def _items(self, items: NDArray[np.int32]) -> tuple[Tensor, int | None]:
        used = items if self._max_items is not None else items[items[:, 2] > 0]
        return torch.from_numpy(used), self._max_items

    def _has_own_kernel(self, head_dim: int, query: torch.dtype, keys: torch.dtype) -> bool:
        """Whether the sparse ops have a kernel for such heads; those of a CPU take any floats of one dtype."""
        if query != keys or query.itemsize == 1:
            return False
        if self.device.type != "cuda":
            return True
        from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse_tiling import missing_kernel

        return missing_kernel(head_dim, query) is None

    def _check_run(self, name: str, query: Tensor) -> None:
        """Raise RuntimeError if nothing was planned, ValueError if queries ``[M, H, D]`` are others."""
        if self._arguments is None and self._table is None:
            raise RuntimeError("call plan() before run()")
        if query.shape != self._shape:
            raise ValueError(f"{name} must be {self._shape}, as planned; got {tuple(query.shape)}")

    def _plan_again(
        self,
        pos_encoding_mode: str,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        if self._arguments is None and self._table is None:
            raise RuntimeError("call plan() before forward()")
        if pos_encoding_mode != self._mode:
            raise ValueError(f"pos_encoding_mode must be {self._mode!r}, as planned; got {pos_encoding_mode!r}")
        self._how = logits(
            self._heads, self.device, causal=self._how.causal, pos_encoding_mode=pos_encoding_mode, window_left=-1,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip

    @property
    def _heads(self) -> int:
        """Query heads of a row, for which positions are."""
        return self._shape[1]


def bits_of(
    mask: Tensor | None, packed: Tensor | None, qo_indptr: Tensor, indptr: Tensor, block: int
) -> tuple[Tensor, Tensor] | None:
    """Return the bits of a mask by block ``[X, R, C]``, or of a packed one, and where each row's bytes begin."""
    lengths = (indptr[1:] - indptr[:-1]).to(torch.int32) * block
    if packed is None and mask is not None:
        own = mask.cpu().bool()
        rows = [own[begin:end].transpose(0, 1).reshape(-1) for begin, end in pairwise(indptr.tolist())]
        return packed_mask(torch.cat(rows), None, qo_indptr, lengths)
    return packed_mask(None, packed if packed is None else packed.cpu(), qo_indptr, lengths)


def tokens_of(seen: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the queries of each row of each kv head begin, where its keys do, and these, of all heads' keys."""
    heads, starts = columns.shape[0], columns.cumsum(1) - columns
    lengths = (seen * columns[:, None]).sum(2).flatten()
    head, _, column = seen.nonzero(as_tuple=True)
    counts = columns[head, column].long()
    firsts = (torch.arange(heads, device=columns.device) * columns[0].sum())[head] + starts[head, column]
    within = torch.arange(int(counts.sum()), device=columns.device) - (counts.cumsum(0) - counts).repeat_interleave(
        counts
    )
    keys = firsts.repeat_interleave(counts) + within
    qo_indptr, kv_indptr = (torch.nn.functional.pad(own.cumsum(0), (1, 0)).int() for own in (rows.flatten(), lengths))
    return qo_indptr, kv_indptr, keys.int()


def refuse_scales(**scales: Scale) -> None:
    for name, scale in scales.items():
        if scale is not None:
            raise ValueError(
                f"{name} is for queries of fp8; plan with q_data_type=torch.float8_e4m3fn, or leave it out"
            )


def on_host(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
