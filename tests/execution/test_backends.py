"""Backends: which one a model gets, what is refused, and decode steps that are planned as prefill is.

The reference decodes on a CPU with an op that needs no plan. Here it is made to plan, as CUDA does with
``backend="flashinfer"``; a backend of another package does either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import WrapConfig
from compiled_llm.compilation import backend as inductor
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.options import passes_for
from compiled_llm.compilation.passes.append import PreparedInAppend
from compiled_llm.compilation.passes.attention import PreparedInAttention
from compiled_llm.compilation.programs import Programs
from compiled_llm.compilation.regions import attentions_in
from compiled_llm.config import OWN_BACKENDS
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.prefill.packing import NO_ROWS, null_extension, pack, padded
from compiled_llm.execution.state.prefill_room import PrefillRoom
from compiled_llm.kinds.full import Full
from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kvcache.table import Span, build_table
from compiled_llm.model.checks import check_layers, check_placement
from compiled_llm_ops import Geometry, append_paged_kv, paged_attention_lse
from compiled_llm_ops.backends import BACKENDS, backend_for, backend_named, backend_names
from compiled_llm_ops.contracts import AppendPagedKv, PagedAttention, PlannedBatch
from compiled_llm_ops.protocol import own_decode_ops, owner_of
from compiled_llm_ops.reference.backend import Reference, ReferencePlan
from support.execution import other_kernels
from support.huggingface.families import FAMILIES, make
from support.noting import note_calls
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "800 tokens", "max_batch_size": 4, "progress": False}
GEOMETRY = Geometry(4, 2, 16, 4, -1, 0.0, torch.float32, torch.float32)
LAYER = Layer(query_heads=4, kv_heads=2, head_dim=64, window_left=-1, logits_soft_cap=0.0, kind=Full())


class Placed:
    """What the checks look at of a model."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = torch.device(device), dtype

    def parameters(self) -> list[Any]:
        return [self]


