"""What ``wrap`` has learnt of the tokens that layers see is learnt again once the model says something else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.model import facts
from compiled_llm.model.version.model_version import ModelVersion
from support.engine.tiny_engines import greedy
from support.huggingface.families import FAMILIES, make
from support.huggingface.recurrent_families import recurrent_model
from support.noting import note_calls
from support.parity import FEW_PAGES, assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")

Change = Callable[[Any], None]
IDS = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(0))
NEW = 5


def windowed() -> Any:
    return tiny_qwen3(eos_token_id=None, **WINDOWS)


def unwindowed() -> Any:
    return tiny_qwen3(eos_token_id=None)


def family(name: str) -> Callable[[], Any]:
    both = {} if name == "MiniCPM3" else {"layer_types": ["sliding_attention", "full_attention"]}
    options = {**FAMILIES[name], **both, "eos_token_id": None, "initializer_range": 0.2}
    return lambda: make(name, options, seed=0)


def in_config(**values: Any) -> Change:
    return lambda model: vars(model.config).update(values)


def in_attention(**values: Any) -> Change:
    return lambda model: [setattr(layer.self_attn, *item) for layer in model.model.layers for item in values.items()]


def first_type(kind: str) -> Change:
    return lambda model: model.config.layer_types.__setitem__(0, kind)


CHANGES: dict[str, tuple[Callable[[], Any], Change]] = {
    "a larger window": (windowed, in_config(sliding_window=9)),
    "a smaller window": (windowed, in_config(sliding_window=2)),
    "another window, Gemma 3": (family("Gemma3"), in_config(sliding_window=3)),
    "a layer of another type, Gemma 3": (family("Gemma3"), first_type("full_attention")),
    "another window, gpt-oss": (family("GptOss"), in_config(sliding_window=3)),
    "a layer of another type, gpt-oss": (family("GptOss"), first_type("full_attention")),
    "a window of the layers that sdpa ignores": (unwindowed, in_attention(sliding_window=4)),
}
REFUSED: dict[str, tuple[Callable[[], Any], Change]] = {
    "both directions, Gemma 3": (family("Gemma3"), in_config(use_bidirectional_attention=True)),
    "layers that are not causal": (unwindowed, in_attention(is_causal=False)),
}


def pair(name: str) -> tuple[Any, Any, Change]:
    made, change = {**CHANGES, **REFUSED}[name]
    return made(), compiled_llm.wrap(made(), **FEW_PAGES, mode="eager"), change


def tokens(model: PreTrainedModel) -> Tensor:
    out: Tensor = model.generate(IDS, max_new_tokens=NEW, do_sample=False)  # type: ignore[operator]
    return out


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Of a prompt without a cache, and of two steps over one."""
    out = model(IDS, use_cache=True)
    steps = [out.logits]
    for _ in range(2):
        out = model(steps[-1][:, -1:].argmax(-1), past_key_values=out.past_key_values)
        steps.append(out.logits)
    return torch.cat([model(IDS, use_cache=False).logits, *steps], dim=1)


def answers(model: PreTrainedModel) -> list[list[int]]:
    with compiled_llm.Engine(model) as engine:
        outputs = engine.generate(IDS.tolist(), greedy(NEW))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize("name", CHANGES)
def test_the_next_calls_see_what_huggingface_sees(name: str) -> None:
    plain, model, change = pair(name)
    before = logits(model)
    change(plain)
    change(model)
    expected = logits(plain)
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(tokens(model), tokens(plain))
    assert answers(model) == tokens(plain)[:, IDS.shape[1] :].tolist()
    assert {*model.compiled.stats().forward_calls, *model.compiled.stats().generate_calls} == {"compiled", "fast loop"}
    ignored = name.endswith("ignores")
    assert torch.allclose(before, expected, atol=1e-3) == ignored, "else the change is none"
    assert_account_is_empty(model)


