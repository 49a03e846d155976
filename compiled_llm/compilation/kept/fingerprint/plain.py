"""Values without parts that can change, and what the names of attributes tell."""

from __future__ import annotations

import enum

import torch

UNNAMED = frozenset(
    {
        *("name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "generation_config", "compiled"),
        *("hf_device_map", "_is_hf_initialized"),
    }
)
"""Attributes that say where a model comes from, or what others do with it; a trace that reads one is not kept."""

BOOKKEEPING = frozenset({"transformers.utils.generic._registered_model_output_types"})
"""Globals in which libraries note what they have seen so far; no value of a trace follows from them."""

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range})
OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)

KEPT_BY_PYTHON = frozenset(
    {
        *("__doc__", "__dict__", "__weakref__", "__module__", "__qualname__", "__orig_bases__", "__parameters__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__"),
        *("_abc_impl", "__static_attributes__", "__firstlineno__", "__type_params__"),
        "__slotnames__",  # once an object was copied or pickled
    }
)


def is_plain(value: object) -> bool:
    """Whether a value is equal to another one wherever it is read, and has no parts that can change."""
    if type(value) in PLAIN or isinstance(value, (*OF_TORCH, enum.Enum)):
        return True
    return type(value) in (tuple, frozenset) and all(map(is_plain, value))  # type: ignore[call-overload]


def path_of(value: object) -> str:
    """Return the module and the name of a class or function."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}.{name or getattr(value, '__name__', None) or value}"


def is_dunder(name: str) -> bool:
    """Whether Python itself may read an attribute of that name."""
    return name.startswith("__") and name.endswith("__")


def is_named(name: str) -> bool:
    """Whether an attribute of that name tells something of its owner."""
    return name not in UNNAMED and name not in KEPT_BY_PYTHON and not name.startswith("___")  # Dynamo's notes
