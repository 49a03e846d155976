"""How many images a request can have, as vLLM writes it: ``{"image": 4}``."""

from __future__ import annotations

import json
from typing import Any

from compiled_llm.server.defaults import MAX_IMAGES


def images_in(limit: str | None) -> int:
    """Return how many images a request can have; ValueError if the limit is malformed, or of something else."""
    if limit is None:
        return MAX_IMAGES
    given = _decoded(limit)
    most = given.get("image", MAX_IMAGES) if isinstance(given, dict) else None
    if type(most) is not int or most < 0:
        raise ValueError(f"--limit-mm-per-prompt {limit}: give JSON with a number, as in '{{\"image\": 4}}'")
    if others := [name for name, count in given.items() if name != "image" and count != 0]:
        raise ValueError(f"--limit-mm-per-prompt {limit}: {others[0]!r} is not served; images alone are, as 'image'")
    return most


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
