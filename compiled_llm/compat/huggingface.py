"""Private parts of transformers that we depend on, all of them; ``tests/compat/test_huggingface.py`` tests each.

Methods that a wrapped model overrides (``huggingface/wrapped_model.py``):

| ``GenerationMixin``'s | why | without it | ends when |
| --- | --- | --- | --- |
| ``_sample`` | the loop is ours | HuggingFace's loop runs | generate takes a decoding method of the model's own |
| ``_beam_search`` | pages go back at the end | pages stay taken | a loop closes the cache it was given |
| ``_assisted_decoding`` | the same | the same | the same |
| ``_prepare_cache_for_generation`` | rows, not tensors | the original path | a model can name its cache class |
| ``_prepare_generation_config`` | its results are kept | slower first tokens | it deep-copies nothing |
| ``_prepare_special_tokens`` | they are uploaded once | slower first tokens | the config keeps the tensors |
| ``_prepare_attention_mask_for_generation`` | the host knows the tokens | waits | 5.23 is the oldest supported |
| ``_prepare_position_ids_for_generation`` | the host knows the mask | waits | 5.23 is the oldest supported |
| ``_maybe_prepare_encoder_kwargs_for_generation`` (5.24) | our encoder | HuggingFace's runs | an encoder can be given |

One that we call: ``_prefill``, for prompts that HuggingFace's own forward computes (without it they take the original
path); ends when ``generate`` can be given the outputs of a prefill.

Attributes, a function or two each:

| attribute | for | without it | ends when |
| --- | --- | --- | --- |
| ``config._attn_implementation_internal`` | a thread's own attention | all threads get ours | a call can name it |
| ``config._experts_implementation_internal`` | a thread's own experts; those of HuggingFace on fake tensors | \
HuggingFace's experts run; float32 is refused | a call can name it; all dtypes have fakes |
| ``GenerationConfig._bos_token_tensor``, ``_eos_token_tensor``, ``_pad_token_tensor``, \
``_decoder_start_token_tensor`` | one upload, not one a call; a batch's processors | slower first tokens \
| the config keeps the tensors |
| ``GenerationConfig._mask_length`` (from 5.23) | the width of a dropped mask | rows cannot go on | masks stay |
| the hooks of ``transformers.utils.output_capturing`` | they stay, inactive | HuggingFace's forward for good after \
``output_hidden_states`` | they are removed |
| ``maybe_install_capturing_hooks`` there | Dynamo traces hidden states, and not how the hooks get there | \
HuggingFace's forward whenever hidden states are asked for | the hooks are there from the start |
| ``PreTrainedModel._output_capturing_hooks_installed`` | a mark beside those hooks, which no forward reads | the \
first request for hidden states empties the prefix cache | the hooks are there from the start |
| ``Cache._is_user_defined`` | whether it goes back to the user | we would close it | generate says so |

Loading: ``convert_and_load_state_dict_in_model``, ``get_model_conversion_mapping``, ``LoadStateDictConfig`` and
``_adjust_missing_and_unexpected_keys``, by which ``from_pretrained`` finds the tensors of a checkpoint that a model's
are made of (experts are stacked, names of old are renamed). Without them weights cannot be updated from a folder; ends
when a model that exists can be given a checkpoint: ``from_pretrained`` changes settings of the whole process meanwhile.

``STOOD_IN_FOR`` names methods of a model that HuggingFace's own loop calls, and ours do not. Without the comparison, a
class's or an object's override of one would be skipped. It ends when ``generate`` takes a decoding method of the
model's own.
A tensor that ``generate`` keeps in a vision-language model, new in each call, and that no forward with positions reads:
``rope_deltas``. Captured graphs do not follow from it; ends when the model no longer holds it.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple, SupportsIndex

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    cache_utils,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, LoadStateDictConfig
from transformers.utils import output_capturing

from compiled_llm.compat.forks import lock

NEWEST = "5.24"  # the newest minor version that the matrix has run; ``pyproject.toml`` allows none after it
WRITTEN_BY_GENERATE = frozenset({"rope_deltas"})
CAPTURING = "_output_capturing_hooks_installed"
"""The mark of a model that has the hooks of ``let_outputs_be_captured``."""
LEFT_BY_TRAINERS = frozenset({"_require_grads_hooks", "_require_grads_hook", "model_tags", "_is_accelerate_prepared"})
"""Attributes of a model in which HuggingFace's trainers and Accelerate keep what no forward reads."""
IMPLEMENTATIONS = frozenset({"_attn_implementation_internal", "_experts_implementation_internal"})
_SPECIAL_TOKENS = ("_bos_token_tensor", "_eos_token_tensor", "_pad_token_tensor", "_decoder_start_token_tensor")

