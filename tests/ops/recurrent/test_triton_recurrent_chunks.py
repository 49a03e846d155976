"""Kernels that compute chunks of a row's tokens: under Triton's interpreter, and compiled for Hopper without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import gated_delta_rule, selective_scan
from support.ops.compiling import compiled, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.recurrent_rows import RecurrentRows, delta_expected, scan_expected

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

COUNTS = {
    "borders": [64, 0, 1, 65, 63],
    "short ones": [2, 3, 0, 5, 60, 1],
    "three chunks": [129],
    "at the end of 64": [63, 64, 2],
    "chunks begin in the middle": [30, 70, 100],
    "none": [0, 0],
}
"""Tokens of each row."""
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def launched(args: Any, launch: Callable[..., None], width: int, *more: Any) -> Tensor:
    out = torch.full((len(args[0]), width), torch.nan, dtype=args[0].dtype)
    heads = args.states.shape[1]
    launch(args, out.unflatten(1, (heads, width // heads)), *more)
    return out


def check(rows: RecurrentRows, args: Any, launch: Callable[..., None], width: int, expected: Any, *more: Any) -> None:
    before, out = args.states.clone(), launched(args, launch, width, *more)
    tolerance = TOLERANCES[args[0].dtype]
    size = max(1.0, float(expected[0].abs().max()))
    torch.testing.assert_close(out.double() / size, expected[0] / size, rtol=tolerance, atol=tolerance)
    size = max(1.0, float(expected[1].abs().max()))
    torch.testing.assert_close(args.states.double() / size, expected[1] / size, rtol=tolerance, atol=tolerance)
    untouched = sorted({*range(rows.entries)} - {*rows.write.tolist()})
    assert torch.equal(args.states[untouched], before[untouched]), "what was read stays as it was"


# ---- the gated delta rule


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("key_heads", "size", "value"), [(2, 16, 24), (1, 20, 16), (2, 72, 80)], ids=str)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalize", "as they are"])
def test_delta_rule(
    counts: str, dtype: torch.dtype, key_heads: int, size: int, value: int, normalize: bool, seed: int
) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_delta_rule import apply_in_chunks

    rows = RecurrentRows(COUNTS[counts], padding=3, seed=seed, dtype=dtype)
    args = rows.delta(key_heads, 2, size, value, normalize=normalize)
    if not normalize:  # what is not of length 1 may grow without end
        args = args._replace(key=args.key / args.key.norm(dim=-1, keepdim=True))
    check(rows, args, apply_in_chunks, 2 * value, delta_expected(rows, args))


@pytest.mark.whole
@interpreted
def test_delta_rule_is_that_of_the_cpu(seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_delta_rule import apply_in_chunks

    args = RecurrentRows([70, 1, 65], padding=130, seed=seed).delta(1, 2, 16, 16)
    there = args._replace(states=args.states.clone())
    out = launched(there, apply_in_chunks, 32)
    torch.testing.assert_close(out, gated_delta_rule(*args).flatten(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(there.states, args.states, rtol=1e-4, atol=1e-5)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", ["decays", "no decays", "some decays", "-inf", "all", "nothing", "same keys"])
def test_delta_rule_at_its_limits(change: str, dtype: torch.dtype, seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_delta_rule import apply_in_chunks

    rows = RecurrentRows([130, 1], seed=seed, dtype=dtype)
    args = rows.delta(1, 1, 16, 16)
    strong = torch.rand(args.decay.shape, generator=rows.generator) < 0.1
    changed = {
        "decays": {"decay": torch.full_like(args.decay, -300.0)},
        "no decays": {"decay": torch.zeros_like(args.decay)},
        "some decays": {"decay": args.decay.masked_fill(strong, -3000.0) / 10},
        "-inf": {"decay": args.decay.masked_fill(strong, -torch.inf)},
        "all": {"beta": torch.ones_like(args.beta)},
        "nothing": {"beta": torch.zeros_like(args.beta)},
        "same keys": {"key": args.key[:1].expand_as(args.key), "decay": args.decay / 100},
    }[change]
    args = args._replace(**changed)
    check(rows, args, apply_in_chunks, 16, delta_expected(rows, args))


@interpreted
def test_keys_of_float16_may_be_as_short_as_none() -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_delta_rule import apply_in_chunks

    rows = RecurrentRows([70], dtype=torch.float16)
    args = rows.delta(1, 1, 16, 16)
    args.key[::3] = 0
    args = args._replace(value=args.value * 1000, key=args.key / 1000)
    check(rows, args, apply_in_chunks, 16, delta_expected(rows, args))


@pytest.mark.whole
@interpreted
def test_bits_of_a_delta_rule_do_not_depend_on_the_tiling(seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_delta_rule import apply_in_chunks
    from compiled_llm_ops.recurrent.kernels.chunking import ChunkTiling

    args = RecurrentRows([66, 1], seed=seed, dtype=torch.bfloat16).delta(1, 1, 16, 48)
    each = [args._replace(states=args.states.clone()) for _ in range(2)]
    outs = [
        launched(own, apply_in_chunks, 48, ChunkTiling(columns, 1, 4))
        for own, columns in zip(each, (16, 64), strict=True)
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    torch.testing.assert_close(each[0].states, each[1].states, rtol=0, atol=0)


@interpreted
@pytest.mark.parametrize("equal", [False, True], ids=["random", "of equal keys"])
def test_inverses(equal: bool, seed: int) -> None:
    import triton
    import triton.language as tl

    from compiled_llm_ops.recurrent.kernels.chunks import unit_inverse

    @triton.jit
    def invert(matrix, out):  # type: ignore[no-untyped-def]
        places = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(out + places, unit_inverse(tl.load(matrix + places), 64, "tf32x3"))

    random = torch.rand(64, 64, generator=torch.Generator().manual_seed(seed)) - 0.5
    lower = (torch.ones(64, 64) if equal else random).tril(-1)
    out = torch.empty(64, 64)
    invert.fn.__globals__.update(tl=tl, unit_inverse=unit_inverse)
    invert[(1,)](lower, out)
    expected = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + lower.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


# ---- with a decay of each channel


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("key_heads", "size", "value"), [(2, 16, 24), (1, 40, 16)], ids=str)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalize", "as they are"])
def test_channel_rule(
    counts: str, dtype: torch.dtype, key_heads: int, size: int, value: int, normalize: bool, seed: int
) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_channel_rule import apply_channels_in_chunks

    rows = RecurrentRows(COUNTS[counts], padding=3, seed=seed, dtype=dtype)
    args = rows.delta(key_heads, 2, size, value, of_channels=True, normalize=normalize)
    if not normalize:  # what is not of length 1 may grow without end
        args = args._replace(key=args.key / args.key.norm(dim=-1, keepdim=True))
    check(rows, args, apply_channels_in_chunks, 2 * value, delta_expected(rows, args))


@interpreted
def test_channel_rule_is_that_of_the_cpu(seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_channel_rule import apply_channels_in_chunks

    args = RecurrentRows([70, 1, 65], padding=130, seed=seed).delta(1, 2, 16, 16, of_channels=True)
    there = args._replace(states=args.states.clone())
    out = launched(there, apply_channels_in_chunks, 32)
    torch.testing.assert_close(out, gated_delta_rule(*args).flatten(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(there.states, args.states, rtol=1e-4, atol=1e-5)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", ["decays", "no decays", "some decays", "-inf", "in turn", "all", "same keys"])
def test_channel_rule_at_its_limits(change: str, dtype: torch.dtype, seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_channel_rule import apply_channels_in_chunks

    rows = RecurrentRows([130, 1], seed=seed, dtype=dtype)
    args = rows.delta(1, 1, 16, 16, of_channels=True)
    strong = torch.rand(args.decay.shape, generator=rows.generator) < 0.1
    changed = {
        "decays": {"decay": torch.full_like(args.decay, -300.0)},
        "no decays": {"decay": torch.zeros_like(args.decay)},
        "some decays": {"decay": args.decay.masked_fill(strong, -3000.0) / 10},
        "-inf": {"decay": args.decay.masked_fill(strong, -torch.inf)},
        "in turn": {"decay": torch.where(torch.arange(16) % 2 == 0, -30.0, args.decay / 100)},
        "all": {"beta": torch.ones_like(args.beta)},
        "same keys": {"key": args.key[:1].expand_as(args.key), "decay": args.decay / 100},
    }[change]
    args = args._replace(**changed)
    check(rows, args, apply_channels_in_chunks, 16, delta_expected(rows, args))


# ---- the selective scan


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", [(4, 24, 16, 2), (2, 16, 20, 1), (2, 40, 72, 2)], ids=str)
def test_selective_scan(counts: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_scan import scan_in_chunks

    rows = RecurrentRows(COUNTS[counts], padding=3, seed=seed, dtype=dtype)
    args = rows.scan(*sizes)
    check(rows, args, scan_in_chunks, sizes[0] * sizes[1], scan_expected(rows, args))


@interpreted
def test_selective_scan_is_that_of_the_cpu(seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_scan import scan_in_chunks

    args = RecurrentRows([70, 1, 65], padding=130, seed=seed).scan(2, 16, 16, 1)
    there = args._replace(states=args.states.clone())
    out, expected = launched(there, scan_in_chunks, 32), selective_scan(*args).flatten(1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(there.states, args.states, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", ["decays", "no decays", "some decays", "-inf", "nothing"])
def test_selective_scan_at_its_limits(change: str, dtype: torch.dtype, seed: int) -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_scan import scan_in_chunks

    rows = RecurrentRows([130, 1], seed=seed, dtype=dtype)
    args = rows.scan(1, 16, 16, 1)
    strong = torch.rand(args.dt.shape, generator=rows.generator) < 0.1
    changed = {
        "decays": {"a": torch.full_like(args.a, -300.0)},
        "no decays": {"a": torch.zeros_like(args.a)},
        "some decays": {"dt": torch.where(strong, 300.0, args.dt / 100), "a": torch.full_like(args.a, -2.0)},
        "-inf": {"a": torch.full_like(args.a, -torch.inf)},
        "nothing": {"dt": torch.zeros_like(args.dt), "a": torch.full_like(args.a, -2.0)},
    }[change]
    args = args._replace(**changed)
    check(rows, args, scan_in_chunks, 16, scan_expected(rows, args))


@interpreted
def test_decays_of_each_number_have_no_chunks() -> None:
    from compiled_llm_ops.recurrent.kernels.chunked_scan import scan_in_chunks

    args = RecurrentRows([70]).scan(4, 1, 16, 1, True)
    with pytest.raises(ValueError, match="decay of each number"):
        scan_in_chunks(args, torch.empty(72, 4, 1))


# ---- what is chosen


def test_kernels_are_chosen_by_shapes() -> None:
    from compiled_llm_ops.recurrent.kernels.chunking import chunks_of, takes_chunks

    for rows in (1, 8, 64, 256):
        assert not takes_chunks(rows, rows, 128), "a step of decode"
        assert takes_chunks(rows - 1 + 64, rows, 128), "a piece of a prompt beside rows that decode"
    assert not takes_chunks(9, 1, 128), "the last piece of a prompt"
    assert takes_chunks(1024, 1, 128)
    assert not takes_chunks(1024, 1, 256), "there is no kernel for such keys"
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        counts = torch.randint(0, 200, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator)
        starts = [0, *counts.cumsum(0).tolist()]
        firsts = [start // 64 + row for row, start in enumerate(starts)]
        for (first, after), count in zip(pairwise(firsts), counts.tolist(), strict=True):
            assert first + -(-count // 64) <= after, "chunks of rows do not meet"
        assert firsts[-1] <= chunks_of(starts[-1], len(counts))


# ---- for Hopper

LARGEST_SHARED = 227 * 1024
MOST_ON_STACK = {"bf16": 0, "fp16": 512, "fp32": 4096}
"""Bytes that a thread does not have registers for."""
ALIGNED_TO_NOTHING = {
    "count",
    "rows",
    "scale",
    *(f"{name}_{of}" for name in ("decay", "beta", "dt") for of in ("stride", "head")),
}
TYPES = dict.fromkeys(("decay", "beta", "dt", "a", "states", "on_query", "on_value", "kept"), "*fp32")
TYPES |= dict.fromkeys(("qo_indptr", "read", "write"), "*i32") | {"scale": "fp32"}
GIVEN = {"query", "key", "value", "tokens", "b", "c", "out"}
SCRATCH = {"w", "u", "attention", "folded_query", "folded_key"}
PREPARED = {
    "delta rule": "chunked_delta_rule._prepare_delta_rule",
    "with decays of channels": "chunked_channel_rule._prepare_channel_rule",
    "scan": "chunked_scan._prepare_scan",
}
LACKING: dict[str, set[str]] = {"delta rule": set(), "with decays of channels": {"on_query", "on_value"}, "scan": {"w"}}
"""Arguments of the walk that are None."""


def made_for_hopper(name: str, dtype: str, path: Any, absent: set[str], warps: int, stages: int, **sizes: Any) -> str:
    """Compile a kernel with aligned arguments, check its shared memory, and return what `cuobjdump` says."""
    import importlib

    module, kernel_name = name.split(".")
    kernel = getattr(importlib.import_module(f"compiled_llm_ops.recurrent.kernels.{module}"), kernel_name)
    scratch = "bf16" if dtype == "bf16" else "fp32"
    sizes |= {"CHUNK": 64, "GROUP": 2, "NORMALIZE": True, "PRECISION": "tf32x3" if dtype == "fp32" else "tf32"}
    sizes |= {argument: 1 for argument in kernel.arg_names if argument.endswith("_step")}
    constants = {argument: value for argument, value in sizes.items() if argument in kernel.arg_names}
    of_chunks = SCRATCH | ({"value"} if kernel_name == "_walk_over_chunks" and "w" not in absent else set())
    of_chunks |= {"query", "key"} if "on_query" in absent else set()
    types = {}
    for argument in sorted({*kernel.arg_names} - {*constants} - absent):
        own = scratch if argument in of_chunks else dtype
        types[argument] = f"*{own}" if argument in GIVEN | SCRATCH else TYPES.get(argument, "i32")
    aligned = [argument for argument in types if argument not in ALIGNED_TO_NOTHING]
    made = compiled(kernel, constants, types, warps=warps, aligned=aligned, num_stages=stages)
    assert made.metadata.shared <= LARGEST_SHARED
    assert "wgmma" in made.asm["ptx"]
    return resources_of(made.asm["cubin"], path / "kernel.cubin")


def check_registers(used: str, dtype: str) -> None:
    # Three products in place of one, of numbers of 32 bits, have more operands than there are registers.
    assert int(re.search(r"STACK:(\d+)", used)[1]) <= MOST_ON_STACK[dtype], used  # type: ignore[index]


SIZES = pytest.mark.parametrize("size", [64, 128])
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])


@pytest.mark.slow
@pytest.mark.drawn(most=1)
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", PREPARED)
@SIZES
@DTYPES
def test_what_prepares_chunks_fits_registers(name: str, size: int, dtype: str, tmp_path: Any) -> None:
    block, warps = {
        "delta rule": (64, 4 if dtype == "bf16" else 8),
        "with decays of channels": (32, 8 if dtype == "fp32" else 4),
        "scan": (64, 4),
    }[name]
    sizes = {"SIZE": 64 if name == "scan" else size, "VALUE": size, "NUMBERS": size, "BLOCK": block, "LEVELS": 6}
    check_registers(made_for_hopper(PREPARED[name], dtype, tmp_path, set(), warps, 1, **sizes), dtype)


@pytest.mark.slow
@pytest.mark.drawn(most=1)
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", LACKING)
@pytest.mark.parametrize("rows_and_heads", [32, 1024])
@SIZES
@DTYPES
def test_the_walk_over_chunks_fits_registers(
    name: str, rows_and_heads: int, size: int, dtype: str, tmp_path: Any
) -> None:
    from compiled_llm_ops.recurrent.kernels.chunking import chunk_tiling

    value = 64 if name == "scan" else size
    columns, stages, warps = chunk_tiling(rows_and_heads, value, 2 if dtype == "bf16" else 4)
    sizes = {"SIZE": size, "VALUE": value, "BLOCK": size, "COLUMNS": columns, "TRANSPOSED": name == "scan"}
    used = made_for_hopper("chunk_walk._walk_over_chunks", dtype, tmp_path, LACKING[name], warps, stages, **sizes)
    check_registers(used, dtype)
