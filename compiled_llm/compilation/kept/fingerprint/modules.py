"""Modules of a model, their tensors and configs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PretrainedConfig

from compiled_llm.compat.huggingface import class_of_config
from compiled_llm.compat.torch.tensors import dispatch_keys, wrapped_in
from compiled_llm.compilation.kept.fingerprint.code import digest
from compiled_llm.compilation.kept.fingerprint.containers import entries_of
from compiled_llm.compilation.kept.fingerprint.plain import UNSAID, is_said, path_of
from compiled_llm.compilation.kept.fingerprint.visit import Visit
from compiled_llm.model.version.module_state import names_read

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks"),
)


def describe_module(visit: Visit, module: nn.Module, where: str) -> str:
    """Return a module's name; its parts are an entry."""
    return visit.later(module, where, lambda name: _parts(visit, module, name))


def _parts(visit: Visit, module: nn.Module, name: str) -> str:
    held = vars(module)
    for each in {"_modules", "_parameters", "_buffers", *_HOOKS} & held.keys():
        visit.open(held[each])
    read = [each for each in names_read(module) if is_said(each)]
    with visit.watching(False):
        attributes = [f"{each}: {visit.attribute(each, held[each], name)}" for each in read]
    hooks = (f"{each}: {entries_of(visit, held[each], f'{name}.{each}')}" for each in _HOOKS if held.get(each))
    tensors = (f"{each}: {visit.said(entry, f'{name}.{each}')}" for each, entry in _tensors_of(module))
    children = (f"{each}: {visit.said(child, f'{name}.{each}')}" for each, child in module._modules.items())
    kind = visit.said(type(module), name)
    return "; ".join((kind, f"training: {module.training}", *attributes, *hooks, *tensors, *children))


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()


def describe_tensor(visit: Visit, tensor: Tensor, where: str) -> str:
    """Describe a tensor but for its values and its address; one that was found before by its name."""
    if (known := visit.known(tensor)) is not None:
        return f"that of {known}"
    visit.open(tensor)
    visit.name(tensor, where)
    layout = (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
    marks = sorted(name for name in vars(tensor) if name.startswith("_dynamo") and name.endswith("_indices"))
    own = {name: value for name, value in vars(tensor).items() if is_said(name) and not name.startswith("_dynamo")}
    visit.watch(vars(tensor), *own)
    visit.see(type(tensor))
    kind = path_of(type(tensor)) if _is_torchs(tensor) else visit.said(type(tensor), where)
    said = f"{kind} {layout} {dispatch_keys(tensor)} {marks}"
    said += "".join(f"; {name}: {visit.attribute(name, value, where)}" for name, value in own.items())
    if (parts := wrapped_in(tensor)) is None:
        return said
    inner = (f"{name}: {visit.said(part, f'{where}.{name}')}" for name, part in parts[0].items())
    return f"{said} of {', '.join(inner)}; {visit.said(parts[1], where)}"


def _is_torchs(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def describe_config(visit: Visit, config: PretrainedConfig, where: str) -> str:
    """Return a config's name; each of its entries is one here."""
    name = visit.name(config, where)
    if not visit.opened(config):
        visit.open(config)
        visit.watch_entries(vars(config))
        kind = visit.said(class_of_config(config), name)
        for base in {*type(config).__mro__} - {*class_of_config(config).__mro__}:
            visit.open(base)  # of ours: a thread reads other implementations than the one that it names
        read = {entry: value for entry, value in vars(config).items() if entry not in UNSAID}
        for entry, value in read.items():
            visit.entries[f"{name}.{entry}"] = digest(visit.said(value, f"{name}.{entry}"))
        visit.entries[name] = digest(f"{kind} {list(read)}")
    return name
