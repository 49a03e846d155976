"""Each change of a model gives another number to what relies on it, once; calls change nothing by themselves."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.mutation_guard import install_generation_tagging_init
from transformers import PreTrainedModel

from compiled_llm.compat.torch.dynamo import before_tracing
from compiled_llm.model.version import contents, module_tree
from compiled_llm.model.version.code import Code
from compiled_llm.model.version.model_version import ModelVersion
from compiled_llm.model.version.module_state import ModuleState
from compiled_llm.model.version.tensors import Tensors
from support.execution.model_changes import ORDER_OF_LAYER, TRACED_LAYER, model_to_change
from support.huggingface.vision import make
from support.in_threads import start
from support.noting import note_calls
from support.tiny_models import tiny_qwen3

PARTS = ("tensors", "layers", "values")


class Watch:
    """Tells which parts of a model have another number than at the last check."""

    def __init__(self, model: PreTrainedModel, layers: int = 1, parts: tuple[str, ...] = PARTS) -> None:
        self._version, self._parts = ModelVersion(model, layers), parts
        self._known = self._now()

    def changed(self) -> set[str]:
        self._version.begin_check()
        before, self._known = self._known, self._now()
        return {part for part in self._parts if before[part] != self._known[part]}

    def _now(self) -> dict[str, int]:
        return {part: getattr(self._version, part) for part in self._parts}


# ---- values: keys and values of earlier texts are no longer right


@pytest.fixture
def model() -> Any:
    """One whose first MLP holds much, in many ways."""
    model = tiny_qwen3(num_hidden_layers=1)
    mlp: Any = model.model.layers[0].mlp
    mlp.scales = {"first": 1.0, "second": 2.0}
    mlp.nested = {"inner": [({"deep": 1.0},)]}
    mlp.active = ["first"]
    mlp.merged = {"first"}
    mlp.ordered = OrderedDict(first=1.0, second=2.0)
    mlp.latest = deque([1.0])
    mlp.tensors = {"scale": torch.ones(()), "several": [torch.ones(2)]}
    mlp.tensor = torch.ones(2)
    mlp.settings = copy.deepcopy(model.config)
    mlp.around = [mlp.scales, mlp]
    mlp.around.append(mlp.around)
    return model


def in_mlp(change: Callable[[Any], object]) -> Callable[[PreTrainedModel], object]:
    return lambda model: change(model.model.layers[0].mlp)


SEEN: dict[str, Callable[[Any], object]] = {
    "an entry": in_mlp(lambda mlp: mlp.scales.update(first=3.0)),
    "a name": in_mlp(lambda mlp: mlp.scales.update(third=mlp.scales.pop("second"))),
    "an entry more": in_mlp(lambda mlp: mlp.active.append("second")),
    "an entry in a set": in_mlp(lambda mlp: mlp.merged.clear()),
    "an entry of a subclass": in_mlp(lambda mlp: mlp.ordered.move_to_end("first")),
    "an entry of a deque": in_mlp(lambda mlp: mlp.latest.append(2.0)),
    "an entry far inside": in_mlp(lambda mlp: mlp.nested["inner"][0][0].update(deep=2.0)),
    "a tensor that was replaced": in_mlp(lambda mlp: mlp.tensors.update(scale=torch.zeros(()))),
    "a tensor that was written to": in_mlp(lambda mlp: mlp.tensors["scale"].fill_(2.0)),
    "a tensor far inside": in_mlp(lambda mlp: mlp.tensors["several"][0].fill_(2.0)),
    "a tensor in an attribute": in_mlp(lambda mlp: mlp.tensor.fill_(2.0)),
    "an attribute": in_mlp(lambda mlp: setattr(mlp, "active", ["first"])),
    "the config": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "a config of a module's own": in_mlp(lambda mlp: setattr(mlp.settings, "rms_norm_eps", 0.5)),
    "a dictionary of the config": lambda model: model.config.rope_parameters.update(rope_theta=1e5),
    "a weight": lambda model: torch.nn.init.ones_(model.lm_head.weight),
    "a module": lambda model: model.model.layers.__setitem__(0, copy.deepcopy(model.model.layers[0])),
}


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_a_change_is_seen_once(change: Callable[[Any], object], model: Any) -> None:
    watch = Watch(model)
    assert not watch.changed()
    change(model)
    assert "values" in watch.changed()
    assert not watch.changed()


def test_what_was_changed_is_watched_from_then_on(model: Any) -> None:
    watch, mlp = Watch(model), model.model.layers[0].mlp
    mlp.scales["more"] = {"inside": 1.0}
    assert watch.changed() == {"values"}
    mlp.scales["more"]["inside"] = 2.0
    assert watch.changed() == {"values"}


def test_what_attributes_hold_is_watched_once_they_hold_it(model: Any) -> None:
    watch = Watch(model)
    for holder in (model.model.layers[0].mlp, model.model):
        holder.later = {"inside": 1.0}
        assert "values" in watch.changed()
        holder.later["inside"] = 2.0
        assert watch.changed() == {"values"}
        holder.later = torch.ones(2)
        assert "values" in watch.changed()
        holder.later.fill_(2.0)
        assert watch.changed() == {"values"}
        holder.later.data = torch.ones(2)
        assert watch.changed() == {"tensors", "values"}


UNSEEN: dict[str, Callable[[Any], object]] = {
    "`.data`": lambda model: model.lm_head.weight.data.mul_(2),
    "an object of another kind": in_mlp(lambda mlp: setattr(mlp.other, "scale", 2.0)),
    "a class": in_mlp(lambda mlp: setattr(type(mlp), "scale", 2.0)),
    "a long list": in_mlp(lambda mlp: mlp.long.append(2.0)),
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_what_docs_name_leaves_no_trace(
    change: Callable[[Any], object], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once one of these is seen, docs/how-to/engine.md need not name it."""
    mlp = model.model.layers[0].mlp
    monkeypatch.setattr(type(mlp), "scale", 1.0, raising=False)
    mlp.other, mlp.long = SimpleNamespace(scale=1.0), [1.0] * (contents.MOST_ENTRIES + 1)
    watch = Watch(model)
    change(model)
    assert not watch.changed()


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 2}], ids=str)
def test_calls_change_nothing(options: dict[str, Any], model: Any) -> None:
    watch, ids = Watch(model), torch.tensor([[5, 6, 7]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **options)
    model(ids)
    assert not watch.changed()


# ---- tensors: CUDA graphs read other addresses

TENSORS: dict[str, Callable[[Any], object]] = {
    "a module in a module": lambda model: setattr(
        model.model.layers[1].self_attn, "o_proj", copy.deepcopy(model.model.layers[1].self_attn.o_proj)
    ),
    "a layer less": lambda model: model.model.layers.pop(1),
    "a layer more": lambda model: model.model.layers.append(copy.deepcopy(model.model.layers[1])),
    "a buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq.clone()),
    "a tensor in an attribute": lambda model: setattr(model.model, "loose", torch.zeros(3)),
    "no tensor in an attribute": lambda model: delattr(model.model, "loose"),
    "a tensor in a list": lambda model: model.model.several.__setitem__(1, torch.zeros(3)),
    "a shorter list": lambda model: model.model.several.pop(),
    "a tensor in a dictionary": lambda model: model.model.named.update(there=torch.zeros(3)),
    "all parameters of a module": lambda model: setattr(
        model.lm_head, "_parameters", {"weight": nn.Parameter(model.lm_head.weight.detach().clone()), "bias": None}
    ),
    "all buffers of a module": lambda model: setattr(
        model.model.rotary_emb, "_buffers", {**copy.deepcopy(model.model.rotary_emb._buffers)}
    ),
    "all modules of a module": lambda model: setattr(model, "_modules", copy.deepcopy(model._modules)),
    "another dtype": lambda model: model.half(),
    "a weight's data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
}
"""Those that change other tensors than ``support.execution.model_changes`` does."""


@pytest.fixture
def two_layers() -> Any:
    model: Any = tiny_qwen3()
    model.model.loose = torch.zeros(3)
    model.model.several, model.model.named = [1, torch.zeros(3)], {"there": torch.zeros(3), "nor": "this"}
    return model


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_every_change_of_what_tensors_there_are_is_noticed(change: Callable[[Any], object], two_layers: Any) -> None:
    alone, watch = Watch(two_layers, 2, parts=("tensors",)), Watch(two_layers, 2)
    change(two_layers)
    assert alone.changed() == {"tensors"}
    assert watch.changed() >= {"tensors", "values"}
    assert not alone.changed() | watch.changed()


def test_what_generate_notes_in_a_vision_language_model_moves_no_tensor() -> None:
    model = make("Qwen2VL")
    model.model.rope_deltas = torch.zeros(2, 1)
    watch = Watch(model, 2, parts=("tensors",))
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1)
    assert not watch.changed()


