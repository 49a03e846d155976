"""Each private part of transformers that we depend on is still there and does what it is for."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import pickle
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM as Llama,
    MixtralConfig,
    Qwen3Config,
)
from transformers.core_model_loading import revert_weight_conversion

import compiled_llm
from compiled_llm.compat import huggingface as compat
from compiled_llm.huggingface.wrapped_model import WrappedModel
from support.huggingface import vision
from support.huggingface.cache_name import CACHE
from support.huggingface.families import CLASSES, FAMILIES, make
from support.huggingface.recurrent_families import ALL_RECURRENT, recurrent_model
from support.in_threads import in_thread
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.core

OURS_ALONE = {"_note_inner_call", "_note_outer_compile"}
OVERRIDDEN = sorted(name for name in vars(WrappedModel) if re.match(r"_[a-z]", name) and name not in OURS_ALONE)
IDS = torch.tensor([[5, 6, 7, 5, 6]])
CALLS: dict[str, dict[str, Any]] = {
    "_beam_search": {"num_beams": 2},
    "_assisted_decoding": {"prompt_lookup_num_tokens": 2},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(num_hidden_layers=1)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[dict[str, Any]]]:
    """Have a method of `GenerationMixin` note the arguments of its calls, by name, `self` left out."""

    def watch(name: str) -> list[dict[str, Any]]:
        original, seen = getattr(GenerationMixin, name), []

        def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append({**dict(zip(list(inspect.signature(original).parameters)[1:], args, strict=False)), **kwargs})
            return original(self, *args, **kwargs)

        monkeypatch.setattr(GenerationMixin, name, noting)
        return seen

    return watch


@pytest.fixture(params=OVERRIDDEN)
def name(request: pytest.FixtureRequest) -> str:
    """A method that we override; the table says since when there is one that is new."""
    found: str = request.param
    if f"``{found}`` (" in str(compat.__doc__) and not hasattr(GenerationMixin, found):
        pytest.skip("this transformers has no such method yet")
    return found


def generate(model: Any, **options: Any) -> Any:
    return model.generate(**{"input_ids": IDS, "max_new_tokens": 3, "do_sample": False, **options})


# ---- methods that are overridden


def test_generate_still_calls_each_method_that_we_override(name, model, watched):
    calls = watched(name)
    generate(model, **CALLS.get(name, {}))
    assert calls, f"generate no longer calls GenerationMixin.{name}"


def test_each_method_that_we_override_takes_what_ours_takes(name):
    ours = inspect.signature(getattr(WrappedModel, name)).parameters.values()
    named = [parameter.name for parameter in ours if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert set(named) <= inspect.signature(getattr(GenerationMixin, name)).parameters.keys(), name


def test_the_table_names_each_method_that_we_override():
    assert compat.__doc__ is not None
    table = compat.__doc__.partition("Attributes")[0]
    assert sorted(re.findall(r"^\| ``(_\w+)``", table, re.MULTILINE)) == OVERRIDDEN


def test_the_loops_get_what_they_need_by_name(model, watched):
    """`_sample` and the others are given everything but the ids by name, the cache among the model's inputs."""
    for name in ("_sample", "_beam_search", "_assisted_decoding"):
        calls = watched(name)
        generate(model, **CALLS.get(name, {}))
        wanted = {"input_ids", "logits_processor", "stopping_criteria", "generation_config", CACHE}
        assert wanted <= calls[0].keys(), name


def test_a_prepared_config_comes_with_the_models_inputs(model):
    config, inputs = model._prepare_generation_config(None, max_new_tokens=3, attention_mask=IDS)
    assert type(config) is GenerationConfig
    assert config.max_new_tokens == 3
    assert inputs.keys() == {"attention_mask"}


def test_a_method_of_the_models_own_is_told_from_huggingfaces(model):
    class Own(type(model)):
        def _prepare_special_tokens(self, *args: Any, **kwargs: Any) -> None:
            return super()._prepare_special_tokens(*args, **kwargs)

    own = Own(model.config)
    assert not compat.is_huggingfaces(own._prepare_special_tokens)
    assert compat.is_huggingfaces(own._prepare_generation_config)