def placed(device: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return cast(PreTrainedModel, Placed(device, dtype))


# ---- which one


@pytest.mark.parametrize(
    ("backend", "device", "name", "plans_decode"),
    [
        ("auto", "cuda", "flashinfer", False),
        ("triton", "cuda", "triton", False),
        ("auto", "cpu", "reference", False),
        ("flashinfer", "cuda", "flashinfer", True),
        ("reference", "cuda", "reference", True),
        ("reference", "cpu", "reference", False),
    ],
)
@pytest.mark.usefixtures("problems")
def test_whose_kernels_attend(backend: str, device: str, name: str, plans_decode: bool) -> None:
    chosen = backend_for(backend, device)
    decode_ops = None if plans_decode else own_decode_ops()
    assert chosen == (name, backend_named(name), decode_ops)


def test_a_backend_is_found_by_its_name() -> None:
    assert ("auto", *BACKENDS) == OWN_BACKENDS
    found = [type(backend_named(name)).__name__ for name in BACKENDS]
    assert found == ["FlashInfer", "Triton", "FlashAttn", "TorchVarlen", "Reference"]
    with pytest.raises(
        ValueError, match="'cudnn' does not exist; choose one of 'flashinfer', 'triton', 'flash-attn', "
    ):
        backend_named("cudnn")


def test_auto_takes_our_own_kernels_where_flashinfer_cannot_run_and_says_so_once(
    problems: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    problems["flashinfer"] = ["nvcc is not found: install it"]
    for _ in range(3):
        chosen = backend_for("auto", "cuda")
        assert chosen == ("triton", backend_named("triton"), own_decode_ops())
    (said,) = caplog.messages
    assert said.endswith("not FlashInfer's: nvcc is not found: install it")
    check_placement(placed("cuda:0", torch.float32), WrapConfig())
    with pytest.raises(RuntimeError, match=r"something is missing there: nvcc is not found: install it"):
        check_placement(placed("cuda:0"), WrapConfig(backend="flashinfer"))


def test_where_nothing_can_run_it_is_flashinfer_that_is_to_be_installed(problems: dict[str, list[str]]) -> None:
    problems |= {"flashinfer": ["pip install X"], "triton": ["Triton compiles for compute capability 8.0"]}
    assert backend_for("auto", "cuda").name == "flashinfer"
    with pytest.raises(RuntimeError, match=r"something is missing there: pip install X"):
        check_placement(placed("cuda:0"), WrapConfig())
    with pytest.raises(RuntimeError, match=r"something is missing there: Triton compiles for compute capability 8\.0"):
        check_placement(placed("cuda:0"), WrapConfig(backend="triton"))


def test_kernels_that_artifacts_hold_are_not_built(problems: dict[str, list[str]], tmp_path: Path) -> None:
    problems["flashinfer"] = ["nvcc is not found: install it"]
    config = WrapConfig(artifacts=tmp_path)
    assert config.backend_on("cuda").name == "triton", "what wrote them had no nvcc either"
    (tmp_path / "flashinfer").mkdir()
    assert config.backend_on("cuda").name == "flashinfer"


def test_gpus_that_triton_does_not_compile_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    (message,) = backend_named("triton").installation.problems()
    assert message.startswith("Triton compiles for compute capability 8.0 or newer, and the device has 7.5: use")


# ---- one that another package brings


ONE_OF_ITS_OWN = """
from compiled_llm_ops.reference.backend import Reference

class Counting(Reference):
    plans = 0

    def new_plan(self, workspace, nbytes):
        self.plans += 1
        return super().new_plan(workspace, nbytes)

BACKEND, NO_BACKEND = Counting(), object()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages with entry points, as pip leaves them."""
    for package, entries in {
        "counting": ["counting = counting_kernels:BACKEND", "twice = counting_kernels:BACKEND"],
        "broken": ["no-backend = counting_kernels:NO_BACKEND", "gone = not_there:BACKEND", "twice = broken:BACKEND"],
        "other": [f"{name.lower()} = support.execution.other_kernels:{name}" for name in ("UNPLANNED", "PLANNED")],
    }.items():
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[compiled_llm_ops.backends]", *entries]))
    (tmp_path / "counting_kernels.py").write_text(ONE_OF_ITS_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    backend_named.cache_clear()
    sys.modules.pop("counting_kernels", None)


@pytest.mark.usefixtures("installed")
def test_a_package_brings_a_backend_that_is_imported_once_it_is_named(seed: int) -> None:
    assert {*backend_names()} == {*BACKENDS, "counting", "gone", "no-backend", "planned", "twice", "unplanned"}
    WrapConfig(backend="counting")
    assert "counting_kernels" not in sys.modules
    reference, model = (tiny_qwen3(num_hidden_layers=1, eos_token_id=None) for _ in range(2))
    compiled_llm.wrap(model, mode="eager", backend="counting", **OPTIONS)
    inputs = mixed_prompts([5, 9], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, 10), greedy(reference, inputs, 10))
    assert cast(Any, backend_named("counting")).plans > 0


@pytest.mark.usefixtures("installed")
def test_a_backend_that_nobody_brings_is_refused_with_all_that_there_are() -> None:
    message = r"'cudnn': choose one of 'auto', 'flashinfer', .*, 'reference', 'counting', .*'twice', 'unplanned'"
    with pytest.raises(ValueError, match=message):
        WrapConfig(backend="cudnn")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("backend", ["unplanned", "planned"])
def test_a_backend_that_reads_no_shared_pages_once_is_refused_with_cascade(backend: str) -> None:
    with pytest.raises(ValueError, match=f"cascade=True: backend='{backend}' has no decode kernel on cpu"):
        compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1), mode="eager", backend=backend, cascade=True)


def assert_huggingfaces_tokens(model: Any, reference: PreTrainedModel, seed: int) -> None:
    """Of batches of one to three rows, in one graph that is compiled once."""
    for lengths in ([5], [5, 9, 17], [3, 4]):
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 20), greedy(reference, inputs, 20))
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert_account_is_empty(model)


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("installed", "without_inductor")
@pytest.mark.parametrize("backend", ["unplanned", "planned"])
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("Qwen2", "eager"),
        ("GptOss", "eager"),
        *(pytest.param(family, "compile", marks=pytest.mark.whole) for family in ("Qwen2", "GptOss")),
    ],
)
def test_a_backend_says_itself_whether_its_decode_steps_are_planned(
    backend: str, family: str, mode: Any, seed: int
) -> None:
    """GptOss has sinks, which need the log-sum-exp, and windows."""
    other_kernels.launched.clear()
    other_kernels.planned.clear()
    reference, model = (make(family, FAMILIES[family], seed) for _ in range(2))
    compiled_llm.wrap(model, mode=mode, backend=backend, **OPTIONS)
    assert_huggingfaces_tokens(model, reference, seed)
    buckets = {1, 2, 4}
    if backend == "unplanned":
        assert ({*other_kernels.launched}, other_kernels.planned) == (buckets, [])
    else:
        assert (other_kernels.launched, buckets - {*other_kernels.planned}) == ([], set())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("backend", ["planned", "unplanned"])
