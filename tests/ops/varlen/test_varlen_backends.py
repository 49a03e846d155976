"""The backends `"flash-attn"` and `"torch"` on a CPU, with stand-ins for the packages' functions: what these are given,
and what becomes of their results. On a GPU see `test_varlen_gpu.py`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import WrapConfig
from compiled_llm.kinds.full import Full
from compiled_llm.kinds.indexers.blocks import Blocks
from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.latent import Latent
from compiled_llm.kinds.latent_probe import Expansion
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.uneven import Uneven
from compiled_llm.kinds.variant import LayerVariant, VariantAttention
from compiled_llm.model.checks import check_layers, check_placement
from compiled_llm_ops import paged_attention, paged_attention_lse
from compiled_llm_ops.backends import BACKENDS, backend_for, backend_named
from compiled_llm_ops.contracts import Geometry, PlannedBatch
from compiled_llm_ops.protocol import Plan, TritonInstallation, owner_of
from compiled_llm_ops.varlen.flash_attn import install as flash_attn_install
from compiled_llm_ops.varlen.rows import BlockTables
from compiled_llm_ops.varlen.torch import install as torch_install
from support.huggingface.families import FAMILIES, make
from support.ops.op_cases import Batch
from support.ops.varlen_packages import PACKAGES, Packages, assert_block_tables, random_table, stand_in_for
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

LENGTHS, QUERIES = [1, 256, 257, 700, 300, 40, 5], [1, 256, 2, 300, 33, 0, 1]
"""One token, a full page, one more; whole rows and the ends of some, and a row without queries."""

LAYER = Layer(query_heads=4, kv_heads=2, head_dim=64, window_left=-1, logits_soft_cap=0.0, kind=Full())
BOTH = pytest.mark.parametrize("backend", ["flash-attn", "torch"])


def plan_of(backend: str) -> Plan:
    """A plan, which has to be kept while it is used."""
    return backend_named(backend).new_plan(backend_named(backend).workspace(torch.device("cpu"), 0), 0)


def batch_of(seed: int, **sizes: Any) -> Batch:
    return Batch(LENGTHS, QUERIES, **{"page_size": 256, "head_dim": 64, "seed": seed, **sizes}).filled()


def decided(batch: Batch, captured_tokens: int = -1) -> PlannedBatch:
    geometry = Geometry(4, 2, 64, batch.page_size, -1, 0.0, torch.float32, torch.float32)
    columns = (batch.qo_indptr.numpy(), batch.indptr.numpy(), batch.last_page_len.numpy())
    return PlannedBatch(*columns, geometry, torch.empty(0), captured_tokens)


# ---- what packages are given, and what becomes of their results


@pytest.mark.drawn
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (0, 0.0), (255, 0.0), (300, 1.5)])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"group": 5, "dtype": torch.bfloat16},
        {"head_dim": 80, "padded": 128, "group": 1},
        {"group": 4, "kv_heads": 1},
    ],
    ids=str,
)
def test_packages_attend_as_plain_pytorch(
    package: str, window_left: int, soft_cap: float, sizes: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft_cap = 0.0 if package == "torch" else soft_cap
    handed, plan, batch = stand_in_for(package, monkeypatch), plan_of(PACKAGES[package]), batch_of(seed, **sizes)
    *arguments, unplanned, workspace, scale = batch.arguments()
    how = (workspace, scale, window_left, soft_cap)
    out, lse = paged_attention_lse(*arguments, plan.tensor, *how)
    expected = batch.expected(scale, window_left, soft_cap)
    near = {"rtol": 2e-2, "atol": 2e-2} if out.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out.float(), expected, **near)
    torch.testing.assert_close(lse, paged_attention_lse(*arguments, unplanned, *how)[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(paged_attention(*arguments, plan.tensor, *how), out), "without the log-sum-exp"
    assert len(handed.calls) == 2


@pytest.mark.parametrize("package", PACKAGES)
def test_keys_and_values_are_views_of_the_pages(package: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handed, plan, batch = stand_in_for(package, monkeypatch), plan_of(PACKAGES[package]), batch_of(seed)
    query, pages, *arguments = batch.arguments()
    paged_attention(query, pages, *arguments[:4], plan.tensor, *arguments[5:])
    (call,) = handed.calls
    assert call.keys.shape == (len(pages), 256, 2, 64)
    assert call.keys.stride() == call.values.stride() == (pages.stride(0), 64, 256 * 64, 1)
    assert call.keys.data_ptr() == pages.data_ptr()
    assert call.values.data_ptr() == pages[0, 1].data_ptr()
    assert call.most_keys == 256 * len(batch.indices)


def test_flash_attn_3_takes_any_page_size(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for("flash-attn 3", monkeypatch)
    plan, batch = plan_of("flash-attn"), batch_of(seed, page_size=4)
    *arguments, _, workspace, scale = batch.arguments()
    out = paged_attention(*arguments, plan.tensor, workspace, scale, 30)
    torch.testing.assert_close(out, batch.expected(scale, 30), rtol=1e-4, atol=1e-5)
    assert backend_named("flash-attn").missing_kernel(decided(batch).geometry) is None


def test_flash_attn_3_is_refused_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(4, 2, 64, 256, 199, 0.0, torch.bfloat16, torch.bfloat16)
    assert backend_named("flash-attn").missing_kernel(geometry) is None
    stand_in_for("flash-attn 3", monkeypatch)
    assert "this layer has one of 200 tokens" in str(backend_named("flash-attn").missing_kernel(geometry))


@BOTH
def test_grids_follow_from_the_longest_row_unless_they_are_captured(
    backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = {"flash-attn": "flash-attn 2"}.get(backend, backend)
    handed, plan, batch = stand_in_for(package, monkeypatch), plan_of(backend), batch_of(seed)
    single = Batch([3, 9], [1, 1], page_size=256, head_dim=64, seed=seed).filled()
    for rows, captured_tokens in ((batch, -1), (batch, sum(QUERIES)), (single, -1), (batch, -1)):
        plan.decide(decided(rows, captured_tokens))
        *arguments, _, workspace, scale = rows.arguments()
        paged_attention(*arguments, plan.tensor, workspace, scale)
    most = [call.most_queries for call in handed.calls]
    assert most == [max(QUERIES), sum(QUERIES), 1, max(QUERIES)]


@pytest.mark.parametrize("package", PACKAGES)
def test_tokens_and_rows_may_be_missing(package: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured batch has room for tokens that no row has, and for rows without pages; and one may have no tokens."""
    handed, plan, batch = stand_in_for(package, monkeypatch), plan_of(PACKAGES[package]), batch_of(seed)
    query, pages, starts, indptr, indices, last, _, workspace, scale = batch.arguments()
    how = (plan.tensor, workspace, scale)
    padded = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, 7))
    more = [torch.cat([column, column[-1:]]) for column in (starts, indptr)]
    room = torch.nn.functional.pad(indices, (0, 9), value=10**6)
    out = paged_attention(padded, pages, *more, room, torch.cat([last, last.new_zeros(1)]), *how)
    torch.testing.assert_close(out[: len(query)], batch.expected(scale), rtol=1e-4, atol=1e-5)
    none = torch.zeros_like(starts)
    assert paged_attention(query[:0], pages, none, indptr, indices, last, *how).shape == (0, 4, 64)
    assert len(handed.calls) == 1


