"""A change that a look can see empties the prefix cache; calls change nothing by themselves."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.execution.graphs.model_watch import ModelWatch
from compiled_llm.model import contents
from support.tiny_models import tiny_qwen3


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
    watch = ModelWatch(model)
    assert not watch.changed()
    change(model)
    assert watch.changed()
    assert not watch.changed()


def test_what_was_changed_is_watched_from_then_on(model: Any) -> None:
    watch, mlp = ModelWatch(model), model.model.layers[0].mlp
    mlp.scales["more"] = {"inside": 1.0}
    assert watch.changed()
    mlp.scales["more"]["inside"] = 2.0
    assert watch.changed()


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
    mlp.other, mlp.long = SimpleNamespace(scale=1.0), [1.0] * (contents._MOST + 1)
    watch = ModelWatch(model)
    change(model)
    assert not watch.changed()


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 2}], ids=str)
def test_calls_change_nothing(options: dict[str, Any], model: Any) -> None:
    watch, ids = ModelWatch(model), torch.tensor([[5, 6, 7]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **options)
    model(ids)
    assert not watch.changed()
