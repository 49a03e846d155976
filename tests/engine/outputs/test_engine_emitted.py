"""What traced hooks emit comes with the requests of an engine that ask for it, in the order of their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine import emitted as wanted
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from engine.test_engine import some_prompts
from support.engine.tiny_engines import greedy, tiny, wrapped
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import alone, assert_account_is_empty

pytestmark = pytest.mark.usefixtures("reading")

NAMES = ["norm", "odd", "output"]


def emit(module: Any, args: Any, output: Tensor, tokens: Any) -> None:
    """Of several dtypes and shapes, one of which makes odd numbers of bytes."""
    tokens.emit("odd", (output[:, :3] > 0))
    tokens.emit("output", output)
    tokens.emit("norm", output.double().norm(dim=-1))
    tokens.emit("positions", tokens.positions)


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped(2000, tiny(), prefill_tokens=16)


def output_of(module: nn.Module, plain: PreTrainedModel, text: list[int]) -> Tensor:
    found: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: found.append(output[0]))
    with torch.no_grad():
        plain(torch.tensor([text]))
    handle.remove()
    return found[0]


def check(plain: PreTrainedModel, output: RequestOutput, names: list[str]) -> None:
    for answer in output.outputs:
        mlp = output_of(plain.model.layers[0].mlp, plain, output.prompt_token_ids + answer.token_ids[:-1])
        expected = {"odd": mlp[:, :3] > 0, "output": mlp, "norm": mlp.double().norm(dim=-1)}
        expected["positions"] = torch.arange(len(mlp))
        assert answer.emitted is not None
        assert list(answer.emitted) == names
        for name, tensor in answer.emitted.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.core
@pytest.mark.parametrize("mixed", [True, False])
def test_requests_that_ask_have_those_of_their_tokens_and_others_none(plain, model, mixed, seed):
    """Prompts in chunks, which the prefix cache knows the second time."""
    prompts = some_prompts(5, seed, longest=40)
    asked: list[dict[str, Any]] = [{"emitted": ["norm"]}, {}, {"emitted": ["positions", *NAMES]}, {}, {}]
    asked[4] = {"emitted": ["output"], "hidden_states": [-1]}
    with compiled_llm.traced_hook(model.model.layers[0].mlp, emit), Engine(model, mixed=mixed) as engine:
        for _ in range(2):
            both = zip(prompts, asked, strict=True)
            handles = [engine.submit(prompt, greedy(9), **options) for prompt, options in both]
            outputs = [handle.result(60) for handle in handles]
            for prompt, options, output in zip(prompts, asked, outputs, strict=True):
                assert output.token_ids == alone(plain, prompt, 9)
                if not options:
                    assert output.emitted is None
                else:
                    check(plain, output, options["emitted"])
                assert (output.hidden_states is None) is ("hidden_states" not in options)
        assert engine.stats().cached_tokens > 0, "the others began with pages"
    assert_account_is_empty(model)


def test_what_no_hook_emits_ends_that_request_alone(plain, model):
    with compiled_llm.traced_hook(model.model.layers[0].mlp, emit), Engine(model) as engine:
        asking, other = engine.submit([5, 6], greedy(4), emitted=["norms"]), engine.submit([5, 6, 7], greedy(4))
        with pytest.raises(RuntimeError, match="emitted: no traced hook emits 'norms'; leave it out"):
            asking.result(60)
        assert other.result(60).token_ids == alone(plain, [5, 6, 7], 4)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("norm", "give a list of the names"),
        ([], "give a list of the names"),
        ([1], "1 is no name"),
        (["norm"], "no tra"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_waits(model, asked, message):
    with Engine(model) as engine:
        for call in (engine.submit, engine.generate):
            with pytest.raises(ValueError, match=f"^emitted=.*{message}"):
                call([5, 6, 7], emitted=asked)
        assert engine.stats().waiting == 0


def test_hidden_states_that_the_host_has_no_memory_for_are_refused(plain, model, monkeypatch):
    """Counted are prompts and answers that cannot end early, those of unfinished requests too."""
    monkeypatch.setattr(wanted, "free_bytes", lambda device: 20 * 4 * plain.config.hidden_size)  # of 20 tokens
    prompt, late = [5, 6, 7, 8], greedy(300)
    early = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=[127])
    message = "hidden_states: those of the prompts and answers take .* GiB are free; give fewer layers"
    with Engine(model) as engine:
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, late, hidden_states=[-1])
        with pytest.raises(ValueError, match=message):
            engine.generate([prompt] * 3, early, hidden_states=[0, -1])
        assert engine.stats().waiting == 0
        check_answers(engine.submit(prompt, early, hidden_states=[0, -1]).result(60))
        with engine.paused():
            waits = engine.submit(prompt * 3, early, hidden_states=[-1])
            with pytest.raises(ValueError, match=message):
                engine.submit(prompt * 3, early, hidden_states=[-1])
        check_answers(waits.result(60))


def test_what_is_still_to_come_to_the_host_counts(plain, model, monkeypatch):
    prompt, most = [5, 6, 7, 8], 900
    room = (most + 6) * 4 * plain.config.hidden_size  # of the first request, and of 3 more tokens
    monkeypatch.setattr(wanted, "free_bytes", lambda device: room)
    with Engine(model) as engine:
        running = engine.submit(prompt, greedy(most), hidden_states=[-1])
        next(iter(running))
        with engine.paused(), pytest.raises(ValueError, match="hidden_states: those of the prompts and answers take"):
            engine.submit(prompt, greedy(1), hidden_states=[-1])
        running.cancel()


def check_answers(output: RequestOutput) -> None:
    assert output.hidden_states is not None
    tokens = len(output.prompt_token_ids) + len(output.token_ids) - 1
    assert all(len(states) == tokens for states in output.hidden_states.values())


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_captured_steps_give_those_of_each_step(plain, monkeypatch, seed):
    let_a_cpu_capture(monkeypatch)
    model = wrapped(2000, tiny(), mode="compile")
    prompts = some_prompts(2, seed, longest=20)
    with compiled_llm.traced_hook(model.model.layers[0].mlp, emit), Engine(model) as engine:
        for names in (None, ["norm"], NAMES):
            for output in engine.generate(prompts, greedy(9), emitted=names):
                assert output.token_ids == alone(plain, output.prompt_token_ids, 9)
                if names is not None:
                    check(plain, output, names)
    assert (model.compiled.stats().recompiles, model.compiled.stats().graph_breaks) == (0, 0)
    assert any(row.replays for row in model.compiled.cuda_graphs)
