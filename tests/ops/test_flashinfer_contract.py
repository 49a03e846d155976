"""Everything of FlashInfer that `compiled_llm_ops.flashinfer.plan` relies on, checked without a GPU.

FlashInfer's classes are replaced by mocks that have their signatures, so that a call with an argument that no longer
exists fails; what signatures do not show (private attributes, C++ planners) is looked up in the sources that the
package ships.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_llm.config import WrapConfig
from compiled_llm.execution.prefill_plans import Planner
from compiled_llm.execution.recorded_shapes import RecordedShapes
from compiled_llm_ops import Geometry, PageTable, find_plan
from compiled_llm_ops.flashinfer import install, splitting, versions, workspace
from compiled_llm_ops.flashinfer.append import append, readable
from compiled_llm_ops.flashinfer.plan import FlashInferPlan
from compiled_llm_ops.flashinfer.planner import PLAN_FIELDS

try:
    import flashinfer
except ModuleNotFoundError as error:
    pytest.skip(f"flashinfer does not import ({error})", allow_module_level=True)

DATA = Path(flashinfer.__file__).parent / "data"
PREFILL = flashinfer.BatchPrefillWithPagedKVCacheWrapper

GEOMETRY = Geometry(4, 2, 128, 16, -1, 0.0, torch.bfloat16, torch.bfloat16)
HOST = PageTable(*(torch.tensor(column, dtype=torch.int32) for column in ([0, 1, 2], [0, 3, 4], [5, 6, 7, 8], [9, 2])))

PLANNER = (
    "float_workspace_buffer",
    "int_workspace_buffer",
    "page_locked_int_workspace_buffer",
    "qo_indptr",
    "kv_indptr",
    "kv_len_arr",
    "total_num_rows",
    "batch_size",
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "enable_cuda_graph",
    "head_dim_qk",
    "head_dim_vo",
    "causal",
    "window_left",
    "fixed_split_size",
    "disable_split_kv",
    "num_colocated_ctas",
)


class Mocked(NamedTuple):
    """A workspace on the CPU, and FlashInfer's wrapper class as a mock with the real signatures."""

    workspace: workspace.Workspace
    prefill: mock.Mock

    @property
    def wrapper(self) -> Any:
        return self.prefill.return_value

    @property
    def planner(self) -> mock.Mock:
        return self.wrapper._cached_module.plan


