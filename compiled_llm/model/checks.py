"""Bad input, refused before anything changes: each message names the argument, its value and the way out."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from compiled_llm.compat.torch.inductor import cpp_compilers, default_inductor_cache
from compiled_llm.compat.torch.modes import cuda_is_lost
from compiled_llm.config import WAITING_MODES, WrapConfig
from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.registry import CODECS
from compiled_llm.kinds.scales import check_scales
from compiled_llm.kinds.support import kinds_of, refusal
from compiled_llm.model.attention_switch import attention_function_of_user
from compiled_llm.model.classifiers import is_classifier
from compiled_llm.model.inputs import in_training
from compiled_llm.model.layer_probe import accepts_logits_to_keep
from compiled_llm.model.sizes import attention_geometries
from compiled_llm.model.version.training import training_difference
from compiled_llm_ops import Geometry
from compiled_llm_ops.backends import BACKENDS, backend_for, backend_named
from compiled_llm_ops.contracts import CASCADE_QUERIES

ROOT = 0  # Root's user id; root is always trusted


def check_model(model: object) -> PreTrainedModel:
    """Return ``model`` if it is a decoder-only causal language model that acts as in evaluation mode.

    Raises:
        TypeError: it is no HuggingFace model.
        UnsupportedModelError: it is one of another kind.
        ValueError: a module of it is in training mode, and acts otherwise there.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"wrap: model is {_no_model(model)}")
    name = type(model).__name__
    scores = is_classifier(model)
    if not scores and (not isinstance(model, GenerationMixin) or not model.can_generate()):
        raise UnsupportedModelError(
            f"wrap: {name} cannot generate; give a ...ForCausalLM, or a ...ForSequenceClassification of its family"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"wrap: {name} is an encoder-decoder; only decoder-only causal LMs can be wrapped")
    if not (scores or accepts_logits_to_keep(model)):
        raise UnsupportedModelError(f"wrap: {name}.forward has no logits_to_keep, which packed prefill needs")
    check_rope(model)
    if (found := training_difference(model.named_modules())) is not None:
        raise ValueError(f"wrap: model is {in_training(found)}")
    return model


def _no_model(given: object) -> str:
    if isinstance(given, str):
        return f"a str; load the PreTrainedModel first: wrap(AutoModelForCausalLM.from_pretrained({given!r}))"
    if type(given).__name__ == "OptimizedModule":
        return "an OptimizedModule; give the model that torch.compile was given, since wrap compiles it itself"
    if any(kind.__name__ == "PeftModel" for kind in type(given).__mro__):
        return (
            f"a {type(given).__name__}; wrap the model inside, and go on with PEFT's around it: "
            "compiled_llm.wrap(model.get_base_model())"
        )
    return f"a {type(given).__name__}; give a transformers PreTrainedModel"


def check_attention(model: PreTrainedModel, config: WrapConfig) -> None:
    """Raise UnsupportedModelError if the model calls an attention function of its user's, and no variants are given."""
    if config.variants is None and (name := attention_function_of_user(model)) is not None:
        raise UnsupportedModelError(
            f"wrap: attn_implementation={name!r} is an attention function of your own, in whose place softmax "
            "attention would run; register what it computes as a variant (compiled_llm_ops.register_variant, "
            "wrap(variants=...)), or, if it is softmax attention, call model.set_attn_implementation('sdpa') first"
        )


def check_placement(model: PreTrainedModel, config: WrapConfig) -> None:
    """Check that all of the model lies on one device that it can run on.

    Raises:
        UnsupportedModelError: this process has only a part of the weights.
        ValueError: parameters on several devices, offloaded, on a device of another kind, or of a type that the backend
            has no kernels for on CUDA.
        RuntimeError: the compiler or a tool of it is not installed, or the device cannot be used in this process.
    """
    check_process(model)
    check_whole(model)
    devices = sorted({str(tensor.device) for tensor in model.parameters()})
    mapped = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if devices == ["meta"] and not mapped:
        raise ValueError(
            "wrap: the model is on the meta device, where parameters have no values; load it with from_pretrained, or "
            "make it on the device that it is to run on"
        )
    if "meta" in devices or (mapped & {"cpu", "disk"} and len(mapped) > 1):
        raise ValueError(
            f"wrap: parameters are offloaded (devices {devices}, device map {sorted(mapped)}); load the model whole, "
            'for example with device_map={"": 0}'
        )
    if len(devices) != 1:
        raise ValueError(f"wrap: parameters lie on several devices ({devices}); load the model on one of them")
    kind = model.device.type
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"wrap: the model is on {devices[0]}; only CUDA devices and the CPU are supported")
    check_device(kind, model.dtype, config)
    if config.kv_dtype is not None and kind == "cuda":
        _check_capability(model.device, config)


def _check_capability(device: torch.device, config: WrapConfig) -> None:
    found, needed = torch.cuda.get_device_capability(device), CODECS[config.kv_dtype].capability
    if found < needed:
        raise ValueError(
            f"wrap: kv_dtype={config.kv_dtype!r} needs compute capability {'.'.join(map(str, needed))} or "
            f"newer, and {device} has {'.'.join(map(str, found))}; wrap without kv_dtype"
        )


