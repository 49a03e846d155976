"""Caches the generation configs that HuggingFace's ``generate`` prepares, for calls with the same settings."""

# It merges its defaults, the model's generation config and the call's arguments again in each call, through several
# deep copies and (up to transformers 5.22) a default config of the model's class. That is a third of the host's time
# before the first token. The result depends on the content of these alone, and its warnings come once.

from __future__ import annotations

import marshal
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from transformers import GenerationConfig, PretrainedConfig

Prepared = tuple[GenerationConfig, dict[str, Any]]  # the config of one call, and the arguments that go to the model

_MOST = 256
_ATOMS = frozenset({type(None), bool, int, float, str})


class _Entry(NamedTuple):
    """A prepared config, and further results of the same settings."""

    config: bytes  # its encoded content
    model_inputs: tuple[str, ...]
    added: dict[str, Any]  # arguments for the model that the config asks for


class PreparedConfigs:
    """The configs prepared for calls of one model so far; safe to use from any thread."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Entry] = {}

    def prepared(
        self,
        prepare: Callable[..., Prepared],
        config: PretrainedConfig,
        of_model: GenerationConfig,
        of_call: GenerationConfig | None,
        arguments: dict[str, Any],
    ) -> Prepared:
        """Return the result of ``prepare(of_call, **arguments)``, with a new config each time."""
        # HuggingFace's ``prepare`` depends on these arguments alone; of the model's ``config`` it reads which
        # attributes are set.
        plain = {name: value for name, value in arguments.items() if type(value) in _ATOMS or _is_plain(value)}
        contents = _content(of_model), None if of_call is None else _content(of_call), marshal.dumps(plain, 2)
        if contents[0] is None or (of_call is not None and contents[1] is None):
            return prepare(of_call, **arguments)
        attributes = frozenset([name for name, value in vars(config).items() if value is not None])
        key = type(config), attributes, contents, tuple(arguments)
        if (known := self._known.get(key)) is not None:
            return _again(known, arguments)
        made = prepare(of_call, **arguments)
        self._keep(key, made, arguments, plain)
        return made

    def _keep(self, key: Hashable, made: Prepared, arguments: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
        config, model_inputs = made
        content = _content(config)
        if content is None or any(name not in plain and name not in model_inputs for name in arguments):
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        added = {name: value for name, value in model_inputs.items() if name not in arguments}
        self._known[key] = _Entry(content, tuple(model_inputs), added)


def _again(known: _Entry, arguments: Mapping[str, Any]) -> Prepared:
    config = GenerationConfig.__new__(GenerationConfig)
    vars(config).update(marshal.loads(known.config))
    return config, {name: {**known.added, **arguments}[name] for name in known.model_inputs}


def _content(config: GenerationConfig) -> bytes | None:
    values = vars(config)
    if type(config) is not GenerationConfig or not _are_plain(values.values()):
        return None
    return marshal.dumps(values, 2)  # in later versions of the format equal content may differ


def _is_plain(value: object) -> bool:
    """Whether ``marshal`` keeps a value as it is; it writes an array as bytes."""
    kind = type(value)
    return kind in _ATOMS or (kind in (list, tuple) and _are_plain(cast("Iterable[object]", value)))


def _are_plain(values: Iterable[object]) -> bool:
    return all(map(_is_plain, [value for value in values if type(value) not in _ATOMS]))
