"""What the KV cache takes over all layers: each has a spec, which its kind makes, and a memory."""

# Nothing else knows how a layer's memory is laid out: the pool counts pages, a page table names them.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.kinds.kind import Codec, Layer, Paging
from compiled_llm.kinds.spec import UNSCALED, JoinedSpec, KVCacheSpec, PageScales
from compiled_llm.kvcache.memory import mark_static
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm_ops.protocol import Backend


def kv_cache_specs(
    layers: Sequence[Layer],
    page_size: int,
    dtype: torch.dtype,
    backend: Backend,
    codec: Codec | None = None,
    scales: Sequence[PageScales] = (),
) -> tuple[KVCacheSpec, ...]:
    """Each layer's spec, and then those of what some keep besides; ``scales`` are those of a codec."""
    paging = Paging(page_size, dtype, backend, codec)
    both = zip(layers, scales or [UNSCALED] * len(layers), strict=True)
    specs = [layer.kind.spec(layer, paging._replace(scales=own)) for layer, own in both]
    beside = [layer.kind.beside for layer in layers if layer.kind.beside is not None]
    return *specs, *(JoinedSpec(size, 0, page_size, dtype) for size in beside)


def page_size_bytes(spec: KVCacheSpec) -> int:
    return math.prod(spec.shape(1)) * spec.dtype.itemsize


def token_numbers(spec: KVCacheSpec) -> int:
    """Return how many numbers a token takes in a layer."""
    return math.prod(spec.shape(1)) // spec.page_size


def token_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes that a token takes in a layer."""
    return page_size_bytes(spec) // spec.page_size


def page_bytes(specs: Sequence[KVCacheSpec]) -> int:
    """Return what one page takes over all layers, in bytes."""
    return sum(map(page_size_bytes, specs))


def allocate_pages(specs: Sequence[KVCacheSpec], pages: int, memory: ReleasableMemory) -> list[Tensor]:
    """Return each layer's memory, zeros at addresses that graphs may rely on."""
    # On a CPU the operating system backs memory with pages only once it is written, so a large pool costs what is used.
    memories = [memory.zeros(spec.shape(pages), spec.dtype) for spec in specs]
    for tensor in memories:
        mark_static(tensor)
        # P depends on what memory is free; built into the code, it would make every start a cold one.
        torch._dynamo.mark_dynamic(tensor, 0)
    return memories
