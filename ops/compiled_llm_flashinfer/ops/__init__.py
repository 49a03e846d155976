"""Ops under FlashInfer's API that no program of ``compiled_llm`` runs: keys and values in any layout, sparse blocks."""

from compiled_llm_flashinfer.ops.sparse.block_sparse import block_sparse_attention, block_sparse_attention_lse
from compiled_llm_flashinfer.ops.sparse.variable import (
    variable_block_sparse_attention,
    variable_block_sparse_attention_lse,
)
from compiled_llm_flashinfer.ops.sparse.work_items import block_sparse_items, variable_block_sparse_tables
from compiled_llm_flashinfer.ops.strided.append import strided_append
from compiled_llm_flashinfer.ops.strided.attention import strided_attention
from compiled_llm_flashinfer.ops.strided.latents import strided_latent_attention

__all__ = [
    "block_sparse_attention",
    "block_sparse_attention_lse",
    "block_sparse_items",
    "strided_append",
    "strided_attention",
    "strided_latent_attention",
    "variable_block_sparse_attention",
    "variable_block_sparse_attention_lse",
    "variable_block_sparse_tables",
]