def test_tensors_that_attributes_get_later_can_be_taken_in(two_layers: Any) -> None:
    version = ModelVersion(two_layers, 2)
    before, two_layers.model.later = version.tensors, torch.zeros(2)
    assert version.take_in_tensors() == before
    two_layers.model.later = torch.zeros(2)
    version.begin_check()
    assert version.tensors != before
    before, two_layers.model.later = version.tensors, torch.zeros(2)
    assert version.take_in_tensors() != before, "nothing is lost that has changed since the check"


# ---- layers: one was traced for all that are equal

BY_DYNAMO = {"a dtype", "a bias"}
"""What compiled code guards for all layers: types of tensors, and how many there are."""
OF_A_LAYER = {name: change for name, change in {**TRACED_LAYER, **ORDER_OF_LAYER}.items() if name not in BY_DYNAMO}


@pytest.mark.parametrize("number", [0, 1], ids="layer {}".format)
@pytest.mark.parametrize("name", OF_A_LAYER)
def test_every_change_of_a_layer_is_noticed(name: str, number: int) -> None:
    model = model_to_change()
    alone, watch = Watch(model, 2, parts=("layers",)), Watch(model, 2)
    OF_A_LAYER[name](model.model.layers[number])
    assert alone.changed() == {"layers"}
    assert watch.changed() >= {"layers", "values"}
    assert not alone.changed() | watch.changed()


