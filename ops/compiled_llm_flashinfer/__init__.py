"""FlashInfer's API over our ops: its names and arguments, on a CPU, too, and under ``torch.compile(fullgraph=True)``.

``import compiled_llm_flashinfer as flashinfer`` in place of ``import flashinfer``. Modules have FlashInfer's
names, too: ``flashinfer.decode``, ``flashinfer.prefill``, ``flashinfer.page``, ``flashinfer.mla`` and so on.

What arguments mean wherever they stand, if nothing else is said. B rows, T packed tokens, H query heads, K kv heads,
D head dimension (E that of values), P pages, S page size, N entries of the page table:

    num_qo_heads, num_kv_heads, head_dim, page_size: H, K, D and S of the shapes.
    qo_indptr: ``[B + 1]`` int32 or int64, where each row's queries begin; its last ones, up to the last key.
    (paged_kv_)indptr, indices, last_page_len: ``[B + 1]``, where each row's pages begin; ``[N]`` page numbers;
        ``[B]`` tokens in each row's last page. On any device.
    ..._buf, ..._buffer: with CUDA graphs, tensors of these shapes, for the largest N that is planned.
    q, out: ``[T, H, D]`` of any dtype that FlashInfer has, any strides; ``out`` is written and returned if given.
    k, v: ``[L, K, D]`` (NHD) or ``[K, L, D]`` (HND), of those dtypes.
    paged_kv_cache: ``[P, 2, S, K, D]`` (NHD), ``[P, 2, K, S, D]`` (HND), any strides, or a tuple of keys and
        values, each without the second axis.
    lse: ``[T, H]`` float32, written if given. A query that sees no key has minus infinity, and zeros in ``out``.
    custom_mask: bool, in place of ``causal``: which keys each query sees, one row after the other.
    packed_custom_mask: uint8, the same as of ``segment_packbits`` with ``bitorder="little"``, which is read first.
    kv_layout: "NHD" or "HND".
    causal: whether queries see no keys after their own position.
    window_left: tokens visible to the left of each query; -1 for all.
    sm_scale: factor on the logits; None for ``D ** -0.5``.
    q_scale, k_scale, v_scale: further factors on the logits, and one on the results.
    logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; None or 0.0 for none.
    pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
    rope_scale, rope_theta: positions are divided by the first, None for 1; base of frequencies, None for 10,000.
    q_data_type, kv_data_type, o_data_type: of queries, of keys and of results; None for that of queries.
    return_lse: whether the log-sum-exp, in base 2, is returned, too.
    fixed_split_size, disable_split_kv: with either, keys are summed in one order, whatever the batch is.
    float_workspace_buffer: any tensor on the device; it is not written.
    use_cuda_graph: whether plans write to the buffers, which captured launches read.
    non_blocking: whether copies to the device may go on after the return.
    backend: one of FlashInfer's, cuDNN's apart; kernels are ours in any case.
    use_fp16_qk_reduction: not read: sums are float32.

KeyError is for a layout or mode that does not exist, NotImplementedError for an argument that is left out here,
RuntimeError for a ``run`` without a plan, and ValueError for shapes, dtypes or buffers that do not fit together, or not
what was planned: nothing is written then.
"""

from compiled_llm_flashinfer import cascade, decode, mla, page, prefill, quantization, sparse
from compiled_llm_flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from compiled_llm_flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from compiled_llm_flashinfer.mla import BatchMLAPagedAttentionWrapper
from compiled_llm_flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from compiled_llm_flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from compiled_llm_flashinfer.quantization import packbits, segment_packbits
from compiled_llm_flashinfer.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cascade",
    "decode",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "packbits",
    "page",
    "prefill",
    "quantization",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "sparse",
]
