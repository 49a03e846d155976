"""Layers that are alike are traced once: the graph is that of the whole model, and every later change is noticed."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Model

import compiled_llm
from compiled_llm.compat.torch.tensors import Fakes
from compiled_llm.compilation import backend as inductor, programs as programs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.program_list import DECODE_MANY, PREFILL
from compiled_llm.compilation.programs import Arguments
from compiled_llm.compilation.tracing import layer_marks, outline
from compiled_llm.compilation.tracing.outline import Outline, Prepared
from compiled_llm.model.attention_switch import paged_attention_in
from compiled_llm.model.traced.shallow_copies import shallow_copy, with_another
from support.compilation.left_uncompiled import leave_uncompiled
from support.compilation.traced import descriptions_of
from support.execution.model_changes import TRACED_LAYER, patch_the_layers_forward, replace_a_weight
from support.huggingface.recurrent_families import recurrent_model
from support.parity import FEW_PAGES, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

LAYERS = 3


class Graphs(list[fx.GraphModule]):
    """The graphs that Dynamo has made, filled, and how many layers of each were traced."""

    traced: list[int]


def tracing(patch: pytest.MonkeyPatch) -> Graphs:
    """Programs are cut into regions as on CUDA; here they run as Dynamo has made them."""
    given = Graphs()
    given.traced = []

    class Backend(inductor.Inductor):
        def __init__(self, *args: Any, layers_in_region: int, **options: Any) -> None:
            super().__init__(*args, layers_in_region=1, **options)

        def _compile_regions(self, module: fx.GraphModule, mixers: Any) -> Callable[..., Any]:
            given.append(module)
            module.recompile()
            return module.forward

    def fill(graph: fx.Graph) -> None:
        ends = graph.find_nodes(op="call_function", target=layer_marks._ends)
        given.traced.append(len({node.args[2] for node in ends}) or LAYERS)
        layer_marks.fill(graph)

    patch.setattr(programs, "Inductor", Backend)
    patch.setattr(inductor, "fill", fill)
    return given


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return tracing(monkeypatch)


def model_of(**overrides: Any) -> PreTrainedModel:
    return tiny_qwen3(num_hidden_layers=LAYERS, eos_token_id=None, **overrides)


def outlined_and_whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Go on twice: layers are traced in outline, and then each by itself, out of a list that is gone through alike."""
    yield
    monkeypatch.setattr(Outline, "prepare", lambda self, arguments: Prepared(with_a_list(arguments["model"])))
    yield


def with_a_list(model: PreTrainedModel) -> PreTrainedModel:
    return with_another(
        model, ["model", "layers"], lambda layers: shallow_copy(layers, layer_marks.listing_class(type(layers)))
    )


def arguments_of(model: PreTrainedModel) -> Arguments:
    """The arguments of a decode step of two rows."""
    model_runner = model.compiled.model_runner()
    state, inputs = model_runner.state, model_runner.decode_buffers.of(StepKey.decode(2))
    return Arguments(model, inputs, state.slots.tables, state.pages, state.specs)


def programs_of(model: PreTrainedModel) -> Any:
    return model.compiled.model_runner().graph_manager.programs


# ---- the graph


@pytest.mark.parametrize("fuse", [pytest.param(False, marks=pytest.mark.whole), True], ids=["apart", "fused"])
def test_what_is_filled_in_is_what_the_whole_would_have_been(fuse, graphs, monkeypatch, seed, whole):
    """Without --whole in decode steps; of prefills, other tests compare what is computed."""
    inputs, tokens = mixed_prompts([5, 9], 128, seed), []
    if not whole:
        leave_uncompiled(monkeypatch, PREFILL)
    for _ in outlined_and_whole(monkeypatch):
        model = compiled_llm.wrap(model_of(), **FEW_PAGES, fuse_projections=fuse)
        tokens.append(greedy(model, inputs, 6, output_logits=True, return_dict_in_generate=True))
    programs_traced = 2 if whole else 1
    assert graphs.traced == [1] * programs_traced + [LAYERS] * programs_traced
    for outlined, all_traced in zip(graphs[:programs_traced], graphs[programs_traced:], strict=True):
        assert descriptions_of(outlined) == descriptions_of(all_traced)
    assert torch.equal(tokens[0].sequences, tokens[1].sequences)
    assert all(map(torch.equal, tokens[0].logits, tokens[1].logits))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "traced"),
    [
        ("Qwen3_5", 2),
        ("Bamba", 2),  # its layers return a tuple with None
        ("FalconH1", 1),  # and these one of their output alone
        ("FalconMamba", 1),  # without attention
    ],
)
def test_layers_with_states_stand_for_others(family, traced, graphs, monkeypatch, seed):
    """Dynamo computes what sizes are once a graph, and here each layer of a prefill does: decode has none of these."""
    inputs, answers = mixed_prompts([5, 9], 90, seed), []
    for _ in outlined_and_whole(monkeypatch):
        model = compiled_llm.wrap(recurrent_model(family, seed), **FEW_PAGES)
        answers.append(greedy(model, inputs, 6, output_logits=True, return_dict_in_generate=True))
    assert graphs.traced == [traced, traced, LAYERS, LAYERS]
    assert descriptions_of(graphs[1]) == descriptions_of(graphs[3])
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    assert all(map(torch.equal, answers[0].logits, answers[1].logits))


