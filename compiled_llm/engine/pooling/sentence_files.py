"""What the files of sentence-transformers beside a model say: how it pools, its prompts, how it scores documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers.utils.hub import cached_file

_MODULES, _SETTINGS, _TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
_LAST, _OLD_MODE = "lasttoken", "pooling_mode_"  # files of before version 6 have one such key for each way


class SentenceFiles(NamedTuple):
    """The files beside one model.

    Attributes:
        modules: what is run after the model, by the names of their classes, with the settings of each; None if there
            is no list of them.
        prompts: what texts may begin with, by name; ``default_prompt`` is the name of that of texts which name none.
        activation: the class of what makes a score of a number; None if they do not say.
        transformer: how the model's tokenizer is called.
    """

    name: str  # of the model, for errors
    modules: Mapping[str, Mapping[str, Any]] | None = None
    prompts: Mapping[str, str] = MappingProxyType({})
    default_prompt: str | None = None
    activation: str | None = None
    transformer: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, name: str) -> SentenceFiles:
        """Read those beside a model, a folder or one on the hub."""
        listed, settings = _read(name, _MODULES), _read(name, _SETTINGS) or {}
        modules = None if listed is None else dict(_settings_of(name, entry) for entry in listed)
        prompts = {key: text for key, text in (settings.get("prompts") or {}).items() if isinstance(text, str)}
        transformer = {} if modules is None else _read(name, _TRANSFORMER) or {}
        return cls(
            name, modules, prompts, settings.get("default_prompt_name"), settings.get("activation_fn"), transformer
        )

    def normalizes(self, pooling: str | None = None) -> bool:
        """Return whether embeddings are made as long as 1.

        Args:
            pooling: ``"last"`` to take the last token where the files do not say how to pool.

        Raises:
            ValueError: the files say nothing, or want what is not served.
        """
        if pooling not in (None, "last"):
            raise ValueError(f"pooling={pooling!r}: give 'last', or None for what the model's folder says")
        if self.modules is None or "Pooling" not in self.modules:
            if pooling is None:
                raise ValueError(
                    f"embed: neither {_MODULES} beside {self.name} nor an option says how to pool its tokens; give "
                    "pooling='last' (--pooling last) if its embeddings are its last tokens'"
                )
            return True
        modes = _modes(self.modules["Pooling"])
        if list(modes) != [_LAST]:
            raise ValueError(
                f"embed: {self.name} pools by {' and '.join(map(repr, modes))}, and only {_LAST!r} is served; use "
                "sentence-transformers"
            )
        if others := self.modules.keys() - {"Transformer", "Pooling", "Normalize"}:
            raise ValueError(
                f"embed: {self.name} has a module {min(others)!r} after its last hidden state, which is not served; "
                "use sentence-transformers"
            )
        return "Normalize" in self.modules

    def prompt(self, name: str | None = None) -> str:
        """Return what texts begin with, by its name; ValueError if there is no such name."""
        if name is None:
            return self.prompts.get(self.default_prompt or "", "")
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise ValueError(f"prompt_name={name!r}: {self.name} has no such prompt; it has {known}")
        return self.prompts[name]


def _read(name: str, file: str) -> Any:
    """Return a file beside a model; None if there is none."""
    try:
        path = cached_file(name, file)
    except OSError:  # or nobody can tell
        return None
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _settings_of(name: str, entry: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    kind, folder = str(entry["type"]).rpartition(".")[2], str(entry.get("path") or "")
    return kind, (_read(name, f"{folder}/config.json") or {}) if folder else {}


def _modes(settings: Mapping[str, Any]) -> Sequence[str]:
    given = settings.get("pooling_mode")
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    old = [key for key, value in settings.items() if key.startswith(_OLD_MODE) and value is True]
    return [key.removeprefix(_OLD_MODE).removesuffix("_tokens").removesuffix("_token") for key in old] or ["mean"]
