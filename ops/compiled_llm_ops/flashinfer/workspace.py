"""Memory and kernels that the plans of one device share."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops.contracts import SCALED_DTYPES, Geometry, PageTable
from compiled_llm_ops.contracts.devices import device_of, power_of_two
from compiled_llm_ops.flashinfer import mla
from compiled_llm_ops.flashinfer.append import append
from compiled_llm_ops.flashinfer.functors import functors
from compiled_llm_ops.flashinfer.hopper import build_for_later, is_there
from compiled_llm_ops.flashinfer.versions import HEAD_DIMS, import_flashinfer, missing_kernel

STAGING_BUFFERS = 16
"""Plans the host may be ahead of the device: three and more prefills of a model with several attention groups."""


class Staged(NamedTuple):
    """Pinned memory that plans are copied from."""

    memory: Tensor  # ``[bytes]`` uint8
    words: NDArray[np.int32]  # the same, int32
    copied: torch.cuda.Event  # recorded after the last copy out of it

    @classmethod
    def of(cls, nbytes: int) -> Staged:
        memory = pinned(nbytes)
        return cls(memory, memory.numpy().view(np.int32), torch.cuda.Event())


class FlashInferWorkspace:
    """Memory that the plans of one model share, allocated once, before any capture."""

    # The buffer holds the partial results of rows whose keys were split over several blocks. They are written and
    # merged within one launch, so one buffer serves all plans whose launches follow each other on a stream. Plans are
    # copied from pinned buffers, used in turn. They belong to the workspace, since a copy may still be on its way when
    # its plan is dropped.
    # One thread at a time may plan with the plans of a workspace; any may launch. ``launching`` is held while a
    # wrapper, which all plans of a geometry share, has the tensors of one launch.

    def __init__(self, device: torch.device | str, workspace_bytes: int = 128 * 2**20) -> None:
        """``workspace_bytes``: size of the buffer; planning raises if it is too small."""
        self.buffer = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self.device = self.buffer.device
        self.processors = device_of(self.device).processors
        self.launching = threading.Lock()
        self._staging = [Staged.of(64 * 2**10) for _ in range(STAGING_BUFFERS)]
        self._next = 0
        self._wrappers: dict[tuple[Geometry, str], Any] = {}
        self._loading: dict[tuple[Geometry, str], Future[Any]] = {}

    def load(self, geometry: Geometry) -> None:
        for kernels in ("fa2", "fa3") if is_there(geometry, self.device) else ("fa2",):
            arguments = geometry, self.buffer, kernels
            self._loading[geometry, kernels] = _loaders.submit(_on_device, self.device, make_wrapper, *arguments)
        # Kernels of our own write other pages.
        if geometry.kv_dtype not in SCALED_DTYPES and not geometry.rope_size:
            # What goes wrong in that one goes wrong again at the first launch.
            _loaders.submit(_on_device, self.device, append_one_token, geometry, self.device)
        build_for_later(geometry, self.device)

    def is_loading(self, geometry: Geometry, kernels: str) -> bool:
        """Whether ``wrapper`` would wait for kernels that ``load`` builds."""
        return (geometry, kernels) in self._loading and not self._loading[geometry, kernels].done()

    def wrapper(self, geometry: Geometry, kernels: str = "fa2") -> Any:
        """Return FlashInfer's wrapper for a geometry; waits for its kernels, or builds or loads them here."""
        key = geometry, kernels
        if key not in self._wrappers:
            loading = self._loading.pop(key, None)
            self._wrappers[key] = make_wrapper(geometry, self.buffer, kernels) if loading is None else loading.result()
        return self._wrappers[key]

    @contextmanager
    def staging(self, nbytes: int) -> Iterator[Staged]:
        """Yield at least ``nbytes`` of pinned memory that no copy reads any more; the block issues copies out of it."""
        # Waits only when the host is ``STAGING_BUFFERS`` plans ahead of the device.
        staged = self._staging[self._next]
        staged.copied.synchronize()
        if staged.memory.numel() < nbytes:
            staged = self._staging[self._next] = Staged.of(power_of_two(nbytes))
        yield staged
        staged.copied.record(torch.cuda.current_stream(self.device))
        self._next = (self._next + 1) % len(self._staging)


