"""``/tokenize`` and ``/detokenize``: what the model sees of a text, and what tokens say."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from compiled_llm.server.front.api_error import invalid
from compiled_llm.server.front.beside import beside
from compiled_llm.server.front.chat_message import Message, plain_messages
from compiled_llm.server.front.chat_prompt import chat_prompt
from compiled_llm.server.front.fields import Body
from compiled_llm.server.front.front import front_of
from compiled_llm.server.front.openapi_responses import ERRORS
from compiled_llm.server.front.tool_fields import Offer, Tools

router = APIRouter()


class TokenizeRequest(Body):
    """A text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(BaseModel):
    """The tokens, how many they are, and how many a request can have with its answer."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body):
    """Tokens."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    """Their text, special tokens included."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeResponse, responses=ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """Return the tokens that a request with this prompt, or these messages, has."""
    model = front_of(request).model_for(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt: give a text here, or messages", "prompt")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens
        tokens = await beside(lambda: model.vocabulary.of_text(text, special), len(text))
    else:
        offer = Offer(body.tools or (), None)
        messages, goes_on = plain_messages(body.messages or ()), body.add_generation_prompt
        chat = await chat_prompt(
            model.vocabulary, messages, offer, body.chat_template_kwargs, add_generation_prompt=goes_on
        )
        tokens = chat.tokens
    return TokenizeResponse(count=len(tokens), max_model_len=model.ready.max_tokens, tokens=tokens)


@router.post("/detokenize", response_model=DetokenizeResponse, responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """Return the text of tokens."""
    model = front_of(request).model_for(body.model)
    tokens, vocabulary = body.tokens, model.ready.vocabulary
    if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
        raise invalid(f"tokens: {wrong[0]} is no token of the model; they are from 0 to {vocabulary - 1}", "tokens")
    return DetokenizeResponse(prompt=await beside(lambda: model.vocabulary.text(tokens), len(tokens)))
