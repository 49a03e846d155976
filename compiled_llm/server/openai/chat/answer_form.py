"""The form of an answer that a request asks for: JSON, calls of tools, and thinking before either."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.api_error import ApiError, invalid
from compiled_llm.server.openai.chat.prompt import ChatPrompt
from compiled_llm.server.openai.fields.response_format import MAX_SCHEMA, Form
from compiled_llm.server.openai.fields.structured_outputs import named_form
from compiled_llm.server.openai.parsing.call_form import CallForm

Format = dict[str, Any]  # a part of a structural tag of xgrammar's


def with_form(params: SamplingParams, form: Form | None, prompt: ChatPrompt) -> SamplingParams:
    """Return settings with a form, as of ``answer_form``, and with the special tokens that readers need."""
    changed: dict[str, Any] = {} if form is None else {"structured_outputs": form.params}
    if prompt.template is not None and prompt.template.needs_special_tokens:
        changed["skip_special_tokens"] = False
    return replace(params, **changed) if changed else params


def answer_form(wanted: Form | None, prompt: ChatPrompt, blanks: int | None) -> Form | None:
    """Return the form of whole answers; None for any text. ApiError if this model cannot be held to it."""
    calls = _calls(wanted, prompt, blanks)
    thinking = None if prompt.template is None else prompt.template.begun(prompt.text)
    if calls is not None:
        field, found = calls
    elif wanted is None or thinking is None:
        return wanted
    else:
        field, found = wanted.field, as_format(wanted)
    if thinking is not None and found["type"] != "triggered_tags":  # among other text, thinking is free anyway
        found = _after(thinking, found, field)
    return named_form(field, structural_tag={"type": "structural_tag", "format": found})


def _calls(wanted: Form | None, prompt: ChatPrompt, blanks: int | None) -> tuple[str, Format] | None:
    """Return the form of an answer that calls tools, after the fields that ask for it; None if that is free."""
    offer = prompt.offer
    if offer.called is not None:
        form = _call_form(prompt, blanks, "tool_choice", "give 'auto'")
        return "tools", form.several(offer.called, offer.several)
    if offer.functions and wanted is not None:
        form = _call_form(prompt, blanks, wanted.field, "give it without tools")
        either = [form.several(offer.functions, offer.several), as_format(wanted)]
        return f"{wanted.field} or tools", {"type": "or", "elements": either}
    if offer.strict:
        form = _call_form(prompt, blanks, "tools", "give functions without strict")
        return "tools", form.beside_text(offer.functions, offer.several)
    return None


def _call_form(prompt: ChatPrompt, blanks: int | None, param: str, instead: str) -> CallForm:
    if len(json.dumps(prompt.offer.plain())) > MAX_SCHEMA:
        raise invalid(f"tools: the schemas have more than {MAX_SCHEMA:,} characters; {instead}", "tools")
    form = prompt.vocabulary.call_form
    if form is None:
        raise _not_held(f"{param}: is not served: calls of this model cannot be held to a form; {instead}", param)
    return replace(form, blanks=blanks)


def _after(thinking: str, form: Format, field: str) -> Format:
    """Return a form that begins after the thinking that the prompt has begun."""
    if not thinking:
        raise _not_held(f"{field}: is not served: where this model's thinking ends is not known", field)
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": thinking}
    return {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": r"\s{0,2}"}, form]}


def as_format(wanted: Form) -> Format:
    """Return a form as a part of a structural tag; ApiError if it cannot be one."""
    params = wanted.params
    if params.disable_any_whitespace:
        raise _not_held(f"{wanted.field}: disable_any_whitespace is not served beside tools or thinking", wanted.field)
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in params.choice]}
    if isinstance(params.json, str) or params.json_object:
        schema = json.loads(params.json) if isinstance(params.json, str) else {"type": "object"}
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": params.max_whitespace_cnt}
    if params.source.kind == "ebnf":
        return {"type": "grammar", "grammar": params.grammar}
    tag = json.loads(params.structural_tag) if isinstance(params.structural_tag, str) else {}
    if "format" not in tag:
        raise _not_held(f"{wanted.field}: of this kind, it is not served beside tools or thinking", wanted.field)
    found: Format = tag["format"]
    return found


def _not_held(message: str, param: str | None) -> ApiError:
    return invalid(message, param, "unsupported_value")
