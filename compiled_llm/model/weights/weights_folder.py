"""Reads the weights in a folder, as ``save_pretrained`` writes them: safetensors only, since pickles can run code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_BYTES = 2**26  # of a file of JSON; the index of a model with a million tensors has less
_LONGEST_SHOWN = 200
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTER = "adapter_model.safetensors"


class StoredTensor:
    """A tensor in a file, read by ``stored[...]`` into memory of its own: the file may be written again."""

    def __init__(self, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)
        self.dtype: str = self._slice.get_dtype()  # as the file names it: ``BF16``, ``F32``

    def __getitem__(self, index: object) -> Tensor:
        read: Tensor = self._slice[index]
        return read.clone()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return a folder's tensors by name, once all files are found whole; ValueError if one is not."""
    if (folder / _WHOLE).is_file():
        return _stored(folder / _WHOLE)
    if (folder / _INDEX).is_file():
        return _sharded(folder)
    raise ValueError(f"update_weights: there is no {_WHOLE} or {_INDEX} in {str(folder)!r}; {_way_out(folder)}")


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the config in a folder, empty if there is none; ValueError if there is no folder, or it cannot be read."""
    _check_folder(folder)
    path = folder / "config.json"
    return _json(path) if path.is_file() else {}


def _check_folder(folder: Path) -> None:
    """Check that a folder can be looked into; ValueError if it is none, or the system refuses its name."""
    try:
        if folder.is_dir():
            next(folder.iterdir(), None)
            return
    except OSError as error:
        raise ValueError(f"update_weights: {_shown(folder)} cannot be read: {error.strerror}; give another") from error
    raise ValueError(f"update_weights: there is no folder {_shown(folder)}; give one with weights in safetensors")


def _shown(folder: Path) -> str:
    name = str(folder)
    return repr(name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}…")


def _way_out(folder: Path) -> str:
    if any((folder / name).exists() for name in _PICKLES):
        return "pickles are never read; save the weights with save_pretrained"
    if (folder / _ADAPTER).exists():
        return "of an adapter alone; merge it (merge_and_unload), and save all weights"
    return "save the weights with save_pretrained"


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    files = _files_by_tensor(folder / _INDEX)
    stored = {name: _stored(_shard(folder, name)) for name in dict.fromkeys(files.values())}
    for tensor, file in files.items():
        if tensor not in stored[file]:
            raise ValueError(
                f"update_weights: {_INDEX} says that {tensor} is in {file}, and it is not; save them again"
            )
    return _united(stored.values())


def _files_by_tensor(index: Path) -> dict[str, str]:
    files = _json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"update_weights: {str(index)!r} has no weight_map of names of files; save the weights again")
    return files


def _shard(folder: Path, name: str) -> Path:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(
            f"update_weights: {_INDEX} names the file {name!r}; only files .safetensors of the folder itself are read"
        )
    if not (folder / name).is_file():
        raise ValueError(f"update_weights: {_INDEX} names the file {name!r}, which is missing; save the weights again")
    return folder / name


def _stored(path: Path) -> dict[str, StoredTensor]:
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"update_weights: {str(path)!r} is damaged, or no safetensors: {error}") from error
    return {name: StoredTensor(file, name) for name in file.keys()}  # noqa: SIM118 (it is no map)


def _united(parts: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    united: dict[str, StoredTensor] = {}
    for part in parts:
        if twice := united.keys() & part.keys():
            raise ValueError(f"update_weights: {min(twice)} is in two files; save the weights again")
        united.update(part)
    return united


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"update_weights: {str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"update_weights: {str(path)!r} cannot be read as JSON: it is no object")
    return found