# ---- what our loops stand in for

# Read or decorated, and not called for what it does: values, and what the experts run on.
NOT_STOOD_IN_FOR = {
    *("config", "device", "dtype", "hf_device_map", "hf_quantizer", "is_remote_code", "forward"),
    *("get_experts_implementation", "set_experts_implementation"),
}


def used_of_self(name: str) -> set[str]:
    """What a method of `GenerationMixin` uses of the model, `self(...)` included."""
    source = textwrap.dedent(inspect.getsource(vars(GenerationMixin)[name]))
    nodes = [node for node in ast.walk(ast.parse(source)) if not isinstance(node, ast.arg)]
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    used = {node.attr for node in attributes if node.value.id == "self"}  # type: ignore[attr-defined]
    return used | ({"__call__"} if "self" in calls else set())


def test_the_table_has_all_that_huggingfaces_loop_calls_of_a_model():
    used, todo = set(), {"_sample"}
    while todo:
        used |= todo
        todo = set().union(*(used_of_self(name) for name in todo if name in vars(GenerationMixin))) - used
    assert used - NOT_STOOD_IN_FOR == set(compat.STOOD_IN_FOR)


@pytest.mark.parametrize("name", compat.STOOD_IN_FOR)
def test_what_huggingface_calls_of_a_model_is_told_from_what_a_user_overrides(name, monkeypatch):
    assert compat.is_stood_in_for(getattr(Llama, name))

    @functools.wraps(getattr(Llama, name))
    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None

    monkeypatch.setattr(Llama, name, own)
    assert not compat.is_stood_in_for(getattr(Llama, name))
    assert not compat.is_stood_in_for(functools.partial(own))


CLASSES_OF_FAMILIES = [
    *(CLASSES.get(family, f"{family}ForCausalLM") for family in FAMILIES),
    *(f"{family}ForConditionalGeneration" for family in vision.FAMILIES),
    *(f"{family}ForCausalLM" for family in sorted(ALL_RECURRENT)),
]


@pytest.mark.parametrize("kind", CLASSES_OF_FAMILIES)
def test_a_family_overrides_nothing_that_our_loops_stand_in_for_or_they_do_its_work(kind):
    """The table names those that do; tests of the families compare their tokens."""
    functions = [getattr(getattr(transformers, kind), name) for name in compat.STOOD_IN_FOR]
    assert all(map(compat.is_stood_in_for, functions))


def test_a_method_of_a_family_that_the_table_lacks_is_not_taken_for_the_general_one():
    assert not compat.is_stood_in_for(transformers.CTRLLMHeadModel.prepare_inputs_for_generation)


# ---- attributes


def test_attention_goes_where_a_thread_reads_that_the_config_points(model):
    reached = []

    def attention(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        reached.append(mask)
        return query.transpose(1, 2), None

    AttentionInterface.register("compiled_llm_contract", attention)
    before = copy.deepcopy(model.config)
    with compat.implementations_read([model.config], "compiled_llm_contract"):
        model(IDS)
        assert reached == [None]
        in_thread(lambda: model(IDS))
        with compat.implementations_read([], None):
            model(IDS)
    model(IDS)
    assert reached == [None]
    assert type(model.config) is type(before)
    assert model.config == before


def test_a_config_that_a_thread_reads_otherwise_is_copied_pickled_and_saved_as_what_it_was(model, tmp_path):
    config = model.config

    def copies() -> list[Any]:
        config.save_pretrained(tmp_path)
        made = AutoModelForCausalLM.from_config(config)
        assert type(made) is type(model)
        return [copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), made.config]

    with compat.implementations_read([config], "compiled_llm_contract"):
        twins = in_thread(copies)
    for twin in (*twins, type(config).from_pretrained(tmp_path, attn_implementation=config._attn_implementation)):
        assert type(twin) is type(config)
        assert twin._attn_implementation == config._attn_implementation
        assert twin.to_dict() == config.to_dict()


