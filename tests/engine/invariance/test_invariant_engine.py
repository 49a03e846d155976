"""`batch_invariant=True`: log-probabilities of answers have the bits of the model called alone, teacher-forced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.compilation import programs
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from support.engine.invariant_answers import (
    answers_of,
    check_answers,
    check_forwards,
    invariant,
    logprobs_of,
    some_requests,
)
from support.engine.random_requests import adapted, cases_read_early_and_late
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.huggingface.families import FAMILIES, make
from support.parity import assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE_VECTORS = {"head_dim": 32}
"""Without Inductor, PyTorch computes what does not fill a vector of the processor in another way."""


def small_qwen3(**config: Any) -> PreTrainedModel:
    return tiny_qwen3(**{"num_hidden_layers": 1, "eos_token_id": None, **WHOLE_VECTORS, **config})


def check_engine(model: PreTrainedModel, seed: int, count: int = 8, preempts: bool = False, warm: bool = False) -> None:
    asked = some_requests(seed, count)
    with Engine(model, max_num_seqs=6) as engine:
        if warm:  # compiling takes longer than a request is waited for
            engine.warmup([1, 6])
        outputs = answers_of(engine, asked, seed)
        stats = engine.stats()
        assert stats.mixed_steps == 0
        assert stats.cached_tokens > 0
        assert not preempts or stats.preemptions > 0
    assert check_answers(model, asked, outputs) > 10 * count
    assert_account_is_empty(model)


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(("case", "late"), cases_read_early_and_late("many pages", "few pages", "windows"))
def test_answers_have_the_bits_of_the_teacher_forced_model(
    case: str, late: bool, seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, chunks, over cached pages, in forks, and computed again after rows have lost their pages."""
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: late))
    if case == "few pages":
        monkeypatch.setitem(POLICIES, "auto", Greedy)
    model = invariant(small_qwen3(**(WINDOWS if case == "windows" else {})), 260 if case == "few pages" else 4000)
    check_engine(model, seed, count=30 if case == "few pages" else 16 if whole else 8, preempts=case == "few pages")
    if case != "few pages":
        check_forwards(model, seed, 6)


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "learned positions": lambda: make("GPT2LMHead", {**FAMILIES["GPT2LMHead"], "n_head": 2, "n_layer": 1}, 0),
    "soft caps": lambda: make("Gemma2", {**FAMILIES["Gemma2"], **WHOLE_VECTORS}, 0),
    "windows in all layers": lambda: make("Gemma3", {**FAMILIES["Gemma3"], **WHOLE_VECTORS}, 0),
    "norms without weights": lambda: make(
        "Olmo", {**FAMILIES["Olmo"], "num_attention_heads": 2, "num_hidden_layers": 1}, 0
    ),
    "an adapter": lambda: adapted(merged=False, num_hidden_layers=1),
}


ELSEWHERE = ("soft caps", "windows in all layers", "norms without weights")
"""Soft caps run with the passes for a GPU, below; windows above."""

BY_KIND = [pytest.param(kind, marks=[pytest.mark.whole] * (kind in ELSEWHERE)) for kind in KINDS]


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("kind", BY_KIND)
def test_layers_of_each_kind_have_them(kind: str, seed: int) -> None:
    check_engine(invariant(KINDS[kind]()), seed)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_generate_has_them(seed: int) -> None:
    """Of several rows, whose prompts are padded."""
    model = invariant(small_qwen3())
    ids = torch.randint(3, 128, (3, 20))
    mask = torch.ones_like(ids)
    mask[1, :7], mask[2, :13] = 0, 0
    given = model.generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert "original" not in model.compiled.stats().generate_calls
    for row, begin in enumerate((0, 7, 13)):
        expected = logprobs_of(model, given.sequences[row, begin:].tolist())
        for step, logits in enumerate(given.logits):
            own = torch.log_softmax(logits[row].float(), -1)
            assert torch.equal(own, expected[20 - begin + step - 1])


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["Qwen3", "GPT2LMHead", "Gemma2", "Gemma3", "Olmo", "Phi3", "OPT", "Cohere"])
def test_compiled_programs_of_each_family_have_them(family: str, dtype: torch.dtype, threads: int, seed: int) -> None:
    plain = tiny_qwen3(eos_token_id=None) if family == "Qwen3" else make(family, FAMILIES[family], 0)
    torch.set_num_threads(threads)  # `one_thread` sets it back
    try:
        model = invariant(plain.to(dtype))
        check_engine(model, seed, warm=True)
        check_forwards(model, seed, 10)
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.whole
def test_the_demo_model_has_them(demo_model_dir: Any, seed: int) -> None:
    from transformers import AutoModelForCausalLM

    model = invariant(AutoModelForCausalLM.from_pretrained(demo_model_dir), page_size=16, prefill_tokens=64)
    check_engine(model, seed, count=8, warm=True)
    check_forwards(model, seed, 2)


@pytest.mark.usefixtures("without_inductor")
def test_a_forward_that_would_have_other_bits_is_refused() -> None:
    """With gradients nothing is promised."""
    model = invariant(small_qwen3(), 40)
    ids = torch.randint(3, 128, (1, 60))
    message = r"^forward with batch_invariant=True: there are more tokens than pages are free.*; that takes HuggingFace"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(ids)
    assert model(ids).logits.requires_grad


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    "kind", ["qk norms", "soft caps", pytest.param("windows in all layers", marks=pytest.mark.whole)]
)
def test_the_passes_for_a_gpu_find_the_same_in_decode_and_prefill(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and rotary embeddings, which become parts of ops, have the same bits in both; steps are captured."""
    let_a_cpu_capture(monkeypatch)
    own = programs.passes_for
    monkeypatch.setattr(
        programs, "passes_for", lambda config, _, fused, decodes: own(config, torch.device("cuda"), fused, decodes)
    )
    model = invariant(small_qwen3() if kind == "qk norms" else KINDS[kind](), mode="cuda-graphs")
    check_engine(model, seed)
    matches = model.compiled.model_runner().graph_manager.programs.pattern_matches()
    if kind == "qk norms":
        assert matches == {"norm": 6, "rotary": 2, "rotary in prefill": 1}, "a prefill and two decode steps"
