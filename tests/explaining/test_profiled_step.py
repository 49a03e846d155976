"""Kinds of kernels are told apart, and bytes that a step has to read are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import compiled_llm
from compiled_llm.explaining.profile.breakdown import (
    Kernel,
    Kind,
    kernels_of,
    kinds_of,
    moved_by_decode,
    moved_by_prefill,
)
from compiled_llm.explaining.profile.kernels import KernelLaunch, KernelProfiler, busy_us, kind_of
from compiled_llm.explaining.profile.step_bytes import StepBytes, prepared_bytes, step_bytes
from support.parity import FEW_PAGES
from support.tiny_models import tiny_llama, tiny_qwen3
from support.uneven_heads import VALUE_DIM, uneven_llama


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


def test_kinds_are_averages_over_the_steps_and_carry_their_bytes() -> None:
    launches = [
        KernelLaunch("a", "attention", 3.0, 0, 3),
        KernelLaunch("a", "attention", 5.0, 4, 9),
        KernelLaunch("m", "matrix products", 2, 9, 11),
    ]
    nbytes = StepBytes(weights=1000, kv_per_row=10, kv_written=1)
    attention, products = kinds_of(launches, 2, moved_by_decode(nbytes, batch=3))
    assert attention == Kind("attention", 4.0, 1.0, 30)
    assert products == Kind("matrix products", 1.0, 0.5, 1000)
    assert kernels_of(launches, 2) == [Kernel("a", 4.0, 1.0), Kernel("m", 1.0, 0.5)]


def test_prefill_counts_the_bytes_of_the_way_into_pages_that_its_layers_take() -> None:
    model = compiled_llm.wrap(tiny_qwen3(), mode="eager", **FEW_PAGES)
    layers, nbytes = state_of(model).facts.layers, step_bytes(model, 1)
    arguments = tensors_of_rope_append(model.config, tokens := 3)
    prepared = prepared_bytes(layers, model.dtype)
    assert tokens * prepared == len(layers) * sum(tensor.nbytes for tensor in arguments)
    alone, fused = (KernelLaunch("k", kind, 1.0, 0, 1) for kind in ("page append", "rotary and page append"))
    for launch, moved in ((alone, tokens * nbytes.kv_written), (fused, tokens * prepared)):
        (kind,) = kinds_of([launch], 1, moved_by_prefill(nbytes, prepared, tokens, [launch]))
        assert kind == Kind(launch.kind, 1.0, 1.0, moved)
    both = kinds_of([alone, fused], 1, moved_by_prefill(nbytes, prepared, tokens, [alone, fused]))
    assert [kind.nbytes for kind in both] == [None, None], "some layers went either way"


def tensors_of_rope_append(config: Any, tokens: int) -> list[torch.Tensor]:
    """What the op reads and writes of each token: query, key, value, cos and sin; query, key and value."""
    query, key = (
        torch.empty(tokens, heads, config.head_dim)
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    angles = torch.empty(tokens, config.head_dim)
    return [query, key, key, angles, angles, query, key, key]


def profile_nothing() -> None:
    with KernelProfiler(torch.device("cpu")) as profiler:
        profiler.start()
        profiler.stop()


def test_profiler_that_saw_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw nothing"):
        profile_nothing()


def test_bytes_of_a_step_are_weights_once_and_each_rows_keys_and_values() -> None:
    model = tiny_qwen3()  # 2 layers, 2 kv heads of 16, vocabulary 128, hidden 64, not tied
    everything = sum(parameter.nbytes for parameter in model.parameters())
    nbytes = step_bytes(model, context=10)
    assert nbytes.weights == everything - 128 * 64 * 4
    assert nbytes.kv_written == 2 * 2 * 2 * 16 * 4
    assert nbytes.kv_per_row == 10 * nbytes.kv_written
    assert nbytes.total(3) == nbytes.weights + 3 * nbytes.kv_per_row


def test_tied_embedding_is_read_whole() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    assert step_bytes(model, 10).weights == sum(parameter.nbytes for parameter in model.parameters())


def test_windows_bound_what_is_read() -> None:
    model = tiny_qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    kinds = model.config.layer_types
    token = 2 * 2 * 16 * 4
    assert sorted(kinds) == ["full_attention", "sliding_attention"]
    assert step_bytes(model, 10).kv_per_row == (10 + 4) * token


def test_keys_and_values_are_counted_as_they_lie_in_pages() -> None:
    """Values of another size than keys, which the config does not tell; windows; and numbers that stay zero."""
    uneven = compiled_llm.wrap(uneven_llama(), mode="eager", **FEW_PAGES)
    nbytes, config = step_bytes(uneven, 10, state_of(uneven)), uneven.config
    token = config.num_key_value_heads * (config.head_dim + VALUE_DIM) * 4
    assert nbytes.kv_written == config.num_hidden_layers * token
    assert nbytes.kv_per_row == 10 * nbytes.kv_written != step_bytes(uneven, 10).kv_per_row
    windows = tiny_qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    state = state_of(compiled_llm.wrap(windows, mode="eager", **FEW_PAGES))
    for context in (3, 4, 10):
        assert step_bytes(windows, context, state) == step_bytes(windows, context)
    state.specs = tuple(spec._replace(stored_head_dim=32) for spec in state.specs)
    assert step_bytes(windows, 10, state).kv_per_row == 2 * step_bytes(windows, 10).kv_per_row


def state_of(model: Any) -> Any:
    return model.compiled.model_runner().state


def test_ceiling_of_experts_is_not_known() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2))
    assert step_bytes(model, 10).total(1) is None