STOOD_IN_FOR = (
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_has_unfinished_sequences",
    "_optimize_model_for_decode",
    "_valid_auto_compile_criteria",
    "get_compiled_call",
    "__call__",
)
"""Methods of a model that HuggingFace's ``_sample`` calls, and itself; ``forward`` is compiled, not stood in for."""
_SERVED_CLASSES = frozenset(
    {
        *("GenerationMixin", "PreTrainedModel", "Module"),
        *("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        *("PaliGemmaForConditionalGeneration", "Phi3ForCausalLM", "PhimoeForCausalLM"),
        *("BambaForCausalLM", "FalconH1ForCausalLM", "NemotronHForCausalLM"),
        *("FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"),
    }
)
"""Classes of transformers and torch whose methods of these names our loops do the work of."""
# Gemma 3 and 4 give the types of tokens to the prompt alone, PaliGemma those of answers, too, which say nothing there.
# Phi-3 and PhiMoE begin again without a cache where they switch to longrope, which ``wrap`` refuses. Bamba, Falcon-H1
# and Nemotron-H ask for the last logits, which is what our loops compute. Models without attention leave the mask out
# after the prompt.


@functools.cache
def warn_if_newer(version: str, stacklevel: int) -> None:
    """Warn of a version of transformers that was not tested, once of each; the package's requirement was overruled."""
    if Version(version).release[:2] > Version(NEWEST).release:
        warnings.warn(
            f"transformers {version} is newer than {NEWEST}, the last version that compiled_llm was tested with: "
            f'models may be refused, or calls fail; if so, install that one (pip install "transformers=={NEWEST}.*")',
            stacklevel=stacklevel + 1,
        )


def is_stood_in_for(function: object) -> bool:
    """Return whether ``function``, found on a class under a name in ``STOOD_IN_FOR``, is one that our loops replace."""
    # A replacement is recognised by where its code stands: ``functools.wraps`` copies names. (``contextlib`` is where
    # ``contextmanager`` puts a function.)
    if not isinstance(function, FunctionType):
        return False
    package = function.__globals__["__name__"].partition(".")[0]
    owner = function.__qualname__.partition(".")[0]
    return package in ("transformers", "torch", "contextlib") and owner in _SERVED_CLASSES


def is_huggingfaces(method: MethodType) -> bool:
    """Return whether a bound method is ``GenerationMixin``'s own, not one of the model's class."""
    function = method.__func__
    return function is vars(GenerationMixin).get(function.__name__)


class _ThreadsOwn(threading.local):
    chosen: bool = False
    attention: str | None = None
    experts: str | None = None


_threads_own = _ThreadsOwn()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _attention_of_this_thread() -> str | None:
    """Return this thread's substitute for the name in a config; Dynamo takes it as it is, and guards nothing."""
    return _threads_own.attention


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _experts_of_this_thread() -> str | None:
    """Return the same for experts."""
    return _threads_own.experts


class _View:
    """A second class of a config while some thread reads another implementation than the one that it names."""

    # Configs are shared: among models, and among threads. So a config's value is never changed; it gets a class that
    # answers each thread by itself, until the last of these threads is done.

    def __init_subclass__(cls) -> None:
        """Keep transformers from making a dataclass of it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Be copied and pickled as the original class."""
        return (copyreg._reconstructor, (_base_of(type(self)), object, None), *object.__reduce_ex__(self, 2)[2:])  # type: ignore[attr-defined]


def _base_of(view: type[Any]) -> type[Any]:
    return view.__mro__[2]


def _become(config: PretrainedConfig, kind: type[PretrainedConfig]) -> None:
    """Change the class of a config, past ``__setattr__`` of its classes, which validate attributes."""
    object.__setattr__(config, "__class__", kind)


def _view_of(config: PretrainedConfig) -> type[PretrainedConfig]:
    base, plain = type(config), _reads_plainly(config)
    if (base, plain) not in _views:
        _views[base, plain] = _new_view(base, plain)
    return _views[base, plain]


def _reads_plainly(config: PretrainedConfig) -> bool:
    """Return whether to read an attribute of a config finds it as in any object."""
    # HuggingFace looks first whether its name stands for another one, and whether each layer has an own one.
    kind, own = type(config), object.__getattribute__(config, "__dict__")
    looks = kind.attribute_map or "attribute_map" in own or "_heterogeneity_spec" in own
    return kind.__getattribute__ is PretrainedConfig.__getattribute__ and not looks


def _new_view(base: type[PretrainedConfig], plain: bool) -> type[PretrainedConfig]:
    """Return a view of a class; ``plain`` ones are read in a tenth of the time, and Dynamo traces nothing in that."""
    own: Any = base._attn_implementation
    of_experts: Any = base._experts_implementation

    def read(config: PretrainedConfig) -> str | None:
        return _attention_of_this_thread() or config._attn_implementation_internal

    def read_experts(config: PretrainedConfig) -> str | None:
        return _experts_of_this_thread() or config._experts_implementation_internal

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_attn_implementation": property(read, own.fset),
        "_experts_implementation": property(read_experts, of_experts.fset),
        **({"__getattribute__": object.__getattribute__} if plain else {}),
    }
    return type(base.__name__, (_View, base), members)


