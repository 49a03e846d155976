"""FlashInfer's functor of a variant: compiled for the CPU with stand-ins for its headers, it computes what the variant
says; on a GPU by FlashInfer itself.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.compat.torch.inductor import cpp_compilers
from compiled_llm_ops import flashinfer_arguments, flashinfer_variant, paged_attention_variant
from compiled_llm_ops.variants.plain import evaluated
from support.gpu import SEED, needs_cuda
from support.ops.op_cases import Batch
from support.ops.variants import EXAMPLES, expected, registered

HEADS, QUERIES, KEYS, ROW_BEGIN, SCALE = 6, 5, 9, 2, 0.3

HEADERS = """
#include <cmath>
#include <cstdint>
#include <cstring>
#define __device__
#define __host__
#define __forceinline__
struct nv_bfloat16 {
  uint16_t bits;
  operator float() const { uint32_t wide = uint32_t(bits) << 16; float own; memcpy(&own, &wide, 4); return own; }
};
struct half {
  uint16_t bits;
  operator float() const {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float own = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return bits >> 15 ? -own : own;
  }
};
namespace math { constexpr float log2e = 1.44269504f, inf = 5e4f; }
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...) \\
  template <typename Params, typename T> T LogitsTransform(const Params& params, T logits, uint32_t batch_idx, \\
  uint32_t qo_idx, uint32_t kv_idx, uint32_t qo_head_idx, uint32_t kv_head_idx) { __VA_ARGS__ }
#define REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...) \\
  template <typename Params> bool LogitsMask(const Params& params, uint32_t batch_idx, \\
  uint32_t qo_idx, uint32_t kv_idx, uint32_t qo_head_idx, uint32_t kv_head_idx) { __VA_ARGS__ }
#define REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, ...) \\
  template <typename Params, typename T, typename T_M> T OutputTransform(const Params& params, T output, \\
  uint32_t batch_idx, uint32_t qo_idx, uint32_t qo_head_idx, T_M& m, float& d, float scale) { __VA_ARGS__ }
struct AttentionVariantBase {};
"""
"""What the functor takes of FlashInfer's headers; the macros have its arguments."""


