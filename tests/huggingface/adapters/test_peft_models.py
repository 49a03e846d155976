"""Adapters of PEFT's, of each kind, on a wrapped model: HuggingFace's results, whichever came first, or a refusal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from torch import Tensor

import compiled_llm
from compiled_llm import CompileError, Engine, SamplingParams, UnsupportedModelError
from support.huggingface.cache_name import CACHE
from support.huggingface.peft_kinds import (
    AS_THEY_ARE,
    BETWEEN,
    KINDS,
    OPTIONS,
    ORDERS,
    PAGE,
    SETTINGS,
    Kind,
    Pair,
    adapted,
    calls_of,
    plain,
    run,
    wrapped_first,
)
from support.parity import assert_account_is_empty

LORA = Kind(PeftType.LORA)
VIRTUAL = {PeftType.PROMPT_TUNING, PeftType.P_TUNING}
"""Kinds that put virtual tokens before a prompt."""
PROMPTS = next(kind for kind in KINDS if kind.type == PeftType.PROMPT_TUNING)
REFUSED_ADAPTED = {"POLY", "WAVEFT", "LORA with `alora_invocation_tokens`"}
"""Refused by `wrap` if the adapter is there already: these need their task, or what fake tensors do not have."""
NOT_ONE_GRAPH = {"SHIRA", "WAVEFT", "FROD", "LORA with `use_dora`"}

Results = dict[str, Tensor | str]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """BOFT leaves `CXX=gcc` behind if its CUDA extension cannot be built; kernels linked like that do not load."""
    with mock.patch.dict(os.environ):
        yield


def outcome(call: Callable[[Any], Tensor], model: Any) -> Tensor | str:
    """What HuggingFace returns, or the kind of its error."""
    try:
        with torch.no_grad():
            return call(model)
    except Exception as error:
        return type(error).__name__


@cache
def unwrapped(kind: Kind) -> Results:
    if CACHE == "cache" and kind.type in VIRTUAL and Version(peft.__version__) < Version("0.22"):
        pytest.skip("PEFT 0.21 looks for the cache under its old name, and gives virtual tokens in each step")
    try:
        model = adapted(kind, plain(kind))
    except ImportError as error:
        pytest.skip(str(error))
    return {name: outcome(call, model) for name, call in calls_of(kind).items()}


@cache
def without_adapter() -> Tensor:
    with torch.no_grad():
        return calls_of(LORA)["`model(...)`"](plain(LORA))


def assert_same(theirs: Tensor | str, call: Callable[[Any], Tensor], pair: Pair) -> None:
    if isinstance(theirs, str):
        assert outcome(call, pair.adapted) == theirs
    else:
        torch.testing.assert_close(run(call, pair)[1], theirs, rtol=1e-4, atol=1e-4)


def cases() -> list[Any]:
    """Kinds that are as LoRA is have one order in CI."""
    alike = {PeftType(name) for name in AS_THEY_ARE} - {PeftType.LORA}
    return [
        pytest.param(kind, order, id=f"{kind}, {order}", marks=[pytest.mark.whole] * (number and kind.type in alike))
        for kind in KINDS
        for number, order in enumerate(ORDERS)
    ]


def is_refused(kind: Kind, order: str) -> bool:
    return str(kind) in REFUSED_ADAPTED and order == "adapted first"


def test_every_kind_of_pefts_is_here() -> None:
    assert set(SETTINGS) == set(PeftType)


@pytest.mark.drawn(most=10)
@pytest.mark.parametrize(("kind", "order"), cases())
def test_an_adapted_model_gives_huggingfaces_results(kind: Kind, order: str) -> None:
    theirs = unwrapped(kind)
    changed = theirs["`model(...)`"]
    assert isinstance(changed, Tensor)
    assert not torch.allclose(changed[:, -without_adapter().shape[1] :], without_adapter(), atol=1e-3)
    if is_refused(kind, order):
        with pytest.raises(UnsupportedModelError, match="cannot be traced with packed tokens"):
            ORDERS[order](kind)
        return
    pair = ORDERS[order](kind)
    for name, call in calls_of(kind).items():
        assert_same(theirs[name], call, pair)
    if pair.wrapped.compiled.stats().pages is not None:
        assert_account_is_empty(pair.wrapped)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if str(kind) in NOT_ONE_GRAPH], ids=str)
def test_a_kind_that_breaks_the_graph_raises_at_the_line_where_it_is_compiled(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIONS, "mode", "compile")
    with pytest.raises(CompileError, match=r", at .*/peft/.*: `.*`. compiled_llm.explain"):
        run(calls_of(kind)["`generate`, greedy"], wrapped_first(kind))


def test_adapters_may_be_switched_disabled_merged_and_deleted_between_calls() -> None:
    ours, theirs = wrapped_first(LORA), adapted(LORA, plain(LORA))
    seen = []

    def compare() -> None:
        for call in calls_of(LORA).values():
            assert_same(outcome(call, theirs), call, ours)
        seen.append(calls_of(LORA)["`model(...)`"](theirs).detach())

    compare()
    for model in (ours.adapted, theirs):
        torch.manual_seed(1)
        model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, r=4))
        model.set_adapter("other")
    compare()
    with ours.adapted.disable_adapter(), theirs.disable_adapter():
        compare()
    for change in ("merge_adapter", "unmerge_adapter"):
        for model in (ours.adapted, theirs):
            getattr(model, change)()
        compare()
    for model in (ours.adapted, theirs):
        model.set_adapter("default")
        model.delete_adapter("other")
    compare()
    first, other, disabled, merged, unmerged, last = seen
    torch.testing.assert_close((merged, unmerged, last), (other, other, first), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(first, other, atol=1e-3)
    assert not torch.allclose(first, disabled, atol=1e-3)


@pytest.mark.parametrize("kind", [LORA, PROMPTS], ids=str)
def test_pefts_model_around_it_is_refused_with_the_line_to_write(kind: Kind) -> None:
    peft_model = adapted(kind, plain(kind))
    with pytest.raises(TypeError, match=r"a PeftModelForCausalLM; .*: compiled_llm.wrap\(model.get_base_model\(\)\)$"):
        compiled_llm.wrap(peft_model)
    wrapped = compiled_llm.wrap(peft_model.get_base_model(), **OPTIONS)
    with pytest.raises(TypeError, match=r"Engine: the PeftModelForCausalLM .* write compiled_llm.Engine\(model.get_ba"):
        Engine(peft_model)
    with Engine(wrapped) as engine:
        assert len(engine.generate([5, 6], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.parametrize("order", ORDERS)
def test_unwrap_takes_pefts_model_and_unwraps_the_one_inside(order: str) -> None:
    pair, call = ORDERS[order](LORA), calls_of(LORA)["`model(...)`"]
    theirs = run(call, pair)[1]
    assert compiled_llm.unwrap(pair.adapted) is pair.adapted
    assert not hasattr(pair.wrapped, "compiled")
    assert type(pair.wrapped) is type(plain(LORA))
    torch.testing.assert_close(outcome(call, pair.adapted), theirs, rtol=1e-4, atol=1e-4)
    assert compiled_llm.unwrap(pair.adapted) is pair.adapted


def hotswapped(model: Any) -> None:
    """With scales that are tensors, as `prepare_model_for_compiled_hotswap` makes them, and with numbers."""
    torch.manual_seed(3)
    other = get_peft_model(plain(LORA), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=40))
    with tempfile.TemporaryDirectory() as folder:
        other.save_pretrained(folder)
        hotswap_adapter(model, folder, "default")


def of_each_layer(change: Callable[[LoraLayer], object]) -> Callable[[Any], None]:
    def of_each(model: Any) -> None:
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                change(layer)

    return of_each


SCALING: dict[str, Callable[[Any], object]] = {
    "set_scale": of_each_layer(lambda layer: layer.set_scale("default", -6.0)),
    "scale_layer": of_each_layer(lambda layer: layer.scale_layer(-6.0)),
    "hotswap_adapter": hotswapped,
    "hotswap_adapter with tensors": hotswapped,
    "merge_adapter": lambda model: model.merge_adapter(),
}


@pytest.mark.parametrize("change", SCALING)
def test_an_engine_forgets_pages_of_other_scales(change: str) -> None:
    """PEFT keeps scales in a dictionary of each layer."""
    ours, theirs = wrapped_first(LORA), adapted(LORA, plain(LORA))
    prompt, params = list(range(3, 23)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    if "tensors" in change:
        for model in (ours.adapted, theirs):
            prepare_model_for_compiled_hotswap(model)
    with Engine(ours.wrapped) as engine:
        for _ in range(2):
            ids = torch.tensor([prompt])
            expected = theirs.generate(input_ids=ids, do_sample=False, min_new_tokens=8, max_new_tokens=8)[0, 20:]
            assert engine.generate([prompt], params)[0].token_ids == expected.tolist()
            for model in (ours.adapted, theirs):
                SCALING[change](model)


def test_the_table_has_a_line_for_each_kind_that_can_be_tried() -> None:
    """`python tests/support/huggingface/peft_kinds.py` writes it."""
    between = BETWEEN.search(PAGE.read_text())
    assert between is not None
    listed = [line.split(" | ")[0][2:].partition(", ")[0] for line in between[0].splitlines()[2:]]
    expected = [str(kind) for kind in KINDS if kind.type != PeftType.ADAMSS]
    assert list(dict.fromkeys(listed)) == expected
