"""The bodies of requests for embeddings, ranks and labels."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Body, Entries
from compiled_llm.server.openai.fields.sampling import WaitingFields

MAX_TEXTS = 2048  # of a request, as OpenAI's API bounds them
_MAX_CHARACTERS = 2**24  # of a query, times the documents: each has it in a prompt that is made tokens
Input = str | Entries[str] | Entries[int] | Entries[Entries[int]]


class InputFields(WaitingFields):
    """A text, or its token ids, or several of them."""

    input: Input

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

    add_special_tokens: bool = True
    use_activation: bool = True


class Document(Body):
    """A document, which may be its text alone."""

    text: str


def _with_text(given: Any) -> Any:
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

    def texts(self) -> list[str]:
        """Return the documents' texts; ApiError if they are too many, or too many for a query so long."""
        if len(self.documents) > MAX_TEXTS:
            raise invalid(f"documents: there are {len(self.documents):,}, and there can be {MAX_TEXTS:,}", "documents")
        if (characters := len(self.query) * len(self.documents)) > _MAX_CHARACTERS:
            raise invalid(
                f"query: its length times the documents is {characters:,} characters, and it can be "
                f"{_MAX_CHARACTERS:,}; shorten it, or send fewer documents at once",
                "query",
                "context_length_exceeded",
            )
        return [document.text for document in self.documents]
