"""What scores become: probabilities, and the order of documents."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compiled_llm.protocol.messages import Activation


def activated(scores: Sequence[float], activation: Activation) -> list[float]:
    """Return what an activation makes of the scores of one text."""
    if activation == "identity":
        return list(scores)
    if activation == "sigmoid":
        return [sigmoid(score) for score in scores]
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def sigmoid(score: float) -> float:
    if score < 0:  # exp of a large number is none
        return 1 - sigmoid(-score)
    return 1 / (1 + math.exp(-score))


def best(scores: Sequence[float], most: int | None) -> list[int]:
    """Return the places of the best scores, the best first, ``most`` of them; those that are equal in their order."""
    places = sorted(range(len(scores)), key=lambda place: -scores[place])
    return places[: most or None]