_views: dict[tuple[type[PretrainedConfig], bool], type[PretrainedConfig]] = {}
_readers: Counter[int] = Counter()  # how many threads read something else of a config, by its id
_readers_lock = lock()


class implementations_read:  # noqa: N801
    """A block in which configs name another implementation to this thread; other threads see no change."""

    def __init__(self, configs: Sequence[PretrainedConfig], name: str | None, experts: str | None = None) -> None:
        """``name``, and ``experts`` for these: what to read; None for what each config names itself."""
        self._configs = configs
        self._names = name, experts

    def __enter__(self) -> None:
        with _readers_lock:
            for config in self._configs:
                _readers[id(config)] += 1
                if not isinstance(config, _View):
                    _become(config, _view_of(config))
        own = _threads_own
        self._before = own.chosen, own.attention, own.experts
        own.chosen, (own.attention, own.experts) = True, self._names

    def __exit__(self, *_: object) -> None:
        _threads_own.chosen, _threads_own.attention, _threads_own.experts = self._before
        with _readers_lock:
            for config in self._configs:
                _readers[id(config)] -= 1
                if not _readers[id(config)]:
                    del _readers[id(config)]
                    _become(config, _base_of(type(config)))


def class_of_config(config: PretrainedConfig) -> type[PretrainedConfig]:
    """Return a config's own class, also while a thread reads another implementation than the one that it names."""
    return _base_of(type(config)) if isinstance(config, _View) else type(config)


def is_view(kind: type) -> bool:
    """Return whether a class is what a config has meanwhile."""
    return issubclass(kind, _View)


def implementations_of_this_thread() -> tuple[str | None, str | None]:
    """Return whose attention and experts configs name to this thread in place of their own; None for their own."""
    return _attention_of_this_thread(), _experts_of_this_thread()


def reads_chosen_implementations() -> bool:
    """Return whether this thread is in a block of ``implementations_read``, which every forward of ours runs in."""
    return _threads_own.chosen


def attention_implementation(config: PretrainedConfig) -> str | None:
    """Return the name of the attention implementation that a config's files ask for."""
    name: str | None = config._attn_implementation_internal
    return name


