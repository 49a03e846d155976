"""Ways to change a wrapped model, each with the least that its next call must do about it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from support.huggingface.overriding import (
    INPUTS,
    KWARGS,
    a_position_further,
    ask_for_hidden_states,
    biased,
    embed_prompt,
    in_class,
    prefer_tokens,
    shift_ids,
    shifted,
    skip_positions,
)
from support.parity import mixed_prompts
from support.tiny_models import tiny_qwen3


class Affine(nn.Module):
    """A norm of two parameters that look alike, and a buffer that looks like them."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm
        self.gain = nn.Parameter(torch.linspace(1, 2, 64))
        self.offset = nn.Parameter(torch.linspace(-1, 0.5, 64))
        self.register_buffer("factor", torch.linspace(0.5, 1.5, 64))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = (self.norm(x) * self.gain + self.offset) * self.factor
        return normed


def model_to_change(seed: int = 0) -> Any:
    model = tiny_qwen3(seed, eos_token_id=None)
    for layer in model.model.layers:
        layer.input_layernorm = Affine(layer.input_layernorm)
    return model


IN_PLACE, CAPTURE, TRACE = "compiled code and CUDA graphs stay", "CUDA graphs are captured again", "traced again"


class Change(NamedTuple):
    """A change, and the least that the next call does about it."""

    # makes it in all models that it is given, after a stack of what undoes it, if it is outside of them
    make: Callable[..., object]
    must: str  # one of the three above, or the id of the reason for a slower path, on which an engine refuses

    @property
    def is_fast(self) -> bool:
        return self.must in (IN_PLACE, CAPTURE, TRACE)


def each(change: Callable[[Any], object], must: str) -> Change:
    return Change(lambda stack, *models: [change(model) for model in models], must)


def in_layer(number: int, change: Callable[[Any], object], must: str) -> Change:
    return each(lambda model: change(model.model.layers[number]), must)


# ---- values and places of tensors


def new_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(1, dims=0))


def moved_data(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight  # one of three that are multiplied as one
    weight.data = -weight.data


def swapped_module(model: PreTrainedModel) -> None:
    mlp = copy.deepcopy(model.model.layers[0].mlp)
    with torch.no_grad():
        mlp.down_proj.weight.neg_()
    model.model.layers[0].mlp = mlp


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, dims=0))


def other_attribute(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.scaling *= 4


def train_a_step(model: PreTrainedModel) -> None:
    ids = mixed_prompts([9, 9], 128, 3)["input_ids"]
    model.train()
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.2).step()
    model.zero_grad()
    model.eval()


def convert_and_back(model: PreTrainedModel) -> None:
    model.double()
    model.float()
    model.lm_head.weight.data.neg_()


def new_head(model: PreTrainedModel) -> None:
    torch.manual_seed(5)
    model.lm_head = nn.Linear(64, 128, bias=False)


def more_tokens(model: PreTrainedModel) -> None:
    torch.manual_seed(5)
    model.resize_token_embeddings(160, mean_resizing=False)


def other_list_of_layers(model: PreTrainedModel) -> None:
    inner = copy.copy(model.model)
    inner._modules = {**inner._modules, "layers": nn.ModuleList(reversed(inner.layers))}
    model.model = inner


WEIGHTS = {
    "values are written": each(in_place, IN_PLACE),
    "load_state_dict": each(lambda model: model.load_state_dict(model_to_change(9).state_dict()), IN_PLACE),
    "a training step": each(train_a_step, TRACE),
    "a parameter": each(new_parameter, CAPTURE),
    "a parameter's data": each(moved_data, CAPTURE),
    "a module's copy": each(swapped_module, TRACE),
    "load_state_dict, assign": each(
        lambda model: model.load_state_dict(model_to_change(8).state_dict(), assign=True), CAPTURE
    ),
    "double and back": each(convert_and_back, CAPTURE),
    "a head": each(new_head, CAPTURE),
    "a tied head": each(lambda model: setattr(model.lm_head, "weight", model.get_input_embeddings().weight), CAPTURE),
    "another dtype": each(lambda model: model.double(), TRACE),
    "more tokens": each(more_tokens, TRACE),
    "a norm outside the layers": each(lambda model: setattr(model.model.norm, "variance_epsilon", 0.5), TRACE),
    "another list of layers": each(other_list_of_layers, TRACE),
}


