"""The option `--speculative-config`, of `serve` and `compile`."""

from __future__ import annotations

import json
from typing import Any

from compiled_llm.engine.parts import DRAFTS
from compiled_llm.features import check_has, needed


def speculative_config_of(text: str | None) -> dict[str, Any] | None:
    """Return the options that a JSON object gives, once they are checked; None for none."""
    if text is None:
        return None
    check_has("drafts", "--speculative-config")
    try:
        given = json.loads(text)
        needed(DRAFTS).config_of(given)
    except json.JSONDecodeError as error:
        example = '{"method": "ngram", "num_speculative_tokens": 7}'
        raise ValueError(f"--speculative-config {text}: is no JSON: {error}; give '{example}', for example") from error
    except ValueError as error:
        raise ValueError(str(error).replace("speculative_config", "--speculative-config", 1)) from error
    return dict(given)
