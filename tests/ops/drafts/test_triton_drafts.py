"""The kernels of drafts, under Triton's interpreter on the CPU, against the ops there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm_ops import accept_drafts, ngram_drafts, write_texts
from support.ops.compiling import compiled
from support.ops.draft_cases import some_drafts, some_texts, some_writes
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.sampling_cases import BRANCHES, EDITED

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


@interpreted
@pytest.mark.parametrize("length", [70, 5000])
def test_what_is_proposed_is_what_the_cpu_proposes(length: int, seed: int) -> None:
    """Texts of one part, and of several."""
    from compiled_llm_ops.drafts.kernels import ngrams as kernels

    for number in range(12 if length == 70 else 4):
        args = some_texts(seed * 100 + number, length=length, k=1 + number % 7)
        if length > 70:  # one place is far away
            args.texts[:] = torch.arange(length) + 9
            args.texts[:, number * 1300 : number * 1300 + 9] = args.texts[:, -9:]
            args = args._replace(lengths=torch.full_like(args.lengths, length))
        for ours, expected in zip(kernels.ngram_drafts(args), ngram_drafts(*args), strict=True):
            assert torch.equal(ours, expected), number


@interpreted
def test_texts_are_written_as_on_the_cpu(seed: int) -> None:
    from compiled_llm_ops.drafts.kernels import texts as kernels

    for number in range(12):
        args, same = (some_writes(seed * 100 + number) for _ in range(2))
        kernels.write_texts(args)
        write_texts(*same)
        assert torch.equal(args.texts, same.texts)


@interpreted
@pytest.mark.parametrize("new", [1, 2, 4, 8])
def test_drafts_are_accepted_as_on_the_cpu(new: int, seed: int) -> None:
    from compiled_llm_ops.drafts.kernels import acceptance as kernels

    settings = [*BRANCHES, *EDITED]
    for number in range(3):
        args, same = (some_drafts(seed * 100 + number, settings, new) for _ in range(2))
        for own in (args, same):
            own.counts[:, 1] += 32758
        assert torch.equal(kernels.accept_drafts(args), accept_drafts(*same))
        for name in ("next_token", "counts", "recent"):
            assert torch.equal(getattr(args, name), getattr(same, name)), name


# ---- the compiler takes them, too

INTEGERS = dict.fromkeys(("slots", "positions", "sampled", "drafts", "next_token", "found"), "*i64")
INTEGERS |= dict.fromkeys(("texts", "lengths", "longest", "shortest", "starts", "offered"), "*i32")
INTEGERS |= dict.fromkeys(("adjustments", "recent"), "*i32") | {"counts": "*i16"}
INTEGERS |= dict.fromkeys(("length", "parts", "k", "count", "vocabulary", "new"), "i32")
CASES: dict[str, tuple[str, dict[str, str], dict[str, int]]] = {
    "_find_earlier": ("ngrams", {}, {"PART": 2048}),
    "_copy_following": ("ngrams", {"tokens": "*i32", "counts": "*i32"}, {"PART": 2048, "PARTS": 32, "K": 8}),
    "_write_texts": ("texts", {"tokens": "*i64"}, {"COUNT": 8}),
    "_accept_drafts": ("acceptance", {"tokens": "*i64"}, {"NEW": 8}),
}


@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_a_gpu(name: str) -> None:
    import importlib

    module, types, constants = CASES[name]
    kernel: Any = getattr(importlib.import_module(f"compiled_llm_ops.drafts.kernels.{module}"), name)
    named = {argument: type for argument, type in {**INTEGERS, **types}.items() if argument in kernel.arg_names}
    named = {argument: type for argument, type in named.items() if argument not in constants}
    warps = 4 if name == "_find_earlier" else 1
    assert "ptx" in compiled(kernel, constants, named, warps=warps).asm
