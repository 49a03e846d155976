"""Run a HuggingFace causal language model as one compiled graph over FlashInfer's paged attention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiled_llm.compilation.torch_compile.compile_error import CompileError
    from compiled_llm.config import KVScales, WrapConfig
    from compiled_llm.demo_model.demo import demo
    from compiled_llm.engine.engine import DeviceLostError, Engine, QueueFullError
    from compiled_llm.engine.metrics import EngineDescription, EngineStats
    from compiled_llm.engine.steps.request import RequestError
    from compiled_llm.execution.reporting.stats import Stats
    from compiled_llm.explaining.explainer import explain
    from compiled_llm.huggingface.kv_scales import kv_scales
    from compiled_llm.huggingface.traced_hook import traced_hook
    from compiled_llm.huggingface.wrap import unwrap, wrap
    from compiled_llm.kinds.refusals import UnsupportedModelError
    from compiled_llm.kvcache.errors import OutOfPagesError
    from compiled_llm.requests.handle import RequestHandle
    from compiled_llm.requests.outputs import RequestOutput
    from compiled_llm.requests.sampling_params import SamplingParams
    from compiled_llm.requests.structured_outputs import StructuredOutputsParams

from compiled_llm.compat.own_version import OWN_VERSION
from compiled_llm.env import Env, enable_logs

__version__ = OWN_VERSION

__all__ = [
    "CompileError",
    "DeviceLostError",
    "Engine",
    "EngineDescription",
    "EngineStats",
    "KVScales",
    "OutOfPagesError",
    "QueueFullError",
    "RequestError",
    "RequestHandle",
    "RequestOutput",
    "SamplingParams",
    "Stats",
    "StructuredOutputsParams",
    "UnsupportedModelError",
    "WrapConfig",
    "demo",
    "explain",
    "kv_scales",
    "traced_hook",
    "unwrap",
    "wrap",
]

# Imported at first use: torch and transformers take seconds, for which `compiled-llm --help` should not wait.
_HOMES = {
    "CompileError": "compiled_llm.compilation.torch_compile.compile_error",
    "DeviceLostError": "compiled_llm.engine.engine",
    "Engine": "compiled_llm.engine.engine",
    "EngineDescription": "compiled_llm.engine.metrics",
    "EngineStats": "compiled_llm.engine.metrics",
    "KVScales": "compiled_llm.config",
    "OutOfPagesError": "compiled_llm.kvcache.errors",
    "QueueFullError": "compiled_llm.engine.engine",
    "RequestError": "compiled_llm.engine.steps.request",
    "RequestHandle": "compiled_llm.requests.handle",
    "RequestOutput": "compiled_llm.requests.outputs",
    "SamplingParams": "compiled_llm.requests.sampling_params",
    "Stats": "compiled_llm.execution.reporting.stats",
    "StructuredOutputsParams": "compiled_llm.requests.structured_outputs",
    "UnsupportedModelError": "compiled_llm.kinds.refusals",
    "WrapConfig": "compiled_llm.config",
    "demo": "compiled_llm.demo_model.demo",
    "explain": "compiled_llm.explaining.explainer",
    "kv_scales": "compiled_llm.huggingface.kv_scales",
    "traced_hook": "compiled_llm.huggingface.traced_hook",
    "unwrap": "compiled_llm.huggingface.wrap",
    "wrap": "compiled_llm.huggingface.wrap",
}

enable_logs(Env.from_environ().logs)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
