"""What mkdocs calls while it builds: tables made from the code, so that they cannot go stale.

A page asks for one by a comment of its own line: ``<!-- table: options -->``; ``TABLES`` has their names.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[1]
RESULTS = CHECKOUT / "docs" / "matrix.json"
MOST_WORDS = 4000
_log = logging.getLogger("mkdocs.hooks")
_PLACE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
_VARIABLE = re.compile(r"``([A-Z][A-Z0-9_]+)``")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where the page asks for them; mkdocs calls this for each page."""
    return _PLACE.sub(lambda match: TABLES[match[1]](), markdown)


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Warn, which ends a strict build, if a page has more words than are read in one go; mkdocs calls this for each."""
    if (count := words_of(html)) > MOST_WORDS:
        _log.warning("%s has %d words, more than %d: part it by theme", page.file.src_uri, count, MOST_WORDS)


def words_of(html: str) -> int:
    """Return the number of words that a page shows."""
    return len(re.sub(r"<[^>]+>", " ", html).split())


def options() -> str:
    """Return a table of the fields of ``WrapConfig``."""
    cls = _from_checkout("compiled_llm.config", "WrapConfig")
    said = described(cls)
    lines = ["| option | type | default | what it does |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        kind = {"Backend": "str", "Mode": "str"}.get(field.type, field.type).replace(" | ", " or ")
        lines.append(f"| `{field.name}` | {kind} | `{_shown(field.default)}` | {said[field.name]} |")
    return "\n".join(lines)


def environment() -> str:
    """Return a table of the variables that ``compiled_llm.env`` reads."""
    said = described(_from_checkout("compiled_llm.env", "Env"))
    lines = ["| variable | what it does |", "|---|---|"]
    for name, text in said.items():
        variable = _VARIABLE.match(text)
        if variable is None:
            raise ValueError(f"Env.{name}: its description must begin with the variable's name in double backquotes")
        rest = text[variable.end() :].lstrip(", :")
        lines.append(f"| `{variable[1]}` | {rest[:1].upper()}{rest[1:]} |")
    return "\n".join(lines)


def matrix() -> str:
    """Return a table of what ``tools/matrix.py`` has run, and what came of it."""
    lines = [
        "| environment | Python | PyTorch | transformers | FlashInfer | of extras | result | on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in json.loads(RESULTS.read_text()).items():
        versions = dict(result["versions"])
        columns = [versions.pop(key, None) or "" for key in ("python", "torch", "transformers", "flashinfer-python")]
        others = ", ".join(f"{package} {version}" for package, version in versions.items())
        columns.append(others if name.startswith("extras") else "")
        lines.append(f"| `{name}` | {' | '.join(columns)} | {_outcome(result)} | <time>{result['date']}</time> |")
    return "\n".join(lines)


def commands() -> str:
    """Return what ``--help`` says of each command of ``compiled-llm`` but ``serve``, with a heading each."""
    return "\n\n".join(said for said in _said_of_commands() if not said.startswith(_SERVE))


def serve() -> str:
    """Return what ``--help`` says of ``compiled-llm serve``, which has more options than all others together."""
    return next(said for said in _said_of_commands() if said.startswith(_SERVE))


_SERVE = "## compiled-llm serve\n"


def _said_of_commands() -> Iterator[str]:
    import typer

    command = typer.main.get_command(_from_checkout("compiled_llm.commands.app", "app"))
    return _helps(command, command.context_class(command, info_name="compiled-llm"))


def vllm_options() -> str:
    """Return a table of the options of `vllm serve` that ``compiled-llm serve`` lacks."""
    options = _from_checkout("compiled_llm.commands.serve.vllm_options", "VLLM_OPTIONS")
    rows = [f"| {', '.join(f'`{name}`' for name in names.split())} | {said} |" for names, said in options.items()]
    return "\n".join(["| `vllm serve` | here |", "|---|---|", *rows])


def _helps(command: Any, context: Any) -> Iterator[str]:
    below = getattr(command, "commands", {})
    parts = [f"## {context.command_path}", *filter(None, (command.help, command.epilog))]
    if rows := [_described_option(param.get_help_record(context)) for param in command.params if not _is_hidden(param)]:
        parts.append("\n".join(["| option | what it does | default |", "|---|---|---|", *rows]))
    yield "\n\n".join(inspect.cleandoc(part) for part in parts)
    for name, each in ((name, each) for name, each in below.items() if not each.hidden):
        yield from _helps(each, each.context_class(each, info_name=name, parent=context))


def _is_hidden(param: Any) -> bool:
    return bool(getattr(param, "hidden", False))


def _described_option(capture: tuple[str, str]) -> str:
    """Return a row of a table: the option, what it does, and its default."""
    name, (said, _, rest) = capture[0], capture[1].partition("  [")
    if choices := re.search(r" <(.+\|.+)>$", name):
        name, said = name[: choices.start()], f"{said} One of {choices[1].replace('|', ', ')}."
    default = rest.removesuffix("]").removeprefix("default: ").replace("x>=", "at least ")
    return f"| `{name}` | {_cell(said)} | {_cell(default)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _outcome(result: dict[str, Any]) -> str:
    if "passed" not in result:
        return f"{result['result']}: {_cell(result['reason'])}"
    failed = [f"**failed**: {', '.join(f'`{name}`' for name in result['failures'])}"] if result["failures"] else []
    skipped = [f"{result['skipped']} skipped"] if result["skipped"] else []
    return "; ".join([*failed, ", ".join([f"{result['passed']} passed", *skipped])])


def described(cls: type) -> dict[str, str]:
    """Return what the docstring of a dataclass says of each field, in one line each.

    Raises:
        ValueError: it leaves a field out, or describes one that does not exist.
    """
    _, _, attributes = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for line in attributes.splitlines():
        if match := re.match(r" {4}(\w+): (.*)", line):
            name, found[match[1]] = match[1], match[2]
        elif line.startswith(" " * 8) and found:
            found[name] += f" {line.strip()}"
        elif line.strip():
            break
    fields = [field.name for field in dataclasses.fields(cls)]
    if sorted(found) != sorted(fields):
        raise ValueError(f"{cls.__name__}: its fields are {fields}, and its docstring describes {sorted(found)}")
    return {name: _cell(found[name]) for name in fields}


def _shown(default: Any) -> str:
    if isinstance(default, int) and not isinstance(default, bool) and default % 2**20 == 0 and default:
        return f"{default // 2**20} * 2**20"
    return repr(default)


def _from_checkout(module: str, name: str) -> Any:
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))  # an installed package comes first
    return getattr(__import__(module, fromlist=[name]), name)


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "environment": environment,
    "matrix": matrix,
    "commands": commands,
    "serve": serve,
    "vllm_options": vllm_options,
}