def test_only_a_backend_that_can_takes_several_new_tokens_of_each_row(backend: str) -> None:
    """The decode ops of one have not said that they can, and the other has none."""
    model: Any = tiny_qwen3(num_hidden_layers=1, eos_token_id=None)
    compiled_llm.wrap(model, mode="eager", backend=backend, **OPTIONS)
    with pytest.raises(ValueError, match=f"'{backend}' decodes one new token of each row at a time, not 2"):
        model.compiled.model_runner().steps.step_of_several(1, 2)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("backend", ["planned", "unplanned"])
def test_mixed_steps_run_with_any_backend(backend: str, seed: int) -> None:
    """Rows that run are rows of a prefill there, and its kernels take any number of new tokens of each row."""
    rng, found = np.random.default_rng(seed), []
    prompts = [rng.integers(3, 128, length).tolist() for length in (20, 3, 18, 9)]
    for mixed in (False, True):
        model = tiny_qwen3(num_hidden_layers=1, eos_token_id=None)
        compiled_llm.wrap(model, mode="eager", backend=backend, **{**OPTIONS, "prefill_tokens": 8})
        with compiled_llm.Engine(model, mixed=mixed) as engine:
            params = compiled_llm.SamplingParams(temperature=0.0, max_tokens=12)
            found.append([output.token_ids for output in engine.generate(prompts, params)])
            assert (engine.stats().mixed_steps > 0) == mixed
    assert found[0] == found[1]


@pytest.mark.whole
@pytest.mark.usefixtures("installed")
def test_graphs_are_cut_before_the_decode_ops_of_any_backend(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    ops = other_kernels.UNPLANNED.decode_ops("cpu")

    def noted(module: fx.GraphModule, inputs: Any, options: Any) -> Any:
        found.append(attentions_in(module.graph, ops.overloads))
        return module.forward

    monkeypatch.setattr(inductor, "compile_with_inductor", noted)
    monkeypatch.setattr(Programs, "_layers_in_region", lambda self: 1)
    reference, model = (tiny_qwen3(num_hidden_layers=3, eos_token_id=None) for _ in range(2))
    compiled_llm.wrap(model, mode="compile", backend="unplanned", **OPTIONS)
    inputs = mixed_prompts([5], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, 8), greedy(reference, inputs, 8))
    assert found.count(1) == 2, "the region between two attentions is compiled once"
    assert max(found) == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "no-backend",
            RuntimeError,
            r"'no-backend' of counting_kernels:NO_BACKEND \(broken\) is object, which lacks dev",
        ),
        (
            "gone",
            RuntimeError,
            r"'gone' of not_there:BACKEND \(broken\) cannot be imported: No module named 'not_there'",
        ),
        ("twice", ValueError, r"'twice' comes from .*\(\w+\) and .*\(\w+\); uninstall all but one"),
    ],
)
def test_what_a_package_brings_that_is_no_backend_is_refused(name: str, error: type[Exception], message: str) -> None:
    model = tiny_qwen3(num_hidden_layers=1)
    with pytest.raises(error, match=message):
        compiled_llm.wrap(model, mode="eager", backend=name, **OPTIONS)
    assert not hasattr(model, "compiled")


# ---- passes


@pytest.mark.parametrize("mode", ["compile", "reduce-overhead", "cuda-graphs", "piecewise"])
@pytest.mark.parametrize(("backend", "is_searched"), [("auto", True), ("triton", True), ("flashinfer", False)])
def test_graphs_are_searched_for_what_decode_attention_prepares_only_if_they_have_it(
    mode: Any, backend: Any, is_searched: bool
) -> None:
    """Else a model like Llama would be said to match no pattern."""
    passes = passes_for(WrapConfig(mode=mode, backend=backend), torch.device("cuda"), [], decodes=True)
    assert any(isinstance(searched, PreparedInAttention) for searched in passes) is is_searched


@pytest.mark.parametrize(
    ("backend", "is_searched"),
    [("auto", True), ("flashinfer", True), ("triton", True), ("reference", False), ("unplanned", False)],
)
@pytest.mark.usefixtures("installed")
def test_backends_that_write_into_the_pages_themselves_still_do(backend: Any, is_searched: bool) -> None:
    passes = passes_for(WrapConfig(backend=backend), torch.device("cuda"), [], decodes=False)
    assert any(isinstance(searched, PreparedInAppend) for searched in passes) is is_searched
    on_a_cpu = passes_for(WrapConfig(backend="auto"), torch.device("cpu"), [], decodes=False)
    assert not any(isinstance(searched, PreparedInAppend) for searched in on_a_cpu)


