"""Whatever changes in a wrapped model, on every path the next call computes what the model does by then.

The table of changes is in ``support.execution.model_changes``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine, SamplingParams
from support.execution.model_changes import (
    CAPTURE,
    CHANGES,
    CLASSES,
    CODE,
    LAYERS,
    SLOWER,
    TRACE,
    calling,
    model_to_change,
)
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

INPUTS = mixed_prompts([4, 9, 6], 128, seed=0)
FEW = 4
"""New tokens: on each path one of a prefill, and steps that repeat."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(**options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    return model_to_change(), compiled_llm.wrap(model_to_change(), **FEW_PAGES, **options)


def rows(names: Iterable[str], whole: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.whole] if name in whole else []) for name in names]


# ---- eager: every path


@torch.no_grad()
def forward(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(**INPUTS).logits[INPUTS["attention_mask"].bool()]
    return logits


def sampled(model: PreTrainedModel) -> Tensor:
    torch.manual_seed(0)
    tokens: Tensor = model.generate(**INPUTS, max_new_tokens=FEW, do_sample=True)
    return tokens


PATHS: dict[str, Callable[[PreTrainedModel], Tensor]] = {
    "generate": lambda model: greedy(model, INPUTS, FEW),
    "sampling": sampled,
    "a processor": lambda model: greedy(model, INPUTS, FEW, no_repeat_ngram_size=2),
    "beams": lambda model: greedy(model, INPUTS, FEW, num_beams=2),
    "no cache": lambda model: greedy(model, INPUTS, FEW, use_cache=False),
    "HuggingFace's cache": lambda model: greedy(model, INPUTS, FEW, cache_implementation="dynamic"),
    "forward": forward,
}
IN_GLOBALS = {"a function of the model's file", "a function of torch's"}
"""Those that leave no trace for an engine's pages, as docs/how-to/engine.md says."""
ALIKE = {*LAYERS, *CODE} - {"a number, last layer", "a class, last layer", "a method of the model's class"}


@pytest.mark.drawn(most=4)
@pytest.mark.parametrize("name", rows((name for name in CHANGES if "first layer" not in name), whole=ALIKE))
def test_the_next_call_on_every_path_computes_what_the_model_does_by_then(name, stack):
    plain, wrapped = pair(mode="eager")
    change, engine = CHANGES[name], stack.enter_context(Engine(wrapped))
    prompt, params = INPUTS["input_ids"][1].tolist(), SamplingParams(temperature=0, max_tokens=FEW)

    def assert_engine_answers() -> None:
        assert engine.generate(prompt, params)[0].token_ids == PATHS["generate"](plain)[1, 9:].tolist()

    for run in PATHS.values():
        run(wrapped)
    before = {path: PATHS[path](plain) for path in ("generate", "forward")}
    slow = wrapped.compiled.stats().slow_paths
    assert_engine_answers()
    change.make(stack, plain, wrapped)
    by_now = wrapped.compiled.stats().slow_paths  # a training step is a call, too
    after = {path: run(plain) for path, run in PATHS.items()}
    for path, run in PATHS.items():
        if path != "sampling" or not change.is_fast:  # our loop draws other numbers
            torch.testing.assert_close(run(wrapped), after[path], rtol=1e-4, atol=1e-4, msg=f"{path} does not see it")
    unseen = all(torch.equal(tensor, after[path]) for path, tensor in before.items())
    assert unseen == (change.must == "output_hidden_states")
    if change.is_fast:
        again = {of: calls + slow.get(of, 0) for of, calls in by_now.items()}
        assert wrapped.compiled.stats().slow_paths == again
        if name in IN_GLOBALS:
            engine.reset_prefix_cache()
        assert_engine_answers()
    else:
        assert wrapped.compiled.stats().slow_paths[change.must] >= 3
        with pytest.raises(RuntimeError, match=change.must):
            engine.generate(prompt)
    assert_account_is_empty(wrapped)


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("name", [name for name in (*SLOWER, *CLASSES) if name != "a hook on all modules"])
def test_a_model_that_was_changed_before_it_was_wrapped_takes_the_same_path(name, stack):
    plain, model = model_to_change(), model_to_change()
    change = {**SLOWER, **CLASSES}[name]
    change.make(stack, plain, model)
    compiled_llm.wrap(model, **FEW_PAGES, mode="eager")
    for path, run in PATHS.items():
        torch.testing.assert_close(run(model), run(plain), rtol=1e-4, atol=1e-4, msg=path)
    assert model.compiled.stats().slow_paths[change.must] >= 3


# ---- compiled: equal layers are traced once, weights fused, and steps captured


@pytest.fixture
def captures(without_inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture(monkeypatch)


# Each traces for four seconds, so there is one of each kind, and one more in a callback, below; that values are written
# to is seen of adapters that are trained, too.
IN_EACH_RUN = {"load_state_dict, assign", "a function of the model's file"}
NOT_DYNAMOS = "a function of torch's"  # torch.compile traces the original of it
FAST = [name for name, change in CHANGES.items() if change.is_fast and name != NOT_DYNAMOS]


def assert_alike(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """In logits of prefill, and of the steps after it."""
    options = {"output_logits": True, "return_dict_in_generate": True}
    ours, theirs = (torch.stack(greedy(each, INPUTS, 3, **options).logits) for each in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", rows(FAST, whole={*FAST} - IN_EACH_RUN))
def test_compiled_code_and_cuda_graphs_stay_if_they_can(name, stack):
    plain, wrapped = pair(fuse_projections=True)
    must = CHANGES[name].must
    assert_alike(wrapped, plain)
    graphs, programs = wrapped.compiled.stats().graphs, wrapped.compiled.model_runner().graph_manager.programs
    CHANGES[name].make(stack, plain, wrapped)
    assert_alike(wrapped, plain)
    now = wrapped.compiled.model_runner().graph_manager
    kept = now.programs is programs and wrapped.compiled.stats().graphs == graphs
    assert kept == (must != TRACE)
    assert not kept or (wrapped.compiled.recaptures()[0] > 0) == (must == CAPTURE)
    assert now.weights.laid_out
    assert len(now.weights.groups) >= 3, "what is moved is fused again"
    assert_account_is_empty(wrapped)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    "name",
    [
        "a method",
        *(pytest.param(name, marks=pytest.mark.whole) for name in ("a parameter's data", "a number, last layer")),
    ],
)
def test_a_callback_changes_the_model_in_the_middle_of_a_call(name):
    plain, wrapped = pair(fuse_projections=True)
    unchanged, changed = greedy(plain, INPUTS, 8), []
    for model in (plain, wrapped):
        with ExitStack() as own:
            change = functools.partial(CHANGES[name].make, own, model)
            changed.append(greedy(model, INPUTS, 8, **calling(change, "stopping_criteria")))
    torch.testing.assert_close(changed[1], changed[0])
    assert not torch.equal(changed[0], unchanged)
