"""Ids of calls: OpenAI's, unless a chat template refuses those when it reads them again."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compiled_llm.server.openai.parsing.call_form import SAMPLE_TOOL, sample_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _nine_characters() -> str:
    """Return an id as templates of Mistral's models check it: nine letters or digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_FORMS = (openai_id, _nine_characters)


def new_ids_for(tokenizer: PreTrainedTokenizerBase) -> Callable[[], str]:
    """Return a function that returns new ids: the first kind that a tokenizer's chat template takes in a chat."""
    return next((new for new in _FORMS if _takes(tokenizer, new())), openai_id)


def _takes(tokenizer: Any, call_id: str) -> bool:
    try:
        tokenizer.apply_chat_template(sample_chat(1, [call_id]), tools=[SAMPLE_TOOL], tokenize=False)
    except Exception:  # of code that came with the model
        return False
    return True
