"""Entries for what is beside a model: the process's state, settings of torch, versions, and our own files."""

from __future__ import annotations

import functools
import platform
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import transformers

import compiled_llm_ops
from compiled_llm.compat.huggingface import implementations_of_this_thread
from compiled_llm.compat.own_version import OWN_VERSION
from compiled_llm.compat.torch.kept.process_state import StateCheck, settings, state
from compiled_llm.compilation.kept.fingerprint.code import digest
from compiled_llm.compilation.kept.fingerprint.plain import path_of

_OWN = Path(__file__).parents[3]
_FOLDERS = (
    *(_OWN / room for room in ("compat", "compilation", "kinds", "kvcache", "model")),
    Path(compiled_llm_ops.__file__).parent,
)
"""Our code that programs are made by and made of; what calls them hands over arguments, which are compared."""

THREADS = "the process's torch.get_num_threads"
"""The entry that only programs with C++ kernels have, which are made for a number of threads."""


def process_state() -> dict[str, str]:
    """Return entries for the state of this thread and process, within ``AttentionSwitch.paged``, and for settings."""
    # ``ProcessWatch`` compares the state again in each step that is made; one that is repeated does not.
    entries = {f"the process's {name}": digest(repr(value)) for name, value in state().items()}
    entries["attention and experts of layers"] = digest(repr(implementations_of_this_thread()))
    for name, values, others in settings():
        words = {setting: _in_words(value) for setting, value in sorted(values.items())}
        entries.update({f"setting {name}.{setting}": digest(words[setting]) for setting in sorted(others)})
        entries[f"settings of {name}"] = digest(repr({**words, **dict.fromkeys(others)}))
    return entries


class ProcessWatch:
    """The state of this thread and process, as when it was made: what is compared when a step is made."""

    def __init__(self, threads: bool = True) -> None:
        """Without ``threads``, their number is left out."""
        self._state = StateCheck(threads)
        self._read = implementations_of_this_thread()

    def holds(self) -> bool:
        """Whether it is as it was; within ``AttentionSwitch.paged``, as when it was made."""
        return self._read == implementations_of_this_thread() and self._state.holds()


@functools.cache
def versions() -> Mapping[str, str]:
    """Return entries that are the same as long as this process runs."""
    read = {
        "version of Python": platform.python_version(),
        "version of torch": f"{torch.__version__} {torch.version.git_version}",
        "kind of processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "version of transformers": transformers.__version__,
        "version of compiled-llm": OWN_VERSION,
        "compiled_llm's files": "".join(_own_files()),
    }
    return {name: digest(value) for name, value in read.items()}


def _own_files() -> Iterator[str]:
    for folder in _FOLDERS:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{path.relative_to(folder)} {digest(path.read_text('utf-8', 'surrogateescape'))}"


def _in_words(value: object) -> str:
    """Describe a setting: a container by its entries, a class by its name, any other value by its words."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_in_words(key)}: {_in_words(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_in_words, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_in_words, value))}]"
    if isinstance(value, type):
        return path_of(value)
    words = repr(value)
    return f"{words} {uuid.uuid4()}" if " at 0x" in words else words  # an address tells nothing of what is there
