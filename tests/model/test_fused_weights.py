"""Fused weights lie in one storage, and stay the user's whatever happens to them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from compiled_llm.model.weights import fused_weights as fused
from compiled_llm.model.weights.fused_weights import FusedGroup, FusedWeights
from support.fused_heads import QKV, Heads, fuse, groups_of, storages

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


# ---- which layers


def test_layers_that_read_one_input_are_a_group(seed):
    assert groups_of(Heads()) == [FusedGroup(QKV, ())]
    assert groups_of(Heads(bias=True)) == [FusedGroup(QKV, ("q.bias", "k.bias", "v.bias"))]


def test_an_input_that_was_written_to_is_another_one(seed):
    class Written(Heads):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            q, k = self.q(x), self.k(x)
            x.view(-1).mul_(2)
            return q, k, self.v(x)

    assert groups_of(Written()) == [FusedGroup(("q.weight", "k.weight"), ())]


class OwnLinear(nn.Linear):
    pass


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def tie_to_an_embedding(module: Any) -> None:
    module.a_embedding = nn.Embedding(8, 24)
    module._modules = dict(sorted(module._modules.items()))
    module.v.weight = module.a_embedding.weight


OTHERS: dict[str, Callable[[Any], object]] = {
    "an embedding's weight": tie_to_an_embedding,
    "a subclass": lambda module: setattr(module, "v", OwnLinear(24, 8, bias=False)),
    "parametrized": lambda module: parametrize.register_parametrization(module.v, "weight", Doubled()),
    "weight norm": lambda module: nn.utils.parametrizations.weight_norm(module.v),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_not_in_a_group(name, seed):
    module = Heads()
    OTHERS[name](module)
    assert groups_of(module) == [FusedGroup(("q.weight", "k.weight"), ())]


def test_no_weight_is_in_two_groups(seed):
    class Twice(Heads):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x * 3
            return *super().forward(x), *super().forward(x * 2), self.k(y), self.out(y)

    assert groups_of(Twice()) == [FusedGroup(QKV, ())]


# ---- one storage


@pytest.mark.parametrize("bias", [False, True])
def test_weights_become_views_of_one_storage(bias, seed):
    module, x = Heads(bias), torch.randn(3, 24)
    expected, parameters = module(x), dict(module.named_parameters())
    values = copy.deepcopy(module.state_dict())
    weights = fuse(module)
    assert len(storages(module, *QKV)) == 1
    assert len(storages(module, "q.weight", "out.weight")) == 2
    assert all(module.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in parameters.values())
    torch.testing.assert_close(dict(module.state_dict()), dict(values), rtol=0, atol=0)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)
    assert weights.laid_out
    addresses = [parameter.data_ptr() for parameter in parameters.values()]
    assert weights.restore()
    assert fuse(module).laid_out
    assert [parameter.data_ptr() for parameter in parameters.values()] == addresses, "nothing moves a second time"


def test_one_group_at_a_time_is_in_memory_twice(monkeypatch, seed):
    module = nn.ModuleList([Heads(), Heads(), Heads()])
    module.forward = lambda x: [heads(x + index) for index, heads in enumerate(module)]
    groups = groups_of(module)
    own = [[StorageWeakRef(module.get_parameter(name).untyped_storage()) for name in group.weights] for group in groups]
    alive, move = [], fused._move_together

    def moving(stack: list[Tensor]) -> None:
        alive.append([any(not storage.expired() for storage in group) for group in own])
        move(stack)

    monkeypatch.setattr(fused, "_move_together", moving)
    FusedWeights(module, groups)
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]
    assert all(storage.expired() for group in own for storage in group)


def transpose(module: Any) -> None:
    module.k.weight.data = torch.randn(24, 8).t()


def make_in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        module.k = nn.Linear(24, 8, bias=False)


LEFT_ALONE: dict[str, Callable[[Any], object]] = {
    "an alias": lambda module: module.k.weight.data,
    "a state_dict": lambda module: module.state_dict(),
    "NumPy's": lambda module: module.k.weight.detach().numpy(),
    "of two parameters": lambda module: nn.Parameter(module.k.weight),
    "of two processes": lambda module: module.k.weight.data.share_memory_() is None,
    "tied": lambda module: setattr(module.v, "weight", module.k.weight),
    "transposed": transpose,
    "of another dtype": lambda module: module.k.double(),
    "made in inference mode": make_in_inference_mode,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_weights_that_are_not_the_models_alone_stay_where_they_are(name, seed):
    module = Heads()
    groups = groups_of(module)
    kept = LEFT_ALONE[name](module)
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    weights = FusedWeights(module, groups)
    assert weights.groups == []
    assert weights.laid_out
    assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
    del kept


def test_weights_that_would_not_be_aligned_stay_where_they_are(seed):
    module = Heads()
    for name, outputs in (("q", 16), ("k", 1), ("v", 8), ("out", 1)):
        setattr(module, name, nn.Linear(25, outputs, bias=False))
    groups = groups_of(module, torch.randn(2, 25))
    assert groups == [FusedGroup(QKV, ())]
    assert FusedWeights(module, groups).groups == []


# ---- what takes weights out again


@pytest.mark.parametrize("change", [lambda module: setattr(module, "k", nn.Identity()), transpose])
def test_what_cannot_be_fused_again_leaves_for_good(change, seed):
    module = Heads()
    weights, layer = fuse(module), module.k
    change(module)
    assert not weights.laid_out
    assert not weights.restore()
    module.k = layer
    assert weights.restore()
    assert weights.groups == []
    assert weights.laid_out


def test_weights_that_are_swapped_to_and_fro_keep_their_memory(seed):
    module = Heads()
    weights, own = fuse(module), module.k.weight.data
    value, average = own.clone(), torch.randn(8, 24)
    module.k.weight.data = average
    assert not weights.laid_out
    assert not weights.restore(), "the test holds the new weight, and may write to it"
    average.fill_(3)
    assert (module.k.weight == 3).all()
    module.k.weight.data = own
    assert weights.laid_out
    torch.testing.assert_close(module.k.weight.data, value, rtol=0, atol=0)


def test_weights_get_memory_of_their_own_again(seed):
    module, x = Heads(bias=True), torch.randn(3, 24)
    weights, expected = fuse(module), module(x)
    weights.separate()
    assert len(storages(module, *QKV, "q.bias", "k.bias", "v.bias")) == 6
    assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in module.parameters())
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)
    assert weights.groups == []
    assert weights.laid_out


def test_nothing_keeps_the_weights_of_a_dropped_model(seed):
    module = Heads()
    weights, storage = fuse(module), StorageWeakRef(module.k.weight.untyped_storage())
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert storage.expired()
    assert not weights.restore()


def test_copies_and_gradients_are_as_ever(seed):
    module, plain = Heads(), Heads()
    plain.load_state_dict(module.state_dict())
    seen: list[Tensor] = []
    hook = module.k.weight.register_hook(lambda gradient: seen.append(gradient))
    optimizers = [torch.optim.AdamW(which.parameters(), lr=0.1) for which in (module, plain)]
    fuse(module)
    x = torch.randn(5, 24)
    for which, optimizer in zip((module, plain), optimizers, strict=True):
        sum((part**2).sum() for part in which(x)).backward()
        optimizer.step()
    assert len(seen) == 1
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    assert len(storages(copy.deepcopy(module), *QKV)) == 3
    hook.remove()
    twin = pickle.loads(pickle.dumps(module))
    torch.testing.assert_close(dict(twin.state_dict()), dict(module.state_dict()), rtol=0, atol=0)
    assert storages(twin, *QKV).isdisjoint(storages(module, *QKV))
    assert fuse(twin).laid_out


def test_two_models_may_share_parameters(seed):
    first, second = Heads(), Heads()
    for name in ("q", "k", "v"):
        getattr(second, name).weight = getattr(first, name).weight
    one, other = fuse(first), fuse(second)
    assert one.laid_out
    assert other.laid_out
    first.k.weight.data = torch.zeros(8, 24)
    assert not one.laid_out
    assert not other.laid_out
    assert one.restore()
    assert one.laid_out
    assert other.laid_out
    assert (second.k.weight == 0).all()
