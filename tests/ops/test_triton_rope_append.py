"""The kernel in front of prefill's attention: here interpreted, on a GPU see `test_rope_append_gpu.py`."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm_ops.contracts import AppendPagedKv, RopeAppendPagedKv
from support.ops.compiling import compiled, in_order
from support.ops.fp8_pages import KINDS, check_codes, scales_of, stored, stored_pages
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.packed_tokens import GIVEN, Sizes, check, expected, packed_tokens

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

SPANS = [(0, 1), (0, 3), (30, 35), (7, 8), (0, 17), (4, 4)]
WHOLE = pytest.mark.whole


def run(args: RopeAppendPagedKv, numbers: int = 2048, near: float = 3e-3) -> None:
    """In float16, which the interpreter computes with as it should."""
    from compiled_llm_ops.kernels.attention.rope_append import RopeAppendTiling, rope_append

    pages = args.pages.clone()
    out = rope_append(args._replace(pages=pages), pdl=False, tiling=RopeAppendTiling(numbers))
    check(args, out, pages, near)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("numbers", [64, 256], ids="numbers={}".format)
def test_queries_keys_and_values_of_mixed_rows(given, numbers, seed):
    """Heads of one token are shared by several programs, which one of a power of two does not divide."""
    run(packed_tokens(SPANS, Sizes(6, 3, 32, 32, 16), given, torch.float16), numbers)


SIZES = [Sizes(16, 8, 128, 128, 16), Sizes(4, 1, 96, 128, 5), Sizes(2, 2, 64, 256, 1)]
MORE_SIZES = [Sizes(5, 5, 80, 128, 16), Sizes(71, 1, 64, 64, 64), Sizes(8, 4, 256, 256, 16), Sizes(2, 1, 6, 8, 4)]


@interpreted
@pytest.mark.parametrize("sizes", [*SIZES, *(pytest.param(sizes, marks=WHOLE) for sizes in MORE_SIZES)], ids=str)
def test_heads_and_pages_of_any_size(sizes, seed):
    run(packed_tokens(SPANS, sizes, "all", torch.float16))


@interpreted
def test_float32_is_as_exact_as_it_can_be(seed):
    run(packed_tokens(SPANS, Sizes(4, 2, 96, 128, 5), "all", torch.float32), near=1e-5)


@interpreted
def test_inputs_may_have_any_strides(seed):
    args = packed_tokens(SPANS, Sizes(), "all", torch.float16)
    states = {name: getattr(args, name).transpose(0, 2).contiguous().transpose(0, 2) for name in ("query", "key")}
    assert all(tensor.stride(2) != 1 for tensor in states.values())
    run(args._replace(**states, value=args.value.transpose(0, 1).contiguous().transpose(0, 1)))


@interpreted
def test_padding_touches_no_page_of_a_row(seed):
    """As in captured prefills: its tokens share one slot of the null page."""
    from compiled_llm_ops.kernels.attention.rope_append import rope_append

    args = packed_tokens(SPANS, Sizes(), "all", torch.float16, rows_of_padding=3)
    pages = args.pages.clone()
    out = rope_append(args._replace(pages=pages), pdl=False)
    pages[0] = args.pages[0]
    kept = len(args.query) - 3
    tokens = {name: getattr(args, name)[:kept] for name in ("query", "key", "value", "token_rows", "token_positions")}
    angles = {name: getattr(args, name)[:kept] for name in ("cos", "sin")}
    check(args._replace(**tokens, **angles), out[:kept], pages, 3e-3)


@interpreted
def test_pages_may_lie_past_what_32_bits_count(seed):
    """The memory is written in one page alone, and takes no more than that."""
    from compiled_llm_ops.kernels.attention.rope_append import rope_append

    args = packed_tokens([(0, 3)], Sizes(2, 1, 16, 16, 4), "nothing", torch.float16)
    far = 2**31 // (2 * 4 * 16) + 1
    memory = torch.empty((far + 1, 2, 1, 4, 16), dtype=torch.float16)
    rope_append(args._replace(pages=memory, indices=torch.full_like(args.indices, far)), pdl=False)
    assert torch.equal(memory[far, 0, 0, :3], args.key[:, 0])
    assert torch.equal(memory[far, 1, 0, :3], args.value[:, 0])


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["nothing", "all"])
def test_keys_and_values_are_rounded_to_fp8_last(given, kind, seed):
    from compiled_llm_ops.kernels.attention.rope_append import RopeAppendTiling, rope_append

    args, scales = packed_tokens(SPANS, Sizes(6, 3, 24, 32, 16), given, torch.float16), scales_of(kind, 3)
    dense = expected(args)
    codes, fp8 = stored_pages(dense.pages, scales).pages, scales.given
    codes.view(torch.uint8)[..., 24:] = 0
    pages = args.pages.to(torch.float8_e4m3fn)
    out = rope_append(args._replace(pages=pages, **fp8), pdl=False, tiling=RopeAppendTiling(64))
    torch.testing.assert_close(out.float(), dense.query, rtol=3e-3, atol=3e-3)
    check_codes(pages, codes, exact=given == "nothing")
    parts = zip(dense.pages.unbind(1), scales, strict=True)
    clamped = sum(int((part.abs() > 448 * (1 if own is None else own[:, None, None])).sum()) for part, own in parts)
    assert fp8["saturated"].item() == pytest.approx(clamped, abs=0 if given == "nothing" else 0.01 * clamped)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_append_in_front_of_flashinfer_writes_fp8_with_this_kernel(kind, seed, monkeypatch):
    """Given no queries."""
    from compiled_llm_ops.attention import append

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    args, scales = packed_tokens(SPANS, Sizes(6, 3, 24, 32, 16), "nothing", torch.float16), scales_of(kind, 3)
    codes, fp8 = stored_pages(expected(args).pages, scales).pages, scales.given
    codes.view(torch.uint8)[..., 24:] = 0
    pages, table = (
        args.pages.to(torch.float8_e4m3fn),
        (args.token_rows, args.token_positions, args.indptr, args.indices),
    )
    append._cuda(AppendPagedKv(args.key, args.value, pages, *table, args.indptr, "flashinfer", **fp8))
    check_codes(pages, codes, exact=True)
    new = zip((args.key, args.value), scales, strict=True)
    assert fp8["saturated"].tolist() == [sum(stored(states, scale).clamped for states, scale in new)]


@interpreted
def test_of_no_tokens_nothing_is_launched(monkeypatch):
    from compiled_llm_ops.kernels.attention import rope_append as module

    monkeypatch.setattr(module, "_rope_append_paged_kv", None)
    run(packed_tokens([(4, 4)], Sizes(), "all", torch.float16))


@interpreted
def test_prefills_of_any_length_are_one_kernel(seed, monkeypatch):
    """Or one would be compiled in the midst of a capture."""
    from compiled_llm_ops.kernels.attention import rope_append as module

    launched: list[Any] = []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **constants: launched.append(
                ([value for value in given if not torch.is_tensor(value)], constants)
            )

    monkeypatch.setattr(module, "_rope_append_paged_kv", Noted())
    for length in (1, 2, 16, 700):
        module.rope_append(packed_tokens([(0, length)], Sizes(), "all", torch.float16), pdl=False)
    assert all(launch == launched[0] for launch in launched)


@interpreted
@pytest.mark.parametrize("change", ["dtype", "pages"])
def test_what_the_kernel_cannot_read_raises(change, seed):
    args = packed_tokens(SPANS, Sizes(), "nothing", torch.float16)
    if change == "dtype":
        args = args._replace(query=args.query.double())
    else:
        args = args._replace(pages=args.pages.transpose(1, 2))
    with pytest.raises(ValueError, match=r"use torch\.float16, torch\.bfloat16, torch\.float32|must be contiguous"):
        run(args)


# ---- compiled, without a GPU


def resources_of(cubin: bytes, path: Path) -> str:
    from triton import knobs

    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("heads", [(16, 8, 128), pytest.param((32, 8, 128), marks=WHOLE), (32, 8, 96)], ids=str)
@pytest.mark.parametrize("left_out", [(), ("query_norm", "key_norm")], ids=["normed", "turned only"])
def test_it_moves_16_bytes_a_thread_and_touches_only_the_table_before_waiting(heads, left_out, tmp_path):
    from compiled_llm_ops.kernels.attention.rope_append import TILING, _rope_append_paged_kv

    queries, keys, size = heads
    names = _rope_append_paged_kv.arg_names
    constants = {
        "HEADS": queries, "KV_HEADS": keys, "HEAD": size, "DIM": 128, "STORED": 128, "PAGE": 16,
        "GROUP": 16, "KV_GROUP": 8, "PDL": True, **dict.fromkeys(left_out),
    }  # fmt: skip
    strides = [name for name in names if name.endswith("_stride")]
    states = ("query", "key", "value", "pages", "query_norm", "key_norm", "cos", "sin", "out")
    aligned = [name for name in [*states, *strides] if name not in left_out]
    types = {
        **dict.fromkeys(aligned, "*bf16"),
        **dict.fromkeys(("token_rows", "token_positions", "indptr", "indices"), "*i32"),
        **dict.fromkeys(strides, "i32"),
        "epsilon": "fp32",
    }
    made = compiled(_rope_append_paged_kv, constants, types, TILING.warps, aligned, launch_pdl=True)
    (registers,), (stack,) = (
        re.findall(rf"{name}:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin")) for name in ("REG", "STACK")
    )
    assert (int(registers) <= 64, int(stack)) == (True, 0), "eight programs fit a multiprocessor"
    assert made.metadata.shared == 0, "threads exchange nothing in memory"
    widths = re.findall(r"(?:ld|st)\.global\.(\S+)", made.asm["ptx"])
    assert sorted({*widths}) == ["b32", "v4.b32"]
    assert widths.count("b32") == 4, "the place of a token"
    letters = {"griddepcontrol.wait": "w", "griddepcontrol.launch_dependents": "d", "ld.global": "l", "st.global": "s"}
    order = "".join(letters[name] for name in in_order(made.asm["ptx"]))
    assert re.fullmatch(r"wdl+s+llllwdl+s+", order), "programs of queries, and of keys, which read the table first"


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("queries", [16, 0], ids="H={}".format)
def test_fp8_is_rounded_on_its_way_and_stored_in_pieces_of_8_bytes(queries):
    from compiled_llm_ops.kernels.attention.rope_append import TILING, _rope_append_paged_kv

    names = _rope_append_paged_kv.arg_names
    constants = {
        "HEADS": queries, "KV_HEADS": 8, "HEAD": 128, "DIM": 128, "STORED": 128, "PAGE": 16,
        "GROUP": max(1, queries), "KV_GROUP": 8, "PDL": True,
    }  # fmt: skip
    strides = [name for name in names if name.endswith("_stride")]
    aligned = ["query", "key", "value", "query_norm", "key_norm", "cos", "sin", "out", *strides]
    types = {
        **dict.fromkeys(aligned, "*bf16"),
        **dict.fromkeys(("token_rows", "token_positions", "indptr", "indices"), "*i32"),
        **dict.fromkeys(strides, "i32"),
        **dict.fromkeys(("key_scale", "value_scale"), "*fp32"),
        "pages": "*fp8e4nv",
        "saturated": "*i64",
        "epsilon": "fp32",
    }
    made = compiled(_rope_append_paged_kv, constants, types, TILING.warps, [*aligned, "pages"], launch_pdl=True)
    ptx = made.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "e4m3x2;" not in ptx.replace("satfinite.e4m3x2.f32", ""), "nothing is converted back"
    assert {*re.findall(r"st\.global\.(\S+)", ptx)} == ({"v2.b32"} if not queries else {"v2.b32", "v4.b32"})
    assert len(re.findall(r"(?:atom|red)\.\S*add\.u64", ptx)) == 2
