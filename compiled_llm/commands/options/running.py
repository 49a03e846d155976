"""The options of a model that runs in the command's own process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.config import KVScales, WrapConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class RunningOptions:
    """Options of how a model is run: ``artifacts`` compiled before or not, ``quiet`` without progress and figures."""

    mode: str
    backend: str
    dtype: str
    device: str
    quiet: bool
    kv_dtype: str | None = None
    kv_scales: Path | None = None
    batch_invariant: bool = False
    check_pages: str = "off"
    artifacts: Path | None = None
    eager_first: bool = True

    def wrap_options(self, device: str) -> dict[str, Any]:
        # On a CPU room for rows costs nothing before it is used, and with the default the code is what ``wrap(model)``
        # compiles: each finds the other's in the cache. On CUDA pages for one row leave others most of the memory.
        rows = {"max_batch_size": 1} if device == "cuda" else {}
        artifacts = {} if self.artifacts is None else {"artifacts": self.artifacts}
        names = ("mode", "backend", "kv_dtype", "batch_invariant", "check_pages")
        options = {name: getattr(self, name) for name in names}
        options["kv_scales"] = None if self.kv_scales is None else KVScales.load(self.kv_scales)
        options["eager_first"] = self.eager_first and not self.batch_invariant
        return {**options, "progress": not self.quiet, **rows, **artifacts}

    def wrap_config(self, device: str) -> WrapConfig:
        return WrapConfig.from_options(self.wrap_options(device))

    def checked_device(self) -> torch.device:
        """Return the device; raises ValueError or RuntimeError if ``wrap`` would refuse it with these options."""
        from compiled_llm.commands.loading.load import device_of, dtype_of
        from compiled_llm.model.checks import check_device

        device = device_of(self.device)
        check_device(device.type, dtype_of(self.dtype, device), self.wrap_config(device.type))
        return device
