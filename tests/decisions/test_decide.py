"""``engine.decide`` answers as transformers' pipeline does, in any batch, and computes a state once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest

from compiled_llm.compat import decisions as compat
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.requests.decisions.decider import Decider
from compiled_llm.requests.decisions.label_read import LabelRead
from support.engine.decisions import PAGE, check, deciding, pipeline, saved_settings, some_requests
from support.server.running_servers import chat_tokenizer

pytest.importorskip("transformers.decision", reason="decisions need transformers 5.24")
pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = {"noul": ["Y", "N"], "choice": list(ascii_lowercase), "score": list(ascii_lowercase)}
OF_ONE = "{{ state | string }} [{{ question.type }}] {{ question.options | join('/') }}:<|mark|> tail<|split|>"
OF_ALL = (
    "{{ state | string }}{% for q in questions %} {{ q.instructions }}<|split|>={{ q.labels | join }}:<|mark|>"
    "{% endfor %}"
)
STATE, QUESTIONS = "a dog barks " * 40, {f"q{n}": {"type": "noul", "instructions": f"Is it {n}?"} for n in range(5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_settings(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    with deciding(folder) as engine:
        yield engine


def asked_in_threads(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(6) as threads:
        return list(threads.map(lambda request: engine.decide(request["state"], request["questions"]), requests))


def test_requests_in_any_order_and_batch(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """With chunks inside prompts, and pages that are lost meanwhile."""
    plans, decoding, draw = itertools.count(), Scheduler._decoding_within_pages, random.Random(seed)

    def out_of_pages(scheduler: Scheduler) -> tuple[list[Request], int]:
        if next(plans) % 7 == 3 and scheduler.running:
            scheduler.preempt()
        return decoding(scheduler)

    monkeypatch.setattr(Scheduler, "_decoding_within_pages", out_of_pages)
    requests, asks = some_requests(draw, 200 if whole else 60), pipeline(folder)
    expected = [asks(request) for request in requests]
    with deciding(folder, max_num_seqs=5) as engine:
        for _ in range(2 if whole else 1):
            order = draw.sample(range(len(requests)), len(requests))
            found = asked_in_threads(engine, [requests[place] for place in order])
            for place, answers in zip(order, found, strict=True):
                check(answers, expected[place])
        assert engine.stats().preemptions > 5


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("template", [OF_ONE, OF_ALL])
@pytest.mark.parametrize("sanitize", [True, False])
def test_templates_with_marks(template: str, sanitize: bool, tmp_path: Path, seed: int) -> None:
    folder = saved_settings(tmp_path, template, labels=LETTERS, sanitize_control_tokens=sanitize)
    requests, asks = some_requests(random.Random(seed), 12), pipeline(folder)
    with deciding(folder) as engine:
        for request in requests:
            check(engine.decide(request["state"], request["questions"]), asks(request))


# ---- computed once


def most_computed(reads: Sequence[LabelRead]) -> int:
    """Return how many tokens of prompts may be computed: those of the state, of the questions, and a page each."""
    first = np.array(reads[0].prompt)
    alike = min(common(first, np.array(read.prompt)) for read in reads)
    return alike + sum(len(read.prompt) - alike + PAGE for read in reads)


def common(one: Any, other: Any) -> int:
    both = min(len(one), len(other))
    different = np.flatnonzero(one[:both] != other[:both])
    return int(different[0]) if len(different) else both


def check_computed_once(engine: Engine, state: str, **options: Any) -> None:
    decided = engine.decide(state, QUESTIONS, **options)
    reads = Decider(engine._tokenizer, engine._model.name_or_path).reads(state, QUESTIONS)
    assert decided.prompt_tokens == sum(len(read.prompt) for read in reads)
    assert decided.prompt_tokens - decided.cached_tokens <= most_computed(reads)


@pytest.mark.parametrize("length", [1, 3, 17, 50], ids="{} words".format)  # of a step's tokens, and of several steps
def test_questions_that_come_at_once_compute_the_state_once(engine: Engine, length: int) -> None:
    check_computed_once(engine, f"{length} dogs bark " * length)


def test_questions_of_a_state_that_is_known_compute_themselves_alone(engine: Engine) -> None:
    engine.decide(STATE, QUESTIONS)
    again = engine.decide(STATE, {"other": {"type": "noul", "instructions": "Is it another?"}})
    assert again.prompt_tokens - again.cached_tokens < 100 < again.cached_tokens


def check_salts_share_nothing(engine: Engine) -> None:
    state = "cats purr " * 30
    first, second = (engine.decide(state, QUESTIONS, cache_salt=salt) for salt in ("a", "b"))
    assert first.cached_tokens == second.cached_tokens
    assert engine.decide(state, QUESTIONS, cache_salt="a").cached_tokens > first.cached_tokens


def test_states_of_other_salts_are_computed_again(folder: Path) -> None:
    with deciding(folder) as engine:
        check_salts_share_nothing(engine)


# ---- planted


def neighbours(labels: Any) -> Any:
    return lambda decider, question: tuple(label + 1 for label in labels(decider, question))


def one_early(reads: Any) -> Any:
    return lambda *given: [read._replace(prompt=read.prompt[:-1]) for read in reads(*given)]


@pytest.mark.parametrize(("method", "planted"), [("_labels", neighbours), ("_reads", one_early)])
def test_other_labels_and_earlier_tokens_are_seen(
    method: str, planted: Any, folder: Path, engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request,) = some_requests(random.Random(seed), 1)
    request["questions"]["tone"] = {"type": "choice", "criteria": {"calm": None, "angry": None, "sad": None}}
    expected = pipeline(folder)(request)
    check(engine.decide(request["state"], request["questions"]), expected)
    monkeypatch.setattr(Decider, method, planted(getattr(Decider, method)))
    with pytest.raises(AssertionError):
        check(engine.decide(request["state"], request["questions"]), expected)


def test_a_prefix_of_another_salt_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    match, insert = PrefixTree.match, PrefixTree.insert
    monkeypatch.setattr(PrefixTree, "match", lambda tree, ids, salt=None: match(tree, ids))
    monkeypatch.setattr(
        PrefixTree, "insert", lambda tree, ids, pages, salt=None, *rest: insert(tree, ids, pages, None, *rest)
    )
    with deciding(folder) as engine, pytest.raises(AssertionError):
        check_salts_share_nothing(engine)


# ---- diagnostics, refusals


def test_diagnostics_say_how_far_labels_were_the_answer(folder: Path, engine: Engine) -> None:
    decided = engine.decide(STATE, QUESTIONS)
    assert decided.diagnostics.keys() == decided.keys() == QUESTIONS.keys()
    for label_mass, argmax_is_label in decided.diagnostics.values():
        assert 0 < label_mass < 0.5
        assert not argmax_is_label


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ({}, "questions: give a dictionary"),
        ([{"type": "noul"}], "questions: give a dictionary"),
        ({"a": {"type": "yes"}}, "questions.a: `type` must be one of noul, choice, score, got 'yes'"),
        ({"a": {"type": ["noul"]}}, r"questions.a: `type` must be a text, got \['noul'\]"),
        ({"a": {"type": "noul", "instructions": "\ud800"}}, "questions: half a character of UTF-16 is no text"),
        ({"a": {"type": "choice", "criteria": {}}}, "questions.a: a choice question needs `criteria`"),
        ({"a": {"type": "noul", "x": 1}}, "questions.a: .*unexpected keyword argument 'x'"),
        ({"a": {"type": "score", "criteria": ["x"] * 27}}, "questions.a: this model reads at most 26 options"),
    ],
)
def test_impossible_questions_are_refused_by_name(engine: Engine, questions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.decide("state", questions)


def test_settings_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    tokenizer, noul = chat_tokenizer(), {"a": {"type": "noul"}}
    settings: list[tuple[dict[str, Any], str]] = [
        (
            {"labels": {"noul": ["Yes", "No"]}},
            r"questions.a: The labels \['Yes', 'No'\] are not distinct single tokens",
        ),
        ({"labels": {"noul": ["Y", "Y"]}}, "not distinct single tokens"),
        ({"temperature": {"noul": 0}}, r"decision.json: temperature.noul=0.0 must be above 0"),
    ]
    for wrong, message in settings:
        with pytest.raises(ValueError, match=message):
            Decider(tokenizer, str(saved_settings(tmp_path, **wrong))).reads("state", noul)
    many = {"choice": [chr(0x3400 + number) for number in range(200)]}
    criteria = {str(number): None for number in range(129)}
    decider = Decider(tokenizer, str(saved_settings(tmp_path, labels=many)))
    with pytest.raises(ValueError, match=r"questions.a: it has 129 options, and there can be 128"):
        decider.reads("state", {"a": {"type": "choice", "criteria": criteria}})
    with pytest.raises(ValueError, match="names the adapter 'lora'"):
        Decider(tokenizer, str(saved_settings(tmp_path, adapter="lora")))
    with pytest.raises(ValueError, match="need a tokenizer"):
        Decider(None, None)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        Decider(tokenizer, None)


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.decision.template_utils.DECISION_PROMPT")
    with pytest.raises(ImportError, match=r"need transformers 5.24 or newer, and 5.\d+.* is installed: pip install"):
        compat.decisions_of_transformers()
