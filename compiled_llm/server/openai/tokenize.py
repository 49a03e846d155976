"""``/tokenize`` and ``/detokenize``: a text as the model sees it, and the text of tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.http.body_route import BodyRoute
from compiled_llm.server.http.worker_thread import written
from compiled_llm.server.openai.chat.message import ChatEnd, Message, images_in, plain_messages
from compiled_llm.server.openai.chat.prompt import chat_prompt
from compiled_llm.server.openai.common.api_server import api_server_of
from compiled_llm.server.openai.common.openapi_responses import ERRORS
from compiled_llm.server.openai.fields.fields import Body, Entries
from compiled_llm.server.openai.fields.tools import Offer, Tools
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary

router = APIRouter(route_class=BodyRoute)

_MAX_TOKENS = 2**18
"""That are made text at once: that takes some hundredths of a second, and nothing else has the GIL meanwhile."""


class TokenizeRequest(ChatEnd):
    """A text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Entries[Message], Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    """The tokens, how many they are, and how many a request can have with its answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Tokens."""

    model: str | None = None
    tokens: Annotated[Entries[int], Field(max_length=_MAX_TOKENS)]


class DetokenizeResponse(BaseModel):
    """Their text, special tokens included."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeResponse, responses=ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the tokens that a request with this prompt, or these messages, has."""
    model = api_server_of(request).model_for(body.model)
    if images := images_in(body.messages or ()):
        raise invalid(f"{images[0][0]}: images are counted in the usage of an answer alone", images[0][0])
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt: give a text here, or messages", "prompt")

    def made() -> TokenizeResponse:
        tokens = _tokens(body, model.vocabulary)
        pieces = model.vocabulary.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        room = model.ready.max_tokens
        return TokenizeResponse(count=len(tokens), max_model_len=room, tokens=tokens, token_strs=pieces)

    return await written(made, len(await request.body()))


def _tokens(body: TokenizeRequest, vocabulary: Vocabulary) -> list[int]:
    if body.prompt is not None:
        return vocabulary.of_text(body.prompt, body.add_special_tokens)
    offer, messages = Offer(body.tools or (), None), plain_messages(body.messages or ())
    return chat_prompt(vocabulary, messages, offer, body.chat_template_kwargs, **body.end).tokens


@router.post("/detokenize", response_model=DetokenizeResponse, responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens."""
    model = api_server_of(request).model_for(body.model)
    tokens, vocabulary = body.tokens, model.ready.vocabulary
    if wrong := [token for token in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= token < vocabulary]:
        raise invalid(f"tokens: {wrong[0]} is no token of the model; they are from 0 to {vocabulary - 1}", "tokens")
    return await written(lambda: DetokenizeResponse(prompt=model.vocabulary.text(tokens)), len(tokens))
