"""Kernels in captured graphs: replays hold for other lengths and tables, plans are never stale and never wait.

Shapes: B rows, T packed tokens, L tokens of one row, Q queries of one row, H query heads, K kv heads, D head
dimension, P pages, S page size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

from compiled_llm.compat.torch.inductor import make_kernels_wait_first
from compiled_llm_ops import PageTable, add_rms_norm, decode_attention, decode_attention_lse
from compiled_llm_ops.flashinfer import splitting
from compiled_llm_ops.flashinfer.workspace import STAGING_BUFFERS, FlashInferWorkspace
from support.gpu import by_dtype, close, needs_cuda, seeded
from support.ops.gpu_rows import (
    MIXED,
    PAGE_SIZE,
    UNWRITTEN,
    Plan,
    Rows,
    by_variant,
    decode,
    fixed_columns,
    geometry_of,
    make_plan,
    on_device,
    options_of,
    outputs,
    preparation_of,
    prepared,
    scale_of,
    starts_of,
    unplanned,
    upload,
)

pytestmark = [pytest.mark.gpu, needs_cuda]


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run once as it is, so that every kernel is loaded, then capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


class DecodeGraph:
    """A captured decode step of layers with different attention groups."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.columns = fixed_columns(rows)
        self.newest = [rows.newest(layer) for layer in rows.layers]
        self.queries = [rows.queries(layer, len(rows.lengths)) for layer in rows.layers]
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self.stage()
        self.graph = capture(self._step)

    def stage(self) -> None:
        """Take one token more of each row, not yet in the pages."""
        rows = self.rows
        rows.lengths = [length + 1 for length in rows.lengths]
        for layer, query, newest in zip(rows.layers, self.queries, self.newest, strict=True):
            query.copy_(rows.queries(layer, len(query)))
            for states, own in zip(newest, rows.newest(layer), strict=True):
                states.copy_(own)
        upload(rows.table(), self.columns)

    def _step(self) -> None:
        layers = zip(self.rows.layers, self.queries, self.newest, strict=True)
        self.outputs = [decode(layer, query, newest, self.columns) for layer, query, newest in layers]

    def replay_and_check(self) -> None:
        for out, lse in self.outputs:
            out.fill_(UNWRITTEN)
            lse.fill_(UNWRITTEN)
        self.graph.replay()
        for layer, query, (out, lse) in zip(self.rows.layers, self.queries, self.outputs, strict=True):
            self.rows.check(layer, query, out, lse)


@seeded
@pytest.mark.parametrize("group", [1, 2, 8], ids="group={}".format)
@pytest.mark.parametrize(
    "lengths", [[15], [15, 16, 1, 250, 31], [15, 16, 1, 250, 31] * 8], ids=lambda lengths: f"rows={len(lengths)}"
)
def test_a_recorded_decode_step_holds_for_all_lengths(group: int, lengths: list[int], seed: int) -> None:
    """Rows grow by tokens and by leaps, over page boundaries, to where many programs share them; and shrink again."""
    rows = Rows([geometry_of(group), geometry_of(group, window_left=300)], lengths, 9000, 128, seed)
    step = DecodeGraph(rows)
    step.replay_and_check()
    leaps = {4: [15, 700, 1, 250, 0], 9: [0, 1, 1600, 0, 2], 14: [6000, 5000, 300, 1200, 300]}
    for count in range(20):
        if count in leaps:
            more = (leaps[count] * 8)[: len(lengths)]
            rows.grow_to([length + leap for length, leap in zip(rows.lengths, more, strict=True)])
        step.stage()
        step.replay_and_check()
    rows.lengths = list(lengths)
    step.stage()
    step.replay_and_check()


@seeded
def test_replays_see_the_table_that_was_captured(seed: int, workspace: FlashInferWorkspace) -> None:
    """A launch may be given columns that an earlier step of the graph computes."""
    rows = Rows([geometry_of(2)], [15, 16, 40], 64, 128, seed)
    (layer,) = rows.layers
    columns = on_device(rows.table())
    before = columns.last_page_len - 1
    columns.last_page_len.fill_(1)
    plan = make_plan(layer, columns, workspace)
    plan.plan(rows.table())
    query = rows.queries(layer, 3)
    planned, decoded, newest = outputs(query), outputs(query), rows.newest(layer)

    def step() -> None:
        advanced = columns._replace(last_page_len=before + 1)
        plan.run(query, layer.pages, *planned, scale_of(plan.geometry), table=advanced)
        for result, given in zip(decode(layer, query, newest, advanced), decoded, strict=True):
            given.copy_(result)

    capture(step).replay()
    rows.check(layer, query, *planned)
    rows.check(layer, query, *decoded)


