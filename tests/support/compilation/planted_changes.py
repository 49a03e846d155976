"""Changes of a model, of code and of settings after which no kept program may be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CellType, FunctionType
from typing import Any, NamedTuple
from unittest import mock

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.utils import generic

from compiled_llm.compilation.kept.fingerprint import surroundings


class Planted(NamedTuple):
    """A change that a stack undoes, and a text that some difference has."""

    make: Callable[[ExitStack, Any], object]
    named: str


def put(owner: Any, name: str, value: object, named: str = "") -> Planted:
    return Planted(lambda stack, model: stack.enter_context(mock.patch.object(owner, name, value)), named or name)


def in_model(path: str, name: str, value: object, named: str) -> Planted:
    """Set an attribute of a part of the model; what was there comes back."""

    def make(stack: ExitStack, model: Any) -> None:
        owner = model.config if path == "config" else model.get_submodule(path)
        stack.enter_context(mock.patch.object(owner, name, value, create=True))

    return Planted(make, named)


def called(function: Callable[..., object], value: object, before: object, named: str) -> Planted:
    def make(stack: ExitStack, model: Any) -> None:
        stack.callback(function, before)
        function(value)

    return Planted(make, named)


def within(context: Callable[[], Any], named: str) -> Planted:
    return Planted(lambda stack, model: stack.enter_context(context()), named)


def another_forward(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)))


def _silu(input: Any, inplace: bool = False) -> Any:
    return input * torch.sigmoid(input)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _hook(module: nn.Module, args: Any, output: Any) -> Any:
    return output


def _add_hook(stack: ExitStack, model: Any) -> None:
    stack.callback(model.model.layers[0].mlp.register_forward_hook(_hook).remove)


def _add_adapter(stack: ExitStack, model: Any) -> None:
    attention = model.model.layers[0].self_attn
    adapted = LoraLinear(attention.q_proj, "default", LoraConfig(r=2), r=2, lora_alpha=2)
    stack.callback(setattr, attention, "q_proj", attention.q_proj)
    attention.q_proj = adapted


def _replace_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[ExitStack, Any], None]:
    def make(stack: ExitStack, model: Any) -> None:
        product = model.model.layers[0].mlp.down_proj
        stack.callback(setattr, product, "weight", product.weight)
        product.weight = nn.Parameter(change(product.weight.detach()), requires_grad=product.weight.requires_grad)

    return make


def _tie(stack: ExitStack, model: Any) -> None:
    stack.callback(setattr, model.lm_head, "weight", model.lm_head.weight)
    model.lm_head.weight = model.model.embed_tokens.weight


def _train(stack: ExitStack, model: Any) -> None:
    stack.callback(model.eval)
    model.train()


def _become_a_subclass(stack: ExitStack, model: Any) -> None:
    kind = type(model)
    stack.callback(setattr, model, "__class__", kind)
    model.__class__ = type("Mine", (kind,), {"__module__": __name__})


def _change_closure(stack: ExitStack, model: Any) -> None:
    """Of a decorator around the ``forward`` of the model's inner part."""
    cell = next(_plain_cells(qwen3.Qwen3Model.forward))
    stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
    cell.cell_contents = "another"


def _plain_cells(function: FunctionType) -> Iterator[CellType]:
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, FunctionType):
            yield from _plain_cells(cell.cell_contents)
        elif isinstance(cell.cell_contents, (str, bool, int)):
            yield cell


def _prefer_precision(stack: ExitStack, model: Any) -> None:
    for matmul in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("high")


def _another_activation(stack: ExitStack, model: Any) -> None:
    mlp = model.model.layers[0].mlp
    stack.callback(setattr, mlp, "act_fn", mlp.act_fn)
    mlp.act_fn = nn.GELU()


def _change_default(stack: ExitStack, model: Any) -> None:
    function = qwen3.apply_rotary_pos_emb
    stack.callback(setattr, function, "__defaults__", function.__defaults__)
    function.__defaults__ = (2,)


def _change_code(stack: ExitStack, model: Any) -> None:
    function = qwen3.rotate_half
    stack.callback(setattr, function, "__code__", function.__code__)
    function.__code__ = (lambda x: x).__code__


def _substitute(stack: ExitStack, model: Any) -> None:
    """Note a function as ``torch.compiler.substitute_in_graph`` does, which nothing undoes."""
    ids = torch._dynamo.trace_rules._polyfilled_function_ids
    stack.callback(ids.remove, id(qwen3.rotate_half))
    ids.add(id(qwen3.rotate_half))


def _freeze(stack: ExitStack, model: Any) -> None:
    weight = model.model.norm.weight
    stack.callback(weight.requires_grad_, weight.requires_grad)
    weight.requires_grad_(not weight.requires_grad)


def _another_buffer(stack: ExitStack, model: Any) -> None:
    rotary = model.model.rotary_emb
    stack.callback(setattr, rotary, "inv_freq", rotary.inv_freq)
    rotary.inv_freq = rotary.inv_freq[:-1]


def _inference_parameter(stack: ExitStack, model: Any) -> None:
    product = model.model.layers[0].mlp.down_proj
    stack.callback(setattr, product, "weight", product.weight)
    with torch.inference_mode():
        product.weight = nn.Parameter(product.weight.clone(), requires_grad=product.weight.requires_grad)


def _another_table(stack: ExitStack, model: Any) -> None:
    table = type(qwen3.ALL_ATTENTION_FUNCTIONS)._global_mapping
    stack.enter_context(mock.patch.dict(table, {"compiled_llm": _silu}))


def _another_version(stack: ExitStack, model: Any) -> None:
    stack.callback(surroundings.versions.cache_clear)
    # The module that is read there: transformers puts another in its place while it is imported.
    there = vars(surroundings)["transformers"]
    stack.enter_context(mock.patch.object(there, "__version__", there.__version__ + "1"))
    surroundings.versions.cache_clear()


