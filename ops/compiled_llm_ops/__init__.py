"""Paged attention, FlashInfer's and our own, as ``torch.library`` ops that trace, compile and replay."""

# Usable on its own: needs torch only; on CUDA also flashinfer-python, and the triton that torch brings. Each op has a
# fake for tracing, a launcher of FlashInfer's or our kernels for CUDA and a kernel in plain PyTorch for the CPU.

from compiled_llm_ops.attention.append import append_paged_kv
from compiled_llm_ops.attention.cascade.attention import cascade_attention, cascade_attention_lse
from compiled_llm_ops.attention.cascade.tables import CascadeTables, SharedRun, cascade_tables
from compiled_llm_ops.attention.decode import decode_attention, decode_attention_lse
from compiled_llm_ops.attention.invariant import invariant_attention, invariant_attention_lse
from compiled_llm_ops.attention.latent.append import append_latent
from compiled_llm_ops.attention.latent.attention import latent_attention, latent_attention_lse
from compiled_llm_ops.attention.latent.decode import latent_decode, latent_decode_lse
from compiled_llm_ops.attention.latent.planned import planned_latent_attention, planned_latent_attention_lse
from compiled_llm_ops.attention.latent.ragged import ragged_attention, ragged_attention_lse
from compiled_llm_ops.attention.merge import merge_state, merge_state_in_place, merge_states
from compiled_llm_ops.attention.plan import plan_paged_attention
from compiled_llm_ops.attention.prefill import paged_attention, paged_attention_lse
from compiled_llm_ops.attention.rope_append import rope_append_paged_kv
from compiled_llm_ops.attention.segments import segment_attention
from compiled_llm_ops.contracts import Geometry, PageTable
from compiled_llm_ops.contracts.sampling import (
    BIASED,
    CLEANED,
    COUNTED,
    DEFERRED,
    FOLLOWING,
    MASKED,
    MAX_BIASES,
    MAX_FOLLOWED,
)
from compiled_llm_ops.drafts.acceptance import accept_drafts
from compiled_llm_ops.drafts.contracts import NOT_ACCEPTED, NOT_DRAFTED
from compiled_llm_ops.drafts.ngrams import ngram_drafts
from compiled_llm_ops.drafts.texts import write_texts
from compiled_llm_ops.experts.fused import fused_experts
from compiled_llm_ops.experts.linear import experts_linear
from compiled_llm_ops.linear.chained_linear import chained_linear
from compiled_llm_ops.linear.invariant import invariant_bmm, invariant_linear, invariant_sum
from compiled_llm_ops.linear.linear import skinny_linear
from compiled_llm_ops.linear.norm import add_rms_norm
from compiled_llm_ops.linear.normed_linear import normed_linear
from compiled_llm_ops.packed.formats import PackedFormat, PackedWeight
from compiled_llm_ops.packed.linear import packed_linear
from compiled_llm_ops.packed.linears import packed_linears
from compiled_llm_ops.recurrent.conv import causal_conv1d
from compiled_llm_ops.recurrent.delta_rule import gated_delta_rule
from compiled_llm_ops.recurrent.selective_scan import selective_scan
from compiled_llm_ops.sampling.launches import build_sampling
from compiled_llm_ops.sampling.logprobs import top_logprobs
from compiled_llm_ops.sampling.sampling import NOT_A_TOKEN, sample_tokens
from compiled_llm_ops.variants.decode import decode_attention_variant, decode_attention_variant_lse
from compiled_llm_ops.variants.flashinfer_source import FlashInferVariant, flashinfer_arguments, flashinfer_variant
from compiled_llm_ops.variants.packed import paged_attention_variant, paged_attention_variant_lse
from compiled_llm_ops.variants.planned import planned_attention_variant, planned_attention_variant_lse
from compiled_llm_ops.variants.registry import Variant, register_variant

__all__ = [
    "BIASED",
    "CLEANED",
    "COUNTED",
    "DEFERRED",
    "FOLLOWING",
    "MASKED",
    "MAX_BIASES",
    "MAX_FOLLOWED",
    "NOT_ACCEPTED",
    "NOT_A_TOKEN",
    "NOT_DRAFTED",
    "CascadeTables",
    "FlashInferVariant",
    "Geometry",
    "PackedFormat",
    "PackedWeight",
    "PageTable",
    "SharedRun",
    "Variant",
    "accept_drafts",
    "add_rms_norm",
    "append_latent",
    "append_paged_kv",
    "build_sampling",
    "cascade_attention",
    "cascade_attention_lse",
    "cascade_tables",
    "causal_conv1d",
    "chained_linear",
    "decode_attention",
    "decode_attention_lse",
    "decode_attention_variant",
    "decode_attention_variant_lse",
    "experts_linear",
    "flashinfer_arguments",
    "flashinfer_variant",
    "fused_experts",
    "gated_delta_rule",
    "invariant_attention",
    "invariant_attention_lse",
    "invariant_bmm",
    "invariant_linear",
    "invariant_sum",
    "latent_attention",
    "latent_attention_lse",
    "latent_decode",
    "latent_decode_lse",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "ngram_drafts",
    "normed_linear",
    "packed_linear",
    "packed_linears",
    "paged_attention",
    "paged_attention_lse",
    "paged_attention_variant",
    "paged_attention_variant_lse",
    "plan_paged_attention",
    "planned_attention_variant",
    "planned_attention_variant_lse",
    "planned_latent_attention",
    "planned_latent_attention_lse",
    "ragged_attention",
    "ragged_attention_lse",
    "register_variant",
    "rope_append_paged_kv",
    "sample_tokens",
    "segment_attention",
    "selective_scan",
    "skinny_linear",
    "top_logprobs",
    "write_texts",
]
