"""Hashes of code objects, the same in each process, and the names that they read."""

from __future__ import annotations

import dis
import functools
import hashlib
from collections.abc import Iterator
from types import CodeType

from compiled_llm.model.version.functions import names_in, with_inner

_CACHED = 16_384  # more than the functions of a model's classes, traced or not
_IMPORT = dis.opmap["IMPORT_NAME"]


def digest(text: str) -> str:
    """Return 20 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()


@functools.lru_cache(_CACHED)
def code_digest(code: CodeType) -> str:
    """Return the hash of all that code does; lines and files do not count."""
    # ``marshal`` would write what depends on references and on the order of sets.
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    handlers = getattr(code, "co_exceptiontable", b"")  # from Python 3.11 on
    return digest(repr((code.co_code, handlers, names, counts, _constant(code.co_consts))))


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_constant, value)))}}}"
    if isinstance(value, slice):
        return f"slice{_constant((value.start, value.stop, value.step))}"
    return f"{type(value).__name__} {value!r}"


@functools.lru_cache(_CACHED)
def names_read_in(code: CodeType) -> frozenset[str]:
    """Return ``names_in`` code, and its texts if it may read attributes by these."""
    names = names_in(code)
    return names.union(words_in(code)) if "getattr" in names else names


@functools.lru_cache(_CACHED)
def codes_in(code: CodeType) -> frozenset[str]:
    """Return the hashes of code and of the functions inside it."""
    return frozenset(map(code_digest, with_inner(code)))


def words_in(code: CodeType) -> Iterator[str]:
    """Yield what code may read attributes by: the names in it, and its texts, which ``getattr`` takes."""
    yield from names_in(code)
    for each in with_inner(code):
        yield from each.co_varnames  # a keyword, or a parameter that stands for one
        for value in each.co_consts:
            yield from filter(str.isidentifier, _texts(value))


@functools.lru_cache(_CACHED)
def imports(code: CodeType) -> bool:
    """Whether code imports a module while it runs."""
    return any(_IMPORT in each.co_code[::2] for each in with_inner(code))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for entry in value:
            yield from _texts(entry)
