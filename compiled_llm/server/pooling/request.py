"""The bodies of requests for embeddings, ranks and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema

from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Body, Entries
from compiled_llm.server.openai.fields.sampling import CutFields, WaitingFields

MAX_TEXTS = 2048  # of a request, as OpenAI's API bounds them
_MAX_CHARACTERS = 2**24  # of a query, times the documents: each has it in a prompt that is made tokens
Input = str | Entries[str] | Entries[int] | Entries[Entries[int]]


class InputFields(CutFields):
    """A text, or its token ids, or several of them, each of which may be cut."""

    input: Input
    add_special_tokens: bool = True

    def inputs(self) -> list[tuple[str, str | list[int]]]:
        """Return each text with the path of its field; ApiError if there are none, too many, or one is empty."""
        given = self.input
        alone = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        texts: list[str | list[int]] = [given] if alone else list(given)  # type: ignore[list-item,arg-type]
        named = [("input" if alone else f"input[{place}]", text) for place, text in enumerate(texts)]
        if not 1 <= len(named) <= MAX_TEXTS:
            raise invalid(f"input: there are {len(named):,} texts, and there can be 1 to {MAX_TEXTS:,}", "input")
        if empty := [path for path, text in named if not text]:
            raise invalid(f"{empty[0]}: is empty", empty[0])
        return named


class EmbeddingsRequest(InputFields):
    """OpenAI's fields, and the name of a prompt that texts begin with."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class ClassifyRequest(InputFields):
    """vLLM's fields."""

    use_activation: bool = True


class Document(Body):
    """A document, which may be its text alone."""

    text: str


def _with_text(given: object) -> object:
    return {"text": given} if isinstance(given, str) else given


_SCHEMA = {"anyOf": [{"type": "string"}, Document.model_json_schema()]}
AnyDocument = Annotated[Document, BeforeValidator(_with_text), WithJsonSchema(_SCHEMA)]


class RerankRequest(WaitingFields):
    """Jina's and Cohere's fields, as vLLM takes them."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Entries[AnyDocument], Field(min_length=1)]
    top_n: Annotated[int | None, Field(ge=0)] = None  # 0 for all, too
    return_documents: bool = True
    use_activation: bool = True

    def pairs(self) -> list[tuple[str, str]]:
        """Return the query with each document; ApiError if they are too many, or too many for a query so long."""
        pairs = [(self.query, document.text) for document in self.documents]
        _check_pairs(pairs, "query", "documents")
        return pairs


Texts = str | Annotated[Entries[str], Field(min_length=1)]


class ScoreRequest(WaitingFields):
    """vLLM's fields: a text and what is scored with it, or as many texts of either kind, each with its own."""

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries"))]
    text_2: Annotated[Texts, Field(validation_alias=AliasChoices("text_2", "documents"))]
    use_activation: bool = True

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of texts; ApiError as of ``RerankRequest.pairs``, or if one has no other."""
        first, second = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            said = f"text_2: there are {len(second):,}, and {len(first):,} of text_1; give one text_1, or as many"
            raise invalid(said, "text_2")
        pairs = [*zip(first, second, strict=True)]
        _check_pairs(pairs, "text_1", "text_2")
        return pairs


def _check_pairs(pairs: Sequence[tuple[str, str]], first: str, second: str) -> None:
    """Raise ApiError, which names one of two fields, if there are too many pairs, or they are too long together."""
    if len(pairs) > MAX_TEXTS:
        raise invalid(f"{second}: there are {len(pairs):,}, and there can be {MAX_TEXTS:,}", second)
    if (characters := sum(len(text) for text, _ in pairs)) > _MAX_CHARACTERS:
        raise invalid(
            f"{first}: with each of {second} it has {characters:,} characters together, and there can be "
            f"{_MAX_CHARACTERS:,}; shorten it, or send fewer at once",
            first,
            "context_length_exceeded",
        )
