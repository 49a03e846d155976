"""The features that are parts: nothing else imports their files, so that each can be taken out with its line here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Generic, TypeVar, cast

Part_co = TypeVar("Part_co", covariant=True)


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
    "drafts": _modules("compilation.drafts", "engine.drafts.part", "huggingface.drafts"),
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


@dataclass(frozen=True)
class Seam(Generic[Part_co]):
    """Where others ask for the module that a feature has in a room: all that they know of it is a protocol."""

    # The module says that it keeps to the protocol, for type checkers: ``checked: Protocol = this`` at its top.
    name: str  # of the feature
    room: str


@dataclass(frozen=True)
class Seams(Generic[Part_co]):
    """Where others ask for all modules in a room that have an ``entry``; each keeps to the protocol."""

    room: str
    entry: str
    file: str = ""  # if not empty, no module of another name is imported

    def named(self, name: str) -> Seam[Part_co]:
        return Seam(name, self.room)


def feature(seam: Seam[Part_co]) -> Part_co | None:
    """Import the module of a feature in a room, and return it; None if the feature was taken out, or has none there."""
    return cast("Part_co | None", _module(seam.name, seam.room))


def features(seams: Seams[Part_co]) -> list[Part_co]:
    """Import and return the modules of all features in a room, but for late ones, that have the entry."""
    return cast("list[Part_co]", _modules_with(seams.room, seams.entry, seams.file))


@cache
def _modules_with(room: str, entry: str, file: str) -> list[ModuleType | None]:
    start, end = f"compiled_llm.{room}.", f".{file}" if file else ""
    paths = {name: [path for path in paths if path.startswith(start)] for name, paths in FEATURES.items()}
    modules = [_module(name, room) for name, own in paths.items() if any(path.endswith(end) for path in own)]
    return [module for module in modules if hasattr(module, entry)]


@cache
def _module(name: str, room: str) -> ModuleType | None:
    modules = FEATURES.get(name, LATE_FEATURES.get(name, ()))
    here = (module for module in modules if module.split(".")[1] == room)
    return next(map(import_module, here), None)


def has(name: str) -> bool:
    """Whether a feature was not taken out."""
    return name in FEATURES or name in LATE_FEATURES


def needed(seam: Seam[Part_co]) -> Part_co:
    """Return the module of a feature in a room; ValueError if the feature was taken out."""
    check_has(seam.name, seam.name)
    return cast("Part_co", feature(seam))


def check_has(name: str, asked: str) -> None:
    """Raise ValueError if a feature was taken out that an option, ``asked``, needs."""
    if not has(name):
        raise ValueError(f"{asked}: this copy of compiled_llm has no {name}; leave it out")