def test_block_tables_of_random_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        args, lengths = random_table(rng)
        found = BlockTables.of(args)
        assert_block_tables(found, args, lengths)


# ---- whole models


@pytest.mark.drawn
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("Qwen2", "eager"),
        ("GptOss", "eager"),
        *(pytest.param(*case, marks=pytest.mark.whole) for case in (("GptOss", "compile"), ("Gemma2", "eager"))),
    ],
)
def test_models_generate_huggingfaces_tokens(
    package: str, family: str, mode: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GptOss has sinks, which need the log-sum-exp, and windows, as Gemma2 has, which caps its logits."""
    if (package, family) == ("torch", "Gemma2"):
        pytest.skip("it has no cap")
    if package == "flash-attn 3" and family != "Qwen2":
        pytest.skip("it is refused windows")
    handed = stand_in_for(package, monkeypatch)
    reference, model = (make(family, FAMILIES[family], seed) for _ in range(2))
    options: dict[str, Any] = {"page_size": 256, "kv_memory": "4096 tokens", "max_batch_size": 4, "progress": False}
    compiled_llm.wrap(model, mode=mode, backend=cast(Any, PACKAGES[package]), **options)
    for lengths in ([5], [5, 40, 17]):
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 12), greedy(reference, inputs, 12))
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert handed.calls, "the stand-in attended"
    assert_account_is_empty(model)


def test_prompts_longer_than_a_page_are_read_in_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = stand_in_for("flash-attn 2", monkeypatch)
    reference, model = (
        tiny_qwen3(num_hidden_layers=1, eos_token_id=None, max_position_embeddings=1024) for _ in range(2)
    )
    options: dict[str, Any] = {"page_size": 256, "kv_memory": "4096 tokens", "max_batch_size": 2, "progress": False}
    compiled_llm.wrap(model, mode="eager", backend="flash-attn", prefill_tokens=200, **options)
    inputs = mixed_prompts([600, 30], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, 5), greedy(reference, inputs, 5))
    assert max(call.most_queries for call in handed.calls) <= 200


# ---- what is refused


class Placed:
    """What the checks look at of a model."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = torch.device("cuda:0"), dtype

    def parameters(self) -> list[Any]:
        return [self]


def config_of(backend: str, **options: Any) -> WrapConfig:
    return WrapConfig(backend=cast(Any, backend), **{"page_size": 256, **options})


def on_cuda(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return cast(PreTrainedModel, Placed(dtype))


@BOTH
@pytest.mark.usefixtures("problems")
def test_what_fits_is_taken_in_any_mode(backend: str) -> None:
    sizes = [LAYER, LAYER._replace(head_dim=256), LAYER._replace(window_left=100), LAYER._replace(head_dim=72)]
    for mode in ("eager", "compile", "reduce-overhead", "cuda-graphs", "piecewise"):
        config = config_of(backend, mode=mode)
        for dtype in (torch.bfloat16, torch.float16):
            check_placement(on_cuda(dtype), config)
            check_layers(on_cuda(dtype), sizes, config)


@BOTH
@pytest.mark.usefixtures("problems")
@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        ({"head_dim": 264}, {}, r"heads of size 264: the largest is 256; .*backend='triton' or backend='ref"),
        ({}, {"page_size": 16}, r"multiples of 256 tokens there, and page_size=16; backend='flashinfer' or"),
        ({"query_heads": 5}, {}, r"5 query heads are no multiple of 2 kv heads; "),
        ({"kind": Uneven(32)}, {}, r"its keys have heads of size 64, and its values of size 32; backend='reference'"),
        (
            {"kind": VariantAttention(Full(), LayerVariant("alibi", (), frozenset()))},
            {},
            r"backend='\S+' cannot run attention layer 1: it has no kernels for variants; backend='flashinfer' or",
        ),
        (
            {"kind": Blocks(Full(), block_size=256)},
            {},
            r"backend='\S+': attention layer 1 reads blocks .* no such kernel.*without back",
        ),
        (
            {"kind": Latent(Expansion("kv_b_proj", 16, 64), 64)},
            {},
            r"backend='\S+' cannot run attention layer 1: it has no kernels for latents .*; backend='triton' can",
        ),
    ],
    ids=str,
)
def test_a_layer_that_does_not_fit_is_named_with_the_reason_and_who_can(
    backend: str, layer: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_layers(on_cuda(), [LAYER, LAYER._replace(**layer)], config_of(backend, **options))


@pytest.mark.usefixtures("problems")
def test_only_flash_attn_caps_logits() -> None:
    capped = [LAYER, LAYER._replace(logits_soft_cap=30.0)]
    check_layers(on_cuda(), capped, config_of("flash-attn"))
    message = r"'torch' cannot run attention layer 1: .* capped at 30.0; .*backend='triton' or backend='flash-attn' or"
    with pytest.raises(UnsupportedModelError, match=message):
        check_layers(on_cuda(), capped, config_of("torch"))


@BOTH
@pytest.mark.usefixtures("problems")
@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.float32, {}, r"has kernels for bfloat16, float16 only; .*, or wrap with backend='triton'"),
        (torch.bfloat16, {"kv_dtype": "fp8_e4m3"}, r"has no kernels for such pages; wrap with back"),
        (
            torch.bfloat16,
            {"cascade": True},
            r"has no decode kernel on cuda that reads pages which rows share once; wrap with backend='auto'",
        ),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(
    backend: str, dtype: torch.dtype, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"backend='{backend}' {message}"):
        check_placement(on_cuda(dtype), config_of(backend, **options))


