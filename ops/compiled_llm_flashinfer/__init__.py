"""FlashInfer's API over our ops: its names and arguments, on a CPU, too, and under ``torch.compile(fullgraph=True)``.

``import compiled_llm_flashinfer as flashinfer`` in place of ``import flashinfer``. Modules have FlashInfer's
names, too: ``flashinfer.decode``, ``flashinfer.prefill``, ``flashinfer.page``, ``flashinfer.mla`` and so on.
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
