"""What ``generate`` makes of its settings and inputs is what HuggingFace makes of them, at each call."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import utils as huggingfaces

import compiled_llm
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 5, "do_sample": False},
    {"max_new_tokens": 5, "do_sample": 0},
    {"do_sample": True, "temperature": 0.5, "top_k": None},
    {"eos_token_id": None, "max_length": 30},
    {"eos_token_id": [3, 4], "suppress_tokens": (7,), "bad_words_ids": [[3], [4, 5]]},
    {"output_attentions": True, "return_dict_in_generate": True},
    {"attention_mask": torch.ones(1, 3), "logits_to_keep": 1, "max_new_tokens": 2},
    {"use_cache": False},
    {"eos_token_id": torch.tensor([3])},
    {"watermarking_config": {"bias": 2.5}, "do_sample": True},
    {"of_nobody": 3, "nor": "this"},
    {"generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=[9])},
    {"generation_config": GenerationConfig(max_new_tokens=7), "temperature": 0.3},
]


@pytest.fixture
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A plain model and a wrapped one."""
    plain, wrapped = (tiny_qwen3(num_hidden_layers=1) for _ in range(2))
    return plain, compiled_llm.wrap(wrapped, mode="eager", progress=False)


def prepared(model: PreTrainedModel, arguments: dict[str, Any]) -> Any:
    config, model_inputs = model._prepare_generation_config(**{"generation_config": None, **arguments})
    return {name: (type(value), repr(value)) for name, value in vars(config).items()}, model_inputs


@pytest.mark.parametrize("first", range(len(ARGUMENTS)))
def test_settings_that_resemble_each_other_are_told_apart(first, pair):
    plain, wrapped = pair
    for _ in range(2):
        for arguments in (ARGUMENTS[first], *ARGUMENTS):
            assert prepared(wrapped, arguments) == prepared(plain, arguments)


CHANGES: dict[str, Callable[[Any], object]] = {
    "length": lambda model: setattr(model.generation_config, "max_length", 77),
    "in a list": lambda model: model.generation_config.eos_token_id.append(5),
    "config": lambda model: setattr(model, "generation_config", GenerationConfig(top_k=3, of_my_own=2)),
    "tensor": lambda model: setattr(model.generation_config, "eos_token_id", torch.tensor([4, 5])),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_generation_config_is_seen(change, pair):
    for model in pair:
        model.generation_config.eos_token_id = [2]
    plain, wrapped = pair
    before = prepared(wrapped, {})
    for model in pair:
        change(model)
    assert prepared(wrapped, {}) == prepared(plain, {}) != before


def test_a_config_that_controls_generation_is_refused_later_too(pair):
    _, wrapped = pair
    prepared(wrapped, {})
    wrapped.config.top_k = 3
    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        prepared(wrapped, {})
    wrapped.config.top_k = None
    prepared(wrapped, {})


def test_what_a_call_does_to_its_config_stays_its_own(pair):
    _, wrapped = pair
    expected = prepared(wrapped, {"eos_token_id": [3, 4]})
    config, model_inputs = wrapped._prepare_generation_config(None, eos_token_id=[3, 4])
    config.eos_token_id.append(9)
    config.max_length = 1
    model_inputs["more"] = 1
    assert prepared(wrapped, {"eos_token_id": [3, 4]}) == expected


# ---- inputs

SPECIAL: list[dict[str, Any]] = [
    {},
    {"pad_token_id": 0},
    {"eos_token_id": 2},
    {"eos_token_id": [2, 3], "bos_token_id": 1},
    {"pad_token_id": 2, "eos_token_id": [2, 3]},
    {"pad_token_id": 0, "eos_token_id": 2},
    {"eos_token_id": -1},
    {"eos_token_id": torch.tensor([2, 3]), "pad_token_id": 3},
]
IDS = [[[4, 5, 6]], [[0, 5, 6]], [[4, 0, 6], [4, 5, 2]], [[0, 0, 2], [7, 8, 9]]]


def with_special_tokens(model: PreTrainedModel, special: dict[str, Any], has_mask: bool, rows: int) -> GenerationConfig:
    config = GenerationConfig(**special)
    model._prepare_special_tokens(config, has_mask, device=torch.device("cpu"), batch_size=rows)
    return config


@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_special_tokens_are_huggingfaces_and_so_is_what_is_said_of_them(special, pair, monkeypatch):
    def prepared_by(model: PreTrainedModel, has_mask: bool | None, rows: int) -> Any:
        said: list[str] = []
        monkeypatch.setattr(huggingfaces.logger, "warning", said.append)
        monkeypatch.setattr(huggingfaces.logger, "warning_once", said.append)
        content = vars(with_special_tokens(model, special, has_mask, rows))
        return said, {name: (type(value), repr(value)) for name, value in content.items()}

    plain, wrapped = pair
    for given in [*itertools.product((True, False, None), (1, 3))] * 3:
        assert prepared_by(wrapped, *given) == prepared_by(plain, *given), given


@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_a_mask_that_is_not_given_is_huggingfaces(special, pair):
    for rows, dtype in itertools.product(IDS, (torch.int64, torch.int32, torch.int16)):
        ids = torch.tensor(rows, dtype=dtype)
        plain, wrapped = (
            model._prepare_attention_mask_for_generation(ids, with_special_tokens(model, special, False, len(ids)), {})
            for model in pair
        )
        torch.testing.assert_close(wrapped, plain)


@pytest.mark.parametrize("rows", [None, [[1, 1, 1]], [[0, 1, 1], [1, 1, 1]], [[1, 1, 1]] * 2, [[1, 0, 1]]], ids=str)
def test_positions_are_huggingfaces(rows, pair):
    for dtype in (torch.int64, torch.int32, torch.bool):
        given = {} if rows is None else {"attention_mask": torch.tensor(rows, dtype=dtype)}
        ids = torch.tensor([[3, 4, 5]] * (1 if rows is None else len(rows)))
        plain, wrapped = (model._prepare_position_ids_for_generation(ids, dict(given)) for model in pair)
        torch.testing.assert_close(wrapped, plain)


@pytest.mark.parametrize("given", [True, False], ids=["mask", "no mask"])
def test_each_input_is_read_from_the_device_once(given, pair, monkeypatch):
    _, wrapped = pair
    read: Counter[int] = Counter()
    own = torch.Tensor.cpu

    def reading(self: torch.Tensor) -> torch.Tensor:
        read[id(self)] += 1
        return own(self).clone()  # as from another device

    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    options = {"attention_mask": torch.ones_like(ids)} if given else {}
    wrapped.generate(ids, max_new_tokens=2, pad_token_id=0, eos_token_id=None, **options)
    monkeypatch.setattr(torch.Tensor, "cpu", reading)
    wrapped.generate(ids, max_new_tokens=2, pad_token_id=0, eos_token_id=None, **options)
    assert [read[id(tensor)] for tensor in (ids, *options.values())] == [1] * (1 + len(options))


def test_signatures_are_the_models_own(pair):
    plain, wrapped = pair
    for name in ("forward", "prepare_inputs_for_generation"):
        for _ in range(2):
            assert inspect.signature(getattr(wrapped, name)) == inspect.signature(getattr(plain, name))
    bound = inspect.signature(wrapped.forward)
    assert inspect.signature(wrapped.forward) is bound, "made again"
    assert "input_ids" not in bound.replace(parameters=[]).parameters
    assert "self" in inspect.signature(type(wrapped).forward).replace(return_annotation=int).parameters