@functools.cache
def max_blocks_of(device: torch.device) -> int:
    """Return how many thread blocks can be resident on a device at once."""
    properties = torch.cuda.get_device_properties(device)
    # No attention kernel has blocks of fewer than 128 threads.
    return int(properties.multi_processor_count * properties.max_threads_per_multi_processor // 128)


def make_wrapper(geometry: Geometry, buffer: Tensor, kernels: str = "fa2") -> Any:
    """Return a wrapper with loaded kernels, ``fa2`` or ``fa3``, by a public plan of one row of one token."""
    _check_geometry(geometry)
    if geometry.rope_size:
        return mla.make_wrapper(geometry, buffer)
    flashinfer = import_flashinfer()
    indptr = torch.tensor([0, 1], dtype=torch.int32, device="cpu")
    indices, last_page_len = (
        torch.tensor([0], dtype=torch.int32, device="cpu"),
        torch.tensor([1], dtype=torch.int32, device="cpu"),
    )
    jit_args = functors().jit_args(geometry) if geometry.function else None  # None for FlashInfer's own functor
    # Whether launches are captured is the planner's to know, not the wrapper's: run() is the same for both.
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        float_workspace_buffer=buffer, kv_layout="HND", backend=kernels, jit_args=jit_args
    )
    wrapper.plan(
        qo_indptr=indptr,
        paged_kv_indptr=indptr,
        paged_kv_indices=indices,
        paged_kv_last_page_len=last_page_len,
        num_qo_heads=geometry.query_heads,
        num_kv_heads=geometry.kv_heads,
        head_dim_qk=geometry.head_dim,
        page_size=geometry.page_size,
        causal=True,
        pos_encoding_mode="NONE",
        sm_scale=1.0,  # each launch has its own
        window_left=geometry.window_left,
        logits_soft_cap=geometry.logits_soft_cap,
        q_data_type=geometry.dtype,
        kv_data_type=geometry.kv_dtype,
        o_data_type=geometry.dtype,
    )
    # Its own int workspace has served; every plan brings one.
    small = torch.empty(16, dtype=torch.uint8, device=buffer.device)
    wrapper.reset_workspace_buffer(float_workspace_buffer=buffer, int_workspace_buffer=small)
    importlib.import_module("flashinfer.utils")._get_cache_alibi_slopes_buf(geometry.query_heads, buffer.device)
    return wrapper


def _check_geometry(geometry: Geometry) -> None:
    if reason := mla.missing_kernel(geometry) if geometry.rope_size else missing_kernel(geometry):
        raise ValueError(f"plan_paged_attention: {reason}")
    if not geometry.rope_size and geometry.head_dim not in HEAD_DIMS:
        raise ValueError(
            f"plan_paged_attention: there is no kernel for head size {geometry.head_dim}; pad it to stored_head_dim() "
            "of the backend"
        )


def append_one_token(geometry: Geometry, device: torch.device) -> None:
    """Build or load the kernel that writes to pages, by writing one token."""
    size = (1, 2, geometry.kv_heads, geometry.page_size, geometry.head_dim)
    pages = torch.empty(size, dtype=geometry.kv_dtype, device=device)
    zero, one = (torch.tensor([number], dtype=torch.int32, device=device) for number in (0, 1))
    indptr = torch.cat([zero, one])
    append(pages[0, :1, :, 0], pages[0, :1, :, 0], pages, zero, zero, PageTable(indptr, indptr, zero, one))


def _on_device(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    with torch.cuda.device(device):
        return function(*args)


_loaders = ThreadPoolExecutor(2, "compiled_llm_kernels")


def pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
