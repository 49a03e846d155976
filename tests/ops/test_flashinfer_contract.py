"""Everything of FlashInfer that `compiled_llm_ops.flashinfer` relies on, checked without a GPU.

FlashInfer's classes are replaced by mocks that have their signatures, so that a call with an argument that no longer
exists fails; what signatures do not show (private attributes, C++ planners) is looked up in the sources that the
package ships.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_llm_ops import Geometry
from compiled_llm_ops.flashinfer import hopper, splitting, versions, workspace
from compiled_llm_ops.flashinfer.append import append
from compiled_llm_ops.flashinfer.planner import PLAN_FIELDS
from compiled_llm_ops.flashinfer.splitting import SPLIT, WHOLE
from support.ops.mocked_flashinfer import DATA, GEOMETRY, HOST, PREFILL, Mocked, flashinfer, make_plan, mocked, tensors

__all__ = ["mocked"]

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
    make_plan(mocked).plan(HOST)
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
    call, (_, *parameters) = mocked.wrapper.run.call_args, inspect.signature(PREFILL.run).parameters
    assert len(call.args) == 2
    assert parameters[:3] == ["q", "paged_kv_cache", "args"]
    assert set(call.kwargs) <= set(parameters[3:])
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
        "flashinfer.BatchMLAPagedAttentionWrapper",
        "flashinfer.BatchPrefillWithPagedKVCacheWrapper",
        "flashinfer.append_paged_kv_cache",
        "flashinfer.utils._get_cache_alibi_slopes_buf",
        "flashinfer.utils.is_sm90a_supported",
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
    private = {"_plan_info", "_int_workspace_buffer", "_float_workspace_buffer", "_cached_module", "_qo_indptr_last"}
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
    make_plan(mocked, captured_tokens=2).plan(HOST)
    passed = dict(zip(declared, mocked.planner.call_args.args, strict=True))
    assert passed["kv_len_arr"].tolist() == [41, 2]
    assert (passed["total_num_rows"], passed["batch_size"], passed["causal"]) == (2, 2, True)
    assert (passed["enable_cuda_graph"], passed["page_size"]) == (True, 16)
    assert passed.get("uniform_q_len", 0) == 0


@pytest.mark.parametrize("variant", [SPLIT, WHOLE, -1])
def test_the_planner_is_told_whether_to_split(mocked: Mocked, variant: int) -> None:
    plan = make_plan(mocked, variant=variant)
    at = PLANNER.index("disable_split_kv")
    for pages, worthwhile in ((1, False), (3000, True)):
        plan.plan(HOST._replace(indptr=torch.tensor([0, pages, pages + 1], dtype=torch.int32)))
        given = mocked.planner.call_args.args[at]
        assert given is not (worthwhile if variant < 0 else variant == SPLIT)


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
    plan = make_plan(mocked, captured_tokens=2, variant=WHOLE)
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
    for variant, blocks in ((SPLIT, 33), (WHOLE, -(-301 * GEOMETRY.query_heads // GEOMETRY.kv_heads // 64) + 1)):
        plan = make_plan(mocked, captured_tokens=301, variant=variant)
        plan.plan(host)
        assert dict(zip(PLAN_FIELDS, plan.owner.numbers.tolist(), strict=False)) == {
            **dict.fromkeys(PLAN_FIELDS, 7), "cta_tile_q": 64, "padded_batch_size": blocks
        }  # fmt: skip


def test_plan_info_has_the_numbers_whose_names_are_known() -> None:
    assert cpp_vector("PrefillPlanInfo") == PLAN_FIELDS


# ---- the kernels for Hopper


def test_the_planner_for_hopper_gets_its_arguments(mocked: Mocked) -> None:
    declared = cpp_parameters("csrc/batch_prefill_sm90_jit_binding.cu", "BatchPrefillWithKVCacheSM90Plan")
    mocked.planner.return_value = list(range(len(hopper.FIELDS)))
    plan = make_plan(mocked, captured_tokens=2, variant=hopper.FA3)
    plan.plan(HOST)
    passed = dict(zip(declared, mocked.planner.call_args.args, strict=True))
    assert passed["kv_len_arr"].tolist() == [41, 2]
    assert (passed["total_num_rows"], passed["batch_size"], passed["causal"]) == (2, 2, True)
    assert (passed["enable_cuda_graph"], passed["page_size"], passed["head_dim_vo"]) == (True, 16, 128)
    assert mocked.prefill.call_args.kwargs["backend"] == "fa3"
    plan.run(*tensors(), 0.1)
    assert mocked.wrapper._plan_info == list(range(len(hopper.FIELDS)))


def test_its_plan_has_the_numbers_whose_names_are_known() -> None:
    assert cpp_vector("PrefillPlanSM90Info") == hopper.FIELDS


def test_its_plan_takes_what_is_reckoned() -> None:
    assert "max_num_works_per_head = ceil_div(total_num_rows, cta_tile_q) + batch_size - 1;" in SCHEDULER
    assert "max_num_works_per_head * num_qo_heads" in SCHEDULER
    lists = set(re.findall(r'"batch_prefill_sm90_(\w+)"', SCHEDULER))
    assert "work_indptr" in lists
    assert len(lists - {"work_indptr"}) == hopper._LISTS
    assert "sizeof(IdType) * (num_sm90_ctas + 1)" in SCHEDULER
    assert "if (head_dim_vo == 64) {\n    cta_tile_q = 192;" in SCHEDULER


def test_its_modules_are_named_and_built_as_the_wrapper_does() -> None:
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    module = hopper._module_of(GEOMETRY)
    for function in (modules.get_batch_prefill_uri, modules.gen_batch_prefill_module):
        inspect.signature(function).bind(*module)
    assert hopper._name(GEOMETRY) == modules.get_batch_prefill_uri(*module)
    spec = importlib.import_module("flashinfer.jit.core").JitSpec
    inspect.signature(spec.build).bind(None, verbose=False)
    env = importlib.import_module("flashinfer.jit.env")
    assert {"FLASHINFER_AOT_DIR", "FLASHINFER_JIT_DIR"} <= set(vars(env))
    assert "FLASHINFER_JIT_DIR / self.name" in inspect.getsource(spec.jit_library_path.fget)


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
    with pytest.raises(RuntimeError, match=r"workspace of 1024 bytes .* 4096 bytes; raise workspace_bytes"):
        plan.plan(HOST)


def test_tiles_of_captured_launches_follow_from_the_longest_row_there_is_room_for() -> None:
    assert "const uint64_t max_seq_len = total_num_rows - batch_size + 1;" in SCHEDULER
    tiles = cpp("include/flashinfer/utils.cuh")
    assert "if (avg_packed_qo_len > 64 && head_dim < 256) {" in tiles
    assert "if (avg_packed_qo_len > 16) {" in tiles
    for tokens, rows, tile in ((64, 64, 16), (64, 60, 16), (64, 50, 64), (64, 32, 128), (64, 3, 128)):
        assert splitting.captured_tile(GEOMETRY, tokens, rows) == tile
    assert splitting.captured_tile(GEOMETRY._replace(head_dim=256), 64, 3) == 64


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
    assert splitting.captured_split_bytes(qwen3_8b, 2064, 65, 132) == results + results // 128 + 32
    blocks_of_long_rows = 2 * 132 // 8
    long_rows = splitting.split_bytes(qwen3_8b, 132)
    assert long_rows == (results + results // 128) // 129 * blocks_of_long_rows + 32
    assert splitting.captured_split_bytes(qwen3_8b, 32, 3, 132) == long_rows


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


def test_each_kernel_is_loaded_by_one_method_and_can_be_loaded_from_a_path() -> None:
    core = importlib.import_module("flashinfer.jit.core")
    assert all("build_and_load" not in vars(kind) for kind in core.JitSpec.__subclasses__())
    built = getattr(core, "JitSpecNvcc", core.JitSpec)  # the subclass in 0.7
    inspect.signature(built.load).bind(None, Path("kernel.so"))
    inspect.signature(built.build_and_load).bind(None)
    assert isinstance(built.is_aot, property)
    jit = inspect.getsource(importlib.import_module("flashinfer.jit.env"))
    assert re.search(r"FLASHINFER_JIT_DIR.*cached_ops", jit)
