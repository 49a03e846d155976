"""Prompts as users give them: token ids, text or chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_llm.requests.prompts import check_texts, content_of, is_dictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | NDArray[np.int64] | torch.Tensor
"""Text, token ids, the messages of a chat, or one of vLLM's dictionaries, ``{"prompt": text}`` or of token ids."""
# Those with images are of the same types; ``engine/images`` reads them.


def token_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> NDArray[np.int64]:
    """Return a prompt's tokens, of which the model can take ``vocabulary``; ValueError says what is missing."""
    ids = np.asarray(_ids(prompt, tokenizer))
    if ids.ndim > 1 and ids.dtype.kind == "f":
        raise ValueError("prompt: embeddings are not served; give token ids, or call model.generate(inputs_embeds=...)")
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"prompt: give one sequence of token ids; got {ids.dtype} of shape {list(ids.shape)}")
    if ids.size == 0:
        raise ValueError("prompt: it is empty; give at least one token")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"prompt: token ids are from 0 to {vocabulary - 1}; got {ids.min()} to {ids.max()}")
    return ids.astype(np.int64)


def _ids(prompt: Prompt, tokenizer: Any) -> Any:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    if isinstance(prompt, torch.Tensor):
        return (prompt.float() if prompt.is_floating_point() else prompt).detach().cpu().numpy()
    if isinstance(prompt, np.ndarray):
        return prompt
    if isinstance(prompt, str):
        check_texts(prompt, "prompt")
        return _with_tokenizer(tokenizer, "text needs")(prompt)["input_ids"]
    if is_dictionary(prompt):
        return _ids(content_of(prompt), tokenizer)
    listed = _one_sequence(prompt)
    if not (len(listed) > 0 and isinstance(listed[0], Mapping)):
        return listed
    check_texts(listed, "prompt")
    chat = _with_tokenizer(tokenizer, "messages need").apply_chat_template
    return chat(listed, add_generation_prompt=True, return_dict=True)["input_ids"]


def _one_sequence(prompt: object) -> Sequence[Any]:
    """Return token ids or messages as they are; ValueError for what is neither."""
    if not isinstance(prompt, Sequence):
        kind = type(prompt).__name__
        ids = ' (["input_ids"] of it)' if isinstance(prompt, Mapping) else ""
        raise ValueError(
            f"prompt: got a{'n' * (kind[0] in 'aeiou')} {kind}; give token ids{ids}, text or the messages of a chat"
        )
    if prompt and isinstance(prompt[0], (str, Sequence, np.ndarray)):
        kinds = "texts" if isinstance(prompt[0], str) else "sequences"
        raise ValueError(f"prompt: got several {kinds}; engine.generate takes several prompts, submit one")
    return prompt


def _with_tokenizer(tokenizer: object, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(
            f"prompt: {what} a tokenizer; give compiled_llm.Engine(model, tokenizer=tokenizer), or token ids"
        )
    return tokenizer