def attention_function_of_user(config: PretrainedConfig) -> str | None:
    """Return the name of an attention function that is neither HuggingFace's nor of its hub (``owner/kernels``)."""
    name = attention_implementation(config)
    if name is None or "/" in name:
        return None
    function: Any = ALL_ATTENTION_FUNCTIONS.get(name)  # None for "eager", which each model has of its own
    while isinstance(function, functools.partial):
        function = function.func
    defined = getattr(function, "__globals__", None) or {"__name__": type(function).__module__}
    known = function is None or defined["__name__"].partition(".")[0] in ("transformers", "compiled_llm")
    return None if known else name


def captures_outputs(hook: object) -> bool:
    """Whether HuggingFace left a forward hook once hidden states were asked for; it does nothing in other calls."""
    return getattr(hook, "__module__", None) == output_capturing.__name__


def let_outputs_be_captured(model: nn.Module, standing: nn.Module) -> None:
    """Put HuggingFace's hooks for hidden states on a model's modules, as its first call that asks for them does.

    ``standing`` is what programs run in its place: shallow copies, whose hooks are the model's own, and which have been
    made before, some of them, without the mark that the hooks are there.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _is_capturing(type(module).forward):
            output_capturing.maybe_install_capturing_hooks(module)
    for module in standing.modules():
        if isinstance(module, PreTrainedModel) and _is_capturing(type(module).forward):
            setattr(module, CAPTURING, True)


def _is_capturing(forward: object) -> bool:
    """Whether one of the decorators of a forward is HuggingFace's that captures outputs."""
    while forward is not None:
        if getattr(forward, "__globals__", None) is vars(output_capturing):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def indexed_layers() -> tuple[type, ...]:
    """Return the layers of dynamic caches that keep index keys, of a model's own once its module is imported."""
    known = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
    found = (getattr(cache_utils, "DynamicIndexedLayer", None), known.get("minimax_m3_sparse"))
    return tuple(layer for layer in found if layer is not None)


def keeps_nothing(layer: object) -> bool:
    """Whether a layer of a cache has no memory, from 5.23 on: it reads another one's keys and values, or none."""
    nothing: type | None = getattr(cache_utils, "DummyLayer", None)
    return nothing is not None and isinstance(layer, nothing)


def sees_images(model: PreTrainedModel) -> bool:
    """Return whether a model reads images; transformers 5.17 names no modalities of Qwen3.5."""
    return "image" in getattr(model, "input_modalities", ()) or hasattr(model, "get_image_features")


def keeps_all(config: PretrainedConfig, filling: Sequence[bool]) -> bool:
    """Return whether HuggingFace's caches keep something of each layer that is ``filling`` them."""
    layers = DynamicCache(config=config).layers
    numbers = [number for number, fills in enumerate(filling) if fills]
    return all(number < len(layers) and not keeps_nothing(layers[number]) for number in numbers)


def columns_in(cache: Cache) -> int | None:
    """Return how many columns a cache holds; None if no layer of it counts them, as those that keep states do not."""
    if cache.layers and not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return None
    return int(cache.get_seq_length())


def keeps_state(layer: object) -> bool:
    """Return whether a layer of HuggingFace's cache keeps a state of each row."""
    state: type | None = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    return state is not None and isinstance(layer, state)


def state_beside_keys(config: PretrainedConfig) -> tuple[int, str] | None:
    """Return the first layer that keeps a state besides keys and values, and its class in a dynamic cache; or None."""
    # Layers with a state alone have no attention, so that a trial forward does not reach them.
    layers = enumerate(DynamicCache(config=config).layers)
    both = ((number, kept) for number, kept in layers if isinstance(kept, CacheLayerMixin) and keeps_state(kept))
    return next(((number, type(kept).__name__) for number, kept in both), None)


def index_keys(layer: object) -> Tensor | None:
    """Return the index keys ``[B, C, I]`` of such a layer; None if it has none."""
    of_blocks: Tensor | None = getattr(layer, "idx_keys", None)
    keys: Tensor | None = getattr(layer, "indexer_keys", None)
    return keys if of_blocks is None else of_blocks[:, 0]


