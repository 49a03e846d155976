"""The backends `"flash-attn"` and `"torch"` on a GPU, by dense float32: prefill, captured or not, and whole models.

Each is skipped where its package is missing, or torch is older than 2.13. With flash-attn 3 beside 2, 3 is the one that
runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_llm
from compiled_llm_ops import append_paged_kv, paged_attention, paged_attention_lse
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.contracts import Geometry, PlannedBatch
from support.execution.twins import assert_parity, parity, small_qwen3, twins_of
from support.gpu import DTYPES, captured, close, needs_cuda, on_gpu, seeded
from support.ops.op_cases import Batch
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.gpu, needs_cuda]

LENGTHS, QUERIES = [1, 256, 257, 400, 300, 130, 4000], [1, 256, 2, 400, 33, 0, 129]
SIZES: list[dict[str, Any]] = [
    {"head_dim": 128, "group": 2},
    {"head_dim": 128, "group": 7},
    {"head_dim": 64, "group": 1},
    {"head_dim": 80, "padded": 128, "group": 5},
    {"head_dim": 256, "group": 4, "kv_heads": 1},
]
NEAR = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(params=["flash-attn", "torch"])
def backend(request: pytest.FixtureRequest) -> Any:
    if problems := backend_named(request.param).installation.problems():
        pytest.skip("; ".join(problems))
    return request.param


def planned(backend: str) -> Any:
    """A plan, which has to be kept while it is used."""
    found = backend_named(backend)
    return found.new_plan(found.workspace(torch.device("cuda"), 0), 0)


def has_windows(backend: str) -> bool:
    """Whether the backend takes layers with windows, which flash-attn 3 computes wrongly."""
    return backend_named(backend).missing_kernel(Geometry(4, 2, 64, 256, 99, 0.0, *DTYPES[:1] * 2)) is None


def decide(plan: Any, batch: Batch) -> None:
    geometry = Geometry(4, 2, 64, batch.page_size, -1, 0.0, torch.bfloat16, torch.bfloat16)
    columns = (batch.qo_indptr.numpy(), batch.indptr.numpy(), batch.last_page_len.numpy())
    plan.decide(PlannedBatch(*columns, geometry, torch.empty(0)))


def test_functions_have_the_arguments_that_they_are_given(backend: str) -> None:
    if backend == "torch":
        from torch.nn.attention.varlen import varlen_attn_out as function
    else:
        function = pytest.importorskip("flash_attn").flash_attn_varlen_func
    wanted = {"block_table", "seqused_k"} if backend == "torch" else {"block_table", "softcap", "window_size"}
    assert wanted <= {*inspect.signature(function).parameters}


@seeded
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (15, 0.0), (200, 0.0), (200, 1.5)])
def test_prefill(
    backend: str, sizes: dict[str, Any], dtype: torch.dtype, window_left: int, soft_cap: float, seed: int
) -> None:
    if backend == "torch" and soft_cap:
        pytest.skip("it has no cap")
    if window_left >= 0 and not has_windows(backend):
        pytest.skip("it is refused layers with windows")
    batch, plan = Batch(LENGTHS, QUERIES, page_size=256, dtype=dtype, seed=seed, **sizes).filled(), planned(backend)
    query, pages, *table, _, workspace, scale = on_gpu(batch.arguments())
    how = (plan.tensor, workspace, scale, window_left, soft_cap)
    out, lse = paged_attention_lse(query, pages, *table, *how)
    close(out.float().cpu(), batch.expected(batch.scale, window_left, soft_cap), NEAR[dtype], f"{sizes}")
    assert torch.equal(paged_attention(query, pages, *table, *how), out)
    by_pytorch = paged_attention_lse(*batch.arguments(), window_left, soft_cap)
    close(lse.cpu(), by_pytorch[1], 2e-2, f"log-sum-exp of {sizes}")
    decide(plan, batch)
    close(paged_attention(query, pages, *table, *how).float(), out.float(), NEAR[dtype], "with the longest row known")


def results_of_flash_attn_3(seed: int, page_size: int, window_left: int) -> tuple[Tensor, Tensor]:
    """Return its results and those that are expected, of rows that it has lost keys of; skip where it is not used."""
    if "256" in (backend_named("flash-attn").missing_kernel(Geometry(4, 2, 64, 16, -1, 0.0, *DTYPES[:1] * 2)) or ""):
        pytest.skip("flash-attn 3 is not installed, or not for this GPU")
    batch = Batch(LENGTHS, QUERIES, page_size=page_size, head_dim=128, dtype=DTYPES[0], seed=seed).filled()
    plan, (query, pages, *table, _, workspace, scale) = planned("flash-attn"), on_gpu(batch.arguments())
    out = paged_attention(query, pages, *table, plan.tensor, workspace, scale, window_left)
    return out.float().cpu(), batch.expected(batch.scale, window_left)


@seeded
def test_pages_of_any_size_with_flash_attn_3(seed: int) -> None:
    close(*results_of_flash_attn_3(seed, 16, -1), NEAR[DTYPES[0]], "pages of 16")


@seeded
def test_flash_attn_3_loses_keys_of_windows(seed: int) -> None:
    """Once it does not, ``missing_kernel`` need not refuse them."""
    found, expected = results_of_flash_attn_3(seed, 256, 200)
    assert (found - expected).abs().max() > 0.1, "all keys of this window are seen: take windows with flash-attn 3, too"


@seeded
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_launches_are_good_for_any_table(backend: str, dtype: torch.dtype, seed: int) -> None:
    generator, plan, rows, tokens, count = torch.Generator().manual_seed(seed), planned(backend), 4, 64, 32
    query = torch.randn(tokens, 8, 128, generator=generator).to("cuda", dtype)
    pages = torch.randn(count, 2, 2, 256, 128, generator=generator).to("cuda", dtype)
    sizes = (rows + 1, rows + 1, count, rows)
    columns = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes]
    workspace = torch.empty(0, dtype=torch.uint8, device="cuda")

    def drawn() -> list[Tensor]:
        """A table of rows with some of the queries, each with at least as many keys; the last row may have none."""
        cuts = torch.randint(0, tokens // rows + 1, (rows,), generator=generator)
        starts = torch.cat([torch.tensor([0]), cuts.cumsum(0)])
        owned = 1 + torch.randint(0, count // rows, (rows,), generator=generator)
        indptr = torch.cat([torch.tensor([0]), owned.cumsum(0)])
        return [starts, indptr, torch.randperm(count, generator=generator), torch.randint(64, 257, (rows,))]

    def run() -> Tensor:
        return paged_attention(query, pages, *columns, plan.tensor, workspace, 0.1, 100)

    def fill() -> int:
        contents = drawn()
        for column, content in zip(columns, contents, strict=True):
            column.copy_(content)
        return int(contents[0][-1])

    fill()
    graph, out = captured(run)
    for _ in range(1000):
        used = fill()
        graph.replay()
        assert torch.equal(out[:used], run()[:used])


@seeded
def test_append_writes_what_the_cpu_does(backend: str, seed: int) -> None:
    batch = Batch(LENGTHS, QUERIES, page_size=256, head_dim=80, padded=128, dtype=torch.bfloat16, seed=seed)
    pages, places = batch.pages.cuda(), batch.slots([0] * len(LENGTHS), LENGTHS)
    states = torch.cat(batch.keys), torch.cat(batch.values)
    append_paged_kv(*on_gpu(states), pages, *on_gpu((*places, *batch.table)), backend=backend)
    assert torch.equal(pages.cpu(), batch.filled().pages)


@pytest.mark.parametrize("mode", ["eager", "compile", "reduce-overhead", "cuda-graphs", "piecewise"])
def test_logits_are_as_exact_as_huggingfaces(backend: str, mode: Any, seed: int) -> None:
    windowed = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}
    model = small_qwen3(seed, **(windowed if has_windows(backend) else {}))
    twins = twins_of(model, backend=backend, mode=mode, page_size=256)
    for lengths in ([1, 15, 16, 33, 64, 100, 250, 700], [100]):
        assert_parity(parity(twins, lengths, 60, seed))
    stats = twins.wrapped.compiled.stats()
    assert (stats.backend, stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (backend, 0, 0, 0)
    assert_account_is_empty(twins.wrapped)
    compiled_llm.unwrap(twins.wrapped)