@BOTH
def test_batch_invariant_answers_have_kernels_of_their_own(backend: str) -> None:
    with pytest.raises(ValueError, match=f"batch_invariant=True with backend='{backend}': attention has kernels"):
        config_of(backend, batch_invariant=True)


@BOTH
def test_a_cpu_has_no_kernels(backend: str) -> None:
    model = tiny_qwen3(num_hidden_layers=1)
    with pytest.raises(ValueError, match=f"backend='{backend}' has kernels for cuda only.*wrap with backend='auto'"):
        compiled_llm.wrap(model, backend=cast(Any, backend), progress=False)
    assert not hasattr(model, "compiled")


def test_auto_never_takes_them(problems: dict[str, list[str]]) -> None:
    for lacks in ({}, {"flashinfer": ["pip install X"]}, {"flashinfer": ["pip install X"], "triton": ["a GPU"]}):
        problems.clear()
        problems |= lacks
        assert backend_for("auto", "cuda").name in ("flashinfer", "triton")


# ---- what must be installed


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, r"flash-attn does not import \(.*\): pip install flash-attn --no-build-isolation, or wrap with"),
        (SimpleNamespace(__version__="2.7.4.post1"), r"flash-attn 2.7.4.post1 is not installed in version 2.8 or"),
        (SimpleNamespace(), r"flash-attn 2 is not installed in version 2.8 or newer"),
    ],
    ids=["none", "old", "version 4 alone"],
)
def test_flash_attn_that_is_missing_or_old_is_said(module: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(TritonInstallation, "problems", lambda self, builds=True: [])
    with pytest.raises(RuntimeError, match=message):
        check_placement(on_cuda(), config_of("flash-attn"))


def test_either_version_of_flash_attn_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installation = flash_attn_install.FlashAttnInstallation()
    for version in ("2.8.0", "2.8.4", "2.10", "3.0"):
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__version__=version))
        assert installation.problems() == []
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(flash_attn_install, "flash_attn_3", lambda: SimpleNamespace())
    assert installation.problems() == []