OUTSIDE: dict[str, Callable[[Any], object]] = {
    "a head": lambda model: setattr(model, "lm_head", nn.Linear(64, 128, bias=False)),
    "a norm's epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "an attribute": lambda model: setattr(model, "used", 3),
    "a weight in a layer": lambda model: setattr(
        model.model.layers[1].mlp.down_proj, "weight", nn.Parameter(torch.zeros(64, 128))
    ),
    "values of a weight": lambda model: nn.init.ones_(model.lm_head.weight),
}


@pytest.mark.parametrize("change", OUTSIDE.values(), ids=OUTSIDE)
def test_layers_are_the_same_whatever_changes_beside_them(change: Callable[[Any], object], two_layers: Any) -> None:
    watch = Watch(two_layers, 2)
    change(two_layers)
    changed = watch.changed()
    assert "values" in changed
    assert "layers" not in changed


def test_another_list_of_layers_is_noticed_though_the_old_one_is_as_it_was(two_layers: Any) -> None:
    watch = Watch(two_layers, 2, parts=("layers",))
    two_layers.model.layers = nn.ModuleList(reversed(two_layers.model.layers))
    assert watch.changed() == {"layers"}


# ---- code


def test_functions_are_watched_where_they_are_defined_or_may_come_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base(nn.Module):
        def forward(self) -> int:
            return 1

    class Inner(Base):
        pass

    model: Any = tiny_qwen3()
    model.model.inner = Inner()
    watch = Watch(model, 2, parts=("code", "values"))
    watch._version.watch_code([(Base, "traced")])
    assert not watch.changed()
    methods = (Base, "forward"), (Inner, "forward"), (Inner, "__call__"), (nn.Module, "_call_impl"), (Base, "traced")
    for owner, name in methods:
        with monkeypatch.context() as patch:
            patch.setattr(owner, "unread", 3, raising=False)
            assert not watch.changed()
            patch.setattr(owner, name, lambda self: 2, raising=False)
            assert watch.changed() == {"code", "values"}
            assert not watch.changed()
        assert watch.changed() == {"code", "values"}


