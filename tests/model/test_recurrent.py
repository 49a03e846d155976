"""Recurrent layers compute packed rows by the cache that is one of ours, and as ever by any other."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, PreTrainedModel

import compiled_llm
from compiled_llm.compat.cache_names import cache_argument
from compiled_llm.kinds.recurrent.forwards import FUNCTIONS, StatesNotFoundError, keeps_states, with_packed_rows
from compiled_llm.kinds.recurrent.layers import RecurrentStates, StateProbe
from compiled_llm.kinds.rows import StateRows
from support.huggingface.recurrent_families import ALL_RECURRENT, RECURRENT, recurrent_model

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


NAME = "dense_rows"


class DenseRows:
    """The keys and values of each layer and row."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, rows: StateRows, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return ``[T, H, D]``, for queries, keys and values of new tokens."""
        out = torch.zeros(*query.shape[:2], value.shape[2])
        for row, (begin, end) in enumerate(pairwise(rows.qo_indptr.tolist())):
            before = self._held.get((layer, row), (key[:0], value[:0]))
            keys, values = (torch.cat([held, new[begin:end]]) for held, new in zip(before, (key, value), strict=True))
            self._held[layer, row] = keys, values
            states = (
                query[begin:end],
                *(each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (keys, values)),
            )
            mask = torch.ones(end - begin, len(keys), dtype=torch.bool).tril(len(keys) - (end - begin))
            out[begin:end] = torch.nn.functional.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in states), attn_mask=mask, scale=scale
            ).transpose(0, 1)
        return out


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, dense: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    held, rows = dense
    packed = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    out = held.attend(module.layer_idx, rows, *packed, scaling)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


AttentionInterface.register(NAME, _attention)


COUNTS = [5, 1, 9, 3]
NEW = 3


def rows_of(counts: list[int], read: list[int], write: list[int]) -> StateRows:
    token_rows = [row for row, count in enumerate(counts) for _ in range(count)]
    starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    return StateRows(*(torch.tensor(each, dtype=torch.int32) for each in (token_rows, starts, read, write)))


def packed_layers(model: PreTrainedModel) -> list[nn.Module]:
    layers = [module for module in model.modules() if keeps_states(type(module))]
    for layer in layers:
        layer.__class__ = with_packed_rows(type(layer), RecurrentStates)
    return layers


class Packed:
    """Runs a model on packed rows."""

    def __init__(self, model: PreTrainedModel, attends: bool) -> None:
        self._model, self._dense = model, DenseRows()
        if attends:
            model.set_attn_implementation(NAME)
        self._cache, self._attends = cache_argument(model.forward), attends

    @torch.no_grad()
    def run(self, ids: Tensor, positions: Tensor, cache: RecurrentStates) -> Tensor:
        own: dict[str, Any] = {self._cache: cache}
        if self._attends:
            own |= {"position_ids": positions, "dense": (self._dense, cache.rows)}
        logits: Tensor = self._model(input_ids=ids, use_cache=True, **own).logits
        return logits.flatten(0, 1)


@pytest.mark.parametrize("family", RECURRENT)
def test_packed_rows_have_the_logits_of_rows_alone(family: str, seed: int) -> None:
    model = recurrent_model(family, seed)
    ids = [torch.randint(3, 100, (count + NEW,)) for count in COUNTS]
    with torch.no_grad():
        expected = [model(input_ids=own[None]).logits[0] for own in ids]
    assert packed_layers(model)
    with torch.no_grad():
        for own, logits in zip(ids, expected, strict=True):
            assert torch.equal(model(input_ids=own[None]).logits[0], logits), "other callers see no difference"
    packed, most = Packed(model, family not in ALL_RECURRENT), len(COUNTS)
    tokens = torch.cat([own[:count] for own, count in zip(ids, COUNTS, strict=True)])[None]
    positions = torch.cat([torch.arange(count) for count in COUNTS])[None]
    probe = StateProbe(rows_of(COUNTS, [-1] * most, [*range(most)]))
    found = packed.run(tokens, positions, probe).split(COUNTS)
    for own, count, logits in zip(found, COUNTS, expected, strict=True):
        torch.testing.assert_close(own, logits[:count], rtol=1e-4, atol=1e-4)
    memory = {place: with_entries_that_show(states) for place, states in probe.memory.items()}
    read, write = [*range(most)], [*range(most, 2 * most)]
    for step in range(NEW):
        at = [count + step for count in COUNTS]
        new = torch.stack([own[place] for own, place in zip(ids, at, strict=True)])[:, None]
        cache = RecurrentStates(rows_of([1] * most, read, write), memory)
        logits = packed.run(new, torch.tensor(at)[:, None], cache)
        torch.testing.assert_close(
            logits, torch.stack([own[place] for own, place in zip(expected, at, strict=True)]), rtol=1e-4, atol=1e-4
        )
        read, write = write, read


