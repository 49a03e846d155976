"""The requirements of compiled code: versions, the machine, the model but for its weights' values, and options."""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from compiled_llm.compat.own_version import OWN_VERSION
from compiled_llm.compat.torch.inductor import cpp_compilers
from compiled_llm.config import WrapConfig
from compiled_llm.kinds.registry import meanings_of
from compiled_llm.model.sizes import max_positions_of
from compiled_llm.model.traced.stand_ins import packed_formats

OPTIONS = (
    *("mode", "backend", "page_size", "prefill_tokens", "cascade", "batch_invariant", "kv_dtype"),
    *("packed", "fuse_projections", "workspace_bytes"),
)
"""The options of ``wrap`` that code depends on; of ``max_batch_size`` it is the room for rows that counts."""

SIZE_OPTIONS = ("mode", "backend", "prefill_tokens", "cascade")
"""The options of ``wrap`` that decide, with the room for rows, which sizes steps have."""

_UNSAID = {"transformers_version", "dtype", "torch_dtype"}
"""Entries of a config that do not describe the model; the dtype is that of the weights."""


def made_for(model: PreTrainedModel, model_class: type[PreTrainedModel], config: WrapConfig) -> dict[str, Any]:
    """Return the requirements by name: they must be equal where code is written and where it is read."""
    kind = model.device.type
    packages = ["torch", "transformers", *(["triton", "flashinfer-python"] if kind == "cuda" else [])]
    found = {
        "compiled-llm": OWN_VERSION,
        **{package: _version(package) for package in packages},
        "Python": platform.python_version(),
        "machine": platform.machine(),
        "device": kind,
        **(_of_cuda(model.device) if kind == "cuda" else _of_cpu()),
        "model": _name_of(model_class),
        "dtype": str(model.dtype),
        "weights": _fingerprint(model),
        "packed weights": packed_formats(model, config.packed),
        **{f"config.{name}": value for name, value in _config_of(model).items()},
        **{f"option {name}": getattr(config, name) for name in OPTIONS},
        "attention kernels": _kernels(kind, config),
        **meanings_of(config.layer_functions),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def sizes_made_for(
    model: PreTrainedModel, model_class: type[PreTrainedModel], config: WrapConfig, rows: int
) -> dict[str, Any]:
    """Return the properties that decide the sizes of steps, by name; other versions, and another GPU, have the same."""
    found = {
        "model": _name_of(model_class),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positions": max_positions_of(model),
        "dtype": str(model.dtype),
        "weights": _fingerprint(model),
        "device": model.device.type,
        **{f"option {name}": getattr(config, name) for name in SIZE_OPTIONS},
        "attention kernels": _kernels(model.device.type, config),
        "rows": rows,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def _kernels(device: str, config: WrapConfig) -> str:
    """Return whose kernels attend in prefill, since ``backend="auto"`` stands for what a machine has."""
    return config.backend_on(device).name


def _name_of(model_class: type[PreTrainedModel]) -> str:
    return f"{model_class.__module__}.{model_class.__qualname__}"


def _version(package: str) -> str:
    if package == "torch":
        return str(torch.__version__)  # with what it was built for
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _of_cuda(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "GPU": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "CUDA": str(torch.version.cuda),
    }


def _of_cpu() -> dict[str, Any]:
    """Return the requirements of C++ kernels: they are built for one kind of CPU, with files of certain folders."""
    return {
        "CPU": _cpu_model(),
        "CPU features": hashlib.sha256(_of_cpuinfo("flags").encode()).hexdigest()[:16],
        "threads of torch": torch.get_num_threads(),
        "C++ compiler": cpp_compilers()[0],  # what Inductor calls: its name is part of keys
        "folder of torch": str(Path(torch.__file__).parent),
        "folder of Python's headers": sysconfig.get_path("include"),
    }


def _cpu_model() -> str:
    return _of_cpuinfo("model name") or platform.processor() or platform.machine()


def _of_cpuinfo(name: str) -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def _fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of all names, shapes and types of a model's tensors."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in sorted(tensors.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _config_of(model: PreTrainedModel) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {name: value for name, value in whole.items() if not name.startswith("_") and name not in _UNSAID}
