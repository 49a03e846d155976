"""Responses of endpoints for embeddings, ranks and labels."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class PooledUsage(BaseModel):
    """Tokens of all texts together; no text is written."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(BaseModel):
    """The embedding of a text: numbers, or the base64 of their float32, little-endian."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """The embeddings in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: PooledUsage


class RankedDocument(BaseModel):
    """The text of a document."""

    text: str


class Rank(BaseModel):
    """A document's place in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankResponse(BaseModel):
    """The documents, the best first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[Rank]


class ScoreEntry(BaseModel):
    """How well two texts go together."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    """The scores in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PooledUsage


class LabelEntry(BaseModel):
    """A text's label, the one that has the highest score, and what is made of the scores of all of them."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(BaseModel):
    """The labels in the order of the texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[LabelEntry]
    usage: PooledUsage
