"""A value that changes more often than torch compiles graphs for breaks no call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compat.torch.dynamo import own_copy
from compiled_llm.compilation.bounded import Bounded
from support.huggingface.pairs import OPTIONS
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("without_inductor")]


@pytest.fixture(autouse=True)
def limit() -> Iterator[int]:
    """Torch compiles a function once."""
    with torch._dynamo.config.patch(recompile_limit=1):
        yield 1


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    plain, model = (tiny_qwen3(num_hidden_layers=1, eos_token_id=None) for _ in range(2))
    return plain, compiled_llm.wrap(model, **{**OPTIONS, "mode": "compile", "progress": False})


@pytest.fixture
def inputs(seed: int) -> dict[str, Tensor]:
    return mixed_prompts([4, 9], 128, seed)


def scale(model: PreTrainedModel, value: int) -> None:
    model.model.layers[0].self_attn.scaling = 0.1 * (1 + value)


def test_calls_go_on_uncompiled_and_say_so_once(models, inputs, caplog):
    plain, wrapped = models
    for value in (0, 1, 2, 0):
        for model in models:
            scale(model, value)
        before = wrapped.compiled.stats().uncompiled
        torch.testing.assert_close(greedy(wrapped, inputs, 5), greedy(plain, inputs, 5))
        assert wrapped.compiled.stats().uncompiled - before == (5 if value else 0)
    said = [record.getMessage() for record in caplog.records if "runs uncompiled" in record.getMessage()]
    assert [message.split()[1] for message in said] == ["prefill_step", "decode_step"]
    reasons = [finding["reason"] for finding in wrapped.compiled.explain().data["findings"]]
    assert any("ran uncompiled 2 times" in reason for reason in reasons)
    assert_account_is_empty(wrapped)


def test_batch_invariant_programs_do_not_run_uncompiled(inputs, caplog):
    options = {**OPTIONS, "mode": "compile", "progress": False, "batch_invariant": True}
    wrapped = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1, eos_token_id=None), **options)
    greedy(wrapped, inputs, 1)
    scale(wrapped, 2)
    with pytest.raises(
        RuntimeError, match=r"^batch_invariant=True: prefill_step was compiled as often as torch does it"
    ):
        greedy(wrapped, inputs, 1)
    assert not [record for record in caplog.records if "runs uncompiled" in record.getMessage()]
    assert wrapped.compiled.stats().uncompiled == 0
    assert_account_is_empty(wrapped)


@pytest.mark.whole
def test_warmup_compiles_for_what_holds_then(models, inputs):
    plain, wrapped = models
    for value in (1, 2):
        scale(wrapped, value)
        greedy(wrapped, inputs, 1)
    wrapped.compiled.warmup([2])
    scale(plain, 2)
    torch.testing.assert_close(greedy(wrapped, inputs, 5), greedy(plain, inputs, 5))
    assert wrapped.compiled.stats().uncompiled == 0


@pytest.mark.whole
def test_a_value_that_a_callback_changes_in_each_step_is_followed(models, inputs):
    def changing(model: PreTrainedModel) -> Callable[..., Tensor]:
        def change(ids: Tensor, scores: Any) -> Tensor:
            scale(model, ids.shape[1])
            return torch.zeros(len(ids), dtype=torch.bool)

        return change

    theirs, ours = (greedy(model, inputs, 8, stopping_criteria=[changing(model)]) for model in models)
    torch.testing.assert_close(ours, theirs)


def scaled(module: Any, x: Tensor) -> Tensor:
    return x * module.factor


def test_a_graph_that_fits_is_used_after_the_limit_too():
    module, function, compiles = nn.Module(), own_copy(scaled), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    program = Bounded(function, backend, torch.device("cpu"))  # type: ignore[arg-type]
    for factor in (1.0, 2.0, 3.0, 1.0, 2.0):
        module.factor = factor
        assert program(module, torch.ones(2)).tolist() == [factor] * 2
    assert (len(compiles), program.full, program.uncompiled) == (1, True, 3)
