"""lm-eval's scores of a wrapped model are those of the model itself: by ``HFLM``, and through a server.

Log-likelihoods are sums of float32 numbers, added in another order; what tasks make of them is equal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.execution.steps.graph_manager import GraphManager
from support.engine.text_tokenizers import SAMPLES, byte_level
from support.noting import note_calls
from support.server.engine_processes import engine_that_names_its_tokenizer
from support.server.running_servers import RunningServer, chat_tokenizer, running_server
from support.tiny_models import tiny_qwen3

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("tenacity", reason="lm-eval is installed without its extra api")

POSITIONS = 512
CHOICES = [" a fox", " the lazy dog", " x"]
SHOTS = "The fox is quick.\nThe dog is lazy.\n"
PAIRS = [(f"{SHOTS}{sample[:20]}", choice) for sample in SAMPLES for choice in CHOICES]


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny_qwen3(vocab_size=len(byte_level()), max_position_embeddings=POSITIONS, eos_token_id=1)


@pytest.fixture(scope="module")
def wrapped(plain: PreTrainedModel) -> PreTrainedModel:
    return compiled_llm.wrap(copy.deepcopy(plain), mode="eager")


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def harness(model: PreTrainedModel, batch_size: int) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=byte_level(), batch_size=batch_size, max_length=POSITIONS, device="cpu")


def check_same(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> None:
    """Check log-likelihoods, whether all tokens are the most likely, and which choice of each question is."""
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    for start in range(0, len(PAIRS), len(CHOICES)):
        chosen = [
            max(range(len(CHOICES)), key=lambda at, of=of, start=start: of[start + at][0]) for of in (ours, theirs)
        ]
        assert chosen[0] == chosen[1]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_choices_are_scored_alike(wrapped: PreTrainedModel, plain: PreTrainedModel, batch_size: int) -> None:
    asked = requests("loglikelihood", PAIRS)
    before = dict(wrapped.compiled.stats().forward_calls)
    ours = harness(wrapped, batch_size).loglikelihood(asked, disable_tqdm=True)
    check_same(ours, harness(plain, batch_size).loglikelihood(asked, disable_tqdm=True))
    calls = wrapped.compiled.stats().forward_calls
    assert calls["compiled"] > before.get("compiled", 0)
    assert not calls.get("original")


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rolling_perplexity_is_alike(wrapped: PreTrainedModel, plain: PreTrainedModel, batch_size: int) -> None:
    asked = requests("loglikelihood_rolling", [(sample * 12,) for sample in SAMPLES])  # longer than the positions
    ours, theirs = (
        harness(model, batch_size).loglikelihood_rolling(asked, disable_tqdm=True) for model in (wrapped, plain)
    )
    assert ours == pytest.approx(theirs, abs=1e-3, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_what_is_generated_is_alike(wrapped: PreTrainedModel, plain: PreTrainedModel, batch_size: int) -> None:
    asked = requests(
        "generate_until", [(sample[:20], {"until": ["\n", "z"], "max_gen_toks": 12}) for sample in SAMPLES]
    )
    ours, theirs = (harness(model, batch_size).generate_until(asked, disable_tqdm=True) for model in (wrapped, plain))
    assert ours == theirs
    assert set(wrapped.compiled.stats().generate_calls) == {"fast loop"}


ONE = [("the quick", {"until": ["\n\n", "Q:"], "max_gen_toks": 8})]


def test_the_harnesss_criteria_leave_the_model_alone(wrapped: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    harness(wrapped, 1).generate_until(requests("generate_until", ONE), disable_tqdm=True)  # prepares all
    looks = note_calls(monkeypatch, GraphManager, "check_model", lambda *_: None)
    harness(wrapped, 1).generate_until(requests("generate_until", ONE), disable_tqdm=True)
    assert len(looks) == 1, "the first step looks at the model, and no later one"


@pytest.mark.usefixtures("without_inductor")
def test_what_another_criterion_of_that_name_writes_in_mid_call_is_noticed(
    plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.utils_hf import MultiTokenEOSCriteria

    own = MultiTokenEOSCriteria.__call__
    unchanged = harness(plain, 1).generate_until(requests("generate_until", ONE), disable_tqdm=True)
    changed = []
    for model in (copy.deepcopy(plain), compiled_llm.wrap(copy.deepcopy(plain), fuse_projections=True)):

        def writes(self: Any, ids: Tensor, scores: Any, model: PreTrainedModel = model, **options: Any) -> Any:
            if ids.shape[1] == self.initial_decoder_input_length + 3:
                for parameter in model.model.layers.parameters():
                    parameter.data = -parameter.data.abs()
            return own(self, ids, scores, **options)

        monkeypatch.setattr(MultiTokenEOSCriteria, "__call__", writes)
        changed += harness(model, 1).generate_until(requests("generate_until", ONE), disable_tqdm=True)
    assert changed[1] == changed[0] != unchanged[0]


# ---- through a server


@pytest.fixture(scope="module")
def engine(wrapped: PreTrainedModel) -> Iterator[Engine]:
    with Engine(wrapped, tokenizer=chat_tokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with engine_that_names_its_tokenizer(engine) as loop, running_server(loop.server._path) as server:
        yield server


@pytest.mark.parametrize(("batch_size", "as_tokens"), [(1, True), (4, True), (4, False)])
def test_a_server_scores_choices_as_the_model_does(
    server: RunningServer,
    engine: Engine,
    plain: PreTrainedModel,
    batch_size: int,
    as_tokens: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As lm-eval asks: the text and one token more, with ``echo`` and ``logprobs``, and the latter is dropped.

    What examples and questions of several prompts share is computed once, though all of each prompt is scored.
    """
    engine.reset_prefix_cache()
    before = engine.stats().cached_tokens
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: byte_level())
    remote = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny",
        tokenizer_backend="huggingface",
        tokenized_requests=as_tokens,
        batch_size=batch_size,
        max_length=POSITIONS,
        max_retries=1,
    )
    asked = requests("loglikelihood", PAIRS)
    ours = remote.loglikelihood(asked, disable_tqdm=True)
    check_same(ours, harness(plain, 1).loglikelihood(asked, disable_tqdm=True))
    assert engine.stats().cached_tokens > before