def _another_file(stack: ExitStack, model: Any) -> None:
    stack.callback(surroundings.versions.cache_clear)
    stack.enter_context(mock.patch.object(surroundings, "_own_files", return_value=["another"]))
    surroundings.versions.cache_clear()


def _hide_a_builtin(stack: ExitStack, model: Any) -> None:
    stack.enter_context(mock.patch.object(masking_utils, "isinstance", issubclass, create=True))


OF_CODE = {
    "forward of a layer's class": put(qwen3.Qwen3MLP, "forward", another_forward, "Qwen3MLP"),
    "a method that a layer's class inherits": put(qwen3.Qwen3MLP.__mro__[1], "_call_impl", another_forward, "Module"),
    "a new method that hides one": Planted(
        lambda stack, model: stack.enter_context(
            mock.patch.object(qwen3.Qwen3MLP, "__call__", another_forward, create=True)
        ),
        "Qwen3MLP",
    ),
    "a class's constant": put(GradientCheckpointingLayer, "gradient_checkpointing", True, "GradientCheckpointingLayer"),
    "forward of one layer object": in_model("model.layers.0.mlp", "forward", another_forward, "model.layers.0.mlp"),
    "a function in the modeling file's globals": put(qwen3, "apply_rotary_pos_emb", _silu, "apply_rotary_pos_emb"),
    "a constant there": put(generic, "_is_torch_available", False, "generic._is_torch_available"),
    "a global that hides a builtin": Planted(_hide_a_builtin, "masking_utils"),
    "a function's code": Planted(_change_code, "rotate_half"),
    "a function's default": Planted(_change_default, "apply_rotary_pos_emb"),
    "a closure's value": Planted(_change_closure, "Qwen3Model.forward"),
    "an attention function in transformers' table": Planted(_another_table, "AttentionInterface"),
    "a function of torch": put(nn.functional, "silu", _silu, "functional.silu"),
    "what a function of torch calls": put(torch._C._nn, "silu", _silu, "torch._C._nn.silu"),
    "a method of tensors": put(torch.Tensor, "pow", lambda x, exponent: x, "class torch.Tensor"),
    "a substitute for a function": Planted(_substitute, "rotate_half"),
    "a module of torch": put(nn.Linear, "forward", another_forward, "Linear"),
    "another version of transformers": Planted(_another_version, "version of transformers"),
    "another file of ours": Planted(_another_file, "compiled_llm's files"),
}

OF_MODEL = {
    "rms_norm_eps": in_model("model.norm", "variance_epsilon", 1e-3, "model.norm"),
    "a layer's number": in_model("model.layers.0.self_attn", "layer_idx", 3, "model.layers.0.self_attn"),
    "an entry of the config": in_model("config", "hidden_act", "gelu", "config.hidden_act"),
    "a new entry of the config": in_model("config", "is_causal", False, "config"),
    "a hook": Planted(_add_hook, "model.layers.0.mlp"),
    "an adapter": Planted(_add_adapter, "q_proj"),
    "a parameter of another type": Planted(_replace_weight(lambda weight: weight.half()), "down_proj"),
    "a parameter of other strides": Planted(_replace_weight(lambda weight: weight.t().contiguous().t()), "down_proj"),
    "a parameter of another shape": Planted(_replace_weight(lambda weight: weight[:, :-1]), "down_proj"),
    "a parameter of inference mode": Planted(_inference_parameter, "down_proj"),
    "a parameter that needs gradients or none": Planted(_freeze, "model.norm"),
    "a buffer of another shape": Planted(_another_buffer, "rotary_emb"),
    "weights that are tied": Planted(_tie, "embed_tokens"),
    "training mode": Planted(_train, "model"),
    "a subclass": Planted(_become_a_subclass, "Mine"),
    "another activation": Planted(_another_activation, "model.layers.0.mlp"),
}

OF_PROCESS = {
    "matmul precision": Planted(_prefer_precision, "matmul_precision"),
    "deterministic algorithms": called(torch.use_deterministic_algorithms, True, False, "deterministic"),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
    "default dtype": called(torch.set_default_dtype, torch.float64, torch.float32, "default_dtype"),
    "default device": called(torch.set_default_device, "meta", None, "default_device"),
    "threads": called(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads(), "num_threads"),
    "a torch function mode": within(_Mode, "function modes"),
    "a stance": within(lambda: torch.compiler.set_stance("force_eager"), "set_stance"),
    "TORCH_COMPILE_DISABLE": within(lambda: torch._dynamo.config.patch(disable=True), "torch.compile"),
    "a setting of Dynamo": within(
        lambda: torch._dynamo.config.patch(capture_scalar_outputs=True), "capture_scalar_outputs"
    ),
    "a setting of AOTAutograd": within(
        lambda: torch._functorch.config.patch(functionalize_rng_ops=True), "functionalize_rng_ops"
    ),
    "a setting of Inductor": within(lambda: torch._inductor.config.patch(epilogue_fusion=False), "epilogue_fusion"),
    "a nested setting of Inductor": within(
        lambda: torch._inductor.config.patch({"cpp.enable_floating_point_contract_flag": "on"}), "contract_flag"
    ),
    "a setting that holds a pass": within(
        lambda: torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: None), "post_grad_custom_pre_pass"
    ),
    "hooks on all modules": Planted(
        lambda stack, model: stack.callback(nn.modules.module.register_module_forward_hook(_hook).remove), "hooks"
    ),
}

PLANTED: dict[str, Planted] = {**OF_CODE, **OF_MODEL, **OF_PROCESS}