def program(name: str) -> str:
    """A function that calls the functor for each query head, query and key of row 1."""
    functor = flashinfer_variant(registered(name).name)
    tensors = [*zip(functor.tensor_names, functor.tensor_dtypes, strict=True)]
    scalars = [*zip(functor.scalar_names, functor.scalar_dtypes, strict=True)]
    fields = [f"{kind}* {field};" for field, kind in tensors] + [f"{kind} {field};" for field, kind in scalars]
    taken = [f"params.{field} = ({kind}*)pointers[{at}];" for at, (field, kind) in enumerate(tensors)]
    taken += [f"params.{field} = numbers[{at}];" for at, (field, _) in enumerate(scalars)]
    return f"""
namespace {name} {{
struct Params {{
  int32_t* q_indptr; int32_t window_left; uint32_t qo_len, kv_len;
  {" ".join(fields)}
  uint32_t get_qo_len(uint32_t) const {{ return qo_len; }}
  uint32_t get_kv_len(uint32_t) const {{ return kv_len; }}
}};
{functor.declaration}
}}
extern "C"
void call_{name}(void** pointers, double* numbers, int32_t* q_indptr, float* logits, bool* seen, int window) {{
  {name}::Params params;
  params.q_indptr = q_indptr; params.window_left = window;
  params.qo_len = q_indptr[2] - q_indptr[1]; params.kv_len = {KEYS};
  {" ".join(taken)}
  {name}::{functor.name} functor(params, 1, nullptr);
  for (uint32_t query = 0; query < {QUERIES}; ++query)
    for (uint32_t head = 0; head < {HEADS}; ++head)
      for (uint32_t key = 0; key < {KEYS}; ++key) {{
        const int at = (query * {HEADS} + head) * {KEYS} + key;
        logits[at] = functor.LogitsTransform(params, logits[at], 1, query, key, head, head / 3);
        seen[at] = functor.LogitsMask(params, 1, query, key, head, head / 3);
      }}
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("functors")
    (folder / "all.cpp").write_text(HEADERS + "\n".join(map(program, EXAMPLES)))
    command = [cpp_compilers()[0], "-std=c++17", "-shared", "-fPIC", "-o", "all.so", "all.cpp"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "all.so"))


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("window", [-1, 3])
def test_the_functor_computes_what_the_variant_says(name: str, window: int, library: ctypes.CDLL, seed: int) -> None:
    variant, logits = registered(name), torch.randn(QUERIES, HEADS, KEYS)
    tensors = [own.contiguous() for own in EXAMPLES[name].tensors(2, ROW_BEGIN + QUERIES, HEADS)]
    found, seen = logits.clone(), torch.zeros(logits.shape, dtype=torch.bool)
    numbers = [own for own in flashinfer_arguments(variant.name, tensors, SCALE) if not isinstance(own, Tensor)]
    pointers = (ctypes.c_void_p * max(1, len(tensors)))(*(own.data_ptr() for own in tensors))
    q_indptr = torch.tensor([0, ROW_BEGIN, ROW_BEGIN + QUERIES], dtype=torch.int32)
    places = (ctypes.c_void_p(own.data_ptr()) for own in (q_indptr, found, seen))
    getattr(library, f"call_{name}")(pointers, (ctypes.c_double * len(numbers))(*numbers), *places, window)

    positions = torch.arange(QUERIES, dtype=torch.int32)[:, None, None]
    inputs = {
        "logit": logits * SCALE,
        "row": torch.tensor(1, dtype=torch.int32),
        "head": torch.arange(HEADS, dtype=torch.int32)[:, None],
        "query_position": positions + KEYS - QUERIES,
        "key_position": torch.arange(KEYS, dtype=torch.int32),
    }
    wanted = [inputs["logit"], torch.ones(logits.shape, dtype=torch.bool)]
    for at, expression in enumerate((variant.logits, variant.visible)):
        if expression is not None:
            wanted[at] = evaluated(variant, expression, inputs, tensors, positions + ROW_BEGIN).expand(logits.shape)
    hidden = -5e4 if variant.softmax else 0.0
    torch.testing.assert_close(found, wanted[0].where(wanted[1], hidden), rtol=1e-5, atol=1e-5)
    far = -1 if window < 0 else inputs["query_position"] - window
    assert torch.equal(seen, (inputs["key_position"] >= far).expand(logits.shape))


def test_programs_that_are_left_over_read_nothing_behind_a_tensor(library: ctypes.CDLL) -> None:
    """Captured launches may have some, for rows without queries that come last."""
    variant = registered("inkling")
    (own,) = EXAMPLES["inkling"].tensors(2, ROW_BEGIN + QUERIES, HEADS)
    poisoned = torch.cat([own, torch.full_like(own, torch.nan)])[: len(own)]
    logits, seen = torch.zeros(QUERIES, HEADS, KEYS), torch.zeros(QUERIES, HEADS, KEYS, dtype=torch.bool)
    numbers = [each for each in flashinfer_arguments(variant.name, [poisoned], SCALE) if not isinstance(each, Tensor)]
    q_indptr = torch.tensor([0, len(own), len(own)], dtype=torch.int32)
    places = (ctypes.c_void_p(each.data_ptr()) for each in (q_indptr, logits, seen))
    pointers = (ctypes.c_void_p * 1)(poisoned.data_ptr())
    library.call_inkling(pointers, (ctypes.c_double * len(numbers))(*numbers), *places, -1)
    assert not logits.isnan().any()


def test_arguments_are_flashinfers() -> None:
    functor = flashinfer_variant(registered("relative").name)
    uri, *sizes, names, types, scalars, scalar_types, name, declaration = functor.jit_args(
        torch.bfloat16, torch.bfloat16, 128
    )
    assert uri == f"variant_{registered('relative').key.replace('@', '_')}_bfloat16_bfloat16_128"
    assert sizes == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32, 128, 128]
    assert (names, types) == (["variant_bias"], ["nv_bfloat16"])
    assert scalars == ["sm_scale", "variant_bias_size_0", "variant_bias_size_1"]
    assert scalar_types == ["double", "int64_t", "int64_t"]
    assert f"struct {name} : AttentionVariantBase" in declaration
    bias = torch.ones(4, 12).bfloat16()
    assert flashinfer_arguments("example_relative", [bias], 0.5) == [bias, 0.5, 4, 12]
    assert "use_softmax = false" in flashinfer_variant(registered("sigmoid").name).declaration


def test_the_functor_has_what_flashinfers_kernels_and_macros_take() -> None:
    flashinfer = pytest.importorskip("flashinfer")
    attention = Path(flashinfer.__file__).parent / "data" / "include" / "flashinfer" / "attention"
    helper, kernel = (attention / "variant_helper.cuh").read_text(), (attention / "prefill.cuh").read_text()
    for macro in ("LOGITS_TRANSFORM", "LOGITS_MASK", "OUTPUT_TRANSFORM"):
        (ours,) = [line for line in HEADERS.splitlines() if f"define REGISTER_{macro}" in line]
        arguments = ours[ours.index("(") + 1 : ours.index(", ...")]
        theirs = helper[helper.index(f"REGISTER_{macro}(") :].replace("\\", "")
        assert " ".join(theirs[theirs.index("(") + 1 : theirs.index("...")].split()).rstrip(", ") == arguments
    declared = flashinfer_variant(registered("alibi").name).declaration
    for member in ("qo_len", "kv_len", "window_left", "sm_scale_log2"):
        assert f"variant.{member}" in kernel
        assert member in declared


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", EXAMPLES)
def test_flashinfer_attends_by_it(name: str) -> None:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    batch = Batch([9, 30, 200, 41], [9, 3, 130, 1], group=3, head_dim=64, page_size=16, dtype=torch.bfloat16, seed=SEED)
    batch.filled()
    tensors: list[Any] = EXAMPLES[name].tensors(4, *batch.query.shape[:2])
    given, variant = [own.contiguous().cuda() for own in tensors], registered(name)
    args = flashinfer_variant(variant.name).jit_args(torch.bfloat16, torch.bfloat16, 64)
    room = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(room, "HND", backend="fa2", jit_args=args)
    query, pages, qo_indptr, *table, _, _, scale = (
        own.cuda() if isinstance(own, Tensor) else own for own in batch.arguments()
    )
    kinds: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    kinds["disable_split_kv"] = not variant.softmax  # parts are summed wrongly
    wrapper.plan(qo_indptr, *table, 6, 2, 64, 16, causal=True, **kinds)
    out = wrapper.run(query, pages, *flashinfer_arguments(variant.name, given, scale))
    outputs, _ = expected(batch, EXAMPLES[name], tensors)
    size = max(1.0, float(outputs.abs().max()))
    torch.testing.assert_close(out.cpu().float() / size, outputs / size, rtol=3e-2, atol=3e-2)
    own_out = paged_attention_variant(query, pages, qo_indptr, *table, variant.name, given, scale)
    torch.testing.assert_close(out.float() / size, own_out.float() / size, rtol=3e-2, atol=3e-2)