def test_a_server_generates_what_the_model_does(
    server: RunningServer, plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: byte_level())
    remote = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="tiny", tokenizer_backend="huggingface", max_retries=1
    )
    asked = requests("generate_until", [("the quick", {"until": ["\n"], "max_gen_toks": 12})])
    assert remote.generate_until(asked, disable_tqdm=True) == harness(plain, 1).generate_until(asked, disable_tqdm=True)


def test_a_server_answers_chats_as_the_model_does(
    server: RunningServer, plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``local-chat-completions`` sends messages, which the server makes text of by the tokenizer's template."""
    from lm_eval.models.openai_completions import LocalChatCompletion

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: byte_level())
    remote = LocalChatCompletion(
        base_url=f"{server.url}/v1/chat/completions", model="tiny", num_concurrent=2, max_retries=1
    )
    chats = [[{"role": "user", "content": sample[:20]}] for sample in SAMPLES]
    settings = {"until": ["\n", "z"], "max_gen_toks": 12}
    asked = requests("generate_until", [(remote.apply_chat_template(chat), dict(settings)) for chat in chats])
    texts = [chat_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    expected = requests("generate_until", [(text, dict(settings)) for text in texts])
    ours, theirs = (
        lm.generate_until(of, disable_tqdm=True) for lm, of in ((remote, asked), (harness(plain, 1), expected))
    )
    assert ours == theirs


def test_texts_that_begin_alike_are_scored_by_an_engine_that_computes_their_beginning_once(
    wrapped: PreTrainedModel, plain: PreTrainedModel
) -> None:
    context, answers = byte_level()(SHOTS)["input_ids"], [byte_level()(choice)["input_ids"] for choice in CHOICES]
    params = compiled_llm.SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(context))
    with Engine(wrapped) as engine:
        outputs = [engine.generate([context + answer], params)[0] for answer in answers]
    assert all(output.cached_tokens for output in outputs[1:])
    for answer, output in zip(answers, outputs, strict=True):
        entries = list(output.prompt_logprobs or ())[len(context) :]
        ours = sum(entry[token].logprob for entry, token in zip(entries, answer, strict=True) if entry is not None)
        with torch.no_grad():
            scores = plain(torch.tensor([context + answer])).logits[0].log_softmax(-1)
        theirs = sum(float(scores[len(context) + at - 1, token]) for at, token in enumerate(answer))
        assert ours == pytest.approx(theirs, abs=1e-4)