@pytest.mark.usefixtures("installed")
def test_ops_that_do_not_prepare_are_not_asked_to() -> None:
    passes = passes_for(WrapConfig(backend="unplanned"), torch.device("cuda"), [], decodes=True)
    assert not any(isinstance(searched, PreparedInAttention) for searched in passes)


@pytest.mark.parametrize("window_left", [-1, 3])
def test_the_reference_attends_as_the_cpu_kernels_do(window_left: int, seed: int) -> None:
    """Its launcher runs on CUDA only; it takes tensors from anywhere."""
    reference, cpu = backend_named("reference"), torch.device("cpu")
    workspace = reference.workspace(cpu, reference.workspace_bytes([GEOMETRY], cpu))
    plan = reference.new_plan(workspace, reference.plan_bytes([GEOMETRY], cpu, 5, 2))
    rows, positions, qo_indptr, indptr, indices, last_page_len = (
        torch.tensor(column, dtype=torch.int32)
        for column in ([0, 0, 0, 1, 1], [3, 4, 5, 0, 1], [0, 3, 5], [0, 2, 3], [4, 1, 2], [2, 2])
    )
    query, key, value, pages = torch.randn(5, 4, 16), *torch.randn(2, 5, 2, 16), torch.randn(6, 2, 2, 4, 16)
    expected, table = pages.clone(), (indptr, indices, last_page_len)
    append_paged_kv(key, value, expected, rows, positions, *table)
    reference.append(AppendPagedKv(key, value, pages, rows, positions, *table))
    assert torch.equal(pages, expected)
    given = (query, pages, qo_indptr, *table, plan.tensor, workspace.buffer, 0.25, window_left)
    out, lse = torch.empty(5, 4, 16), torch.empty(5, 4)
    owner_of(plan.tensor).launch(PagedAttention(*given), out, lse)
    torch.testing.assert_close((out, lse), paged_attention_lse(*given))


# ---- what is refused


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend='cudnn': choose one of 'auto', 'flashinfer', 'triton', "):
        WrapConfig(backend=cast(Any, "cudnn"))


def test_flashinfer_on_a_cpu_is_refused_with_the_way_out() -> None:
    model = tiny_qwen3(num_hidden_layers=1)
    with pytest.raises(
        ValueError, match=r"backend='flashinfer' has kernels for cuda only.*on cpu; wrap with backend='auto'"
    ):
        compiled_llm.wrap(model, backend="flashinfer", **OPTIONS)
    assert not hasattr(model, "compiled")


@pytest.mark.parametrize("mode", ["compile", "reduce-overhead", "cuda-graphs"])
def test_the_reference_on_cuda_runs_only_where_attention_may_wait(mode: Any) -> None:
    message = r"reads lengths back from a CUDA device.*wrap with mode='eager' or mode='piecewise'"
    with pytest.raises(ValueError, match=message):
        check_placement(placed("cuda:0"), WrapConfig(backend="reference", mode=mode))


def test_the_reference_on_cuda_needs_nothing_installed_and_takes_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    installation = type(backend_named("flashinfer").installation)
    monkeypatch.setattr(installation, "problems", lambda self, builds: ["pip install X", "nvcc was not found"])
    for mode in ("eager", "piecewise"):
        check_placement(placed("cuda:0", torch.float32), WrapConfig(backend="reference", mode=cast(Any, mode)))
    with pytest.raises(RuntimeError, match=r"CUDA.*pip install X; nvcc was not found"):
        check_placement(placed("cuda:0"), WrapConfig(backend="flashinfer"))


@pytest.mark.usefixtures("problems")
def test_a_layer_without_a_kernel_is_named_with_the_reason_and_who_can() -> None:
    layers = [LAYER, LAYER._replace(head_dim=600)]
    message = r"'flashinfer' cannot run attention layer 1: head size 600 .*; backend='reference' with mode='eager' can"
    for backend in ("auto", "flashinfer"):
        with pytest.raises(UnsupportedModelError, match=message):
            check_layers(placed("cuda:0"), layers, WrapConfig(backend=cast(Any, backend)))
    check_layers(placed("cuda:0"), layers, WrapConfig(backend="reference", mode="eager"))
    with pytest.raises(UnsupportedModelError, match=r"'triton' cannot run attention layer 1: .* the largest is 512"):
        check_layers(placed("cuda:0"), layers, WrapConfig(backend="triton"))
    check_layers(placed("cpu"), layers, WrapConfig())