# ---- a layer


class Half(qwen3.Qwen3MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5  # type: ignore[no-any-return]


class Third(qwen3.Qwen3MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 3  # type: ignore[no-any-return]


def replace_a_module(layer: Any) -> None:
    new = Half(layer.self_attn.config).eval()
    new.load_state_dict(layer.mlp.state_dict())
    layer.mlp = new


def patch_a_forward(layer: Any) -> None:
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) * 0.5


def patch_the_layers_forward(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda hidden, **others: forward(hidden, **others) * 0.5


def convert_a_weight(layer: Any) -> None:
    layer.self_attn.q_norm.weight = nn.Parameter((layer.self_attn.q_norm.weight.detach() * 2).bfloat16())


def replace_a_weight(layer: Any) -> None:
    layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight.detach() * 2)


def register_again(layer: Any) -> None:
    """As ``torch.nn.utils.prune`` does: parameters then come in another order."""
    norm = layer.input_layernorm
    gain = norm.gain.detach()
    del norm.gain
    norm.register_parameter("gain", nn.Parameter(gain * 2))


def exchange_names(layer: Any) -> None:
    norm = layer.input_layernorm
    gain, offset = norm.gain, norm.offset
    del norm.gain, norm.offset
    norm.offset, norm.gain = gain, offset


def replace_the_dictionary(layer: Any) -> None:
    norm = layer.input_layernorm
    norm._parameters = {name: nn.Parameter(tensor.detach() * 2) for name, tensor in norm._parameters.items()}


def replace_all_attributes(layer: Any) -> None:
    """As unpickling does."""
    norm = layer.input_layernorm
    norm.__dict__ = {**vars(norm), "_buffers": {"factor": norm.factor * 2}}


TRACED_LAYER: dict[str, Callable[[Any], object]] = {
    "a number": lambda layer: setattr(layer.self_attn, "scaling", layer.self_attn.scaling * 3),
    "a norm's epsilon": lambda layer: setattr(layer.post_attention_layernorm, "variance_epsilon", 0.5),
    "a module": replace_a_module,
    "a class": lambda layer: setattr(layer.mlp, "__class__", Third),
    "a module's forward": patch_a_forward,
    "a layer's forward": patch_the_layers_forward,
    "a dtype": convert_a_weight,
    "a bias": lambda layer: setattr(layer.mlp.up_proj, "bias", nn.Parameter(torch.ones(128))),
    "an activation": lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()),
    "an output": lambda layer: setattr(layer.self_attn, "o_proj", nn.Sequential(layer.self_attn.o_proj, nn.Tanh())),
}
ORDER_OF_LAYER: dict[str, Callable[[Any], object]] = {
    "a parameter that is registered again": register_again,
    "names that are exchanged": exchange_names,
    "a dictionary of parameters": replace_the_dictionary,
    "all attributes": replace_all_attributes,
}
LAYERS = {
    f"{name}, {where} layer": in_layer(number, change, must)
    for number, where in ((-1, "last"), (0, "first"))
    for changes, must in ((TRACED_LAYER, TRACE), (ORDER_OF_LAYER, TRACE), ({"a weight": replace_a_weight}, CAPTURE))
    for name, change in changes.items()
}


# ---- code


