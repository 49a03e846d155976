"""Checks for the packages that read a GGUF file, before torch is imported."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock


def require_gguf() -> None:
    """Raise RuntimeError if a package is missing with which transformers loads a GGUF file."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"a GGUF file needs {package} to be loaded: pip install '.[demo]' in the checkout")


@contextmanager
def parsed_once() -> Iterator[None]:
    """Let transformers parse a file once, and name its tensors once, while the block runs."""
    # It does the first for the config, the tokenizer and the weights, and the second for each module: in Python, for
    # two thirds of the time that loading takes.
    gguf = importlib.import_module("gguf")
    with ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            stack.enter_context(mock.patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        yield