class UnusedEvent:
    def synchronize(self) -> None: ...

    def record(self, stream: object) -> None: ...


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> Mocked:
    h200 = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setattr(torch.cuda, "Event", UnusedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(workspace, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    prefill = mock.create_autospec(PREFILL)
    prefill.return_value._cached_module = mock.Mock()
    prefill.return_value._cached_module.plan.return_value = list(range(15))
    monkeypatch.setattr(flashinfer, PREFILL.__name__, prefill)
    versions.uniform_q_len_argument.cache_clear()
    # The mock stands for the class; whether the planner takes one argument more is read off the real one.
    monkeypatch.setattr(prefill, "plan", PREFILL.plan)
    return Mocked(workspace.Workspace("cpu", 1024), prefill)


def make_plan(
    mocked: Mocked, geometry: Geometry = GEOMETRY, *, static: bool = False, split: bool = True
) -> FlashInferPlan:
    return FlashInferPlan(geometry, HOST, rows=2, workspace=mocked.workspace, static=static, split=split)


def plan_parameters() -> set[str]:
    parameters = inspect.signature(PREFILL.plan).parameters.values()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def attributes(function: Callable[..., Any], context: type[ast.expr_context]) -> set[str]:
    """The attributes of `self` that a method loads or stores."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, context))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def cpp(path: str) -> str:
    return (DATA / path).read_text()


def cpp_parameters(path: str, function: str) -> list[str]:
    match = re.search(rf"\b{function}\(([^)]*)\);", cpp(path))
    assert match is not None, f"{function} is no longer declared in {path}"
    return [re.split(r"\s+", parameter.strip())[-1] for parameter in match[1].split(",")]


def cpp_vector(struct: str) -> tuple[str, ...]:
    """The members that `struct::ToVector` returns, in order."""
    match = re.search(rf"struct {struct} {{.*?ToVector\(\) const {{\s*return {{(.*?)}};", SCHEDULER, re.DOTALL)
    assert match is not None, f"{struct}::ToVector is gone"
    return tuple(name.strip() for name in match[1].split(","))


def macro_cases(macro: str, pattern: str) -> set[int]:
    match = re.search(rf"#define {macro}\(.*?\n\n", cpp("include/flashinfer/utils.cuh"), re.DOTALL)
    assert match is not None, f"{macro} is gone"
    return {int(number) for number in re.findall(pattern, match[0])}


SCHEDULER = cpp("include/flashinfer/attention/scheduler.cuh")
ALLOCATOR = cpp("include/flashinfer/allocator.h")


# ---- the public surface


def test_wrapper_and_its_plan_take_what_is_passed(mocked: Mocked) -> None:
    make_plan(mocked)
    call = mocked.wrapper.plan.call_args
    assert call.args == ()
    assert set(call.kwargs) <= plan_parameters()
    assert call.kwargs["sm_scale"] == 1, "the launch brings its own"
    mocked.wrapper.reset_workspace_buffer.assert_called_once()


def test_run_takes_what_is_passed(mocked: Mocked) -> None:
    plan = make_plan(mocked)
    plan.plan(HOST)
    query, pages, out, lse = tensors()
    plan.run(query, pages, out, lse, 0.1)
    call = mocked.wrapper.run.call_args
    assert call.args == ()
    assert set(call.kwargs) <= set(inspect.signature(PREFILL.run).parameters)
    assert call.kwargs["q_scale"] == 0.1


def test_run_scales_logits_by_what_it_is_given() -> None:
    """Plans are made with a scale of 1, so that they hold for layers of any."""
    assert "sm_scale *= q_scale" in inspect.getsource(inspect.unwrap(PREFILL.run))


def test_run_returns_the_log_sum_exp_in_base_2_unless_told_otherwise() -> None:
    base = inspect.signature(PREFILL.run).parameters.get("lse_base")
    assert base is None or base.default == "log2"
    assert "math::log2e" in cpp("include/flashinfer/attention/variants.cuh")


def test_append_takes_what_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = mock.create_autospec(flashinfer.append_paged_kv_cache)
    monkeypatch.setattr(flashinfer, "append_paged_kv_cache", theirs)
    _, pages, _, _ = tensors()
    states = torch.zeros(2, 2, 128, dtype=torch.bfloat16)
    append(states, states, pages, HOST.qo_indptr[:2], HOST.qo_indptr[:2], HOST)
    theirs.assert_called_once()
    assert theirs.call_args.args == ()


def test_append_reads_strided_keys_and_values() -> None:
    source = cpp("csrc/page.cu")
    for name in ("append_key", "append_value"):
        assert f"CHECK_LAST_DIM_CONTIGUOUS({name})" in source
        assert f"{name}.strides()" in source


def test_pages_are_split_into_keys_and_values_along_their_second_dimension() -> None:
    utils = importlib.import_module("flashinfer.utils")
    _, pages, _, _ = tensors()
    keys, values = utils._unpack_paged_kv_cache(pages, "HND")
    assert keys.shape == values.shape == (3, 2, 16, 128)
    assert (keys.data_ptr(), values.data_ptr()) == (pages[:, 0].data_ptr(), pages[:, 1].data_ptr())


def sources() -> str:
    """All that touches FlashInfer."""
    return "\n".join(path.read_text() for path in Path(workspace.__file__).parent.glob("*.py"))


def called_by_name() -> dict[str, ast.Call]:
    """The calls of FlashInfer's functions and classes in the backend, by their dotted names."""
    roots = {"import_flashinfer()": "flashinfer", "importlib.import_module('flashinfer.utils')": "flashinfer.utils"}
    calls = {}
    for node in ast.walk(ast.parse(sources())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            root, _, attribute = ast.unparse(node.func).rpartition(".")
            parent, _, child = root.rpartition(".")
            root = roots.get(root) or (f"{roots[parent]}.{child}" if parent in roots else root)
            if root.partition(".")[0] == "flashinfer":
                calls[f"{root}.{attribute}"] = node
    return calls


def test_every_function_and_class_takes_what_is_passed() -> None:
    calls = called_by_name()
    assert set(calls) == {
        "flashinfer.BatchPrefillWithPagedKVCacheWrapper",
        "flashinfer.append_paged_kv_cache",
        "flashinfer.utils._get_cache_alibi_slopes_buf",
    }
    for name, call in calls.items():
        module, _, function = name.rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(module), function))
        signature.bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})