@pytest.mark.whole
def test_a_cpu_traces_layers_once_and_looks_at_them_once_a_call(without_inductor, monkeypatch, seed):
    """Dynamo checks its guards in each step there; to compare layers as well would take as long again."""
    traced, looked = [], []
    fill, prepare = layer_marks.fill, Outline.prepare

    def counting(graph: fx.Graph) -> None:
        traced.append(len({node.args[2] for node in graph.find_nodes(op="call_function", target=layer_marks._ends)}))
        fill(graph)

    monkeypatch.setattr(inductor, "fill", counting)
    monkeypatch.setattr(Outline, "prepare", lambda self, arguments: looked.append(self) or prepare(self, arguments))
    plain, model = model_of(), compiled_llm.wrap(model_of(), **FEW_PAGES)
    assert_alike(model, plain, seed)
    assert traced == [1, 1]
    for new_tokens in (3, 9):
        looked.clear()
        greedy(model, mixed_prompts([9, 12], 128, seed), new_tokens)
        assert len(looked) == len(set(looked)) == 2  # prefill and decode
    for changed in (plain, model):
        TRACED_LAYER["a number"](changed.model.layers[2])
    assert_alike(model, plain, seed)
    assert traced == [1, 1, 0, 0]


@pytest.mark.whole
def test_layers_of_two_kinds_in_turn_are_traced_once_each(graphs, seed):
    layers = [("sliding_attention", "full_attention")[number % 2] for number in range(LAYERS)]
    plain, model = (model_of(layer_types=layers, use_sliding_window=True, sliding_window=6) for _ in range(2))
    assert_alike(compiled_llm.wrap(model, **FEW_PAGES), plain, seed, new_tokens=1)
    assert graphs.traced == [2]


def test_the_part_with_all_layers_is_the_list_itself_and_others_are_the_same_layers():
    layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
    listed = shallow_copy(layers, layer_marks.listing_class(nn.ModuleList))
    assert listed[:LAYERS] is listed
    for part in (slice(0, 2), slice(1, None), slice(None, -1), slice(None, None, 2)):
        assert [*listed[part]] == [*layers[part]]
    assert listed[1] is layers[1]


# ---- layers that differ


def logits(model: PreTrainedModel, seed: int, new_tokens: int = 4) -> list[Tensor]:
    """With one new token, prefill's alone."""
    inputs = mixed_prompts([9, 12], 128, seed)
    return list(greedy(model, inputs, new_tokens, output_logits=True, return_dict_in_generate=True).logits)