def test_what_the_first_trace_puts_around_methods_of_modules_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program is taken as it was kept, and the next is the first that Dynamo traces in the process."""
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, before_tracing(getattr(nn.Module, name)))
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    code, init = Code(), nn.Module.__init__
    code.watch([(nn.Module, "__init__"), (nn.Module, "__setstate__")])
    install_generation_tagging_init()
    assert nn.Module.__init__ is not init
    assert code.valid()
    monkeypatch.setattr(nn.Module, "__init__", lambda self: init(self))
    assert not code.valid()


def test_what_a_trace_of_another_thread_puts_around_methods_of_modules_is_no_change() -> None:
    """A thread compiles for drafts, while calls go on and check the model."""
    code, original = Code(), nn.Module.__call__
    code.watch([(nn.Module, "__call__"), (nn.Module, "__getattr__")])
    seen = []

    class Looks(nn.Module):
        def forward(self, x: Any) -> Any:
            seen.append((nn.Module.__call__ is original, code.valid()))
            return x

    fx.symbolic_trace(Looks())
    assert seen == [(False, True)]
    assert nn.Module.__call__ is original
    assert code.valid()


# ---- checks


def test_each_part_is_compared_once_a_look_and_only_if_it_is_asked_for(
    two_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = {
        name: note_calls(monkeypatch, owner, name, lambda *_: None)
        for owner, name in (
            (ModuleState, "has_its_dictionaries"),
            (ModuleState, "has_its_attributes"),
            (Tensors, "valid"),
        )
    }
    version = ModelVersion(two_layers, 2)
    seen = version.tensors, version.layers

    def counts() -> list[int]:
        found = [len(calls) for calls in compared.values()]
        for calls in compared.values():
            calls.clear()
        return found

    counts()
    two_layers.lm_head.weight = nn.Parameter(torch.zeros(128, 64))
    assert (version.tensors, version.layers) == seen, "nobody has checked"
    assert counts() == [0, 0, 0]
    version.begin_check()
    for _ in range(2):
        assert version.tensors != seen[0]
    assert counts() == [2, 0, 1]
    assert version.layers == seen[1]
    assert counts() == [0, 1, 0]


def test_what_was_let_go_is_remembered_anew_and_layers_go_on(two_layers: Any) -> None:
    version, weight = ModelVersion(two_layers, 2), weakref.ref(two_layers.lm_head.weight)
    before = {part: getattr(version, part) for part in PARTS}
    two_layers.lm_head.weight = nn.Parameter(torch.zeros(128, 64))
    assert weight() is not None
    version.let_go()
    assert weight() is None
    assert version.layers == before["layers"]
    assert version.tensors != before["tensors"]
    module = weakref.ref(two_layers.model.layers[1].mlp.down_proj)
    two_layers.model.layers[1].mlp.down_proj = nn.Identity()
    version.let_go()
    assert module() is None
    assert version.layers != before["layers"]


def test_no_version_keeps_a_model_alive() -> None:
    model = tiny_qwen3()
    version = ModelVersion(model, 2)
    model.version = version  # as a wrapped model has it
    before, gone = version.values, weakref.ref(model.lm_head)
    # No collection of garbage: that is how long the memory of a dropped model would be missing.
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    version.let_go()
    with pytest.raises(RuntimeError, match="no longer exists"):
        assert version.values != before


# ---- any thread


def test_another_thread_that_asks_during_a_walk_knows_all_of_it(
    two_layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, asked = ModelVersion(two_layers, 2), list[Future[str | None]]()

    def kind(module: nn.Module) -> str:
        if not asked:
            asked.append(start(lambda: version.obstacles().mixing))
        return "a kind"

    monkeypatch.setattr(module_tree, "_kind_that_mixes", kind)
    assert version.obstacles().mixing == asked[0].result(10) == "a kind"


def test_modules_that_a_thread_finds_replaced_are_new_to_the_loop_too(two_layers: Any) -> None:
    watch = Watch(two_layers, 2)
    version = watch._version
    watch.changed()
    two_layers.model.layers[1].mlp.act_fn = nn.GELU()
    version.obstacles()  # in the middle of a check
    assert watch.changed() == {*PARTS}
    two_layers.lm_head = copy.deepcopy(two_layers.lm_head)
    version.obstacles()
    assert watch.changed() == {"tensors", "values"}


def test_placement_is_that_of_the_model_and_its_inner_hooks(two_layers: Any) -> None:
    version = ModelVersion(two_layers, 2)
    device, dtype, hooks = version.placement
    assert (device.type, dtype, hooks) == ("cpu", torch.float32, frozenset())
    two_layers.register_forward_hook(lambda *_: None)
    assert version.placement == (device, dtype, hooks)
    handle = two_layers.lm_head.register_forward_hook(lambda *_: None)
    assert version.placement != (device, dtype, hooks)
    assert version.obstacles().hooked
    handle.remove()
    assert version.placement == (device, dtype, hooks)
    two_layers.half()
    assert version.placement == (device, torch.float16, hooks)
