"""FlashInfer's own wrappers, planned for exactly the batch that they compute, and given the tensors that they write.

Arguments as of FlashInfer 0.6.13. A wrapper's `use_cuda_graph` is for batches that change under a captured graph, and
makes grids larger; the plans here do not change, so launches can be captured without.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_ops.inputs import PAGE_SIZE, Inputs, Launch, Part

WORKSPACE = 2**28


def decode(inputs: Inputs) -> Launch | str:
    return _decode(inputs, tensor_cores=False)


def decode_by_tensor_cores(inputs: Inputs) -> Launch | str:
    return _decode(inputs, tensor_cores=True)


def prefill_fa2(inputs: Inputs) -> Launch | str:
    return _prefill(inputs, "fa2")


def prefill_fa3(inputs: Inputs) -> Launch | str:
    if inputs.device.type == "cuda" and (found := torch.cuda.get_device_capability(inputs.device))[0] != 9:
        return f"fa3 has kernels for compute capability 9.x alone; this is {found[0]}.{found[1]}"
    return _prefill(inputs, "fa3")


def batch_attention(inputs: Inputs) -> Launch | str:
    """One persistent kernel for rows of any kind."""
    wrapper_class = _class_of("BatchAttention", inputs)
    if isinstance(wrapper_class, str):
        return wrapper_class
    wrapper, part = wrapper_class(kv_layout="HND", device=str(inputs.device)), inputs.whole
    wrapper.plan(
        qo_indptr=part.host.qo_indptr,
        kv_indptr=part.host.indptr,
        kv_indices=part.device.indices,  # launches read it
        kv_len_arr=part.lengths.cpu(),
        head_dim_qk=inputs.heads.dim,
        head_dim_vo=inputs.heads.dim,
        causal=True,
        **_common(inputs),
    )
    out = torch.empty_like(part.query)
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    return lambda number: (wrapper.run(part.query, _pages(inputs, number), out=out, lse=lse)[0],)


def batch_pod(inputs: Inputs) -> Launch | str:
    """One launch whose blocks take a tile of the chunk or a row, whatever its multiprocessor has fewer of."""
    wrapper_class = _class_of("BatchPODWithPagedKVCacheWrapper", inputs)
    if isinstance(wrapper_class, str):
        return wrapper_class
    rows, chunk = inputs.one_each, inputs.others
    if rows is None or chunk is None:
        return "it is for rows of one new token beside others"
    wrapper = wrapper_class(_workspace(inputs), "HND")
    wrapper.plan(*_table(chunk), *_table(rows), head_dim=inputs.heads.dim, **_common(inputs))

    def launch(number: int) -> Sequence[Tensor]:
        pages = _pages(inputs, number)
        of_chunk, of_rows = wrapper.run(chunk.query, pages, rows.query, pages, causal_p=True)
        return of_rows, of_chunk

    return launch


def cascade(inputs: Inputs) -> Launch | str:
    """One launch for what all rows share, one for what each has alone, and one that merges their results."""
    wrapper_class = _class_of("MultiLevelCascadeAttentionWrapper", inputs)
    if isinstance(wrapper_class, str):
        return wrapper_class
    part, shared = inputs.whole, inputs.case.shared // PAGE_SIZE
    starts, indptr, indices, last = _table(part)
    rows = len(part.rows)
    first = [torch.tensor([0, size], dtype=torch.int32) for size in (int(starts[-1]), shared)]
    own = torch.cat([numbers[shared:] for numbers in indices.split(indptr.diff().tolist())])
    wrapper = wrapper_class(2, _workspace(inputs), "HND")
    levels = (
        [first[0], starts],
        [first[1], indptr - shared * torch.arange(rows + 1, dtype=torch.int32)],
        [indices[:shared], own],
        [torch.tensor([PAGE_SIZE], dtype=torch.int32), last],
    )
    given = (inputs.heads.query, inputs.heads.kv, inputs.heads.dim, PAGE_SIZE)
    on_device = [[column.to(inputs.device) for column in columns] for columns in levels]
    types = {"q_data_type": inputs.dtype, "kv_data_type": inputs.dtype}
    wrapper.plan(*on_device, *given, causal=True, sm_scale=inputs.scale, **types)
    return lambda number: (wrapper.run(part.query, _pages(inputs, number)),)


def _decode(inputs: Inputs, tensor_cores: bool) -> Launch | str:
    wrapper_class = _class_of("BatchDecodeWithPagedKVCacheWrapper", inputs)
    if isinstance(wrapper_class, str):
        return wrapper_class
    part = inputs.whole
    wrapper = wrapper_class(_workspace(inputs), "HND", use_tensor_cores=tensor_cores)
    _, *table = _table(part)
    wrapper.plan(*table, head_dim=inputs.heads.dim, **_common(inputs))
    out = torch.empty_like(part.query)
    return lambda number: (wrapper.run(part.query, _pages(inputs, number), out=out),)


def _prefill(inputs: Inputs, backend: str) -> Launch | str:
    wrapper_class = _class_of("BatchPrefillWithPagedKVCacheWrapper", inputs)
    if isinstance(wrapper_class, str):
        return wrapper_class
    part = inputs.whole
    wrapper = wrapper_class(_workspace(inputs), "HND", backend=backend)
    wrapper.plan(*_table(part), head_dim_qk=inputs.heads.dim, causal=True, **_common(inputs))
    out = torch.empty_like(part.query)
    return lambda number: (wrapper.run(part.query, _pages(inputs, number), out=out),)


def _class_of(name: str, inputs: Inputs) -> Any:
    """Return a class of FlashInfer's, or why there is none."""
    if inputs.device.type != "cuda":
        return "FlashInfer needs CUDA"
    try:
        flashinfer = importlib.import_module("flashinfer")
    except Exception as error:  # a mismatched flashinfer-jit-cache raises RuntimeError, a broken CUDA OSError
        return f"FlashInfer does not import: {error}"
    return getattr(flashinfer, name, f"FlashInfer {flashinfer.__version__} has no {name}")


def _table(part: Part) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return where queries and pages of rows begin, page numbers, and the tokens in last pages, as all `plan` do."""
    return part.host.qo_indptr, part.host.indptr, part.host.indices, part.host.last_page_len


def _common(inputs: Inputs) -> dict[str, Any]:
    return {
        "num_qo_heads": inputs.heads.query,
        "num_kv_heads": inputs.heads.kv,
        "page_size": PAGE_SIZE,
        "sm_scale": inputs.scale,
        "q_data_type": inputs.dtype,
        "kv_data_type": inputs.dtype,
    }


def _pages(inputs: Inputs, number: int) -> Tensor:
    return inputs.pages[number % len(inputs.pages)]


def _workspace(inputs: Inputs) -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=inputs.device)
