"""The backend `"triton"` on a GPU: append, prefill, and decode in float32, captured or not, by dense float32.

Nothing is planned, so that captured launches are good for any table of their sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import append_paged_kv, decode_attention, paged_attention, paged_attention_lse
from compiled_llm_ops.backends import backend_named
from support.gpu import DTYPES, captured, close, needs_cuda, on_gpu, seeded
from support.ops.fp8_pages import KINDS, Fp8Batch
from support.ops.op_cases import Batch

pytestmark = [pytest.mark.gpu, needs_cuda]

LENGTHS, QUERIES = [1, 16, 17, 400, 300, 130, 4000], [1, 16, 2, 400, 33, 0, 129]
SIZES: list[dict[str, Any]] = [
    {"head_dim": 128, "group": 2},
    {"head_dim": 128, "group": 7},
    {"head_dim": 64, "group": 1},
    {"head_dim": 64, "group": 71, "kv_heads": 1},
    {"head_dim": 80, "padded": 128, "group": 5},
    {"head_dim": 256, "group": 4, "kv_heads": 1},
    {"head_dim": 512, "group": 2},
]
TYPES = [*DTYPES, torch.float32]
NEAR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}


def planned() -> Any:
    """A plan, which has to be kept while it is used."""
    backend = backend_named("triton")
    return backend.new_plan(backend.workspace(torch.device("cuda"), 0), 0)


@seeded
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (15, 0.0), (200, 1.5)])
def test_prefill(sizes: dict[str, Any], dtype: torch.dtype, window_left: int, soft_cap: float, seed: int) -> None:
    batch, plan = Batch(LENGTHS, QUERIES, page_size=16, dtype=dtype, seed=seed, **sizes).filled(), planned()
    query, pages, *table, _, workspace, scale = on_gpu(batch.arguments())
    how = (plan.tensor, workspace, scale, window_left, soft_cap)
    out, lse = paged_attention_lse(query, pages, *table, *how)
    close(out.float().cpu(), batch.expected(batch.scale, window_left, soft_cap), NEAR[dtype], f"{sizes}")
    assert torch.equal(paged_attention(query, pages, *table, *how), out)
    assert lse.isfinite().all()


@seeded
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_over_pages_of_fp8(kind: str, dtype: torch.dtype, seed: int) -> None:
    sizes: dict[str, Any] = {"head_dim": 128, "page_size": 16, "dtype": dtype, "group": 3}
    batch, plan = Fp8Batch(LENGTHS, QUERIES, kind=kind, seed=seed, **sizes).filled(), planned()
    query, pages, *table, _, workspace, scale = on_gpu(batch.arguments())
    scales = on_gpu((batch.scales.key, batch.scales.value))
    out, lse = paged_attention_lse(query, pages, *table, plan.tensor, workspace, scale, 100, 1.5, *scales)
    close(out.float().cpu(), batch.read().expected(batch.scale, 100, 1.5), max(NEAR[dtype], 4e-3), kind)
    close(lse.cpu(), batch.expected_lse(batch.scale, 100, 1.5), 2e-2, f"log-sum-exp of {kind}")


@seeded
@pytest.mark.parametrize("sizes", [{"head_dim": 128}, {"head_dim": 80, "padded": 128}, {"head_dim": 512}], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_append_writes_what_the_cpu_does(dtype: torch.dtype, sizes: dict[str, Any], seed: int) -> None:
    batch = Batch(LENGTHS, QUERIES, page_size=16, dtype=dtype, seed=seed, **sizes)
    pages, places = batch.pages.cuda(), batch.slots([0] * len(LENGTHS), LENGTHS)
    states = torch.cat(batch.keys), torch.cat(batch.values)
    append_paged_kv(*on_gpu(states), pages, *on_gpu((*places, *batch.table)), backend="triton")
    assert torch.equal(pages.cpu(), batch.filled().pages)


@seeded
@pytest.mark.parametrize("new_tokens", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_in_float32(sizes: dict[str, Any], new_tokens: int, seed: int) -> None:
    if new_tokens > 1 and sizes["group"] == 71:
        pytest.skip("more queries than the kernel takes in float32")
    lengths = [3, 16, 17, 400, 4000, 130]
    batch = Batch(lengths, [new_tokens] * len(lengths), page_size=16, seed=seed, **sizes).filled()
    arguments = on_gpu(batch.decode_arguments())
    out = decode_attention(*arguments, 200)
    close(out.cpu(), batch.expected(batch.scale, 200), 2e-5, f"{sizes}")
    assert torch.equal(arguments[3].cpu(), batch.pages)


@seeded
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_captured_launches_are_good_for_any_table(dtype: torch.dtype, seed: int) -> None:
    generator, plan, rows, tokens, count = torch.Generator().manual_seed(seed), planned(), 4, 64, 64
    query = torch.randn(tokens, 8, 128, generator=generator).to("cuda", dtype)
    pages = torch.randn(count, 2, 2, 16, 128, generator=generator).to("cuda", dtype)
    sizes = (rows + 1, rows + 1, count, rows)
    columns = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes]
    workspace = torch.empty(0, dtype=torch.uint8, device="cuda")

    def drawn() -> list[Tensor]:
        """A table of rows with all of the queries; each has at least as many keys."""
        cuts = torch.randperm(tokens - 1, generator=generator)[: rows - 1].sort().values + 1
        starts = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])
        owned = -(-starts.diff() // 16) + torch.randint(0, 8, (rows,), generator=generator)
        indptr = torch.cat([torch.tensor([0]), owned.cumsum(0)])
        numbers = torch.randperm(count, generator=generator)
        return [starts, indptr, numbers, torch.full((rows,), 16)]

    def run() -> Tensor:
        return paged_attention(query, pages, *columns, plan.tensor, workspace, 0.1, 100)

    def fill() -> None:
        for column, content in zip(columns, drawn(), strict=True):
            column.copy_(content)

    fill()
    graph, out = captured(run)
    for _ in range(1000):
        fill()
        graph.replay()
        assert torch.equal(out, run())