@pytest.mark.usefixtures("problems")
def test_float32_on_cuda_is_for_our_own_kernels() -> None:
    model, many = placed("cuda:0", torch.float32), LAYER._replace(query_heads=71 * 2)
    with pytest.raises(ValueError, match=r"backend='flashinfer' has kernels for .*, or wrap with backend='triton'"):
        check_placement(model, WrapConfig())
    config = WrapConfig(backend="triton")
    check_placement(model, config)
    check_layers(model, [LAYER, LAYER._replace(head_dim=512), many], config)
    with pytest.raises(UnsupportedModelError, match=r"in float32 for 71 query heads of size 256 .*: at most 64; .*ref"):
        check_layers(model, [many._replace(head_dim=256)], config)
    with pytest.raises(ValueError, match=r"cascade=True: the model is torch.float32 on CUDA.*for 16 bits only"):
        check_placement(model, WrapConfig(backend="triton", cascade=True))


# ---- decode that is planned


@pytest.fixture
def planned_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("planned_decode", "without_inductor")
@pytest.mark.parametrize(("mode", "layers"), [("eager", 2), ("compile", 1)])
def test_planned_decode_gives_huggingfaces_tokens(mode: str, layers: int, seed: int) -> None:
    reference, model = (tiny_qwen3(num_hidden_layers=layers, eos_token_id=None) for _ in range(2))
    compiled_llm.wrap(model, mode=mode, **OPTIONS)
    assert_huggingfaces_tokens(model, reference, seed)


@pytest.mark.usefixtures("planned_decode")
def test_decode_is_planned_again_when_a_row_enters_a_page_and_never_in_between(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = note_calls(
        monkeypatch, Planner, "plan_decode", lambda self, table, _: (table.indptr[1:] - table.indptr[:-1]).tolist()
    )
    model = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1, eos_token_id=None), mode="eager", **OPTIONS)
    greedy(model, mixed_prompts([5], 128, seed), 14)  # rows of 6 to 18 tokens, in pages of 4
    assert pages == [[1], [2], [3], [4], [5]]  # a null row first, when the bucket is prepared


@pytest.mark.usefixtures("planned_decode")
def test_decode_steps_of_a_bucket_have_one_fixed_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the rows are, the plan of a bucket has the same address, tokens and variant."""
    made: list[tuple[Tensor, PlannedBatch]] = []
    monkeypatch.setattr(ReferencePlan, "decide", lambda plan, batch: made.append((plan.tensor, batch)))
    config = WrapConfig(max_batch_size=4)
    windowed = GEOMETRY._replace(window_left=7)
    planner = Planner(
        [GEOMETRY, windowed, GEOMETRY], config, torch.device("cpu"), max_row_tokens=400, room=PrefillRoom(64, 4, 0)
    )
    monkeypatch.setattr(type(backend_named("reference")), "best_schedule", lambda *args: 5)
    inputs = planner.for_decode(StepKey.decode(4))
    assert inputs is not None
    assert inputs.groups == (0, 1, 0)
    for lengths in ([1, 1], [90, 3], [400, 400, 400, 400]):
        rows = [Span([1] * -(-length // 4), length) for length in lengths]
        planner.plan_decode(build_table(rows, [1] * len(rows), 4, 4), StepKey.decode(4))
    assert {(batch.captured_tokens, batch.schedule) for _, batch in made} == {(4, 5)}
    assert [plan.data_ptr() for plan, _ in made] == [tensor.data_ptr() for tensor in inputs.tensors] * 3
    assert [batch.geometry for _, batch in made] == [GEOMETRY, windowed] * 3
    assert all(batch.qo_indptr.tolist() == [0, 1, 2, 3, 4] for _, batch in made), (
        "null rows have one query and one page"
    )


@pytest.mark.parametrize(("mode", "planned"), [("cuda-graphs", (64, 0)), ("piecewise", (-1, -1))])
def test_what_is_not_captured_is_planned_for_its_own_batch(
    mode: Any, planned: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(ReferencePlan, "decide", lambda plan, batch: found.append(batch[-2:]))
    config, shape = WrapConfig(mode=mode, backend="reference", **OPTIONS), StepKey.prefill(64, 2)
    planner = Planner(
        [GEOMETRY], config, torch.device("cpu"), max_row_tokens=40, room=PrefillRoom(64, 3, 0), shapes=[shape]
    )
    one = null_extension(5, 4)
    planner.plan_prefill(pack(NO_ROWS._replace(rows=padded([one], shape, 4)), 4)[1], shape)
    assert found == [planned]
    assert planner.schedules == (0,)
    assert planner.schedule_for([5], [5]) == 0
