"""New weights for a model, read and checked before any of its own changes; then written in their place."""

# Parameters keep their objects and addresses. So fused weights, compiled programs and CUDA graphs go on with the new
# ones; nothing else is made of weights.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_llm.compat.huggingface import Misfits, load_checkpoint
from compiled_llm.compat.torch.gate import wait_for_device
from compiled_llm.model.weights.config_of_weights import check_config, method_of
from compiled_llm.model.weights.weights_folder import StoredTensor, read_config, stored_tensors

_FLOATS = ("F64", "F32", "F16", "BF16")
_PACKED = {
    torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""What codes and their scales are in files that hold them as the model does, which is never converted."""
_AS_IN_FILES = ("fp8", "compressed-tensors")
"""The ways to quantise whose modules hold what their files do."""
_NAMES_SHOWN = 3


class NewWeights:
    """A model's next weights, in host memory."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        """Read a folder of ``save_pretrained``, in the model's dtypes; ValueError if it does not fit."""
        self._model = model
        self._own = own = _own_tensors(model)
        check_config(model, read_config(folder))
        stored = stored_tensors(folder)
        _check_dtypes(stored, own)
        stand_in = _stand_in(own)
        misfits = load_checkpoint(model, stand_in, stored)
        new = {name: tensor for name, tensor in stand_in.state_dict().items() if not tensor.is_meta}
        _check_misfits(folder, misfits, _without_tied(misfits.missing, own, new))
        _check_tied(own, new)
        self._new = new

    def write(self) -> None:
        """Write them over the model's, which nobody may read meanwhile; RuntimeError if its tensors are others now."""
        present: dict[str, Any] = self._model.state_dict(keep_vars=True)
        if any(present.get(name) is not tensor for name, tensor in self._own.items()):
            raise RuntimeError("update_weights: tensors of the model were replaced meanwhile; call it again")
        wait_for_device(self._model.device)
        for name, tensor in self._new.items():
            own = self._own[name]
            with torch.inference_mode(own.is_inference()), torch.no_grad():
                own.copy_(tensor)
        wait_for_device(self._model.device)  # other streams may read them from now on


def _own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model's checkpoint, by name; ValueError if its weights have another form than files."""
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            _refuse_quantised(f"{name} is a {type(tensor).__name__}")
    if (method := method_of(model)) and method not in _AS_IN_FILES:
        _refuse_quantised(f"by {method}, after its files were read")
    return own


def _refuse_quantised(why: str) -> None:
    raise ValueError(f"update_weights: the model is quantised ({why}), and files have other weights; load it again")


def _check_dtypes(stored: Mapping[str, StoredTensor], own: Mapping[str, Tensor]) -> None:
    """Check that stored dtypes are floating point, or the model's of codes; buffers that hold integers keep theirs."""
    for name, tensor in stored.items():
        if isinstance(own.get(name), nn.Parameter) and (packed := _PACKED.get(own[name].dtype)) is not None:
            if tensor.dtype != packed:
                raise ValueError(
                    f"update_weights: {name} has the dtype {tensor.dtype} in the folder, and {own[name].dtype} in the "
                    "model; give weights of the same quantisation, or load them as another model"
                )
        elif tensor.dtype not in _FLOATS and (name not in own or own[name].is_floating_point()):
            raise ValueError(
                f"update_weights: {name} has the dtype {tensor.dtype} in the folder; give weights of the dtypes "
                f"{', '.join(_FLOATS)}"
            )


def _stand_in(own: Mapping[str, Tensor]) -> nn.Module:
    """Return modules with tensors of the same names, without memory."""
    root = nn.Module()
    for name, tensor in own.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
        else:
            owner.register_buffer(leaf, empty)
    return root


def _names_by_tensor(own: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor: a tied one has several."""
    names = defaultdict(list)
    for name, tensor in own.items():
        names[id(tensor)].append(name)
    return list(names.values())


def _without_tied(missing: set[str], own: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[str]:
    """Return what is missing under all of its names."""
    return [name for names in _names_by_tensor(own) if not new.keys() & names for name in names if name in missing]


def _check_misfits(folder: Path, misfits: Misfits, missing: Iterable[str]) -> None:
    for name, theirs, ours in sorted(misfits.mismatched):
        raise ValueError(f"update_weights: {name} has the shape {theirs} in the folder, and {ours} in the model")
    for name, why in sorted(misfits.failed.items()):
        raise ValueError(f"update_weights: {name} cannot be made of the tensors in the folder: {why}")
    if lacking := sorted(missing):
        raise ValueError(f"update_weights: {str(folder)!r} lacks tensors of the model: {_listed(lacking)}")
    if foreign := sorted(misfits.unexpected):
        raise ValueError(f"update_weights: {str(folder)!r} has tensors that the model has not: {_listed(foreign)}")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_tied(own: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for names in _names_by_tensor(own):
        first, *others = [name for name in names if name in new] or [""]
        for other in others:
            if not torch.equal(new[first], new[other]):
                raise ValueError(
                    f"update_weights: {first} and {other} differ in the folder, and the model has one tensor for both"
                )
