"""The features that are parts: nothing else imports their files, so that each can be taken out with its line here."""

from __future__ import annotations

import itertools
from functools import cache
from importlib import import_module
from typing import Any


def _modules(*parts: str) -> list[str]:
    return [f"compiled_llm.{part}" for part in parts]


_POOLED = (
    "client.pooling",
    "compilation.pooling",
    "engine.pooling.part",
    "huggingface.pooling.classifiers",
    "server.pooling.endpoint",  # imported when a request asks for it, as late features are
)

FEATURES = {
    # Kinds of layers take the place of what those before them have found, or lie over it.
    "latents": ["compiled_llm.kinds.latent"],
    "indexers": ["compiled_llm.kinds.indexers"],
    "variants": ["compiled_llm.kinds.variant"],
    "fp8_e4m3": ["compiled_llm.kinds.fp8"],
    "recurrent layers": ["compiled_llm.kinds.recurrent"],
    "packed": ["compiled_llm.model.packed.part"],
    "cascade": ["compiled_llm.execution.cascade.cascade"],
    "chat page": _modules("server.chat_page.page"),
    "drafts": _modules("compilation.drafts", "execution.drafts.part", "engine.drafts.part", "huggingface.drafts"),
    "hidden_states": _modules("client.emitted", "engine.emitted", "huggingface.emitted"),
    "logprobs": _modules("client.logprobs", "engine.logprobs.tap", "server.logprobs.columns"),
    "pooling": _modules(*_POOLED),
    "kept programs": ["compiled_llm.compilation.kept.part"],
    "structured_outputs": ["compiled_llm.engine.grammars.part"],
}
"""The modules of each, by the option or the layers that ask for it: one in each room that has a part of it."""

LATE_FEATURES = {
    "decisions": _modules("requests.decisions.part", "server.decisions.endpoint"),
    "images": _modules("engine.images.part", "huggingface.images", "server.images.part"),
    "lm_eval": _modules("commands.lm_eval"),
    "responses": _modules("server.openai.responses.endpoint"),
}
"""Those of which nothing is imported before a request asks for it."""

LATE_ROUTES = {
    "/v1/systemone": "decisions",
    "/v1/decisions": "decisions",
    "/v1/responses": "responses",
    "/v1/embeddings": "pooling",
    "/v1/rerank": "pooling",
    "/rerank": "pooling",
    "/v2/rerank": "pooling",
    "/score": "pooling",
    "/v1/score": "pooling",
    "/classify": "pooling",
}
"""Paths of the server, and the features that serve them."""

LATE_INPUTS = {("pixel_values",): "images", ("mm_encoder_outputs", "image"): "images"}
"""What inputs of a model have besides tokens, by names inside one another, and the features whose steps read it."""


@cache
def modules_named(room: str, name: str) -> list[Any]:
    """Import the modules by a name that features have in a room."""
    every = itertools.chain.from_iterable(FEATURES.values())
    return [import_module(path) for path in every if path.split(".")[1] == room and path.endswith(f".{name}")]


@cache
def feature(name: str, room: str) -> Any:
    """Import the module of a feature in a room, and return it; None if the feature was taken out, or has none there."""
    modules = FEATURES.get(name, LATE_FEATURES.get(name, ()))
    here = (module for module in modules if module.split(".")[1] == room)
    return next(map(import_module, here), None)


def has(name: str) -> bool:
    """Whether a feature was not taken out."""
    return name in FEATURES or name in LATE_FEATURES


def needed(name: str, room: str) -> Any:
    """Return the module of a feature in a room; ValueError if the feature was taken out."""
    check_has(name, name)
    return feature(name, room)


def check_has(name: str, asked: str) -> None:
    """Raise ValueError if a feature was taken out that an option, ``asked``, needs."""
    if not has(name):
        raise ValueError(f"{asked}: this copy of compiled_llm has no {name}; leave it out")