def negate(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: -original(self, *args, **kwargs)


def negate_entry(entry: int | str) -> Callable[..., Any]:
    def negated(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(self, *args, **kwargs)
            if isinstance(out, tuple):
                return tuple(-each if place == entry else each for place, each in enumerate(out))
            out[entry] = -out[entry]
            return out

        return forward

    return negated


def code(owner: Any, name: str, replacement: Callable[..., Any]) -> Change:
    def make(stack: ExitStack, *models: PreTrainedModel) -> None:
        stack.enter_context(mock.patch.object(owner, name, replacement(getattr(owner, name)), create=True))

    return Change(make, TRACE)


CODE = {
    "a method": code(qwen3.Qwen3MLP, "forward", negate),
    "a norm's method": code(qwen3.Qwen3RMSNorm, "forward", negate),
    "an attention's method": code(qwen3.Qwen3Attention, "forward", negate_entry(0)),
    "a method of the model's class": code(qwen3.Qwen3ForCausalLM, "forward", negate_entry("logits")),
    "a method of the base model's class": code(qwen3.Qwen3Model, "forward", negate_entry("last_hidden_state")),
    "a method of torch's": code(nn.Linear, "forward", negate),
    "an inherited method, overridden": code(qwen3.Qwen3MLP, "__call__", negate),
    "a function of the model's file": code(qwen3, "rotate_half", lambda _: lambda x: x),
    "a function of torch's": code(nn.functional, "silu", negate),
}


# ---- hooks and overrides


def steer(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Turn the last column, which is each row's newest token in HuggingFace's shapes."""
    output = output.clone()
    output[:, -1] += 3 * torch.sin(torch.arange(output.shape[-1]))
    return output


def on_a_layer(model: PreTrainedModel) -> Any:
    return model.model.layers[0].register_forward_hook(steer)


def before_a_layer(model: PreTrainedModel) -> Any:
    def turn(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        return (steer(module, (), args[0]), *args[1:]), kwargs

    return model.model.layers[1].register_forward_pre_hook(turn, with_kwargs=True)


def in_a_new_dictionary(model: PreTrainedModel) -> Any:
    model.model.layers[0]._forward_hooks = OrderedDict()
    return on_a_layer(model)


def on_all_modules(stack: ExitStack, *models: PreTrainedModel) -> None:
    layers = [layer for model in models for layer in model.model.layers]

    def turn(module: nn.Module, args: Any, output: Any) -> Any:
        return steer(module, args, output) if module in layers else None

    stack.callback(register_module_forward_hook(turn).remove)


def hook_by_accelerate(model: PreTrainedModel) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    class PrefersTokens(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return biased(output)

    add_hook_to_module(model, PrefersTokens())


SLOWER = {
    "a hook": each(on_a_layer, "inner_hooks"),
    "a hook before a layer": each(before_a_layer, "inner_hooks"),
    "a hook in a new dictionary": each(in_a_new_dictionary, "inner_hooks"),
    "a hook on all modules": Change(on_all_modules, "inner_hooks"),
    "the ids of a step": each(shift_ids, "overrides"),
    "a prompt's embeddings": each(embed_prompt, "overrides"),
    "positions": each(skip_positions, "overrides"),
    "the forward": each(prefer_tokens, "own_forward"),
    "the forward, by accelerate": each(hook_by_accelerate, "own_forward"),
    "hidden states": each(ask_for_hidden_states, "output_hidden_states"),
}

CHANGES = {**WEIGHTS, **LAYERS, **CODE, **SLOWER}


class HalvesScores(qwen3.Qwen3ForCausalLM):
    def _sample(self, *args: Any, logits_processor: Any, **kwargs: Any) -> Any:
        logits_processor.append(lambda ids, scores: scores - (ids[:, -1:] % 2) * 4 * (torch.arange(128) % 2))
        return super()._sample(*args, logits_processor=logits_processor, **kwargs)


CLASSES = {
    "the ids of a step, in a class": each(in_class(INPUTS, shifted), "overrides"),
    "positions, in a class": each(in_class(KWARGS, a_position_further), "overrides"),
    "each call, in a class": each(in_class("__call__", biased), "overrides"),
    "the loop, in a class": each(lambda model: setattr(model, "__class__", HalvesScores), "overrides"),
}
"""Those that a model has before it is wrapped."""


# ---- in the middle of a call


class Doing(LogitsProcessor, StoppingCriteria):
    """Does something to a model once three tokens were generated."""

    def __init__(self, what: Callable[[], object], prompt: int) -> None:
        self.what, self.at = what, prompt + 3

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        if input_ids.shape[1] == self.at:
            self.what()
        return scores if isinstance(scores, Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


def calling(what: Callable[[], object], how: str, prompt: int = 9) -> dict[str, Any]:
    """The option of `generate` that makes it call `what` in the middle."""
    lists = {"stopping_criteria": StoppingCriteriaList, "logits_processor": LogitsProcessorList}
    return {how: lists[how]([Doing(what, prompt)])}


class Changing(BaseStreamer):
    """Changes the model once five tokens have arrived."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change, self.seen = change, 0

    def put(self, value: Tensor) -> None:
        self.seen += 1
        if self.seen == 6:  # the prompt comes first
            self.change()

    def end(self) -> None:
        pass