def test_a_graph_stays_when_what_the_config_names_changes_but_not_what_the_thread_reads(model):
    read = torch.compile(lambda x: x + len(model.config._attn_implementation), fullgraph=True, backend="eager")
    with compat.implementations_read([model.config], "compiled_llm_contract"):
        assert read(torch.zeros(1)) == len("compiled_llm_contract")
    model.config._attn_implementation = "eager"
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        compat.implementations_read([model.config], "compiled_llm_contract"),
    ):
        assert read(torch.zeros(1)) == len("compiled_llm_contract")


def test_a_config_is_read_as_any_object_unless_names_or_layers_say_otherwise() -> None:
    plain, renamed, layered = Qwen3Config(num_hidden_layers=2), GPT2Config(), Qwen3Config(num_hidden_layers=2)
    configs = [plain, renamed, layered]
    if hasattr(layered, "per_layer_config"):
        layered.per_layer_config = {1: {"intermediate_size": 8}}
    names = sorted({*vars(plain), *renamed.attribute_map, "use_cache", "output_attentions", "absent"})

    def read(config: Any) -> list[Any]:
        values: list[Any] = []
        for name in names:
            try:
                values.append(getattr(config, name))
            except Exception as error:
                values.append(type(error))
        return values

    before = [read(config) for config in configs]
    with compat.implementations_read(configs, None):
        reading = [type(config).__getattribute__ is object.__getattribute__ for config in configs]
        assert [read(config) for config in configs] == before
    assert reading == [True, False, not hasattr(layered, "per_layer_config")]
    assert [type(config) for config in configs] == [Qwen3Config, GPT2Config, Qwen3Config]


def test_experts_have_the_implementation_that_is_set():
    config = MixtralConfig(num_hidden_layers=1)
    config._experts_implementation = "grouped_mm"
    assert compat.experts_implementation(config) == "grouped_mm"
    compat.set_experts_implementation(config, "batched_mm")
    assert config._experts_implementation == "batched_mm"
    assert compat.experts_implementation(LlamaConfig()) in (None, "grouped_mm", "eager", "batched_mm")


def test_a_call_has_its_special_tokens_as_tensors(model, watched):
    calls = watched("_sample")
    generate(model, pad_token_id=3, eos_token_id=[8, 9], bos_token_id=4)
    config = calls[0]["generation_config"]
    found = [None if tensor is None else tensor.tolist() for tensor in compat.special_tokens(config)]
    assert found[:3] == [4, [8, 9], 3]
    pad = compat.pad_token(config)
    assert pad is not None
    assert int(pad) == 3
    compat.set_special_tokens(config, [None] * 4)
    assert compat.special_tokens(config) == [None] * 4
    assert compat.pad_token(config) is None


def test_a_mask_that_hides_nothing_is_there_or_its_width_is_noted(model, watched):
    calls = watched("_sample")
    generate(model, attention_mask=torch.ones_like(IDS))
    (call,) = calls
    mask = call.get("attention_mask")
    assert (compat.mask_width(call["generation_config"], -1) if mask is None else mask.shape[1]) == IDS.shape[1]
    assert compat.mask_width(GenerationConfig(), 17) == 17


def test_a_users_cache_is_told_from_one_that_generate_made(model, watched):
    calls = watched("_sample")
    cache = DynamicCache(config=model.config)
    assert not compat.is_users_own(cache)
    generate(model, **{CACHE: cache})
    generate(model)
    assert [compat.is_users_own(call[CACHE]) for call in calls] == [True, False]


def test_a_prefill_gives_the_logits_that_first_tokens_are_chosen_from(model, watched):
    calls = watched("_prefill")
    tokens = generate(model)
    (call,) = calls
    cache = DynamicCache(config=model.config)
    inputs = {**call["model_kwargs"], CACHE: cache, "attention_mask": None, "position_ids": None}
    with torch.no_grad():
        output = compat.prefill(model, call["input_ids"], call["generation_config"], inputs)
    assert output.logits[:, -1].argmax(-1).tolist() == tokens[:, IDS.shape[1]].tolist()
    assert output[CACHE] is cache
    assert cache.get_seq_length() == IDS.shape[1]


