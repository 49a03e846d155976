"""The properties of a model, learnt once and passed around as one object."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from compiled_llm.compat.cache_names import cache_argument, generate_argument
from compiled_llm.compat.huggingface import keeps_all
from compiled_llm.kinds.kind import Expands, Layer, LayerFunctions, ScoreSizes
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.registry import forward_cache_for, states_cache
from compiled_llm.kinds.spec import StateSpec
from compiled_llm.kinds.support import FoundKind, kinds_of, runs_original
from compiled_llm.model.attention import PagedBatch
from compiled_llm.model.attention_switch import AttentionSwitch
from compiled_llm.model.probes.autocast_probe import AutocastProbe
from compiled_llm.model.probes.cache_probe import hands_cache_back
from compiled_llm.model.probes.layers_of import as_if_unwrapped, layers_of
from compiled_llm.model.probes.position_probe import DefaultPositions, default_positions
from compiled_llm.model.sizes import MaxPositions
from compiled_llm.model.traced.hooks import TracedHooks, with_hooks
from compiled_llm.model.traced.shallow_copies import shallow_copy, with_another
from compiled_llm.model.traced.stand_ins import Change, Groups, StandIns
from compiled_llm.model.version.model_version import ModelVersion
from compiled_llm.model.weights.fused_weights import FusedGroup

Forward = Callable[..., Any]  # a model class's own ``forward``

Learnt = tuple[Sequence[Layer], Sequence[FusedGroup], DefaultPositions, bool]
"""The arguments of ``ModelFacts.of`` after a model and its forward."""


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model, as they were when its probes ran; it keeps no model alive."""

    # ``model_class`` is its own class, a wrapped model's is ours. A copy of the model begins without ``hooks``.
    # ``refused`` is why the model, as it is since its probes ran again, cannot run over pages; None if it can. ``taps``
    # are the classes of ``RunnerTap`` that watch all steps of runners to come, of which at most one hears of rows.

    reference: weakref.ref[PreTrainedModel]
    model_class: type[PreTrainedModel]
    layers: tuple[Layer, ...]
    fused_groups: tuple[FusedGroup, ...]
    attention: AttentionSwitch
    version: ModelVersion
    default_positions: DefaultPositions = "columns"
    hooks: TracedHooks = field(default_factory=TracedHooks)
    stand_ins: StandIns | None = None
    refused: UnsupportedModelError | None = None
    taps: list[type[Any]] = field(default_factory=list, compare=False)
    _probed: int = 0
    _positions: MaxPositions = field(default_factory=MaxPositions)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        model_class: type[PreTrainedModel],
        layers: Sequence[Layer],
        fused_groups: Sequence[FusedGroup] = (),
        default_positions: DefaultPositions = "columns",
        hold: bool = True,
        stand_ins: StandIns | None = None,
    ) -> ModelFacts:
        """Return what was learnt of a model; unless it is known to ``hold``, the probes run again before it is used."""
        switch = AttentionSwitch(model)
        hooks = TracedHooks()
        version = ModelVersion(model, len(layers), walked=switch.find_configs, code=hooks.functions)
        return cls(
            weakref.ref(model),
            model_class,
            tuple(layers),
            tuple(fused_groups),
            switch,
            version,
            default_positions,
            hooks,
            stand_ins,
            _probed=version.probed if hold else 0,
        )

    @property
    def learnt(self) -> Learnt:
        """The part that a copy of the model, or one read from a file, need not learn again."""
        return self.layers, self.fused_groups, self.default_positions, self.hold

    @property
    def hold(self) -> bool:
        """Whether the model's probes would find the same, as far as what they read tells; at no cost worth a look."""
        return self.version.probed == self._probed

    def learnt_again(self, functions: LayerFunctions) -> ModelFacts:
        """Return the facts of the model as it is now, by its probes; what is the same stays the same objects."""
        probed, model = self.version.probed, self.model
        try:
            with self.attention.original(), as_if_unwrapped(model, self.model_class) as unwrapped:
                tried = self.with_stand_ins(unwrapped)
                layers = tuple(layers_of(tried, functions))
                positions = default_positions(tried)
        except UnsupportedModelError as error:
            return replace(self, refused=error, _probed=probed)
        kept = self.layers if layers == self.layers else layers
        return replace(self, layers=kept, default_positions=positions, refused=None, _probed=probed)

    @property
    def stacks_hidden_states(self) -> bool:
        """Whether a layer gives several hidden states of a token, stacked, as Gemma 3n's do; steps emit one of each."""
        return getattr(self.model.config.get_text_config(decoder=True), "altup_num_inputs", 1) > 1

    @cached_property
    def sees_prompts_both_ways(self) -> bool:
        """Whether tokens of a prompt see later ones of it, so that HuggingFace's own forward has to compute prompts."""
        return not all(layer.causal for layer in self.layers)

    @property
    def max_positions(self) -> int:
        """How many positions the model was made for, by its config as it is now."""
        return self._positions.of(self.model)

    @cached_property
    def kinds(self) -> tuple[FoundKind, ...]:
        """Of which kinds layers are, each with the first layer of it."""
        found = reversed([*kinds_of(self.layers)])
        return tuple({kind.support: kind for kind in found}.values())[::-1]

    @cached_property
    def states(self) -> tuple[StateSpec, ...]:
        """The states that rows have beside pages, by layer; programs get their memory after the pages."""
        return tuple(spec for layer in self.layers for spec in layer.states)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The window sizes of layers with sliding windows, a query itself included; each size once."""
        positions = self.max_positions
        return tuple(sorted({layer.visible(positions) for layer in self.layers} - {positions}))

    @cached_property
    def expands(self) -> Expands | None:
        """When layers attend to keys and values that they expand of new tokens, where rows have no others."""
        attending, on_cpu = [layer for layer in self.layers if layer.kind.attends], self.model.device.type == "cpu"
        rules = [layer.kind.expands(layer, on_cpu) for layer in attending]
        return rules[0] if rules and all(rules) else None

    @cached_property
    def scores(self) -> ScoreSizes | None:
        """The sizes that the memory of indexers' scores follows from; None if no layer has an indexer."""
        config, dtype = self.model.config.get_text_config(decoder=True), self.model.dtype
        found = [own for layer in self.layers if (own := layer.kind.scores(config, dtype)) is not None]
        return max(found, key=lambda own: own.size, default=None)

    @property
    def forward(self) -> Forward:
        """The ``forward`` that the class defines now, taking pages, with the hooks that there are now."""
        argument = self.cache_argument
        attending = with_kinds(self.model_class.forward, self.layers, argument)
        return with_hooks(attending, self.hooks)

    def replaced_attention(self) -> str | None:
        """The user's own attention function, which ours would replace unasked; None if there is none."""
        return None if self._attends_by_functions else self.attention.function_of_user()

    @cached_property
    def _attends_by_functions(self) -> bool:
        return any(layer.kind.function for layer in self.layers)

    @cached_property
    def cache_argument(self) -> str:
        """The name under which ``forward`` takes a cache."""
        return cache_argument(self.model_class.forward)

    @cached_property
    def generate_argument(self) -> str:
        """The name under which ``generate`` keeps the cache among the model's inputs."""
        return generate_argument(self.model_class.forward)

    @cached_property
    def hands_cache_back(self) -> bool:
        """Whether ``forward`` returns a cache that it is given, although ``use_cache`` is False."""
        if (layers := self.version.list_of_layers()) is None:
            return True
        with self.attention.original():
            model, path = self.with_stand_ins(self.model), layers[0].split(".")
            return hands_cache_back(self.model_class.forward, model, self.cache_argument, path)

    @cached_property
    def fills_caches(self) -> bool:
        """Whether HuggingFace's caches hold all that pages do, so that one can stand in for the other."""
        return keeps_all(self.model.config, [layer.fills_caches for layer in self.layers])

    @cached_property
    def shares_caches(self) -> bool:
        """Whether new tokens of a user's ``DynamicCache`` can stay in pages until somebody looks at its layers."""
        own = all(layer.keys_of is None for layer in self.layers)
        return own and self.fills_caches and not runs_original(self.kinds, "stepped_cache")

    def autocast_matters(self) -> bool:
        """Return whether the ``torch.autocast`` that this thread is in changes what the model computes."""
        with self.attention.original():
            return self._autocast.matters(self.model_class.forward, self.with_stand_ins(self.model))

    @cached_property
    def _autocast(self) -> AutocastProbe:
        return AutocastProbe(self.version)

    @property
    def model(self) -> PreTrainedModel:
        """The model; RuntimeError if it no longer exists."""
        model = self.reference()
        if model is None:
            raise RuntimeError("the model of this cache or runner no longer exists")
        return model

    @property
    def in_programs(self) -> PreTrainedModel:
        """The model as programs run it: hooks on embeddings that do nothing to tokens are not on a copy of these."""
        # Dynamo cannot trace them, and their coming and going would compile programs again.
        model = self.with_stand_ins(self.model)
        for path in self.version.hooked_embeddings():
            model = with_another(model, path, _without_hooks)
        return model

    def with_stand_ins(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model, or a copy in which modules of ours stand for some of its own."""
        return model if self.stand_ins is None else self.stand_ins.standing_in(model)

    @property
    def packed_weights(self) -> dict[str, int]:
        """Count linear layers with packed weights by format, and by whose kernels multiply them in programs."""
        return {} if self.stand_ins is None else dict(self.stand_ins.counted)

    @property
    def tables_of_weights(self) -> dict[str, int]:
        """The bytes of what was made of packed weights' scales and zeros, under its name; nothing if nothing was."""
        return {"tables": self.stand_ins.copied} if self.stand_ins is not None and self.stand_ins.copied else {}

    def drop_stand_ins(self) -> None:
        """Let modules that stand for the model's drop its tensors, until they are next asked for."""
        if self.stand_ins is not None:
            self.stand_ins.drop()

    @property
    def groups_of_stand_ins(self) -> Groups:
        """The modules with stand-ins whose products read one input; nothing if there are none."""
        return () if self.stand_ins is None else self.stand_ins.groups

    def lay_stand_ins_out(self) -> bool:
        """Let what stand-ins multiply by lie side by side where one product can read it; whether all still can."""
        # Nobody may read the weights meanwhile.
        return self.stand_ins is None or self.stand_ins.lay_out(self.model)

    def separate_stand_ins(self) -> None:
        """Give what stand-ins multiply by memory of its own again."""
        if self.stand_ins is not None:
            self.stand_ins.separate()

    def refresh_stand_ins(self) -> Change:
        """Let modules that stand for the model's follow it; return what has to be made anew because of it."""
        return None if self.stand_ins is None else self.stand_ins.refresh(self.model, self.version.values)


def _without_hooks(module: nn.Module) -> nn.Module:
    copied: nn.Module = shallow_copy(module, _forward_hooks=OrderedDict())
    return copied


def with_kinds(forward: Forward, layers: Sequence[Layer], argument: str) -> Forward:
    """Return a ``forward`` whose layers attend as their kinds do; ``argument`` is what a stand-in for a cache is."""
    forward_cache, with_states = forward_cache_for(layers), states_cache(layers)

    def attending(model: PreTrainedModel, *, paged_batch: PagedBatch, **inputs: object) -> Any:
        batch = paged_batch._replace(layers=layers)
        if forward_cache is not None:
            cache, more = forward_cache(model, batch)
            batch, inputs = batch._replace(cache=cache), {**inputs, argument: cache, **more}
        if with_states is not None:
            assert batch.states is not None, "steps of such models have some"
            inputs[argument] = with_states(batch.states, batch.pages[len(batch.specs) :], batch.cache)
        return forward(model, paged_batch=batch, **inputs)

    return attending
