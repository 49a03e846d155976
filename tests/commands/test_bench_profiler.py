"""The profiler sees exactly the steps that it says, and kinds of kernels are told apart."""

from __future__ import annotations

import pytest

from compiled_llm.commands.bench import contenders, models, roofline
from compiled_llm.commands.bench.local import LocalSession
from compiled_llm.commands.bench.step_profiler import StepProfiler
from compiled_llm.commands.bench.workload import Workload
from compiled_llm.explaining.profile.breakdown import Kernel, Kind, kernels_of, kinds_of, moved_by_decode
from compiled_llm.explaining.profile.kernels import KINDS, Launch, busy_us, kind_of
from compiled_llm.explaining.profile.step_bytes import StepBytes, step_bytes
from support.bench import CPU, new_setup


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_decode_paged_attention", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<...>", "attention, merge of splits"),
        ("void flashinfer::AppendPagedKVCacheKernel<128u, ...>", "page append"),
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
    assert kind_of(["aten::mm", "aten::linear"]) == "matrix products"


def test_overlapping_kernels_are_busy_once() -> None:
    spans = [(0.0, 10.0), (5.0, 8.0), (9.0, 12.0), (20.0, 21.0)]
    assert busy_us(Launch("k", "attention", end - start, start, end) for start, end in reversed(spans)) == 13.0


def test_kinds_are_averages_over_the_steps_and_carry_their_bytes() -> None:
    launches = [
        Launch("a", "attention", 3.0, 0, 3),
        Launch("a", "attention", 5.0, 4, 9),
        Launch("m", KINDS[5][0], 2, 9, 11),
    ]
    nbytes = StepBytes(weights=1000, kv_per_row=10, kv_written=1)
    attention, products = kinds_of(launches, 2, moved_by_decode(nbytes, batch=3))
    assert attention == Kind("attention", 4.0, 1.0, 30)
    assert products == Kind("matrix products", 1.0, 0.5, 1000)
    assert kernels_of(launches, 2) == [Kernel("a", 4.0, 1.0), Kernel("m", 1.0, 0.5)]


@pytest.mark.parametrize("name", ["hf-eager", "compiled-llm:eager"])
@pytest.mark.parametrize("new", [4, 9, 40])
def test_profiler_sees_exactly_the_steps_it_says(name: str, new: int) -> None:
    """Whether the loop reads each step's tokens at once (HuggingFace) or a step late (ours)."""
    asked = Workload(2, 8, new)
    (contender,) = contenders.choose(name, "cpu")
    with contender.opened(new_setup([asked])) as session:
        assert isinstance(session, LocalSession)
        session.prepare(asked)
        result = roofline.measure_step(name, session, asked, 2, 1e9)
    layers = models.SHAPES["tiny"]["num_hidden_layers"]
    calls = {kernel.name: kernel.launches for kernel in result.kernels}
    attention = {"hf-eager": "aten::_scaled_dot_product_flash_attention_for_cpu"}
    assert calls[attention.get(name, "compiled_llm::decode_attention")] == layers
    assert result.steps == min(16, new // 2)
    assert (result.host_us is None) == (name == "hf-eager")
    assert result.kv_bytes == 2 * step_bytes(session.model, asked.context).kv_per_row


def profile_nothing() -> None:
    with StepProfiler(CPU, steps=1, after=1) as profiler:
        for _ in range(3):
            profiler.clock.put("the prompt, then tokens")


def test_profiler_that_saw_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw nothing"):
        profile_nothing()
