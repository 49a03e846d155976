"""The options of a model that runs in the command's own process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compiled_llm.commands.options import shared
from compiled_llm.commands.options.choices import Device, Dtype
from compiled_llm.commands.options.groups import OptionGroup
from compiled_llm.config import KVScales, WrapConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class RunningOptions(OptionGroup):
    """Options of how a model is run."""

    mode: shared.RunningMode = "cuda-graphs"
    eager_first: shared.EagerFirst = True
    backend: shared.Backend = "auto"
    dtype: shared.WeightsDtype = Dtype.auto
    device: shared.OnDevice = Device.auto
    kv_dtype: shared.KeysAndValues = None
    kv_scales: shared.ScalesFile = None

    def wrap_options(self, device: str, quiet: bool = False) -> dict[str, Any]:
        # On a CPU room for rows costs nothing before it is used, and with the default the code is what ``wrap(model)``
        # compiles: each finds the other's in the cache. On CUDA pages for one row leave others most of the memory.
        rows = {"max_batch_size": 1} if device == "cuda" else {}
        scales = None if self.kv_scales is None else KVScales.load(self.kv_scales)
        pages = {"kv_dtype": self.kv_dtype, "kv_scales": scales}
        chosen = {"mode": self.mode, "backend": self.backend, "eager_first": self.eager_first}
        return {**chosen, **pages, "progress": not quiet, **rows}

    def wrap_config(self, device: str) -> WrapConfig:
        return WrapConfig.from_options(self.wrap_options(device))

    def checked_device(self) -> torch.device:
        """Return the device; raises ValueError or RuntimeError if ``wrap`` would refuse it with these options."""
        from compiled_llm.commands.loading.load import device_of, dtype_of
        from compiled_llm.model.checks import check_device

        device = device_of(self.device.value)
        check_device(device.type, dtype_of(self.dtype.value, device), self.wrap_config(device.type))
        return device


@dataclass(frozen=True, kw_only=True)
class AllRunningOptions(RunningOptions):
    """Those of `generate`: its answer may be compared with others, and use code that was compiled before."""

    batch_invariant: shared.BatchInvariant = False
    artifacts: shared.Artifacts = None

    def wrap_options(self, device: str, quiet: bool = False) -> dict[str, Any]:
        options = super().wrap_options(device, quiet)
        if self.artifacts is not None:
            options["artifacts"] = self.artifacts
        options["eager_first"] = self.eager_first and not self.batch_invariant
        return {**options, "batch_invariant": self.batch_invariant}