def test_every_method_that_is_called_has_a_test_above() -> None:
    """Methods are called on mocks with the real signatures; this notices a new one."""
    source = sources()
    methods = set(re.findall(r"\bwrapper\.(?:_cached_module\.)?(\w+)\(", source))
    assert methods == {"plan", "reset_workspace_buffer", "run"}


# ---- private attributes


def test_plan_leaves_the_module_and_its_numbers_where_they_are_looked_for() -> None:
    assert {"_cached_module", "_plan_info"} <= attributes(PREFILL.plan, ast.Store)


def test_run_reads_what_is_set_before_it() -> None:
    table = {"_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf", "_qo_indptr_buf"}
    private = {"_plan_info", "_int_workspace_buffer", "_cached_module", "_qo_indptr_last"}
    assert table | private <= attributes(PREFILL.run, ast.Load)


def test_run_does_not_ask_whether_it_is_captured() -> None:
    """One wrapper serves captured and eager launches: only cuDNN's branch may look."""
    source = inspect.getsource(inspect.unwrap(PREFILL.run))
    for line in source.splitlines():
        if "cuda_graph" in line:
            assert "is_cuda_graph_compatible=" in line, line
    assert not attributes(PREFILL.run, ast.Load) & {"_fixed_batch_size", "_max_total_num_rows"}


def test_alibi_slopes_are_made_once_a_device() -> None:
    slopes = importlib.import_module("flashinfer.utils")._get_cache_alibi_slopes_buf
    assert list(inspect.signature(slopes).parameters) == ["num_qo_heads", "device"]
    assert slopes(4, torch.device("cpu")) is slopes(4, torch.device("cpu"))


# ---- the planners


def test_planner_gets_its_arguments(mocked: Mocked) -> None:
    declared = cpp_parameters("csrc/batch_prefill_jit_binding.cu", "BatchPrefillWithKVCachePlan")
    assert tuple(declared) in (PLANNER, (*PLANNER, "uniform_q_len"))
    make_plan(mocked, static=True).plan(HOST)
    passed = dict(zip(declared, mocked.planner.call_args.args, strict=True))
    assert passed["kv_len_arr"].tolist() == [41, 2]
    assert (passed["total_num_rows"], passed["batch_size"], passed["causal"]) == (2, 2, True)
    assert (passed["enable_cuda_graph"], passed["page_size"]) == (True, 16)
    assert passed.get("uniform_q_len", 0) == 0


@pytest.mark.parametrize("split", [True, False, None])
def test_the_planner_is_told_whether_to_split(mocked: Mocked, split: bool | None) -> None:
    plan = FlashInferPlan(GEOMETRY, HOST, rows=2, workspace=mocked.workspace, static=False, split=split)
    at = PLANNER.index("disable_split_kv")
    for pages, worthwhile in ((1, False), (3000, True)):
        plan.plan(HOST._replace(indptr=torch.tensor([0, pages, pages + 1], dtype=torch.int32)))
        given = mocked.planner.call_args.args[at]
        assert given is not (worthwhile if split is None else split)


def test_idle_blocks_of_a_captured_launch_repeat_the_last_row(mocked: Mocked) -> None:
    masked = "only when the batch is split.\n  if (enable_cuda_graph) {" in SCHEDULER
    assert versions.idle_blocks_read_the_plan() is not masked
    if masked:
        return
    before_copy, *_ = SCHEDULER.split("std::copy(request_indices_vec.begin()")
    assert "memset" not in before_copy
    offsets = ("request_indices_offset", "qo_tile_indices_offset", "kv_tile_indices_offset")
    numbers = {"padded_batch_size": 5, "cta_tile_q": 1, **dict(zip(offsets, (0, 32, 64), strict=True))}
    places = [numbers.get(name, 0) for name in PLAN_FIELDS]
    seen: list[Any] = []

    def planner(_: Any, __: Any, pinned: torch.Tensor, *___: Any) -> list[int]:
        seen.append(pinned[:96].view(torch.int32).clone())
        pinned.fill_(1)
        return places

    mocked.planner.side_effect = planner
    plan = make_plan(mocked, static=True, split=False)
    for _ in range(2):
        plan.plan(HOST)
        assert seen[-1].view(3, 8)[:, :5].tolist() == [[1] * 5, [0] * 5, [0] * 5]
    assert len(seen) == 3  # at first it says where, too


