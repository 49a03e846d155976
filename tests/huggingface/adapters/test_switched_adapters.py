"""LoRA adapters of the same shapes are one program's, whichever is active: PEFT's tokens, and nothing recompiles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import compiled_llm
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.execution.twins import OPTIONS as TWINS, prompts_on_device, small_qwen3
from support.huggingface.peft_kinds import Pair
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_llama

SIX = [f"adapter {number}" for number in range(6)]
OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "400 tokens", "max_batch_size": 4, "progress": False}
PROGRAMS = 2
"""A prefill and a decode step."""

Change = Callable[[Any], object]


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 64, "init_lora_weights": False, **settings})


def plain() -> Any:
    return tiny_llama(num_hidden_layers=1, eos_token_id=None)


def with_adapters(model: Any) -> Any:
    torch.manual_seed(0)
    adapted = get_peft_model(model, lora(), SIX[0])
    for name in SIX[1:]:
        adapted.add_adapter(name, lora())
    return adapted.eval()


class Pairs:
    """A wrapped model and another one, both with the same adapters."""

    def __init__(self, seed: int) -> None:
        wrapped = compiled_llm.wrap(plain(), **OPTIONS)
        self.pair, self.theirs = Pair(with_adapters(wrapped), wrapped), with_adapters(plain())
        self._calls, self._inputs = 0, mixed_prompts([4, 7, 5], 128, seed)

    def tokens(self, change: Change = lambda model: None) -> Tensor:
        """Change both; return the tokens of both, which are the same."""
        self._calls += 1
        for model in (self.pair.adapted, self.theirs):
            torch.manual_seed(self._calls)
            change(model)
        ours, theirs = (greedy(model, self._inputs, 8) for model in (self.pair.adapted, self.theirs))
        torch.testing.assert_close(ours, theirs)
        return theirs

    @property
    def recompiles(self) -> int:
        return int(self.pair.wrapped.compiled.stats().recompiles)


def switch(name: str | list[str]) -> Change:
    return lambda model: model.base_model.set_adapter(name)


def train(model: Any) -> None:
    """A step of an optimizer, which writes in place."""
    active = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(active, lr=0.5)
    model(input_ids=torch.arange(3, 20)[None]).logits.float().var().backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def write_without_a_trace(model: Any) -> None:
    """As trainers do that keep weights elsewhere, too."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            parameter.data.mul_(-1)


def load(model: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(plain(), lora()).save_pretrained(folder)
        model.load_adapter(folder, "loaded")
    model.set_adapter("loaded")


IN_PLACE: dict[str, Change] = {
    **{f"switch to {name}": switch(name) for name in SIX},
    "train": train,
    "write without a trace": write_without_a_trace,
    "switch to the next": switch(SIX[0]),
}


@pytest.fixture
def pairs(without_inductor: None, seed: int) -> Pairs:
    return Pairs(seed)


def assert_all_differ(pairs: Pairs) -> None:
    """Change both models in each way; each gives tokens of its own, but for an adapter that was seen before."""
    seen = {what: pairs.tokens(change) for what, change in IN_PLACE.items()}
    last = seen.pop("switch to the next")
    assert torch.equal(last, seen[f"switch to {SIX[0]}"])
    assert len({str(tokens.tolist()) for tokens in seen.values()}) == len(seen)


def add(name: str, **settings: Any) -> Change:
    return lambda model: (model.add_adapter(name, lora(**settings)), model.set_adapter(name))


@pytest.mark.whole
def test_adapters_of_other_shapes_are_compiled_once_for_each_shape(pairs: Pairs, whole: bool) -> None:
    """So are several that are active at once, if all is asked for."""
    pairs.tokens()
    for name in ("other", "another"):
        pairs.tokens(add(name, r=8, target_modules=["k_proj", "embed_tokens"]))
    shapes, again = 1, ["other", SIX[4], "another"]
    assert pairs.recompiles == shapes * PROGRAMS
    if whole:
        pairs.tokens(switch(SIX[:2]))
        shapes, again = 2, ["other", SIX[2:4], SIX[4], "another", SIX[1:3]]
        assert pairs.recompiles == shapes * PROGRAMS
    assert len({str(pairs.tokens(switch(names)).tolist()) for names in again}) == len(again)
    assert pairs.recompiles == shapes * PROGRAMS


@pytest.mark.whole
def test_disabled_and_merged_adapters_are_one_program(pairs: Pairs) -> None:
    acting = pairs.tokens()
    with pairs.pair.adapted.disable_adapter(), pairs.theirs.disable_adapter():
        disabled = pairs.tokens()
        assert torch.equal(pairs.tokens(switch(SIX[1])), disabled)
    assert pairs.recompiles == PROGRAMS
    pairs.tokens(switch(SIX[0]))
    assert torch.equal(pairs.tokens(lambda model: model.merge_adapter()), acting)
    assert torch.equal(pairs.tokens(lambda model: model.unmerge_adapter()), acting)
    assert not torch.equal(disabled, acting)
    assert pairs.recompiles == PROGRAMS


@pytest.mark.usefixtures("without_inductor")
def test_a_captured_step_reads_the_adapter_that_is_active(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture(monkeypatch)
    pairs = Pairs(seed)
    pairs.tokens()
    handle = pairs.pair.wrapped.compiled
    captured = handle.stats()
    assert captured.cuda_graphs > 0
    assert captured.prefill_cuda_graphs > 0
    assert_all_differ(pairs)
    now = handle.stats()
    assert (now.cuda_graphs, now.prefill_cuda_graphs) == (captured.cuda_graphs, captured.prefill_cuda_graphs)
    assert (now.recompiles, handle.recaptures()) == (0, (0, []))
    before = pairs.tokens(load)
    assert torch.equal(pairs.tokens(lambda model: model.delete_adapter(SIX[5])), before)
    assert not torch.equal(pairs.tokens(lambda model: model.delete_adapter("loaded")), before)
    pairs.tokens(lambda model: model.base_model.set_adapter(SIX[2], inference_mode=True))
    assert pairs.recompiles == 0
    pairs.tokens(add("of another rank", r=8))
    assert handle.recaptures()[0] > 0, "its tensors are elsewhere"
    pairs.tokens(switch(SIX[1]))


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_adapter_that_is_active(seed: int) -> None:
    """In bfloat16: logits of prefill and of a decode step are nearer to PEFT's than to those of any other adapter."""
    wrapped = compiled_llm.wrap(small_qwen3(seed), **{**TWINS, "progress": False})
    ours, theirs = with_adapters(wrapped), with_adapters(small_qwen3(seed))
    inputs = prompts_on_device([9, 50, 17, 33], seed)

    def logits(model: Any, name: str) -> Tensor:
        model.set_adapter(name)
        options = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
        first, second, *_ = model.generate(**inputs, do_sample=False, **options).logits
        return torch.cat([first, second]).float()

    expected = {name: logits(theirs, name) for name in SIX}
    for name in SIX[:2]:
        logits(ours, name)
    wrapped.compiled.warmup([4])
    before = wrapped.compiled.stats()
    for name in SIX * 2:
        found = logits(ours, name)
        distances = {other: (found - each).square().mean().item() for other, each in expected.items()}
        assert min(distances, key=distances.__getitem__) == name, distances
    after = wrapped.compiled.stats()
    assert (after.recompiles, after.cuda_graphs) == (before.recompiles, before.cuda_graphs)
    assert before.recompiles == 0
    assert wrapped.compiled.recaptures() == (0, [])
