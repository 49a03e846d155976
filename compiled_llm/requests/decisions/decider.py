"""Makes prompts of typed questions, as ``transformers.pipeline("decision")`` does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from compiled_llm.compat.decisions import decision_config, decisions_of_transformers, variables_of, written
from compiled_llm.requests.decisions.label_read import LabelRead
from compiled_llm.requests.prompts import check_texts
from compiled_llm.requests.sampling_params import MAX_LOGPROB_TOKEN_IDS


class QuestionError(ValueError):
    """A question that is impossible; ``name`` is its own, or None if all questions are."""

    def __init__(self, said: str, name: str | None = None) -> None:
        super().__init__(f"questions: {said}" if name is None else f"questions.{name}: {said}")
        self.name, self.said = name, said


class Decider:
    """A tokenizer with the settings of decisions that lie beside a model."""

    def __init__(self, tokenizer: Any, source: str | None) -> None:
        """Read the settings.

        Args:
            tokenizer: stays as it is.
            source: the folder, or the name on the hub, with ``decision.json`` and ``decision_template.jinja``; one
                without them has transformers' defaults.

        Raises:
            DecisionsMissingError: transformers is older than 5.24.
            ValueError: there is no tokenizer or no template for chats, or the settings name an adapter.
        """
        self._transformers = decisions_of_transformers()
        self.config = decision_config(source)
        if tokenizer is None:
            raise ValueError("decide: questions need a tokenizer; give compiled_llm.Engine(model, tokenizer=tokenizer)")
        if self.config.adapter:
            raise ValueError(
                f"decision.json: it names the adapter {self.config.adapter!r}, which is not loaded by itself; merge "
                "it into the model, or wrap the model with it, and leave it out"
            )
        if self.config.chat_template is None and not getattr(tokenizer, "chat_template", None):
            raise ValueError("decide: the tokenizer has no chat template, and the model no decision_template.jinja")
        self._given_tokenizer = tokenizer
        self._label_ids: dict[tuple[str, ...], tuple[int, ...]] = {}

    @cached_property
    def _tokenizer(self) -> Any:
        """A tokenizer that knows the sentinels of templates, which no text of a request can write."""
        tokenizer, known = copy.deepcopy(self._given_tokenizer), self._transformers
        if known.MARK not in tokenizer.get_vocab():
            tokenizer.add_tokens([known.AddedToken(text, special=True, normalized=False) for text in _sentinels(known)])
        return tokenizer

    @cached_property
    def _sentinel_ids(self) -> tuple[int, int]:
        mark, split = self._tokenizer.convert_tokens_to_ids(_sentinels(self._transformers))
        return int(mark), int(split)

    @cached_property
    def _read_by_template(self) -> frozenset[str]:
        return variables_of(self.config.chat_template or self._transformers.DECISION_PROMPT)

    def reads(
        self, state: Any, questions: Any, check: Callable[[Sequence[Any]], object] = lambda group: None
    ) -> list[LabelRead]:
        """Return the prompt of each question, in order; QuestionError if one is impossible.

        Args:
            state: what the questions are about: text, or JSON.
            questions: by name: ``{"type": "choice" | "score" | "noul", "instructions": ..., "criteria": ...}``.
            check: is given transformers' questions of each prompt, before one is made tokens; it may raise.
        """
        check_texts(state, "state")
        check_texts(questions, "questions")
        if not self.config.sanitize_control_tokens:  # its template escapes texts itself, but for the sentinels
            state, questions = self._without_sentinels([state, questions])
        asked = self._parsed(questions)
        groups = [asked] if "questions" in self._read_by_template else [[question] for question in asked]
        for group in groups:
            check(group)
        return [read for group in groups for read in self._reads(state, group)]

    def _without_sentinels(self, given: Any) -> Any:
        text = json.dumps(given, ensure_ascii=False)
        return json.loads(text.replace(self._transformers.MARK, "").replace(self._transformers.SPLIT, ""))

    def _parsed(self, questions: object) -> list[Any]:
        """Return transformers' questions, checked."""
        if not isinstance(questions, Mapping) or not questions:
            raise QuestionError("give a dictionary of them by name, with one at least")
        return [self._question(name, question) for name, question in questions.items()]

    def _question(self, name: str, question: Any) -> Any:
        if isinstance(question, Mapping) and not isinstance(kind := question.get("type", ""), str):
            raise QuestionError(f"`type` must be a text, got {kind!r}", name)
        try:
            parsed = self._transformers.Question.from_request(name, question, self.config)
        except ValueError as error:
            raise QuestionError(str(error).removeprefix(f"Question {name!r}: "), name) from None
        if (count := len(parsed.options)) > MAX_LOGPROB_TOKEN_IDS:
            raise QuestionError(f"it has {count} options, and there can be {MAX_LOGPROB_TOKEN_IDS}", name)
        return parsed

    def _reads(self, state: object, group: Sequence[Any]) -> list[LabelRead]:
        """Return the reads of questions that one text asks: up to the mark of each, or its end without marks."""
        mark, split = self._sentinel_ids
        prompt, marks = list[int](), list[int]()
        for token in self._tokens(state, group):
            if token == mark:
                marks.append(len(prompt))
            elif token != split:
                prompt.append(token)
        ends = marks or [len(prompt)]
        if len(ends) < len(group):
            raise ValueError(f"decision_template.jinja: it marks {len(ends)} places for {len(group)} questions")
        return [
            LabelRead(question, prompt[:end], self._labels(question), self._temperature(question))
            for question, end in zip(group, ends, strict=False)
        ]

    def _tokens(self, state: Any, group: Sequence[Any]) -> list[int]:
        template, content = self.config.chat_template, ""
        given: dict[str, Any] = {}
        if template is None:
            content = written(self._transformers.DECISION_PROMPT, state=state, question=group[0])
        else:
            plain = [asdict(question) for question in group]
            variables = {"state": state, "question": plain[0], "questions": plain}
            given = {name: value for name, value in variables.items() if name in self._read_by_template}
            given["chat_template"] = template
        tokens: list[int] = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            enable_thinking=False,
            sanitize_control_tokens=self.config.sanitize_control_tokens,
            tokenize=True,
            return_dict=True,
            **given,
        )["input_ids"]
        return tokens

    def _labels(self, question: Any) -> tuple[int, ...]:
        labels = tuple(question.labels)
        if labels not in self._label_ids:
            try:
                self._label_ids[labels] = tuple(self._transformers.label_token_ids(self._tokenizer, labels))
            except ValueError as error:
                raise QuestionError(str(error), question.name) from None
        return self._label_ids[labels]

    def _temperature(self, question: Any) -> float:
        temperature = float(self.config.temperature.get(question.type, 1.0))
        if not temperature > 0:
            raise ValueError(f"decision.json: temperature.{question.type}={temperature} must be above 0")
        return temperature


def _sentinels(known: Any) -> list[str]:
    return [known.MARK, known.SPLIT]
