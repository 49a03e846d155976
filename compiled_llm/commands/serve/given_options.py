"""Options of `compiled-llm serve` that are not on its command line: of a file in YAML, or of the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import typer

from compiled_llm.commands.serve.vllm_options import instead_of

PREFIX = "COMPILED_LLM_SERVE_"  # of environment variables

_ADDRESS = r"(tcp|udp|sctp)://.*"
_OF_KUBERNETES = re.compile(
    rf"{PREFIX}(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)=.*|{PREFIX}(.+_)?PORT={_ADDRESS}",
    re.DOTALL,
)
"""Variables that Kubernetes sets in each container for a service whose name begins with ``compiled-llm-serve``."""

_NOT_GIVEN_SO = ("config", "help", "same_model")


class GivenOption(NamedTuple):
    """An option's value as text, or as texts if there may be several, and the place that gives it."""

    value: Any
    place: str


def from_file(context: typer.Context, file: Path) -> dict[str, GivenOption]:
    """Return a file's options, by names with underscores; ValueError, with the line, if one is wrong or given twice."""
    found: dict[str, GivenOption] = {}
    lines: dict[str, int] = {}
    for line, key, value in _entries(file):
        place = f"--config {file}, line {line}: {key}"
        name = key.replace("-", "_")
        if name in found:
            raise ValueError(f"{place}: was given in line {lines[name]} already; leave one of them out")
        found[name] = GivenOption(_checked(context, name, value, place, _in_file), place)
        lines[name] = line
    return found


def from_environ(context: typer.Context, environ: Mapping[str, str] = os.environ) -> dict[str, GivenOption]:
    """Return the options of environment variables, as ``from_file``; an empty one counts as unset."""
    not_ours = of_kubernetes(environ)
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
    given = {name: value for name, value in given.items() if name not in not_ours}
    names = {variable: variable.removeprefix(PREFIX).lower() for variable in given}
    several = {param.name for param in context.command.params if getattr(param, "multiple", False)}
    return {
        name: GivenOption(_checked(context, name, texts, variable, _in_environ), variable)
        for variable, value in given.items()
        for name in [names[variable]]
        for texts in [value.split(",") if name in several else value]
    }


def of_kubernetes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that look like options, and are the address of a service of Kubernetes'."""
    return sorted(name for name, value in environ.items() if _OF_KUBERNETES.fullmatch(f"{name}={value}"))


def _in_file(name: str) -> str:
    return name.replace("_", "-")


def _in_environ(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _entries(file: Path) -> Iterator[tuple[int, str, Any]]:
    import yaml  # type: ignore[import-untyped]  # comes with transformers

    try:
        with file.open(encoding="utf-8") as text:
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(f"--config {file}: give an option a line, as in `port: 8000`")
        for key, value in root.value:
            yield key.start_mark.line + 1, str(key.value), loader.construct_object(value, deep=True)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(
            f"--config {file}{line}: is no YAML: {error.problem}; give `port: 8000`, for example"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _checked(context: typer.Context, name: str, value: object, where: str, shown: Callable[[str], str]) -> Any:
    """Return a value as the command line would have it; ValueError if there is no such option, or value of it."""
    params: dict[str, Any] = {
        str(param.name): param
        for param in context.command.params
        if param.name not in _NOT_GIVEN_SO and not getattr(param, "hidden", False)
    }
    if name not in params:
        raise ValueError(f"{where}: there is no such option; {_advice(name, sorted(params), shown)}")
    param = params[name]
    texts = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if value is None or isinstance(value, dict) or not texts:
        raise ValueError(f"{where}: give a value")
    several = bool(getattr(param, "multiple", False))
    if len(texts) > 1 and not several and name != "warmup":
        raise ValueError(f"{where}: give one value, and not {len(texts)}")
    text: Any = texts if several else ",".join(texts)
    try:
        param.process_value(context, text)
    except typer.BadParameter as error:
        given = ",".join(texts)
        raise ValueError(f"{where} {given}: {error.message.removeprefix('Value error, ')}") from error
    return text


def _advice(name: str, known: Sequence[str], shown: Callable[[str], str]) -> str:
    if (said := instead_of(f"--{name}")) is not None:
        return f"it is one of vLLM: {said}"
    if meant := get_close_matches(name, known, 2):
        return f"did you mean {' or '.join(map(shown, meant))}?"
    return f"there are {', '.join(map(shown, known))}"
