"""How a model writes the parts of its answers: HuggingFace's response template, and the parser that reads by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from compiled_llm.compat.response_templates import known_response_template
from compiled_llm.server.openai.parsing.answer_parts import CALLS, CONTENT, REASONING
from compiled_llm.server.openai.parsing.call_ids import new_ids_for
from compiled_llm.server.openai.parsing.call_style import Begun, call_style_of, text_of_calls
from compiled_llm.server.openai.parsing.delimiters import Delimiters, pattern_of
from compiled_llm.server.openai.parsing.parsed_reader import BeginCall, ParsedReader

logger = logging.getLogger("compiled_llm.server")

_KNOWN = (CONTENT, CALLS, *REASONING)
_SAMPLE = [{"role": "user", "content": "hi"}]


class ResponseTemplate:
    """A model's response template; parts that are not served are content. ValueError if HuggingFace cannot read it."""

    def __init__(self, tokenizer: Any, spec: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        fields = {name: field for name, field in spec["fields"].items() if name in _KNOWN}
        self._with_calls = {**spec, "fields": fields}
        self._style = call_style_of(fields[CALLS]) if CALLS in fields else None
        changed = {} if self._style is None else {CALLS: text_of_calls(fields[CALLS])}
        self._read_with_calls = {**spec, "fields": {**fields, **changed}}
        self._without_calls = {**spec, "fields": {name: fields[name] for name in fields if name != CALLS}}
        self.has_calls = CALLS in fields  # whether it says how tools are called
        self._delimiters = Delimiters(fields)
        self._anchor = pattern_of(spec, "start_anchor")
        self._whole_parser(None)

    def reader(
        self,
        prompt: str,
        tools: Sequence[dict[str, Any]] | None,
        several_calls: bool = True,
        are_held: bool = False,
    ) -> ParsedReader:
        """Return a reader of one answer; without tools, nothing is a call."""
        fields, begin_call = self._with_calls["fields"], self._begin_call(tools or (), are_held)
        begun = self._after_anchor(prompt)
        return ParsedReader(
            *(self._parser(tools), fields, self._delimiters, several_calls, begin_call, begun, bool(tools)),
            new_id=lambda: self._new_id(),
        )

    @cached_property
    def _new_id(self) -> Callable[[], str]:
        return new_ids_for(self._tokenizer)

    def _after_anchor(self, prompt: str) -> str:
        """Return the part of a prompt that may have begun the answer: as HuggingFace's parser, all if there is none."""
        end = max((found.end() for found in self._anchor.finditer(prompt)), default=0)
        return prompt[end:]

    def _begin_call(self, tools: Sequence[dict[str, Any]], are_held: bool) -> BeginCall | None:
        """Return a function that begins to read calls; None if they are read once they are whole."""
        style = self._style
        if style is None:
            return None
        return lambda opening, captures: style(
            Begun(captures, tools, lambda text: self._arguments(opening + text, tools), are_held)
        )

    def _parser(self, tools: Sequence[dict[str, Any]] | None) -> Any:
        spec = self._read_with_calls if tools else self._without_calls
        return self._tokenizer.get_response_parser(spec, prefix="", tools=tools)

    def _arguments(self, call: str, tools: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
        parser = self._whole_parser(tools)
        parser.feed(call)
        found = parser.finalize()[0][CALLS]
        arguments: Mapping[str, Any] = (found[0] if isinstance(found, list) else found)["function"]["arguments"]
        return arguments

    def _whole_parser(self, tools: Sequence[dict[str, Any]] | None) -> Any:
        return self._tokenizer.get_response_parser(self._with_calls, prefix="", tools=tools)

    def begun(self, prompt: str) -> str | None:
        """Return the text that ends the thinking that a prompt begins; None if it begins none."""
        open_part = None
        for event in self._parser(None).feed(self._after_anchor(prompt)):
            if event["type"] == "region_open":
                open_part = event["field"]
            elif event["type"] == "region_close":
                open_part = None
        return None if open_part not in REASONING else self._close_of(open_part)

    def _close_of(self, part: str) -> str:
        close = self._with_calls["fields"][part].get("close", "")
        return close if isinstance(close, str) else close[0]

    @cached_property
    def needs_special_tokens(self) -> bool:
        """Whether special tokens begin or end a part, so that they have to be in the text."""
        special = [token for token in self._tokenizer.all_special_tokens if token]
        marks = [mark for field in self._with_calls["fields"].values() for mark in _marks(field)]
        return any(token in mark.replace("\\", "") for token in special for mark in marks)


def _marks(field: dict[str, Any]) -> list[str]:
    """Return the texts, or patterns, of a part's beginning and end; none of one that needs no beginning."""
    if not ("open" in field or "open_pattern" in field):
        return []
    given = (field.get(name, []) for name in ("open", "open_pattern", "close", "close_pattern"))
    return [mark for marks in given for mark in ([marks] if isinstance(marks, str) else marks)]


def response_template_of(tokenizer: Any, model_type: str) -> ResponseTemplate | None:
    """Return a tokenizer's template, or HuggingFace's for its model if the chat template begins so, or None."""
    own = getattr(tokenizer, "response_template", None)
    spec = own or _fitting(tokenizer, known_response_template(model_type))
    if spec is None:
        return None
    try:
        return ResponseTemplate(tokenizer, spec)
    except Exception as error:
        logger.warning("compiled_llm: answers are plain text: the response template is wrong: %s", error)
        return None


def _fitting(tokenizer: Any, spec: dict[str, Any] | None) -> dict[str, Any] | None:
    if spec is None or not getattr(tokenizer, "chat_template", None):
        return None
    anchors = spec.get("start_anchor", [])
    try:
        prompt = tokenizer.apply_chat_template(_SAMPLE, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template that takes no such message
        return None
    return spec if any(anchor in prompt for anchor in ([anchors] if isinstance(anchors, str) else anchors)) else None
