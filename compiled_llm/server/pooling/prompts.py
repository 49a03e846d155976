"""From the texts of a request to prompts."""

from __future__ import annotations

from compiled_llm.protocol.messages import Embedding, Ranking
from compiled_llm.requests.pooling.embeddings import POOLED
from compiled_llm.server.http.api_error import ApiError, invalid
from compiled_llm.server.openai.common.api_server import check_prompt
from compiled_llm.server.openai.common.engine_link import Model
from compiled_llm.server.pooling.request import InputFields


def beginning(embedding: Embedding, name: str | None) -> str:
    """Return what texts begin with, by its name; ApiError if there is no such name."""
    if name is None:
        return embedding.prompts.get(embedding.default_prompt or "", "")
    if name not in embedding.prompts:
        known = ", ".join(map(repr, embedding.prompts)) or "none"
        raise invalid(f"prompt_name: there is no {name!r}; the model has {known}", "prompt_name")
    return embedding.prompts[name]


def of_input(model: Model, body: InputFields, path: str, given: str | list[int], begins: str = "") -> list[int]:
    """Return the prompt of a text, or of token ids, cut if the request says so.

    Raises:
        ApiError: it is impossible; names the ``path``.
    """
    kept = (0, 0)
    if isinstance(given, str):
        given = model.vocabulary.of_text(begins + given, body.add_special_tokens, path)
        kept = model.vocabulary.added if body.add_special_tokens else kept
    side = model.vocabulary.tokenizer.truncation_side
    return _checked(model, path, body.cut(given, model.ready.max_tokens, side, kept))


def of_pair(model: Model, ranking: Ranking, query: str, document: str, path: str) -> list[int]:
    """Return the prompt that asks how well a document answers a query; ApiError, which names the ``path`` of that."""
    if ranking.chat is None:
        return _checked(model, path, model.vocabulary.of_pair((ranking.prompt or "") + query, document, path))
    texts = {"system": ranking.prompt, "query": query, "document": document}
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if ranking.in_parts else text}
        for role, text in texts.items()
        if text is not None
    ]
    try:
        return _checked(model, path, model.vocabulary.of_chat(messages, **ranking.chat))
    except ApiError as error:
        raise error.about(path) from None


def _checked(model: Model, path: str, tokens: list[int]) -> list[int]:
    if not tokens:
        raise invalid(f"{path}: has no tokens", path)
    check_prompt(tokens, POOLED, path, model.ready)
    return tokens