def add_index_keys(cache: Cache, keys: Tensor, layer: int) -> None:
    """Append index keys ``[B, C, I]`` to those of a layer that such a cache has."""
    own: Any = cache.layers[layer] if layer < len(cache.layers) else None
    if hasattr(own, "update_index"):
        own.update_index(keys[:, None])
    else:
        cache.update_indexer(keys, layer)


def experts_implementation(config: PretrainedConfig) -> str | None:
    """Return the name of the implementation that mixtures of experts have; None if the config names none."""
    return getattr(config, "_experts_implementation_internal", None)


def set_experts_implementation(config: PretrainedConfig, name: str) -> None:
    config._experts_implementation_internal = name


def special_tokens(config: GenerationConfig) -> list[Tensor | None]:
    """Return the tensors of a call's special tokens: BOS, EOS, padding and the decoder's start."""
    return [getattr(config, name) for name in _SPECIAL_TOKENS]


def set_special_tokens(config: GenerationConfig, tensors: Sequence[Tensor | None]) -> None:
    for name, tensor in zip(_SPECIAL_TOKENS, tensors, strict=True):
        setattr(config, name, tensor)


def pad_token(config: GenerationConfig) -> Tensor | None:
    """Return the padding token of a call, a 0-dim tensor; None if it has none."""
    return config._pad_token_tensor


def with_end_tokens(
    config: GenerationConfig, ends: Sequence[int], device: torch.device | str = "cpu"
) -> GenerationConfig:
    """Return a copy of a config that has end tokens as ``generate`` gives them to processors."""
    own = copy.copy(config)
    own._eos_token_tensor = torch.tensor(ends, device=device) if ends else None
    return own


def mask_width(config: GenerationConfig, tokens: int) -> int:
    """Return how wide a mask was that generate dropped because it hides nothing; ``tokens`` if none was noted."""
    return getattr(config, "_mask_length", tokens)


def prefill(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, inputs: Mapping[str, Any]
) -> CausalLMOutputWithPast:
    """Run the first forward of a call as ``generate`` does; ``input_ids`` are ``[B, T]``."""
    generating: Any = model
    output: CausalLMOutputWithPast = generating._prefill(input_ids, config, dict(inputs))
    return output


def is_users_own(cache: Cache) -> bool:
    """Return whether the user gave the cache to ``generate``, which did not make it."""
    return getattr(cache, "_is_user_defined", False)


class Misfits(NamedTuple):
    """The differences between a checkpoint and a model."""

    missing: set[str]  # names of the model's tensors that it lacks; of tied ones all but one may be
    unexpected: set[str]  # names of its tensors that the model does not have
    # names of tensors with other shapes, and these: the checkpoint's, then the model's
    mismatched: list[tuple[str, list[int], list[int]]]
    failed: dict[str, str]  # names of tensors that could not be made of the checkpoint's, and why


def load_checkpoint(model: PreTrainedModel, into: nn.Module, tensors: Mapping[str, Any]) -> Misfits:
    """Load a checkpoint's tensors into a stand-in without memory, as ``from_pretrained`` would."""
    # The class and config of ``model``, which is not changed, say how tensors are named and stacked in files. ``into``
    # has parameters and buffers of the same names, shapes and dtypes, which are replaced.
    mapping: Any = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(weight_mapping=mapping)
    shown: Any = into
    shown.base_model_prefix, shown.config = model.base_model_prefix, model.config
    info, _ = convert_and_load_state_dict_in_model(shown, dict(tensors), config)
    adjusting: Any = model
    adjusting._adjust_missing_and_unexpected_keys(info)
    mismatched = [(name, list(theirs), list(ours)) for name, theirs, ours in info.mismatched_keys]
    failed = {name: str(text).strip().splitlines()[-1] for name, text in info.conversion_errors.items()}
    return Misfits(info.missing_keys, info.unexpected_keys, mismatched, failed)
