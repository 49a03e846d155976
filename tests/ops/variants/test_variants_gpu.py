"""Variants on a GPU: against dense computations, replayed with other rows and tensors, and beside what is built in."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import (
    decode_attention,
    decode_attention_lse,
    decode_attention_variant,
    decode_attention_variant_lse,
    paged_attention_variant,
    paged_attention_variant_lse,
    register_variant,
)
from support.gpu import by_dtype, captured, close, needs_cuda, on_gpu, seeded
from support.ops.op_cases import FP8, SCALES, Batch
from support.ops.variants import EXAMPLES, expected, registered, slopes_of

pytestmark = [pytest.mark.gpu, needs_cuda, seeded]

LENGTHS = [1, 15, 16, 17, 200, 64, 65]
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}


def batch_of(lengths: list[int], queries: list[int], seed: int, **options: Any) -> Batch:
    return Batch(lengths, queries, seed=seed, **{"head_dim": 64, "page_size": 16, "group": 3, **options}).filled()


def check(name: str, found: tuple[Tensor, ...], batch: Batch, tensors: list[Tensor], window: int) -> None:
    outputs, sums = expected(batch, EXAMPLES[name], tensors, window)
    size = max(1.0, float(outputs.abs().max()))
    close(found[0].cpu().float() / size, outputs / size, TOLERANCE[batch.query.dtype], name)
    if len(found) > 1:
        close(found[1].cpu(), sums, 1e-2, f"log-sum-exp of {name}")


@by_dtype
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(("new_tokens", "window"), [(1, -1), (1, 40), (3, -1)])
@pytest.mark.parametrize(("head_dim", "padded"), [(64, 64), (96, 128)])
def test_examples_in_decode(name, dtype, new_tokens, window, head_dim, padded, seed) -> None:
    lengths = [length for length in LENGTHS if length >= new_tokens]
    options = {"dtype": dtype, "head_dim": head_dim, "padded": padded}
    batch = batch_of(lengths, [new_tokens] * len(lengths), seed, **options)
    tensors = EXAMPLES[name].tensors(len(lengths), *batch.query.shape[:2])
    *arguments, scale = on_gpu(batch.decode_arguments())
    given = (*arguments, registered(name).name, [own.cuda() for own in tensors], scale, window)
    found = decode_attention_variant_lse(*given) if EXAMPLES[name].softmax else (decode_attention_variant(*given),)
    check(name, found, batch, tensors, window)
    assert torch.equal(arguments[3].cpu(), batch.pages)


@by_dtype
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("window", [-1, 20])
def test_examples_over_packed_queries(name, dtype, window, seed) -> None:
    batch = batch_of([9, 30, 200, 41, 1], [9, 3, 130, 1, 1], seed, dtype=dtype)
    tensors = EXAMPLES[name].tensors(5, *batch.query.shape[:2])
    query, pages, qo_indptr, *table, _, _, scale = on_gpu(batch.arguments())
    given = (query, pages, qo_indptr, *table, registered(name).key, [own.cuda() for own in tensors], scale, window)
    found = paged_attention_variant_lse(*given) if EXAMPLES[name].softmax else (paged_attention_variant(*given),)
    check(name, found, batch, tensors, window)


@pytest.mark.parametrize("name", ["alibi", "sigmoid"])
def test_long_rows_are_shared_by_programs(name, seed) -> None:
    batch = batch_of([4000, 1, 2500], [1, 1, 1], seed, dtype=torch.bfloat16, head_dim=128)
    tensors = EXAMPLES[name].tensors(3, *batch.query.shape[:2])
    *arguments, scale = on_gpu(batch.decode_arguments())
    out = decode_attention_variant(*arguments, registered(name).name, [own.cuda() for own in tensors], scale)
    check(name, (out,), batch, tensors, -1)


def test_pages_of_fp8(seed) -> None:
    batch = Batch([40, 200], [1, 1], head_dim=64, page_size=16, dtype=torch.bfloat16, seed=seed)
    batch.pages = batch.pages.to(FP8)
    batch.append([0, 0], batch.lengths)
    scales = tuple(scale.cuda() for scale in SCALES)
    found = []
    for _ in range(2):
        *arguments, scale = on_gpu(batch.decode_arguments())
        count = torch.zeros(1, dtype=torch.int64, device="cuda")
        how = {"key_scale": scales[0], "value_scale": scales[1], "saturated": count}
        if not found:
            found.append(decode_attention_lse(*arguments, scale, **how))
        else:
            found.append(decode_attention_variant_lse(*arguments, register_variant("no_change").name, [], scale, **how))
    close(found[1][0].float(), found[0][0].float(), 2e-2, "results")
    close(found[1][1], found[0][1], 1e-2, "log-sum-exp")


def test_replays_with_other_tables_lengths_and_tensors_equal_launches(seed, whole) -> None:
    """Rows change their places in the table, and pages, lengths and slopes are drawn for each replay."""
    *arguments, scale = on_gpu(batch_of([2000] * 4, [1] * 4, seed, dtype=torch.bfloat16).decode_arguments())
    pages, starts, lengths, indices = arguments[3:]
    pages.nan_to_num_(0.5)
    slopes, variant = slopes_of(6).cuda(), registered("alibi")
    given = (*arguments, variant.name, [slopes], scale)
    graph, out = captured(lambda: decode_attention_variant(*given))
    draw = random.Random(seed)
    for replay in range(1000 if whole else 40):
        lengths.copy_(torch.tensor([draw.choice([1, 16, 17, draw.randint(1, 2000)]) for _ in range(4)]))
        starts.copy_(starts[torch.randperm(4, device="cuda")])
        indices.copy_(indices[torch.randperm(len(indices), device="cuda")])
        slopes.copy_(torch.rand(6))
        graph.replay()
        assert torch.equal(out, decode_attention_variant(*given)), replay


def test_compiled_by_inductor(seed) -> None:
    batch = batch_of([200, 17], [1, 1], seed, dtype=torch.bfloat16)
    *arguments, scale = on_gpu(batch.decode_arguments())
    slopes, name = slopes_of(6).cuda(), registered("alibi").key

    def step(query: Tensor, *others: Tensor) -> Tensor:
        return decode_attention_variant(query * 2, *others, name, [slopes], scale) + 1

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(*arguments), step(*arguments))


def test_a_cap_of_ones_own_is_the_cap_that_is_built_in(seed) -> None:
    batch = batch_of([900, 17], [1, 1], seed, dtype=torch.bfloat16)
    *arguments, scale = on_gpu(batch.decode_arguments())
    out = decode_attention_variant(*arguments, registered("soft_cap").name, [], scale)
    close(out.float(), decode_attention(*arguments, scale, -1, 2.0).float(), 1e-2, "results")


def test_what_has_no_kernel_is_refused(seed) -> None:
    batch = Batch([9], [9], head_dim=1024, page_size=16, dtype=torch.bfloat16, seed=seed).filled()
    query, pages, qo_indptr, *table, _, _, scale = on_gpu(batch.arguments())
    with pytest.raises(ValueError, match="no kernel for heads of size 1024: the largest is 512"):
        paged_attention_variant(query, pages, qo_indptr, *table, register_variant("no_change").name, [], scale)