def test_a_captured_launch_that_does_not_split_has_a_block_for_each_tile(mocked: Mocked) -> None:
    """Kernels take as many blocks as the plan says, and the planner never needs more than its bound for tiles."""
    assert "total_num_tiles_q = ceil_div(total_num_rows * gqa_group_size, cta_tile_q) + batch_size - 1;" in SCHEDULER
    assert "dim3 nblks(padded_batch_size, 1, num_kv_heads);" in cpp("include/flashinfer/attention/prefill.cuh")
    numbers = {"padded_batch_size": 33, "cta_tile_q": 64}
    mocked.planner.return_value = [numbers.get(name, 7) for name in PLAN_FIELDS]
    host = HOST._replace(qo_indptr=torch.tensor([0, 100, 301], dtype=torch.int32))
    for split, blocks in ((True, 33), (False, -(-301 * GEOMETRY.query_heads // GEOMETRY.kv_heads // 64) + 1)):
        plan = make_plan(mocked, static=True, split=split)
        plan.plan(host)
        plan.freeze()
        assert plan._frozen is not None
        assert dict(zip(PLAN_FIELDS, plan._frozen, strict=True)) == {
            **dict.fromkeys(PLAN_FIELDS, 7), "cta_tile_q": 64, "padded_batch_size": blocks
        }  # fmt: skip


def test_a_static_plan_must_be_told_whether_to_split(mocked: Mocked) -> None:
    with pytest.raises(ValueError, match="static=True needs True or False"):
        FlashInferPlan(GEOMETRY, HOST, rows=2, workspace=mocked.workspace, static=True)


def test_a_plan_waits_for_kernels_that_are_being_built_until_its_first_launch(
    mocked: Mocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, make = Event(), workspace.make_wrapper

    def slow(*args: Any) -> Any:
        built.wait()
        return make(*args)

    monkeypatch.setattr(workspace, "make_wrapper", slow)
    monkeypatch.setattr(workspace, "append_one_token", mock.Mock())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    mocked.workspace.load(GEOMETRY)
    plan = make_plan(mocked)
    columns = PageTable(*(column.clone() for column in HOST))
    plan.plan(columns)
    for column in columns:
        column.zero_()  # they are free to be rewritten
    mocked.planner.assert_not_called()
    built.set()
    query, pages, out, lse = tensors()
    plan.run(query, pages, out, lse, 0.1)
    assert mocked.planner.call_args.args[5].tolist() == [41, 2]
    plan.plan(HOST)
    assert mocked.planner.call_count == 2
    plan.run(query, pages, out, lse, 0.1)
    assert mocked.planner.call_count == 2, "what was planned last"
    mocked.prefill.assert_called_once()


def test_plan_info_has_the_numbers_whose_names_are_known() -> None:
    assert cpp_vector("PrefillPlanInfo") == PLAN_FIELDS


def test_planner_copies_asynchronously_on_the_current_stream() -> None:
    assert "get_stream(float_workspace_buffer.device())" in cpp("csrc/batch_prefill.cu")
    assert "cudaMemcpyAsync(int_buffer, page_locked_int_buffer," in SCHEDULER
    assert "cudaStreamSynchronize" not in SCHEDULER


def test_launches_add_the_offsets_to_the_workspaces() -> None:
    """That is why every number of a plan is baked into a captured launch."""
    source = cpp("csrc/batch_prefill.cu")
    paged = DATA / "csrc/batch_prefill_paged.cuh"
    source += paged.read_text() if paged.exists() else ""
    unused = {"enable_cuda_graph", "split_kv"}
    missing = [name for name in PLAN_FIELDS if f"plan_info.{name}" not in source and name not in unused]
    assert missing == []


def test_full_workspace_is_recognised(mocked: Mocked) -> None:
    text = re.search(r'"Buffer overflow when allocating memory for " << name << " with size "', ALLOCATOR)
    assert text is not None
    names = re.findall(r'"(batch_prefill_tmp_[vs])"', SCHEDULER)
    assert {"batch_prefill_tmp_v", "batch_prefill_tmp_s"} <= set(names)
    plan = make_plan(mocked)
    mocked.planner.side_effect = RuntimeError(
        "Error in function 'aligned_alloc' at allocator.h:49: Buffer overflow when allocating memory for "
        "batch_prefill_tmp_v with size 4096 and alignment 16, but only 1024 bytes available in AlignedAllocator."
    )
    with pytest.raises(RuntimeError, match=r"float workspace of 1024 bytes .* 4096 bytes; raise workspace_bytes"):
        plan.plan(HOST)


def test_split_rows_take_what_is_reckoned() -> None:
    assert "int num_blocks_per_sm = 2;" in SCHEDULER
    assert "max_batch_size_if_split = max_grid_size / num_kv_heads;" in SCHEDULER
    assert "ceil_div(total_num_rows * gqa_group_size, cta_tile_q) + batch_size - 1;" in SCHEDULER
    assert "std::max(max_batch_size_if_split, total_num_tiles_q)" in SCHEDULER
    qwen3_8b = Geometry(32, 8, 128, 16, -1, 0.0, torch.bfloat16, torch.bfloat16)
    results = 270_532_608  # what 0.6.13 asked for on an H200
    if versions.counts_pairs_as_queries():
        queries = "padded_batch_size * cta_tile_q"
    else:
        queries, results = "max_partial_rows", results // 4
        assert "ceil_div(static_cast<size_t>(padded_batch_size) * cta_tile_q, gqa_group_size);" in SCHEDULER
    assert f"num_qo_heads * {queries} * head_dim_vo * sizeof(float)" in SCHEDULER
    assert f"num_qo_heads * {queries} * sizeof(float)" in SCHEDULER
    assert splitting.static_split_bytes(qwen3_8b, 2064, 65, 132) == results + results // 128 + 32
    blocks_of_long_rows = 2 * 132 // 8
    long_rows = splitting.split_bytes(qwen3_8b, 132)
    assert long_rows == (results + results // 128) // 129 * blocks_of_long_rows + 32
    assert splitting.static_split_bytes(qwen3_8b, 32, 3, 132) == long_rows


@pytest.mark.parametrize(
    ("query_heads", "max_batch_size", "given", "everything_fits"),
    [(16, 64, None, True), (32, 64, None, True), (32, 64, 2**30, True),
     (16, 64, 2**20, False), (16, 4096, None, True), (16, 1, None, True)],
)  # fmt: skip
def test_workspace_holds_all_prefills_and_within_bounds_those_to_record(
    mocked: Mocked,
    monkeypatch: pytest.MonkeyPatch,
    query_heads: int,
    max_batch_size: int,
    given: int | None,
    everything_fits: bool,
) -> None:
    def unallocated(device: torch.device, nbytes: int) -> SimpleNamespace:
        return SimpleNamespace(float_buffer=torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    monkeypatch.setattr(workspace, "Workspace", unallocated)
    group = Geometry(query_heads, 8, 128, 16, -1, 0.0, torch.bfloat16, torch.bfloat16)
    config = WrapConfig(max_batch_size=max_batch_size, workspace_bytes=given)
    shapes = RecordedShapes(max_batch_size, weights=1).all()
    planner = Planner([group], config, torch.device("cuda"), 40_960, shapes)
    assert all(map(planner.fits, shapes))
    pays = [shape._replace(split=True) for shape in shapes if planner._may_split(shape)]
    assert max(shape.tokens for shape in pays) == {16: 1536, 32: 768}[query_heads]
    assert all(map(planner.fits, pays)) is everything_fits
    assert not any(planner.fits(shape._replace(split=True)) for shape in shapes if shape.tokens > pays[-1].tokens)
    if given is None:
        assert splitting.split_bytes(group, 132) <= planner.workspace_bytes <= 256 * 2**20
    else:
        assert planner.workspace_bytes == given


# ---- what kernels there are


def test_head_sizes_with_kernels() -> None:
    assert macro_cases("DISPATCH_HEAD_DIM", r"case (\d+):") == set(versions.HEAD_DIMS)


def test_query_tiles_are_of_16_and_more() -> None:
    """The bound of the int workspace counts on it."""
    assert min(macro_cases("DISPATCH_CTA_TILE_Q", r"case (\d+):")) == 16


def test_queries_have_kernels_in_these_types() -> None:
    types = importlib.import_module("flashinfer.jit.utils").dtype_map
    assert set(versions.QUERY_DTYPES) <= set(types)
    assert torch.float32 not in types


def test_nvcc_and_ninja_are_looked_for_where_flashinfer_looks() -> None:
    source = Path(importlib.import_module("flashinfer.jit.cpp_ext").__file__ or "").read_text()
    for name in ('"FLASHINFER_NVCC"', '"CUDA_HOME"', '"CUDA_PATH"', '["which", "nvcc"]', '"/usr/local/cuda"'):
        assert name in source
    assert re.search(r'"ninja",\n', source)
    assert hasattr(importlib.import_module("flashinfer.jit.env"), "has_flashinfer_jit_cache")


def test_installed_version_is_supported() -> None:
    assert install.flashinfer_problem() is None


# ---- the plan itself, as far as it goes without kernels


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    pages = torch.zeros(3, 2, 2, 16, 128, dtype=torch.bfloat16)
    return query, pages, torch.empty_like(query), torch.empty(2, 4)


def test_plan_is_found_by_its_page_table(mocked: Mocked) -> None:
    plan = make_plan(mocked)
    assert find_plan(HOST.indptr, 2, GEOMETRY) is plan


def test_run_reads_the_table_it_is_given(mocked: Mocked) -> None:
    plan = make_plan(mocked)
    with pytest.raises(RuntimeError, match="nothing was planned"):
        plan.run(*tensors(), 0.1)
    plan.plan(HOST)
    wrapper = mocked.wrapper
    read = []
    wrapper.run.side_effect = lambda **_: read.append(wrapper._paged_kv_last_page_len_buf)
    advanced = HOST._replace(last_page_len=HOST.last_page_len + 1)
    plan.run(*tensors(), 0.1)
    plan.run(*tensors(), 0.1, table=advanced)
    assert [id(column) for column in read] == [id(HOST.last_page_len), id(advanced.last_page_len)]
    assert wrapper._paged_kv_last_page_len_buf is HOST.last_page_len, "what a graph made is let go"


def test_plans_of_one_geometry_share_the_wrapper_and_nothing_else(mocked: Mocked) -> None:
    first, second = (make_plan(mocked) for _ in range(2))
    mocked.prefill.assert_called_once()
    planner = mocked.planner
    planner.side_effect = lambda *arguments: list(range(15))
    first.plan(HOST)
    second.plan(HOST)
    workspaces = [call.args[1].data_ptr() for call in planner.call_args_list]
    pinned = [call.args[2].data_ptr() for call in planner.call_args_list]
    assert len(set(workspaces)) == len(set(pinned)) == 2
    infos = []
    for plan in (first, second, first):
        plan.run(*tensors(), 0.1)
        infos.append(mocked.wrapper._int_workspace_buffer.data_ptr())
    assert infos == [workspaces[0], workspaces[1], workspaces[0]]


def test_staging_buffers_take_turns(mocked: Mocked) -> None:
    plan = make_plan(mocked)
    planner = mocked.planner
    for _ in range(workspace.STAGING_BUFFERS + 1):
        plan.plan(HOST)
    addresses = [call.args[2].data_ptr() for call in planner.call_args_list]
    assert len(set(addresses)) == workspace.STAGING_BUFFERS >= 3
    assert addresses[0] == addresses[-1]


def test_frozen_plan_names_what_changed(mocked: Mocked) -> None:
    plan = make_plan(mocked, static=True)
    with pytest.raises(RuntimeError, match="freeze"):
        plan.freeze()
    plan.plan(HOST)
    plan.freeze()
    plan.plan(HOST)
    planner = mocked.planner
    planner.return_value = [*range(3), 64, *range(4, 15)]
    with pytest.raises(RuntimeError, match="cta_tile_q was 3 and is now 64"):
        plan.plan(HOST)


def test_static_prefill_keeps_to_the_tokens_of_its_first_plan(mocked: Mocked) -> None:
    plan = make_plan(mocked, static=True)
    plan.plan(HOST._replace(qo_indptr=torch.tensor([0, 3, 5], dtype=torch.int32)))
    plan.plan(HOST)
    assert mocked.planner.call_args.args[6] == 5
    with pytest.raises(ValueError, match="6 tokens"):
        plan.plan(HOST._replace(qo_indptr=torch.tensor([0, 3, 6], dtype=torch.int32)))


def test_int_workspace_grows_with_the_tokens_and_pinned_memory_with_it(mocked: Mocked) -> None:
    plan = make_plan(mocked)
    planner = mocked.planner
    for tokens in (2, 200_000):
        plan.plan(HOST._replace(qo_indptr=torch.tensor([0, 1, tokens], dtype=torch.int32)))
        _, int_buffer, pinned = planner.call_args.args[:3]
        assert int_buffer.numel() >= 4 * tokens
        assert pinned.numel() >= int_buffer.numel()


@pytest.mark.parametrize(
    "host",
    [
        HOST._replace(indptr=HOST.indptr.long()),
        HOST._replace(indptr=HOST.indptr[:2]),
        HOST._replace(last_page_len=HOST.last_page_len.to("meta")),
    ],
    ids=["type", "size", "place"],
)
def test_planner_never_gets_columns_it_would_misread(mocked: Mocked, host: PageTable) -> None:
    plan = make_plan(mocked)
    with pytest.raises(ValueError, match="on the host"):
        plan.plan(host)
    mocked.planner.assert_not_called()


def test_strides_that_kernels_cannot_read_are_copied() -> None:
    fused = torch.arange(3 * 4 * 64, dtype=torch.float32).view(3, 4, 64).to(torch.bfloat16)
    assert readable(fused[:, 1:3]) is not fused
    assert readable(fused[:, 1:3]).data_ptr() == fused[:, 1:3].data_ptr()
    for unreadable in (fused.transpose(1, 2)[..., :3], fused[..., 1:9], fused[..., :63].contiguous()[..., :56]):
        copied = readable(unreadable)
        assert copied.is_contiguous()
        assert copied.data_ptr() != unreadable.data_ptr()
        torch.testing.assert_close(copied, unreadable, rtol=0, atol=0)


@pytest.mark.parametrize(("d", "padded"), [(1, 64), (64, 64), (71, 128), (96, 128), (129, 256), (512, 512)])
def test_head_size_is_padded_to_the_next_with_kernels(d: int, padded: int) -> None:
    assert versions.padded_head_dim(d) == padded


def test_head_size_beyond_all_kernels_raises() -> None:
    with pytest.raises(ValueError, match="head size 513 is larger than 512"):
        versions.padded_head_dim(513)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "pad it"),
        ({"query_heads": 5}, "no multiple"),
        ({"dtype": torch.float32}, "use torch.bfloat16"),
    ],
)
def test_geometry_without_kernels_raises(mocked: Mocked, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(mocked, GEOMETRY._replace(**change))


def test_large_heads_need_a_version_with_their_kernels(mocked: Mocked) -> None:
    """Ends with 0.6, whose tensor-core kernels reject 512 at their launch."""
    has_kernels = "USE_VO_SPLIT" in cpp("include/flashinfer/attention/prefill.cuh")
    expectation = nullcontext() if has_kernels else pytest.raises(ValueError, match=r"flashinfer-python>=0\.7")
    with expectation:
        make_plan(mocked, GEOMETRY._replace(head_dim=512))


# ---- what is missing


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name.startswith("/usr") else real(name))


@pytest.mark.usefixtures("bare_machine")
def test_missing_compilers_are_named_with_the_way_out() -> None:
    nvcc, ninja = install.missing_for_cuda()
    assert "CUDA_HOME" in nvcc
    assert "flashinfer-jit-cache" in nvcc
    assert "pip install ninja" in ninja


@pytest.mark.usefixtures("bare_machine")
def test_kernels_that_come_along_need_no_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert install.missing_for_cuda() == []


@pytest.mark.usefixtures("bare_machine")
def test_nvcc_is_found_in_cuda_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert install.find_nvcc() == str(nvcc)


def test_unsupported_version_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "__version__", "0.8.0")
    assert 'pip install "flashinfer-python>=0.6.13,<0.8"' in str(install.flashinfer_problem())


def test_absent_flashinfer_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert 'pip install "compiled-llm[cuda]"' in str(install.flashinfer_problem())