@pytest.mark.parametrize("name", REFUSED)
def test_what_pages_cannot_serve_is_huggingfaces_and_counted(name: str) -> None:
    plain, model, change = pair(name)
    usual, kept = tokens(model), model.compiled.new_cache()
    before = model.config.to_dict()
    change(plain)
    change(model)
    torch.testing.assert_close(logits(model), logits(plain))
    assert torch.equal(tokens(model), tokens(plain))
    assert {*model.compiled.stats().slow_paths} == {"cannot_run", "forward: cannot_run"}
    with torch.no_grad(), pytest.raises(ValueError, match=r"cannot run over pages now: .*(not causal|sees neither)"):
        model(IDS, past_key_values=kept)
    with compiled_llm.Engine(model) as engine, pytest.raises(RuntimeError, match="cannot run over pages now"):
        engine.generate(IDS.tolist(), greedy(NEW))
    for undone in (in_config(**before), in_attention(is_causal=True)):
        undone(model)
    assert torch.equal(tokens(model), usual)
    assert model.compiled.stats().generate_calls["fast loop"] == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_changed_model_learns_again(copied: Callable[[Any], Any]) -> None:
    plain, model, change = pair("a larger window")
    change(plain)
    change(model)
    torch.testing.assert_close(logits(copied(model)), logits(plain), rtol=1e-3, atol=1e-3)


def test_a_copy_that_is_changed_learns_alone() -> None:
    plain, model, change = pair("a larger window")
    usual, twin = tokens(model), copy.deepcopy(model)
    change(plain)
    change(twin)
    assert torch.equal(tokens(twin), tokens(plain))
    assert torch.equal(tokens(model), usual)


@torch.no_grad()
def test_a_kept_cache_of_before_is_refused_with_one_sentence() -> None:
    _, model, change = pair("a larger window")
    kept = model(IDS, use_cache=True).past_key_values
    change(model)
    with pytest.raises(ValueError, match=r"or other windows; begin with model\.compiled\.new_cache\(\)"):
        model(IDS[:, :1], past_key_values=kept)


def test_an_engine_answers_by_the_windows_that_there_are(seed: int) -> None:
    """Also where prefixes were computed before."""
    plain, model, change = pair("a larger window")
    with compiled_llm.Engine(model) as engine:
        engine.generate(IDS.tolist(), greedy(NEW))
        change(plain)
        change(model)
        again = engine.generate(IDS.tolist(), greedy(NEW))
    assert [list(output.outputs[0].token_ids) for output in again] == tokens(plain)[:, IDS.shape[1] :].tolist()


def test_probes_run_again_only_for_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, change = pair("a larger window")
    ran = note_calls(monkeypatch, facts, "layers_of", lambda *_: True)
    tokens(model)
    model.config.use_cache = model.config.output_hidden_states = False
    model.set_attn_implementation("eager")
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    tokens(model)
    assert not ran
    change(model)
    for _ in range(2):
        tokens(model)
    assert len(ran) == 1


@pytest.mark.parametrize("made", [lambda: recurrent_model("Lfm2"), family("MiniCPM3")], ids=["recurrent", "latents"])
def test_layers_of_other_kinds_are_the_same_after_probes_have_run_again(made: Callable[[], Any]) -> None:
    model = compiled_llm.wrap(made(), **FEW_PAGES, mode="eager")
    usual, before = tokens(model), model.compiled.facts
    model.config.of_the_users_own = 1
    assert torch.equal(tokens(model), usual)
    after = model.compiled.facts
    assert after is not before
    assert after.layers is before.layers
    assert model.compiled.stats().generate_calls == {"fast loop": 2}


def test_a_look_and_a_repeated_step_compare_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = pair("a larger window")
    tokens(model)
    compared: list[bool] = []
    probed = ModelVersion.probed
    monkeypatch.setattr(ModelVersion, "probed", property(lambda self: compared.append(True) or probed.fget(self)))  # type: ignore[func-returns-value,attr-defined]
    model.compiled.model_runner().graph_manager.check_model()
    by_runner = len(compared)
    tokens(model)
    few = len(compared) - by_runner
    model.generate(IDS, max_new_tokens=4 * NEW, do_sample=False)
    assert len(compared) - by_runner == 2 * few, "once a call, however many tokens it makes"
