"""The state of a process that torch traces and compiles by: what Dynamo guards beside arguments, and settings."""

# Torch's own key for compiled code (``FxGraphHashDetails``) has most of it, but takes a graph and the whole compiler.

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.fx.experimental._config
import torch.utils.deterministic
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo.guards import GlobalStateGuard
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from compiled_llm.compat.torch.dynamo import off_by_stance, switched_off
from compiled_llm.compat.torch.modes import hooks_on_all_modules

_IN_WORDS = {
    "grad_mode": "torch.is_grad_enabled",
    "autocast_state": "torch.autocast",
    "torch_function": "torch functions of subclasses",
    "torch_function_all_disabled": "torch functions of modes",
    "deterministic_algorithms": "torch.use_deterministic_algorithms",
    "deterministic_algorithms_warn_only": "torch.use_deterministic_algorithms(warn_only)",
    "allow_tf32": "torch.backends.cuda.matmul.allow_tf32",
    "allow_fp16_reduce": "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduce": "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "num_threads": "torch.get_num_threads",
    "default_dtype": "torch.set_default_dtype",
}
"""The settings that users know, by the names of Dynamo's guard of the process's state (``GlobalStateGuard``)."""

_SETTINGS = {
    "torch._dynamo.config": torch._dynamo.config,
    "torch._functorch.config": torch._functorch.config,
    "torch._inductor.config": torch._inductor.config,
    "torch.fx.experimental._config": torch.fx.experimental._config,
}

_PASSES = re.compile(r"custom.*pass|_fusion_custom_pass|_ddp_communication_passes")
"""Settings of Inductor's that hold code of others, each of which its key handles for itself."""

_WITHOUT_EFFECT = frozenset(
    {
        *("recompile_limit", "accumulated_recompile_limit", "debug_dir_root", "base_dir", "log_file_name", "verbose"),
        *("cache_size_limit", "accumulated_cache_size_limit", "log_compilation_metrics", "profile_cache_file"),
        *("assume_static_by_default", "automatic_dynamic_shapes"),
    }
)
"""Settings that bound how often torch compiles, or say where it writes; the last are ours: ``dynamic=False``."""


def state() -> dict[str, object]:
    """Return the state of this thread and process, by names that a user understands; values are those of JSON."""
    guarded: dict[str, object] = json.loads(GlobalStateGuard().__getstate__())  # type: ignore[attr-defined]
    return {
        **{_IN_WORDS.get(name, f"Dynamo's {name}"): value for name, value in guarded.items()},
        **{name: _as_read(read) for name, read in _BESIDE_GUARDED.items()},
        "torch.backends.opt_einsum": [torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy],
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "torch.distributed": _distributed(),
        "torch.compile": switched_off(),
    }


def settings() -> Iterator[tuple[str, Mapping[str, Any], frozenset[str]]]:
    """Yield the settings of Dynamo, AOTAutograd and Inductor that code depends on; last, those others than torch's."""
    # As Inductor's own key has them: it leaves out what is only about caches, processes and traces of its own.
    for name, module in _SETTINGS.items():
        read: dict[str, Any] = module.save_config_portable(ignore_private_configs=False)
        kept = {setting: value for setting, value in read.items() if setting not in _WITHOUT_EFFECT}
        entries: dict[str, Any] = module._config
        kept |= {setting: _said_of_passes(getattr(module, setting)) for setting in entries if _PASSES.search(setting)}
        yield name, kept, frozenset(setting for setting, value in kept.items() if value != entries[setting].default)


def _said_of_passes(value: Any) -> Any:
    """Return a setting that holds passes: names as they are, other ones as something that is equal to nothing."""
    plain = value is None or (isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value))
    return value if plain else f"{value!r} {uuid.uuid4()}"


class StateCheck:
    """The state of this thread and process, remembered, and compared in some microseconds; settings are left out.

    Who compiles reads settings, and what is compiled reads none.
    """

    def __init__(self, threads: bool = True) -> None:
        """Without ``threads``, their number is left out."""
        self._guarded = GlobalStateGuard()
        self._beside = _beside_guarded()
        self._threads = threads

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        return self._holds_guarded() and self._beside == _beside_guarded()

    def _holds_guarded(self) -> bool:
        return self._guarded.check() or (not self._threads and self._guarded.reason().split() == ["num_threads"])


def _beside_guarded() -> list[object]:
    return [*map(_as_read, _BESIDE_GUARDED.values())]


def _as_read(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError as error:  # older and newer settings of precision contradict each other
        return str(error)


def _modes() -> list[str]:
    if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        return []
    return [*map(_name_of, (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()))]


def _name_of(mode: object) -> str:
    device = f" {mode.device}" if isinstance(mode, _device.DeviceContext) else ""
    return f"{type(mode).__module__}.{type(mode).__qualname__}{device}"


_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("cuda", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"))
_KERNELS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")

_BESIDE_GUARDED: dict[str, Callable[[], object]] = {
    "torch.inference_mode": torch.is_inference_mode_enabled,
    "torch.set_default_device": lambda: str(_device.CURRENT_DEVICE),
    "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision,
    **{
        f"fp32_precision of {' '.join(place)}": partial(torch._C._get_fp32_precision_getter, *place)
        for place in _PRECISIONS
    },
    "torch.utils.deterministic.fill_uninitialized_memory": lambda: (
        torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    ),
    **{f"torch.backends.cuda.{name}": getattr(torch.backends.cuda, name) for name in _KERNELS},
    "torch function modes and dispatch modes": _modes,
    "torch.func": lambda: peek_interpreter_stack() is not None,
    "torch.autograd.forward_ad": lambda: torch.autograd.forward_ad._current_level,
    "torch.jit.trace": lambda: torch._C._get_tracing_state() is not None,
    "saved tensors' hooks": lambda: _top_saved_tensors_default_hooks(True) is not None,
    "anomaly mode": torch.is_anomaly_enabled,
    "torch.compiler.set_stance": off_by_stance,
    "hooks on all modules": hooks_on_all_modules,
}
"""What Dynamo's own guard of the process does not compare, and steps do: by names that a user understands."""


def _distributed() -> list[int] | None:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return [distributed.get_rank(), distributed.get_world_size()]
