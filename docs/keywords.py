"""What mkdocstrings calls when it has read a package: functions show the arguments that they show to an IDE.

It has read files without importing them, so neither ``takes_fields_of`` nor ``define_op`` has spelled them out yet.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

_LSE = Path(__file__).parents[1] / "ops" / "compiled_llm_ops" / "attention" / "lse.py"
_OPTIONS = re.compile(r"^ {4}options: .*\n(?: {8}.*\n)*", re.MULTILINE)


class Keywords(griffe.Extension):
    """Replaces the ``**options`` of ``wrap`` by the fields of ``WrapConfig``."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Do so once the whole package is read."""
        if pkg.path != "compiled_llm":
            return
        wrap, config = pkg["huggingface.wrap.wrap"], pkg["config.WrapConfig"]
        del wrap.parameters["options"]
        for parameter in _fields(config, griffe.ParameterKind.keyword_only):
            wrap.parameters.add(parameter)
        wrap.docstring.value = _OPTIONS.sub("", wrap.docstring.value)


class Ops(griffe.Extension):
    """Gives an op the fields of its NamedTuple as parameters, and what ``with_lse`` makes of it a page as well."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Do so once the whole package is read."""
        for module in _modules(pkg):
            for member in tuple(module.members.values()):
                if isinstance(member, griffe.Function) and (arguments := _arguments_of_op(member)) is not None:
                    fields = _fields(arguments, griffe.ParameterKind.positional_or_keyword)
                    member.parameters = griffe.Parameters(*fields)
                elif isinstance(member, griffe.Attribute) and str(member.value).startswith("with_lse("):
                    module.set_member(member.name, _with_lse(member))


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _modules(inner)


def _arguments_of_op(function: griffe.Function) -> griffe.Class | None:
    for decorator in function.decorators:
        if str(decorator.value).startswith("define_op("):
            return function.modules_collection[decorator.value.arguments[0].canonical_path]
    return None


def _fields(cls: griffe.Class, kind: griffe.ParameterKind) -> list[griffe.Parameter]:
    fields = [member for member in cls.attributes.values() if "instance-attribute" in member.labels]
    return [
        griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value) for field in fields
    ]


def _with_lse(made: griffe.Attribute) -> griffe.Function:
    """Return ``name_lse = with_lse(name)`` as the function that it is, with the docstring that it was given."""
    attention = made.module[made.value.arguments[0].name]
    said = _said_of_lse().format(name=attention.name) + attention.docstring.value.partition("Raises:")[2]
    function = griffe.Function(
        made.name,
        parameters=attention.parameters,
        returns=f"tuple[{attention.returns}, {attention.returns}]",
        docstring=griffe.Docstring(said, parser="google"),
        lineno=made.lineno,
    )
    function.docstring.parent = function
    return function


def _said_of_lse() -> str:
    """Return what ``with_lse`` writes into docstrings; the site is built without torch, which its module imports."""
    nodes = ast.parse(_LSE.read_text()).body
    (text,) = (node.value for node in nodes if isinstance(node, ast.Assign) and "_DOCUMENTED" in ast.dump(node))
    documented: str = ast.literal_eval(text)
    return documented