@pytest.mark.parametrize(("capability", "is_taken"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_flash_attn_3_is_for_hopper(
    capability: tuple[int, int], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace())
    flash_attn_install.flash_attn_3.cache_clear()
    assert (flash_attn_install.flash_attn_3() is not None) is is_taken
    flash_attn_install.flash_attn_3.cache_clear()


def test_a_torch_without_block_tables_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    installation = torch_install.TorchInstallation()

    def varlen_attn_out(out: Tensor, query: Tensor, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        return out

    for module in (SimpleNamespace(), SimpleNamespace(varlen_attn_out=varlen_attn_out)):
        monkeypatch.setattr(torch_install, "varlen", lambda module=module: module)
        (found,) = installation.problems()
        assert found.startswith(f"torch {torch.__version__} has no torch.nn.attention.varlen.varlen_attn_out with a bl")
        assert found.endswith("install torch 2.13 or newer, or wrap with backend='auto'")


@pytest.mark.skipif(torch_install.TorchInstallation().problems() != [], reason="needs torch 2.13")
def test_a_torch_that_runs_another_kernel_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("torch.nn.attention"), "current_flash_attention_impl", lambda: "FA3")
    (found,) = torch_install.TorchInstallation().problems()
    assert found.startswith("torch runs FA3 in place of its own kernel: call torch.nn.attention.restore_flash")


# ---- the real functions


@pytest.mark.skipif(torch_install.TorchInstallation().problems() != [], reason="needs torch 2.13")
def test_the_stand_in_has_the_signature_and_the_shapes_of_torchs() -> None:
    module = torch_install.varlen()
    assert_same_arguments(Packages.varlen_attn_out, module.varlen_attn_out)
    assert module.AuxRequest._fields == ("lse",)
    batch = batch_of(0, dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        query, pages, *columns = (mode.from_tensor(tensor) for tensor in batch.arguments()[:6])
        keys, values = pages.transpose(2, 3).unbind(1)
        starts, _, _, last = columns
        table = torch.empty(len(last), 7, dtype=torch.int32)
        out = torch.empty_like(query)
        found, lse = module.varlen_attn_out(
            out, query, keys, values, starts, starts, 300, 7 * 256, return_aux=module.AuxRequest(lse=True), scale=0.1,
            window_size=(100, 0), enable_gqa=True, seqused_k=last, block_table=table, num_splits=1,
        )  # fmt: skip
        assert found is out
        assert lse.shape == (query.shape[1], len(query)), "heads first, though its docstring says tokens"


@pytest.mark.parametrize("name", ["flash_attn.flash_attn_varlen_func", "flash_attn_interface.flash_attn_with_kvcache"])
def test_the_stand_in_has_the_signature_of_flash_attns(name: str) -> None:
    module, function = name.split(".")
    found = pytest.importorskip(module, exc_type=ImportError)
    assert_same_arguments(getattr(Packages, function), getattr(found, function))


def assert_same_arguments(stand_in: Any, real: Any) -> None:
    _, *ours = inspect.signature(stand_in).parameters.values()
    theirs = inspect.signature(real).parameters.values()
    assert [(one.name, one.kind, one.default) for one in ours] == [(one.name, one.kind, one.default) for one in theirs]


def test_plans_are_found_by_their_address() -> None:
    for backend in ("flash-attn", "torch"):
        plan = plan_of(backend)
        assert owner_of(plan.tensor) is plan
        assert backend in BACKENDS


@pytest.mark.parametrize("package", PACKAGES)
def test_graphs_hold_one_op_with_its_fake(package: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and strides of fakes are those of results, and nothing in a graph sees which package attends."""
    handed, plan, batch = stand_in_for(package, monkeypatch), plan_of(PACKAGES[package]), batch_of(seed)
    *arguments, _, workspace, scale = batch.arguments()

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = paged_attention_lse(*tensors, plan.tensor, workspace, scale, 300)
        return out * 2, lse

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(*arguments), attend(*arguments))
    assert len(handed.calls) == 2