def with_entries_that_show(states: Tensor) -> Tensor:
    """As many further entries, of NaN."""
    return torch.cat([states, torch.full_like(states, torch.nan)])


def test_layers_are_traced_whole(seed: int) -> None:
    model = recurrent_model("Mamba2", seed)
    packed_layers(model)
    rows = rows_of([3, 2], [-1, -1], [0, 1])
    probe, ids = StateProbe(rows), torch.randint(3, 100, (1, 5))
    with torch.no_grad():
        expected = model(input_ids=ids, cache_params=probe, use_cache=True).logits
    memory = dict(probe.memory)
    expected_states = copy.deepcopy(memory)

    def run(ids: Tensor, rows: StateRows) -> Tensor:
        logits: Tensor = model(input_ids=ids, cache_params=RecurrentStates(rows, memory), use_cache=True).logits
        return logits

    for states in memory.values():
        states.fill_(torch.nan)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(ids, rows)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(memory, expected_states)


def test_copies_are_of_the_layers_own_class(seed: int) -> None:
    model = recurrent_model("Lfm2", seed)
    classes = {type(module) for module in model.modules()}
    layers = packed_layers(model)
    assert {type(layer).__name__ for layer in layers} == {"Lfm2ShortConv"}
    assert repr(copy.deepcopy(model)) == repr(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(module) for module in again.modules()} == classes
        assert all(torch.equal(*both) for both in zip(again.parameters(), model.parameters(), strict=True))


class KeepsInItsOwnWay(nn.Module):
    def forward(self, states: Tensor, cache: Any) -> Tensor:
        kept: Tensor = cache.update_conv_state(states, 0)
        return kept.sum(-1)


class KeepsInNoArgument(nn.Module):
    cache: Any

    def forward(self, states: Tensor) -> Tensor:
        kept: Tensor = self.cache.update_conv_state(states, 0)
        return kept


def test_layers_that_keep_states_in_another_way_are_told_apart() -> None:
    assert keeps_states(KeepsInItsOwnWay)
    assert not keeps_states(nn.Linear)
    with pytest.raises(StatesNotFoundError, match=r"KeepsInItsOwnWay: forward calls none of causal_conv1d_fn"):
        with_packed_rows(KeepsInItsOwnWay, RecurrentStates)
    with pytest.raises(StatesNotFoundError, match="no argument of forward"):
        with_packed_rows(KeepsInNoArgument, RecurrentStates)


@pytest.mark.parametrize("family", ["Qwen3_5", "KimiLinear", "GraniteMoeHybrid", "Jamba"])
def test_no_kernel_of_others_is_launched_on_fake_tensors(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read memory that is not there: those of flash-linear-attention did, and the device was lost."""
    model = recurrent_model(family, seed)
    (module,) = {inspect.getmodule(type(layer)) for layer in model.modules() if keeps_states(type(layer))}

    def launched(function: Any, *args: Any, **kwargs: Any) -> Any:
        assert not any(isinstance(given, FakeTensor) for given in (*args, *kwargs.values()))
        return function(*args, **kwargs)

    found = [name for name in FUNCTIONS if hasattr(module, name)]
    assert found
    for name in found:
        monkeypatch.setattr(module, name, functools.partial(launched, getattr(module, name)))
    ids = torch.randint(3, 100, (2, 9))
    plain = copy.deepcopy(model).generate(ids, max_new_tokens=4, do_sample=False)
    wrapped = compiled_llm.wrap(model, mode="eager", max_batch_size=2)
    assert torch.equal(wrapped.generate(ids, max_new_tokens=4, do_sample=False), plain)
    compiled_llm.unwrap(model)
