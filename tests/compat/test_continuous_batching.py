"""Each part of HuggingFace's continuous batching that ours runs over is still there and does what it is for."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.logits_process import TemperatureLogitsWarper

from compiled_llm.compat import continuous_batching as compat
from compiled_llm.huggingface.batch.continuous_batching import EngineManager
from compiled_llm.huggingface.wrapped_model import WrappedModel
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.core

INHERITED = (
    *("add_request", "add_requests", "cancel_request", "join"),
    *("get_result", "__iter__", "request_id_iter", "register_result_handler", "is_running"),
)
"""HuggingFace's methods that run over our attributes."""
OURS = ("stop", "start", "warmup", "destroy")
ENTRIES = ("generate_batch", "continuous_batching_context_manager", "destroy_cached_continuous_batching_manager")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(num_hidden_layers=1)


@pytest.fixture
def parts(model: Any) -> compat.ManagerParts:
    return compat.ManagerParts(model, GenerationConfig(num_return_sequences=None), ContinuousBatchingConfig())


def test_inherited_methods_use_what_the_parts_have(parts):
    for name in INHERITED:
        assert name not in vars(EngineManager)
        source = inspect.getsource(vars(continuous_api.ContinuousBatchingManager)[name])
        used = set(re.findall(r"self\.(\w+)", source))
        assert used <= vars(parts).keys() | set(dir(EngineManager)), name


def test_huggingfaces_entries_use_what_a_manager_has():
    used = set()
    for name in ENTRIES:
        used |= set(re.findall(r"\bmanager\.(\w+)", inspect.getsource(getattr(GenerationMixin, name))))
    assert used - {"warmed_up"} <= set(dir(EngineManager))
    assert {"warmup", "start", "stop", "destroy", "add_requests", "get_result", "is_running"} <= used


@pytest.mark.parametrize("name", ["init_continuous_batching", *OURS])
def test_our_methods_take_what_huggingfaces_take(name):
    kinds = (
        (EngineManager, continuous_api.ContinuousBatchingManager) if name in OURS else (WrappedModel, GenerationMixin)
    )
    taken, given = (list(inspect.signature(getattr(kind, name)).parameters) for kind in kinds)
    assert taken == given


def test_a_thread_ends_when_it_is_asked_to_and_no_request_is_taken_then(parts):
    done = []
    assert parts.add_request([5]) == "req_0"
    parts.start_thread(lambda: done.append(1))
    assert parts.is_running()
    parts.ask_to_stop(hard=False)
    parts.join(0.0)
    assert done == [1]
    assert parts.add_request([5]) is None
    parts.start_thread(lambda: 1 / 0)
    assert parts.add_request([5]) == "req_1"
    parts.ask_to_stop(hard=True)
    parts.join(0.0)
    assert isinstance(parts.background_thread_status.fatal_error, ZeroDivisionError)


def test_requests_come_in_with_huggingfaces_ids_and_are_taken_at_once(parts, monkeypatch):
    came = []
    monkeypatch.setattr(parts.input_queue, "_take", lambda state: came.append(state))
    monkeypatch.setattr(parts.cancel_queue, "_take", came.append)
    parts.num_return_sequences = 2
    assert [parts.add_request([5]), *parts.add_requests([[6], [7]]), parts.add_request([8])] == [
        f"req_{number}" for number in range(4)
    ]
    assert [state.initial_tokens for state in came] == [[5], [7], [6], [8]]
    assert [state.request_id for state in compat.with_children(came[0])] == ["req_0", "req_0__child#0"]
    parts.cancel_request("req_1")
    assert came[-1] == "req_1"


def test_processors_are_those_of_a_config_and_settings_of_a_request_are_checked(model):
    found = compat.processors_of(model, GenerationConfig(do_sample=True, temperature=0.5), [5], 3, [])
    assert [type(entry) for entry in found] == [TemperatureLogitsWarper]
    config = ContinuousBatchingConfig(per_request_processors=True)
    batched = compat.batched_processors(list(found), config)
    assert batched.do_processing
    batched.check_kwargs({"temperature": 0.7})
    with pytest.raises(ValueError, match="top_k"):
        batched.check_kwargs({"top_k": 5})
    others: LogitsProcessorList = compat.processors_of(model, GenerationConfig(repetition_penalty=1.2), [5, 6], 3, [2])
    assert others[0].supports_continuous_batching is False
    assert not compat.batched_processors(list(others), ContinuousBatchingConfig()).do_processing
