"""What HuggingFace's ``generate`` makes of its settings, kept for calls that have the same ones.

It merges its defaults, the model's generation config and the call's arguments anew in each call, through several deep
copies and (up to transformers 5.22) a default config of the model's class. That is a third of the host's time before
the first token. What comes of it depends on the content of these alone, and what it warns of it says once.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig, PretrainedConfig

Prepared = tuple[GenerationConfig, dict[str, Any]]
"""The config of one call, and the arguments that go to the model."""

_MOST = 256


class _Known(NamedTuple):
    """What came of settings.

    Attributes:
        config: content of the prepared config.
        model_inputs: names of the arguments that go to the model.
        added: arguments for the model that the config asks for.
    """

    config: bytes
    model_inputs: tuple[str, ...]
    added: dict[str, Any]


class KnownSettings:
    """The settings that calls of one model had so far; safe to use from any thread."""

    def __init__(self) -> None:
        """Know none yet."""
        self._known: dict[Hashable, _Known] = {}

    def prepared(
        self,
        prepare: Callable[..., Prepared],
        config: PretrainedConfig,
        of_model: GenerationConfig,
        given: GenerationConfig | None,
        arguments: dict[str, Any],
    ) -> Prepared:
        """Return what ``prepare(given, **arguments)`` returns, a new config each time.

        Args:
            prepare: HuggingFace's, which looks at nothing but what is named here.
            config: the model's; HuggingFace asks which of its attributes are set.
            of_model: the model's generation config.
            given: the call's, if it has one.
            arguments: those of the call.
        """
        plain = {name: value for name, value in arguments.items() if _is_plain(value)}
        contents = _content(of_model), None if given is None else _content(given), marshal.dumps(plain, 2)
        if contents[0] is None or (given is not None and contents[1] is None):
            return prepare(given, **arguments)
        attributes = frozenset(name for name, value in vars(config).items() if value is not None)
        key = type(config), attributes, contents, tuple(arguments)
        if (known := self._known.get(key)) is not None:
            return _again(known, arguments)
        made = prepare(given, **arguments)
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
        self._known[key] = _Known(content, tuple(model_inputs), added)


def _again(known: _Known, arguments: Mapping[str, Any]) -> Prepared:
    config = GenerationConfig.__new__(GenerationConfig)
    vars(config).update(marshal.loads(known.config))
    return config, {name: {**known.added, **arguments}[name] for name in known.model_inputs}


def _content(config: GenerationConfig) -> bytes | None:
    """Return the content of a config, or None where that is not plain values alone."""
    values = vars(config)
    if type(config) is not GenerationConfig or not all(value is None or _is_plain(value) for value in values.values()):
        return None
    return marshal.dumps(values, 2)  # in later versions of the format equal content may differ


def _is_plain(value: object) -> bool:
    """Whether ``marshal`` keeps a value as it is; it writes an array as bytes."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, float, str)
