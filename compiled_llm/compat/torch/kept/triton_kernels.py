"""Kernels of Triton's in the code of a graph: which tiling each runs with, its files, and how it is loaded."""

# Inductor compiles a kernel with several tilings, times them in the first call, and goes on with one. That one is kept
# by what it was made with and by Triton's name for the result, and loaded alone: to choose again would take time, and
# another tiling adds in another order, so it has other bits. Triton's name is a hash of all that its code depends on.
# This file ends once torch keeps which kernels a code file launches.

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner


_NEEDED = (".json", ".cubin")
"""The endings of files that Triton loads a kernel from; the others are what it was made of."""

_PLAIN = (bool, int, float, str, type(None))
_TUNING = ("dynamic_scale_rblock", "coordinate_descent_tuning", "combo_tuning_groups")
"""Settings by which Inductor would time further tilings."""


class TritonKernel(NamedTuple):
    """A kernel of a code file, as this process runs it."""

    kernel: CachingAutotuner
    source: str  # its module, as the code file has it

    @property
    def launched(self) -> Any:
        """Its launcher with the tiling that was chosen; ValueError before its first run, which chooses."""
        launchers = self.kernel.launchers
        if len(launchers) != 1:
            raise ValueError("a kernel of Triton's has not run in its first call")
        return launchers[0]

    def encoded(self) -> dict[str, Any]:
        """Return its tiling and Triton's name for it, as values of JSON; ValueError if it cannot be told so."""
        launched = self.launched
        tiling = {name: value for name, value in vars(launched.config).items() if value is not None}
        if not all(map(_is_plain, tiling.values())):
            raise ValueError("a kernel of Triton's has a tiling that is none of numbers")
        return {"name": launched.cache_hash, "tiling": tiling}

    def files(self) -> dict[str, Path]:
        """Return what it is loaded from, by where that lies in a folder of caches; ValueError if it is gone."""
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        name = self.launched.cache_hash
        folder = Path(triton_cache_dir(self.kernel.device_props.index or 0)) / name
        found = {f"triton/{name}/{path.name}": path for path in folder.glob("*") if path.suffix in _NEEDED}
        if not any(path.suffix == ".cubin" for path in found.values()):
            raise ValueError("a kernel of Triton's was not found in its cache")
        module = Path(PyCodeCache.write(self.source)[1])
        return {f"inductor/{module.parent.name}/{module.name}": module, **found}


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and isinstance(each, _PLAIN) for name, each in value.items())
    return isinstance(value, _PLAIN)


def load_kernel(name: str, source: str, encoded: Mapping[str, Any]) -> CachingAutotuner:
    """Return a kernel of ``TritonKernel.encoded``, from where ``kernels_in`` says; ValueError if Triton has another."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import compile_tasks

    for choose in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):  # the latter from torch 2.12 on
        getattr(compile_tasks, choose, lambda: None)()
    key, path = PyCodeCache.write(source)
    module = compile_tasks._reload_python_module(key, path)  # of this code alone, unlike torch's
    kernel: CachingAutotuner = getattr(module, name)
    assert kernel.configs is not None, "its module has just been loaded"
    config = copy.copy(kernel.configs[0])
    vars(config).update(encoded["tiling"])
    kernel.configs = [config]
    kernel.inductor_meta.update(dict.fromkeys(_TUNING, False))
    kernel.precompile()
    if [launcher.cache_hash for launcher in kernel.launchers] != [encoded["name"]]:
        raise ValueError(f"Triton makes another kernel of {name} than there was")
    return kernel
