"""Kinds of kernels are told apart, and what a step spends on each is counted."""

from __future__ import annotations

import pytest
import torch

from compiled_llm.explaining.profile.kernels import KernelLaunch, KernelProfiler, Spent, busy_us, kind_of, spent_by


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_decode_paged_attention", "attention"),
        ("_shared_prefix_attention", "attention"),
        ("_merge_state_parts", "attention, merge of splits"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<...>", "attention, merge of splits"),
        ("void flashinfer::AppendPagedKVCacheKernel<128u, ...>", "page append"),
        ("_rope_append_paged_kv", "rotary and page append"),
        ("nvjet_tst_64x8_64x16_2x1_v_bz_splitK_TNT", "matrix products"),
        ("triton_red_fused_mm_3", "matrix products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, ...>", "matrix products"),
        ("triton_red_fused_argmax_9", "sampling"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norms, rotary, elementwise"),
        ("Memcpy DtoH (Device -> Pinned)", "memory copies"),
        ("aten::addmm", "matrix products"),
    ],
)
def test_kernels_are_told_apart(name: str, kind: str) -> None:
    assert kind_of([name]) == kind


def test_operators_inside_attention_are_attention() -> None:
    assert kind_of(["aten::bmm", "compiled_llm::paged_attention"]) == "attention"
    assert kind_of(["aten::index_put_", "compiled_llm::append_paged_kv"]) == "page append"
    assert kind_of(["aten::mul", "compiled_llm::rope_append_paged_kv"]) == "rotary and page append"
    assert kind_of(["aten::mm", "aten::linear"]) == "matrix products"


def test_overlapping_kernels_are_busy_once() -> None:
    spans = [(0.0, 10.0), (5.0, 8.0), (9.0, 12.0), (20.0, 21.0)]
    assert busy_us(KernelLaunch("k", "attention", end - start, start, end) for start, end in reversed(spans)) == 13.0


def test_what_is_spent_is_an_average_over_the_steps_the_longest_first() -> None:
    launches = [
        KernelLaunch("m", "matrix products", 2, 9, 11),
        KernelLaunch("a", "attention", 3.0, 0, 3),
        KernelLaunch("a", "attention", 5.0, 4, 9),
    ]
    kinds = [Spent("attention", 4.0, 1.0), Spent("matrix products", 1.0, 0.5)]
    assert spent_by(lambda launch: launch.kind, launches, 2) == kinds
    assert spent_by(lambda launch: launch.name, launches, 2) == [Spent("a", 4.0, 1.0), Spent("m", 1.0, 0.5)]


def profile_nothing() -> None:
    with KernelProfiler(torch.device("cpu")) as profiler:
        profiler.start()
        profiler.stop()


def test_profiler_that_saw_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw nothing"):
        profile_nothing()