def assert_alike(model: PreTrainedModel, plain: PreTrainedModel, seed: int, new_tokens: int = 4) -> None:
    for ours, theirs in zip(logits(model, seed, new_tokens), logits(plain, seed, new_tokens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.whole
def test_layers_that_differ_from_the_start_are_each_traced_for_themselves(graphs, seed, whole):
    """All in one model: the first and the last layer are as they were, each between them differs in its own way."""
    ways = [change for name, change in TRACED_LAYER.items() if name != "a layer's forward"]
    changes = ways if whole else random.Random(seed).sample(ways, 3)
    count = len(changes) + 2
    plain, model = (tiny_qwen3(num_hidden_layers=count, eos_token_id=None) for _ in range(2))
    compiled_llm.wrap(model, **FEW_PAGES)
    for changed in (plain, model):
        for change, layer in zip(changes, changed.model.layers[1:-1], strict=True):
            change(layer)
    assert_alike(model, plain, seed, new_tokens=1)
    assert graphs.traced == [count - 1]
    outlines = programs_of(model)._outlines
    found = [outline._layers.like for outline in outlines.values() if outline._layers is not None]
    assert found == [[*range(count - 1), 0]]


# A weight is an input, and a graph cannot tell one from another.
NOT_TOLD_APART = {replace_a_weight: 1, patch_the_layers_forward: LAYERS}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(("change", "traced"), NOT_TOLD_APART.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_differs_without_an_attribute_does_not_mislead(change, traced, graphs, seed):
    plain, model = model_of(), compiled_llm.wrap(model_of(), **FEW_PAGES)
    for changed in (plain, model):
        change(changed.model.layers[2])
    assert_alike(model, plain, seed, new_tokens=1)
    assert graphs.traced == [traced]


@pytest.mark.whole
def test_a_window_of_one_layer_is_seen_and_none_that_huggingfaces_mask_has(graphs, monkeypatch, seed):
    """The mask comes from the config, so answers stay; a layer's code has another constant: all are traced anew."""
    found = []
    for windows in ([None, 3], [3]):
        model = compiled_llm.wrap(model_of(), **FEW_PAGES)
        for window in windows:
            model.model.layers[2].self_attn.sliding_window = window
            found.append(torch.stack(logits(model, seed, new_tokens=1)))
        monkeypatch.setattr(Outline, "prepare", lambda self, arguments: Prepared(arguments["model"]))
    assert graphs.traced == [1, LAYERS, LAYERS]
    assert torch.equal(found[1], found[2]), "that is the whole model's"
    assert torch.equal(found[0], found[1])


@pytest.fixture(scope="module")
def outlined() -> PreTrainedModel:
    """A model whose decode step was traced in outline; a test that changes it undoes that."""
    with pytest.MonkeyPatch.context() as patch:
        graphs = tracing(patch)
        leave_uncompiled(patch, PREFILL)
        model = compiled_llm.wrap(model_of(), **FEW_PAGES)
        logits(model, 0)
        assert graphs.traced == [1]
    return model


@contextmanager
def undone(layer: nn.Module) -> Iterator[None]:
    """Undo what is done to attributes, modules, parameters and classes."""
    before = [
        (module, type(module), dict(vars(module)), [(held, dict(held)) for held in dicts_of(module)])
        for module in layer.modules()
    ]
    yield
    for module, kind, attributes, contents in before:
        module.__class__ = kind
        vars(module).clear()
        vars(module).update(attributes)
        for held, content in contents:
            held.clear()
            held.update(content)


def dicts_of(module: nn.Module) -> list[dict[str, Any]]:
    return [module._modules, module._parameters, module._buffers]


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize("number", [0, 2], ids="layer {}".format)
@pytest.mark.parametrize("change", TRACED_LAYER.values(), ids=TRACED_LAYER)
def test_a_later_change_of_any_layer_is_noticed(change, number, outlined, monkeypatch):
    """By what a CUDA graph takes for granted, and by what is called where nothing is captured."""
    outlines, decode = programs_of(outlined)._outlines, DECODE_MANY
    arguments = programs_of(outlined)._by_name(arguments_of(outlined))

    @torch.no_grad()
    def traced_whole() -> bool:
        version.begin_check()
        with paged_attention_in(outlined):
            return copy.copy(outline).prepare(arguments).model is outlined

    outline, version = outlines[decode], outlined.compiled.facts.version
    version.begin_check()
    outline._layers.number = version.layers  # also if they had changed, and that was undone
    monkeypatch.setitem(outlines, decode, copy.copy(outline))  # it looks at its layers no longer once one has changed
    valid, layer = validity_of(outlined), outlined.model.layers[number]
    assert valid()
    assert not traced_whole()
    with undone(layer):
        change(layer)
        assert not valid()
        assert traced_whole()
    version.begin_check()
    outline._layers.number = version.layers
    assert not traced_whole()


def validity_of(model: PreTrainedModel) -> Callable[[], bool]:
    """Return the check of what a CUDA graph of decode takes for granted."""

    @torch.no_grad()
    def valid() -> bool:
        with paged_attention_in(model):
            version.begin_check()
            return version.tensors == tensors and guards.valid()

    version = model.compiled.facts.version
    with torch.no_grad(), paged_attention_in(model):
        programs, arguments = programs_of(model), arguments_of(model)
        tensors, guards = version.tensors, programs.guards(arguments, programs.prepared(arguments))
        guards.find()
    return valid


def test_after_a_change_the_whole_model_is_traced(graphs, seed):
    plain, model = model_of(), compiled_llm.wrap(model_of(), **FEW_PAGES)
    assert_alike(model, plain, seed, new_tokens=1)
    for changed in (plain, model):
        changed.model.norm.variance_epsilon = 0.5  # which Dynamo notices, outside all layers
    assert_alike(model, plain, seed, new_tokens=1)
    assert graphs.traced == [1, LAYERS]
    assert model.compiled.stats().recompiles == 1


class Numbered(Qwen3Attention):
    """The same class and attributes in each layer, and yet another thing in one of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return (out * 2.0 if self.layer_idx == 2 else out), weights


class Leaking(Qwen3Attention):
    """Adds what the first layer has made."""

    made: ClassVar[list[Tensor]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        if self.layer_idx == 0:
            Leaking.made[:] = [out]
        return out + Leaking.made[0], weights


class Changing(Qwen3Attention):
    """Counts its calls."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.layer_type = "called"
        return super().forward(*args, **kwargs)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("kind", "new_tokens", "traced"),
    [
        (Numbered, 1, [2]),
        (Leaking, 1, [LAYERS]),
        pytest.param(Changing, 4, [LAYERS, 1], marks=pytest.mark.whole),  # what it writes is there by then
    ],
)
def test_what_layers_do_is_looked_at_too(kind, new_tokens, traced, graphs, seed):
    plain, model = model_of(), compiled_llm.wrap(model_of(), **FEW_PAGES)
    for changed in (plain, model):
        for layer in changed.model.layers:
            layer.self_attn.__class__ = kind
    assert_alike(model, plain, seed, new_tokens)
    assert graphs.traced == traced


@pytest.mark.whole
def test_only_the_first_of_equal_layers_runs_on_fake_tensors(graphs, monkeypatch, seed):
    """The others reuse a function's result: a run takes a tenth of a millisecond."""
    ran: list[int] = []
    fakes = outline.fake_tensors

    @contextmanager
    def counting() -> Iterator[Fakes]:
        with fakes() as made:

            def of(values: Any) -> Any:
                ran[-1] += 1
                return made.of(values)

            yield Fakes(of, made.another)

    monkeypatch.setattr(outline, "fake_tensors", counting)
    for layers in (2, LAYERS):
        ran.append(0)
        logits(compiled_llm.wrap(tiny_qwen3(num_hidden_layers=layers, eos_token_id=None), **FEW_PAGES), seed, 1)
    of_two, of_all = ran
    assert of_all - of_two < of_two / 4  # what gives back what it was given runs each time


class TwiceInTheMiddle(Qwen3Model):
    """Its loop works between two layers, and hands something else to one of them."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(hidden, position_ids)
        for number, layer in enumerate(self.layers):
            turned = tuple(each * 1.5 for each in rotary) if number == 1 else rotary
            hidden = layer(hidden, position_embeddings=turned, position_ids=position_ids, **kwargs)
            hidden = hidden * 2 if number == 2 else hidden
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


@pytest.mark.whole
def test_what_happens_between_layers_stays_where_it_is(graphs, monkeypatch, seed):
    found = []
    for _ in outlined_and_whole(monkeypatch):
        model = compiled_llm.wrap(model_of(), **FEW_PAGES)
        model.model.__class__ = TwiceInTheMiddle
        found.append(torch.stack(logits(model, seed, new_tokens=1)))
    assert torch.equal(*found)
    assert graphs.traced == [2, LAYERS]


def test_looking_at_a_model_leaves_it_as_it_was(graphs, seed):
    model = compiled_llm.wrap(model_of(), **FEW_PAGES)
    arguments = programs_of(model)._by_name(arguments_of(model))
    buffers = model.compiled.model_runner().decode_buffers.of(StepKey.decode(2))
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    tensors = [*model.state_dict().values(), *filter(torch.is_tensor, buffers)]
    values = [tensor.clone() for tensor in tensors]
    with torch.no_grad(), paged_attention_in(model):
        shown = programs_of(model)._outlines[DECODE_MANY].prepare(arguments).model
    assert shown is not model
    assert all(now == then for now, then in before)
    assert all(map(torch.equal, values, tensors))


@pytest.mark.whole
def test_an_outline_keeps_no_model_alive(graphs, seed):
    model = compiled_llm.wrap(model_of(), **FEW_PAGES)
    logits(model, seed, new_tokens=1)
    layer = weakref.ref(model.model.layers[2])
    gc.collect()
    del model
    assert layer() is None