def check_whole(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if processes share the weights (tensor, expert or fully sharded parallelism)."""
    # Each process would draw tokens, admit rows and count pages for itself, and nothing keeps these equal in all of
    # them: HuggingFace's ``generate`` synchronises its processes, our loops do not yet.
    processes = getattr(model, "tp_size", None) or 1
    if processes > 1 or any(_is_sharded(parameter) for parameter in model.parameters()):
        over = f"{processes} processes" if processes > 1 else "several processes"
        raise UnsupportedModelError(
            f"wrap: the weights of {type(model).__name__} are divided among {over}, whose tokens would drift apart "
            "without an error; load it whole in each process (without tp_plan, distributed_config or fully_shard), or "
            "use it unwrapped, where HuggingFace's generate keeps the processes together"
        )


def _is_sharded(tensor: torch.Tensor) -> bool:
    # Without the module there is no such tensor; importing it to ask would take a tenth of a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_process(model: PreTrainedModel) -> None:
    """Raise RuntimeError if this process was forked from one that had used CUDA, and the model is there."""
    if model.device.type == "cuda" and cuda_is_lost():
        raise RuntimeError(
            "the model is on CUDA, which does not work in a process that was forked after CUDA had been used; start "
            'processes by multiprocessing.get_context("spawn"), and load the model there'
        )


def check_device(kind: str, dtype: torch.dtype, config: WrapConfig) -> None:
    """Check kind (``"cuda"`` or ``"cpu"``) and dtype of a model before it is loaded; ValueError or RuntimeError."""
    _check_backend(kind, dtype, config)
    compiles = config.mode != "eager" and config.artifacts is None
    if kind == "cpu" and compiles and (missing := missing_compiler()) is not None:
        raise RuntimeError(f"wrap: {missing}")
    if compiles:
        check_inductor_cache()


def _check_backend(kind: str, dtype: torch.dtype, config: WrapConfig) -> None:
    name, backend, ops = config.backend_on(kind)
    if kind not in backend.devices:
        raise ValueError(
            f"wrap: backend={name!r} has kernels for {' and '.join(backend.devices)} only, and the model is on {kind}; "
            "wrap with backend='auto', or move the model"
        )
    if config.cascade is True and (ops is None or not ops.joint):
        raise ValueError(
            f"wrap: cascade=True: backend={name!r} has no decode kernel on {kind} that reads pages which rows share "
            "once; wrap with backend='auto', or without cascade"
        )
    if config.kv_dtype is not None and CODECS[config.kv_dtype].dtype not in backend.kv_dtypes:
        raise ValueError(
            f"wrap: kv_dtype={config.kv_dtype!r}: backend={name!r} has no kernels for such pages; wrap with "
            "backend='auto', or without kv_dtype"
        )
    if kind == "cpu":
        return
    if not backend.capturable and config.mode not in WAITING_MODES:
        raise ValueError(
            f"wrap: backend={name!r} reads lengths back from a CUDA device, which mode={config.mode!r} never waits "
            "for; wrap with mode='eager' or mode='piecewise', or with backend='auto'"
        )
    if dtype not in backend.dtypes:
        raise ValueError(
            f"wrap: the model is {dtype} on CUDA, where backend={name!r} has kernels for "
            f"{', '.join(sorted(str(known).removeprefix('torch.') for known in backend.dtypes))} only; load it with "
            f"dtype=torch.bfloat16, or call model.to(torch.bfloat16){_with_kernels_for(dtype)}"
        )
    if config.cascade is True and dtype.itemsize > 2:
        raise ValueError(
            f"wrap: cascade=True: the model is {dtype} on CUDA, where pages that rows share are read once by kernels "
            "for 16 bits only; wrap without cascade"
        )
    if missing := backend.installation.problems(builds=config.artifacts is None):
        raise RuntimeError("wrap: the model is on CUDA and something is missing there: " + "; ".join(missing))


def _with_kernels_for(dtype: torch.dtype) -> str:
    able = [name for name in BACKENDS if backend_named(name).capturable and dtype in backend_named(name).dtypes]
    return "".join(f", or wrap with backend={name!r}" for name in able)


def check_layers(model: PreTrainedModel, layers: Sequence[Layer], config: WrapConfig) -> None:
    """Raise UnsupportedModelError if layers cannot run as the options say; it says why, and the way out."""
    device = model.device.type
    chosen = config.backend_on(device)
    planned = device == "cuda" and not chosen.decodes_by_our_own
    for found in kinds_of(layers):
        for feature, given in _asked(config, found.layer, planned):
            if (sentence := refusal([found], feature, f"wrap: {given}")) is not None:
                raise UnsupportedModelError(sentence)
    for number, (layer, geometry) in enumerate(zip(layers, _geometries(model, layers, config), strict=True)):
        if not layer.kind.attends:
            continue
        if config.cascade is True and (group := geometry.query_heads // geometry.kv_heads) > CASCADE_QUERIES:
            raise UnsupportedModelError(
                f"wrap: cascade=True: attention layer {number} has {group} query heads for each kv head, and at most "
                f"{CASCADE_QUERIES} can read shared pages together; wrap without cascade"
            )
        reason = layer.kind.missing_kernel(chosen, layer, geometry, device)
        if reason is not None and config.batch_invariant:
            raise UnsupportedModelError(
                f"wrap: batch_invariant=True: there is no such kernel for attention layer {number}: {reason}; wrap "
                "without batch_invariant"
            )
        if reason is not None:
            raise UnsupportedModelError(
                f"wrap: backend={chosen.name!r} cannot run attention layer {number}: {reason}; "
                f"{_others(chosen.name, layer, geometry, device)}"
            )
    if config.kv_scales is not None:
        check_scales("wrap", config.kv_scales, layers)


def _asked(config: WrapConfig, layer: Layer, planned: bool) -> Iterator[tuple[str, str]]:
    """Yield the features of the table of support that options and a layer ask for, each as it is given."""
    divides = layer.kind.together == 1 or layer.kind.together % config.page_size == 0
    for feature, given, asks in (
        ("batch_invariant", "batch_invariant=True", config.batch_invariant),
        ("cascade", "cascade=True", config.cascade is True),
        ("kv_dtype", f"kv_dtype={config.kv_dtype!r}", config.kv_dtype is not None),
        ("variants", "variants", bool(layer.kind.function) or (bool(config.variants) and not layer.kind.attends)),
        ("page_size", f"page_size={config.page_size}", not divides),
        ("backend", f"backend={config.backend!r}", planned),
        ("window", f"a window of {layer.window_left + 1} tokens", layer.window_left >= 0),
        ("soft_cap", f"logits capped at {layer.logits_soft_cap}", layer.logits_soft_cap > 0),
    ):
        if asks:
            yield feature, given


def _geometries(model: PreTrainedModel, layers: Sequence[Layer], config: WrapConfig) -> list[Geometry]:
    found = attention_geometries(layers, config.page_size, model.dtype)
    codec = CODECS.get(config.kv_dtype)
    return found if codec is None else [geometry._replace(kv_dtype=codec.dtype) for geometry in found]


def on_fastest_backend(config: WrapConfig, layers: Sequence[Layer], model: PreTrainedModel) -> WrapConfig:
    """Return the options with FlashInfer for ``"auto"`` if its kernels are faster for so many heads."""
    attending = [layer for layer in layers if layer.kind.attends]
    faster = all(layer.kind.is_faster_by_plan(layer) for layer in attending)
    if not (attending and faster) or model.device.type != "cuda" or config.attention_backend != "auto":
        return config
    if config.backend_on("cuda").name != "flashinfer":
        return config
    other = replace(config, backend="flashinfer")
    chosen, both = other.backend_on("cuda"), zip(layers, _geometries(model, layers, config), strict=True)
    missing = (layer.kind.missing_kernel(chosen, layer, own, "cuda") for layer, own in both if layer.kind.attends)
    return config if any(missing) else other


def _others(name: str, layer: Layer, geometry: Geometry, device: str) -> str:
    others = [backend_for(other, device) for other in BACKENDS if other != name]
    able = [other for other in others if layer.kind.missing_kernel(other, layer, geometry, device) is None]
    ways = [f"backend={other.name!r}" + ("" if other.backend.capturable else " with mode='eager'") for other in able]
    return f"{' or '.join(ways)} can" if ways else "no backend can"


def check_inductor_cache() -> None:
    """Raise RuntimeError if another user made Inductor's cache, whose code would be run."""
    # The cache has a known name in the folder for temporary files, where any user can make it first.
    folder = default_inductor_cache()
    if folder is not None and belongs_to_another(folder):
        raise RuntimeError(
            f"wrap: {folder}, whose code Inductor would run, belongs to another user; set TORCHINDUCTOR_CACHE_DIR to a "
            "folder of your own"
        )


def belongs_to_another(folder: Path) -> bool:
    """Whether the folder exists and is neither this user's nor root's."""
    return folder.exists() and folder.stat().st_uid not in (os.geteuid(), ROOT)


def missing_compiler() -> str | None:
    """Return the missing tool for compiling on a CPU, and how to get it; None if none is missing."""
    names = cpp_compilers()
    if any(shutil.which(name) for name in names):
        return None
    return (
        f"no C++ compiler was found (looked for {', '.join(names)}); install one, for example with "
        "'apt install g++', or wrap with mode='eager'"
    )


def check_rope(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if rotary embeddings depend on the longest row: packed rows influence each other."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    per_layer_type = [entry for entry in parameters.values() if isinstance(entry, dict)]
    for entry in per_layer_type or [parameters]:
        if (kind := entry.get("rope_type")) in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"wrap: {type(model).__name__} has rope_type={kind!r}, whose frequencies depend on the longest row of "
                "a batch, so that rows would change each other; use it unwrapped, or set a fixed rope type "
                "('default', 'linear', 'yarn', 'llama3') in config.rope_parameters"
            )
