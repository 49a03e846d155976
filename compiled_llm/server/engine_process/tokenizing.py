"""Tokens of texts and chats, and texts of tokens, for clients that have no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from msgspec import Struct

from compiled_llm.protocol.messages import AskText, AskTokens, Refused, TextReply, TokensReply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST = 2**22
"""Characters of a text: more than any model has positions for, and few enough for the frame with its tokens."""


def reply_of(tokenizer: PreTrainedTokenizerBase, question: AskTokens | AskText) -> Struct:
    if tokenizer is None:
        return Refused(question.number, "invalid", "the engine process has no tokenizer; give token ids")
    if isinstance(question, AskTokens) and not isinstance(question.prompt, str) and not tokenizer.chat_template:
        return Refused(question.number, "invalid", "this model's tokenizer has no chat template; ask without a chat")
    if isinstance(question, AskTokens) and (characters := _characters(question.prompt)) > _MOST:
        said = f"the prompt has {characters:,} characters; there can be {_MOST:,}"
        return Refused(question.number, "invalid", said)
    try:
        if isinstance(question, AskText):
            text = tokenizer.decode(question.tokens, skip_special_tokens=question.skip_special_tokens)
            return TextReply(question.number, str(text))
        return TokensReply(question.number, list(_encoded(tokenizer, question.prompt)["input_ids"]))
    except TemplateError as error:
        return Refused(question.number, "invalid", f"the model's chat template refuses this: {error}")
    except Exception as error:  # a tokenizer may be anything, and the client waits
        return Refused(question.number, "failed", f"{type(error).__name__}: {error}")


def _characters(prompt: str | list[dict[str, Any]]) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(str(message.get("content"))) for message in prompt)


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]) -> Any:
    if isinstance(prompt, str):
        return tokenizer(prompt)
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