def test_what_generate_writes_into_a_model_is_read_by_no_forward_with_positions():
    model = vision.make("Qwen2VL")
    model.generate(IDS, max_new_tokens=1)
    for name in compat.WRITTEN_BY_GENERATE:
        (holder,) = [module for module in model.modules() if isinstance(vars(module).get(name), torch.Tensor)]
        with torch.no_grad():
            before = model(IDS, position_ids=torch.arange(5)[None]).logits
            setattr(holder, name, torch.full((1, 1), 100))
            torch.testing.assert_close(model(IDS, position_ids=torch.arange(5)[None]).logits, before)


# ---- nowhere else


def test_private_attributes_of_transformers_are_used_in_one_module_only():
    """`test_private_parts.py` finds those that are not in the table."""
    assert compat.__doc__ is not None
    attributes = set(re.findall(r"[`.](_\w+)", compat.__doc__.partition("Attributes")[2]))
    assert len(attributes) == 10
    for file in Path(str(compiled_llm.__file__)).parent.rglob("*.py"):
        if file.name != "huggingface.py":
            assert not attributes.intersection(re.findall(r"\b_\w+", file.read_text())), file


def test_hooks_that_huggingface_leaves_on_modules_are_recognized():
    model = tiny_llama(num_hidden_layers=1)
    model(IDS, output_hidden_states=True)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert hooks
    assert all(map(compat.captures_outputs, hooks))
    assert not compat.captures_outputs(lambda *_: None)


@pytest.mark.parametrize("misfit", ["none", "missing", "unexpected", "mismatched"])
def test_a_checkpoint_becomes_the_tensors_of_a_model(misfit: str) -> None:
    """Mixtral's files have each expert by itself, and its model has all of them in one tensor."""
    model = make("Mixtral", FAMILIES["Mixtral"], 0)
    into = copy.deepcopy(model).to("meta")
    stored = {name: tensor.double() for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    assert any(".experts.1." in name for name in stored)
    norm = "model.norm.weight"
    if misfit == "missing":
        del stored[norm]
    elif misfit != "none":
        stored["other" if misfit == "unexpected" else norm] = torch.ones(1)
    misfits = compat.load_checkpoint(model, into, stored)
    assert misfits.missing == ({norm} if misfit == "missing" else set())
    assert misfits.unexpected == ({"other"} if misfit == "unexpected" else set())
    assert misfits.mismatched == ([(norm, [1], [len(model.model.norm.weight)])] if misfit == "mismatched" else [])
    assert misfits.failed == {}
    expected = model.state_dict()
    for name, tensor in into.state_dict().items():
        if name != norm:
            assert torch.equal(tensor, expected[name])
            assert tensor.dtype == expected[name].dtype


def test_layers_that_keep_a_state_beside_keys_are_found() -> None:
    found = compat.state_beside_keys(recurrent_model("FalconH1").config)
    assert found == (0, "LinearAttentionAndFullAttentionLayer")
    assert compat.state_beside_keys(recurrent_model("Lfm2").config) is None
    assert compat.state_beside_keys(tiny_llama().config) is None


@pytest.mark.parametrize(("version", "warns"), [("5.24.3", False), ("5.25.0", True), ("6.0.0.dev0", True)])
def test_wrap_warns_once_of_a_version_that_was_not_tested_and_goes_on(
    version: str, warns: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    compat.warn_if_newer.cache_clear()
    for _ in range(2):
        assert compiled_llm.wrap(tiny_llama(num_hidden_layers=1), mode="eager").compiled is not None
    noted = [notice for notice in recwarn if "transformers" in str(notice.message)]
    assert [notice.filename for notice in noted] == [__file__] * warns
    for notice in noted:
        assert f"transformers {version} is newer than {compat.NEWEST}" in str(notice.message)