@seeded
def test_decode_replays_on_several_streams_at_once(seed: int) -> None:
    """CudaGraphs from one stream, replayed on others at the same time, with launches outside of them in between."""
    given = []
    for lengths in ([5000], [700, 3000], [*[40] * 40, 6000, 1, 900]):
        rows = Rows([geometry_of(2)], lengths, max(lengths), 128, seed)
        (layer,) = rows.layers
        given.append((layer, rows.queries(layer, len(lengths)), rows.newest(layer), on_device(rows.table())))
    expected = [decode(*arguments) for arguments in given]
    cuda_graph, graphs, results = torch.cuda.Stream(), [], []
    for layer, query, newest, columns in given:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=cuda_graph):
            results.append([decode(layer, query + 0, newest, columns) for _ in range(20)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for repeat in range(30):
        for out, _ in [result for own in results for result in own]:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        eager = []
        for stream, graph, own in zip(streams, graphs, given, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                eager.append(decode(*own))
                graph.replay()
        torch.cuda.synchronize()
        for own, launched, wanted in zip(results, eager, expected, strict=True):
            for actual in [*own, launched]:
                assert all(torch.equal(a, w) for a, w in zip(actual, wanted, strict=True)), repeat


@seeded
@by_dtype
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (2, 96), (4, 128), (8, 64), (2, 256)])
@pytest.mark.parametrize("lengths", [[1], [160], [1, 16, 17, 700], [3000] * 40], ids=str)
def test_decode_norms_and_turns_queries_and_keys(
    group: int, head_dim: int, lengths: list[int], dtype: torch.dtype, seed: int
) -> None:
    rows = Rows([geometry_of(group, dtype, head_dim)], lengths, max(lengths), head_dim, seed)
    (layer,) = rows.layers
    columns = on_device(rows.table())
    query = rows.queries(layer, len(lengths))[..., :head_dim] * 3
    key, value = rows.newest(layer)
    norms, cos, sin = preparation_of(rows, len(lengths), head_dim, dtype)
    ready = [prepared(states, norm, cos, sin).to(dtype) for states, norm in zip((query, key), norms, strict=True)]
    expected = decode(layer, ready[0], (ready[1], value), columns)
    pages = layer.pages.clone()
    rows.forget_newest()
    options = options_of(layer.geometry)
    given = (query, key, value, layer.pages, *unplanned(columns), *options, *norms, 0.01, cos, sin)
    for overlap in (False, True):
        out, lse = decode_attention_lse(*given, overlap)
        tolerance = 2e-3 if dtype is torch.float16 else 1.6e-2
        close(layer.pages.float(), pages.float(), tolerance, "pages")
        close(out.float(), expected[0].float(), 2 * tolerance, "out")
        close(lse, expected[1], 5 * tolerance, "lse")
        assert torch.equal(decode_attention(*given, overlap), out)


def test_inductors_kernels_wait_before_they_touch_memory() -> None:
    """Also those that read nothing, or nothing of what the kernel in front writes."""
    make_kernels_wait_first()

    def steps(states: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        product = states @ states.T
        sums = other.sum(1)
        return product, torch.full_like(other, 2.0), sums, (other * product.sum()).softmax(1)

    options = {"triton.enable_pdl": True}
    given = (torch.randn(64, 64, device="cuda"), torch.randn(100, 70000, device="cuda"))
    with fresh_cache():
        _, (code,) = run_and_get_code(torch.compile(steps, options=options), *given)  # type: ignore[call-overload]
    kernels = re.findall(r"\ndef triton_\w+\(.*?device_str", code, flags=re.S)
    assert len(kernels) >= 3
    for kernel in kernels:
        access = re.search(r"tl\.(load|store)", kernel)
        assert access is not None
        assert kernel.index("gdc_wait") < access.start(), kernel


@seeded
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="kernels do not overlap"
)
@pytest.mark.parametrize("lengths", [[100], [5000], [600] * 8], ids=str)
def test_decode_waits_for_what_is_in_front_of_it(lengths: list[int], seed: int) -> None:
    """Chains of layers, each of which reads what the one before wrote, between kernels that let go early."""
    rows = Rows([geometry_of(2)], lengths, max(lengths), 128, seed)
    (layer,) = rows.layers
    table, scale = unplanned(on_device(rows.table())), scale_of(layer.geometry)
    norms, cos, sin = preparation_of(rows, len(lengths), 128, torch.bfloat16)
    preparation = (-1, 0.0, *norms, 0.01, cos, sin)
    make_kernels_wait_first()

    def chain(query: Tensor) -> Tensor:
        for _ in range(12):
            key, value = query[:, :2], query[:, 2:]
            out = decode_attention(query, key, value, layer.pages, *table, scale, *preparation, overlap=True)
            total, query = add_rms_norm(out, query, norms[0], 1e-6, overlap=True)
            query = torch.nn.functional.rms_norm(out + query + total, (128,))
        return query

    compiled = torch.compile(chain, options={"triton.enable_pdl": True}, fullgraph=True)
    query = rows.queries(layer, len(lengths))
    expected = compiled(query)
    plain = torch.compile(chain, options={"triton.enable_pdl": False}, fullgraph=True)(query)
    close(expected.float(), plain.float(), 2e-2, "with and without overlap")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(query)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@seeded
@by_variant
def test_static_prefill_replays_smaller_batches(variant: int, seed: int, workspace: FlashInferWorkspace) -> None:
    rows = Rows([geometry_of(4)], [200, 33, 64], 400, 128, seed)
    (layer,) = rows.layers
    columns = fixed_columns(rows)
    plan = make_plan(layer, columns, workspace, variant=variant)
    query = rows.queries(layer, 60)
    out, lse = outputs(query)

    def prepare(queries: list[int]) -> None:
        for staged in workspace._staging:
            staged.memory.fill_(1)  # what earlier plans have left there must not matter
        upload(rows.table(queries), columns)
        plan.plan(rows.table(queries))

    prepare([20, 20, 20])
    graph = capture(lambda: plan.run(query, layer.pages, out, lse, scale_of(plan.geometry)))
    for lengths, queries in (([200, 33, 64], [20, 20, 20]), ([260, 40, 200], [1, 40, 3]), ([400, 40, 200], [58, 1, 1])):
        rows.grow_to(lengths)
        prepare(queries)
        graph.replay()
        rows.check(layer, query, out, lse, queries)


@pytest.mark.parametrize(("tokens", "rows"), [(60, 3), (300, 1), (2064, 65)])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="D={}".format)
def test_static_plans_take_what_is_reckoned(tokens: int, rows: int, head_dim: int) -> None:
    geometry = geometry_of(4, head_dim=head_dim)
    queries = [1] * (rows - 1) + [tokens - rows + 1]
    counts = torch.tensor([-(-count // PAGE_SIZE) for count in queries])
    last = torch.tensor([(count - 1) % PAGE_SIZE + 1 for count in queries])
    host = PageTable(
        *(
            column.int()
            for column in (starts_of(torch.tensor(queries)), starts_of(counts), torch.arange(counts.sum()), last)
        )
    )
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    needed = splitting.captured_split_bytes(geometry, tokens, rows, processors)

    def plan(nbytes: int) -> None:
        workspace = FlashInferWorkspace("cuda", nbytes)
        Plan(geometry, on_device(host), workspace, static=True, variant=splitting.SPLIT).plan(host)

    plan(needed)
    with pytest.raises(RuntimeError, match="raise workspace_bytes"):
        plan(needed - 1024)


# ---- what a captured launch baked in


@seeded
def test_a_number_that_a_captured_launch_has_read_may_not_change(
    seed: int, workspace: FlashInferWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows([geometry_of(2)], MIXED, max(MIXED), 128, seed)
    (layer,) = rows.layers
    plan = make_plan(layer, on_device(rows.table()), workspace)
    plan.plan(rows.table())
    query = rows.queries(layer, len(MIXED))
    given = query, layer.pages, *outputs(query), scale_of(plan.geometry)
    graph = capture(lambda: plan.run(*given))  # as long as it lives, it may be replayed
    module = workspace.wrapper(plan.geometry)._cached_module
    real = module.plan

    def changed(*arguments: Any) -> list[int]:
        numbers = [int(number) for number in real(*arguments)]
        return [numbers[0] + 1, *numbers[1:]]

    monkeypatch.setattr(module, "plan", changed)
    with pytest.raises(RuntimeError, match=r"padded_batch_size was \d+ and is now \d+"):
        plan.plan(rows.table())
    del graph


# ---- plan() never waits


def in_pinned_memory(table: PageTable) -> PageTable:
    return PageTable(*(column.pin_memory() for column in table))


@seeded
def test_plan_does_not_wait_for_the_device(seed: int, workspace: FlashInferWorkspace) -> None:
    """As many plans as there are staging buffers, each launched, while the device sleeps; then all results are right.

    All batches share one plan, as a model's prefills do: its copies and launches are in stream order.
    """
    rows = Rows([geometry_of(4)], [10, 100, 1, 700], 1000, 128, seed)
    (layer,) = rows.layers
    queries, tokens = [7, 1, 1, 20], 29
    batches = []
    for _ in range(STAGING_BUFFERS):
        rows.grow_to([length + step for length, step in zip(rows.lengths, (1, 5, 16, 17), strict=True)])
        query = rows.queries(layer, tokens)
        batches.append((rows.lengths, in_pinned_memory(rows.table(queries)), query, *outputs(query)))
    columns = fixed_columns(rows)
    plan = make_plan(layer, columns, workspace, static=False)

    def launch_all() -> None:
        for _, host, query, out, lse in batches:
            upload(host, columns, non_blocking=True)
            plan.plan(host)
            plan.run(query, layer.pages, out, lse, scale_of(plan.geometry))

    launch_all()  # loads the kernels and fills the allocators' caches
    for _, _, _, out, lse in batches:
        out.fill_(UNWRITTEN)
        lse.fill_(UNWRITTEN)
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        asleep.record()
        start = time.perf_counter()
        launch_all()
        took, waited = time.perf_counter() - start, asleep.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, f"{len(batches)} plans returned after {took:.3f} s, when the device had woken up"
    torch.cuda.synchronize()
    for lengths, _, query, out, lse in batches:
        rows.lengths = lengths
        rows.check(layer, query, out, lse, queries)


# ---- failing loudly


@seeded
def test_small_workspace_is_named(seed: int) -> None:
    rows = Rows([geometry_of(2)], [100, 200], 200, 128, seed)
    plan = make_plan(rows.layers[0], on_device(rows.table()), FlashInferWorkspace("cuda", 4096))
    with pytest.raises(RuntimeError, match=r"workspace of 4096 bytes is too small .* raise workspace_bytes"):
        plan.plan(rows.table())


@seeded
def test_plan_inside_a_capture_raises(seed: int, workspace: FlashInferWorkspace) -> None:
    rows = Rows([geometry_of(2)], [100, 200], 200, 128, seed)
    plan = make_plan(rows.layers[0], on_device(rows.table()), workspace)
    graph, touched = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        touched.add_(1)
        with pytest.raises(RuntimeError, match="plan before the capture"):
            plan.plan(rows.table())


@seeded
def test_launch_that_was_not_planned_raises(seed: int, workspace: FlashInferWorkspace) -> None:
    rows = Rows([geometry_of(2)], [100, 200], 200, 128, seed)
    (layer,) = rows.layers
    plan = make_plan(layer, on_device(rows.table()), workspace)
    query = rows.queries(layer, 2)
    with pytest.raises(RuntimeError, match="nothing was planned"):
        plan.run(query, layer.pages, *outputs(query), 1.0)
    plan.plan(rows.table())
    with pytest.raises(ValueError, match="plan is of another batch: tokens"):
        plan.run(query[:1], layer.pages, *outputs(query[:1]), 1.0)
    with pytest.raises(ValueError, match="plan is of another batch: geometry"):
        plan.run(query[..., :64], layer.pages[..., :64], *outputs(query), 1.0)
