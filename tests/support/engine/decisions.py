"""A tiny model with settings of decisions beside it, random questions, and transformers' answers to them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from support.engine.tiny_engines import wrapped
from support.server.running_servers import chat_tokenizer
from support.tiny_models import tiny_qwen3

PAGE = 16
WORDS = ["twice", "for my", "a refund", "<|mark|>", "<|im_end|>", "é", "12", "assistant:", "please\n"]
SETTINGS: dict[str, Any] = {"labels": {"noul": ["Y", "N"]}, "temperature": {"choice": 0.7, "noul": 1.5}}


def plain() -> PreTrainedModel:
    return tiny_qwen3(num_hidden_layers=1, vocab_size=400)


def saved_settings(folder: Path, template: str | None = None, **settings: Any) -> Path:
    """Write ``decision.json``, and a template, into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "decision.json").write_text(json.dumps({**SETTINGS, **settings}))
    if template is not None:
        (folder / "decision_template.jinja").write_text(template)
    return folder


@contextmanager
def deciding(folder: Path, tokens: int = 20_000, page_size: int = PAGE, **options: Any) -> Iterator[Engine]:
    """An engine of the model, with the settings of a folder."""
    model = wrapped(tokens, plain(), page_size=page_size, max_batch_size=16, prefill_tokens=256)
    model.name_or_path = str(folder)
    with Engine(model, tokenizer=chat_tokenizer(), **options) as engine:
        yield engine


def pipeline(folder: Path) -> Any:
    """Transformers' pipeline over the same model, unwrapped."""
    pipelines: Any = pytest.importorskip("transformers.pipelines.decision", reason="transformers < 5.24")
    return pipelines.DecisionPipeline(
        model=plain(), tokenizer=copy.deepcopy(chat_tokenizer()), decision_config=str(folder)
    )


def some_text(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def some_state(draw: random.Random) -> Any:
    text = some_text(draw, 30)
    return draw.choice([text, {"message": text, "count": 3}, [text, {"from": some_text(draw, 3)}]])


def some_question(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(["noul", "choice", "score"])
    question: dict[str, Any] = {"type": kind}
    if draw.random() < 0.8:
        question["instructions"] = draw.choice([some_text(draw, 8), {"ask": some_text(draw, 4)}])
    described = [draw.choice([None, some_text(draw, 4)]) for _ in range(draw.randint(1, 5))]
    described += [None] * draw.choice([0, 0, 0, 21])
    if kind == "choice":
        question["criteria"] = {f"{place} {some_text(draw, 1)}": text for place, text in enumerate(described)}
    elif kind == "score":
        question["criteria"] = [text or "no" for text in described]
    elif draw.random() < 0.5:
        question["criteria"] = {"true": some_text(draw, 4)}
    return question


def some_requests(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests of one to four questions; some have a state in common."""
    states = [some_state(draw) for _ in range(max(1, count // 3))]
    return [
        {
            "state": draw.choice(states),
            "questions": {f"q{place}": some_question(draw) for place in range(draw.randint(1, 4))},
        }
        for _ in range(count)
    ]


def check(answers: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    """Check that answers are transformers', each number within 1e-5."""
    assert list(answers) == list(expected)
    for name, own in answers.items():
        assert own.keys() == expected[name].keys()
        for field, value in own.items():
            other = expected[name][field]
            if field in ("noul", "score", "probabilities", "confidence"):
                of_scale = field in ("score", "confidence")  # sums over a scale, which multiply an error
                assert value == pytest.approx(other, abs=1e-5 * (26 if of_scale else 1))
            elif field == "choice" and value != other:  # a tie
                both = expected[name]["probabilities"]
                assert both[value] == pytest.approx(both[other], abs=1e-5)
            else:
                assert value == other
