"""Functions of other packages are what the table says of them: in the installed packages, and by what they do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from types import CodeType, FunctionType, MethodType
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch import nn
from transformers import PreTrainedModel

from compiled_llm.compat.known_functions import (
    KNOWN,
    Known,
    asks_for_gradients,
    author_of,
    forward_called,
    reads_tokens_alone,
    source_hash,
)
from support.characters import character_tokenizer
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core


def inner_code(function: Callable[..., Any], name: str) -> CodeType:
    """The code of a function that another one defines."""
    codes = [inspect.unwrap(function).__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return next(code for code in codes if code.co_name == name)


def of_trl() -> CodeType:
    return inner_code(pytest.importorskip("trl.trainer.utils").add_fused_lm_head, "_fused_forward")


def of_peft() -> CodeType:
    return inner_code(pytest.importorskip("peft").prepare_model_for_kbit_training, "make_inputs_require_grad")


def of_transformers() -> CodeType:
    return inner_code(PreTrainedModel.enable_input_require_grads, "make_inputs_require_grads")


def of_accelerate() -> CodeType:
    return inner_code(pytest.importorskip("accelerate.utils").convert_outputs_to_fp32, "forward")


def of_torch() -> CodeType:
    return inner_code(torch.amp.autocast_mode.autocast_decorator, "decorate_autocast")


def multi_token_eos_criteria() -> Any:
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity", reason="lm-eval is installed without its extra api")
    return import_module("lm_eval.models.utils_hf").MultiTokenEOSCriteria


def of_lm_eval() -> CodeType:
    return inner_code(multi_token_eos_criteria().__call__, "__call__")


@pytest.mark.parametrize("code_of", [of_trl, of_peft, of_transformers, of_accelerate, of_torch, of_lm_eval])
def test_an_installed_version_that_the_table_names_has_the_source_of_its_hash(code_of: Callable[[], CodeType]) -> None:
    package = code_of.__name__.removeprefix("of_")
    code, installed = code_of(), version(package)
    entries: dict[str, Known] = {known: entry for known, entry in KNOWN.items() if entry.package == package}
    named = [entry for entry in entries.values() if SpecifierSet(entry.versions).contains(installed, prereleases=True)]
    if not named:
        pytest.skip(f"{package} {installed} is none of the versions in the table: look at its source, and add its hash")
    assert KNOWN.get(source_hash(code)) in named, f"{package} {installed} does something else by now"
    assert all(entry.calls in (*code.co_freevars, "") for entry in named)


def test_hooks_are_known_by_their_source() -> None:
    model = tiny_qwen3()
    model.enable_input_require_grads()
    (hook,) = model.model.embed_tokens._forward_hooks.values()
    assert asks_for_gradients(hook)

    def make_inputs_require_grads(module: nn.Module, input: Any, output: Any) -> Any:
        return output.requires_grad_(True) * 2

    assert not asks_for_gradients(make_inputs_require_grads)
    assert not asks_for_gradients(nn.Identity())
    without_source: dict[str, Any] = {}
    exec("def hook(module, input, output): output.requires_grad_(True)", without_source)
    assert not asks_for_gradients(without_source["hook"])


def test_a_criterion_is_known_by_the_source_of_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    known = multi_token_eos_criteria()
    criterion = known("x", character_tokenizer(), initial_decoder_input_length=1, batch_size=1)
    own = known.__call__
    assert reads_tokens_alone(criterion)
    assert not asks_for_gradients(own)

    class Derived(known):  # type: ignore[misc]
        """May replace whatever the call uses."""

    class Calling(known):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs)

    for other in (Derived, Calling):
        assert not reads_tokens_alone(other("x", character_tokenizer(), initial_decoder_input_length=1, batch_size=1))
    assert not reads_tokens_alone(own)
    monkeypatch.setattr(known, "__call__", functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs)))
    assert not reads_tokens_alone(criterion)


def test_wrappers_of_mixed_precision_are_looked_through_if_they_change_no_arithmetic() -> None:
    utils = pytest.importorskip("accelerate.utils")
    model = tiny_qwen3()
    own = type(model).forward
    for enabled in (False, True):
        inside = torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)(own)
        forward = MethodType(utils.convert_outputs_to_fp32(inside), model)
        assert (forward_called(forward) is own) is not enabled
        assert "keep_fp32_wrapper=False" in author_of(forward)
    assert forward_called(own) is own


def test_a_function_is_named_by_its_package_and_not_by_what_it_wraps() -> None:
    model = tiny_qwen3()
    model.enable_input_require_grads()
    (hook,) = model.model.embed_tokens._forward_hooks.values()
    named = "PreTrainedModel.enable_input_require_grads of transformers"
    assert author_of(hook) == f"{named}, which model.disable_input_require_grads() takes off"
    assert author_of(lambda *_: None).endswith(f"{__name__.partition('.')[0]}")
    assert author_of(nn.Identity()) == "Identity"
    assert isinstance(hook, FunctionType)
