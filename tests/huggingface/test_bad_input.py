"""Bad input raises one clear error before anything changes, and the next correct call works."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch._inductor.runtime import cache_dir_utils
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import UnsupportedModelError
from compiled_llm.config import WrapConfig
from compiled_llm.model import checks
from compiled_llm.model.checks import check_placement
from support.huggingface.families import REFUSED, make
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import TINY, tiny_llama, tiny_qwen3

pytestmark = pytest.mark.core

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "400 tokens", "max_batch_size": 4}


@pytest.fixture
def model() -> PreTrainedModel:
    return compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **OPTIONS, progress=False)


# ---- models


def of(name: str, **config: Any) -> PreTrainedModel:
    """A model of this class with a tiny config."""
    kind: Any = getattr(transformers, name)
    return kind(kind.config_class(vocab_size=128, **config))


def with_rope(kind: str, **parameters: Any) -> PreTrainedModel:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **parameters}
    return tiny_llama(rope_parameters=rope, max_position_embeddings=64)


BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
QWEN3 = {name: value for name, value in TINY.items() if name != "vocab_size"}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
UNSUPPORTED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    **{name: (partial(make, name, options, 0), reason) for name, (options, reason) in REFUSED.items()},
    "T5": (partial(of, "T5ForConditionalGeneration", **T5), "encoder-decoder"),
    "BERT": (partial(of, "BertModel", **BERT), "ForCausalLM"),
    "BERT with a language head": (partial(of, "BertLMHeadModel", **BERT), "Bert.*causal"),
    "no head": (partial(of, "Qwen3Model", **QWEN3), "ForCausalLM"),
    "classifier of an encoder": (partial(of, "BertForSequenceClassification", **BERT), "generic classifier"),
    "dynamic rope": (partial(with_rope, "dynamic"), "Llama.*rope"),
    "longrope": (partial(with_rope, "longrope", **LONG), "Llama.*rope"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_cannot_run_over_pages_is_refused_and_stays_usable(name):
    made, message = UNSUPPORTED[name]
    if name == "Inkling" and not hasattr(transformers, "InklingForCausalLM"):
        pytest.skip("this version of transformers has no Inkling")
    model = made().eval()
    before = type(model), set(model.__dict__), model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        compiled_llm.wrap(model, mode="eager")
    assert "\n" not in str(caught.value)
    assert (type(model), set(model.__dict__), model.config._attn_implementation) == before
    if model.can_generate() and not model.config.is_encoder_decoder and name != "BERT with a language head":
        text = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False, eos_token_id=None)
        assert text.shape == (1, 5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, r"a NoneType; give a transformers PreTrainedModel"),
        (torch.nn.Linear(2, 2), r"a Linear; give a transformers PreTrainedModel"),
        ("Qwen/Qwen3-0.6B", r"a str; load .*AutoModelForCausalLM\.from_pretrained\('Qwen/Qwen3-0\.6B'\)"),
        (torch.compile(torch.nn.Linear(2, 2)), r"an OptimizedModule; give the model that torch\.compile was given"),
    ],
    ids=["None", "no language model", "a name", "compiled"],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(TypeError, match=f"wrap: model is {message}"):
        compiled_llm.wrap(model)


def test_training_mode_is_refused_until_eval_is_called(seed):
    model = tiny_qwen3(attention_dropout=0.1).train()
    named = (
        r"training mode, where model\.layers\.0\.self_attn \(Qwen3Attention: attention_dropout=0\.1\).*model\.eval\(\)"
    )
    with pytest.raises(ValueError, match=named):
        compiled_llm.wrap(model, **OPTIONS)
    assert not hasattr(model, "compiled")
    compiled_llm.wrap(model.eval(), **OPTIONS)
    inputs = mixed_prompts([4], 128, seed)
    expected = greedy(model, inputs, 3)
    model.train()
    with pytest.raises(ValueError, match=named):
        greedy(model, inputs, 3)
    with pytest.raises(ValueError, match=named):
        model(**inputs, past_key_values=model.compiled.new_cache())
    assert_account_is_empty(model)
    torch.testing.assert_close(greedy(model.eval(), inputs, 3), expected)


# ---- placement; what a CPU cannot show is told to the checks


class Placed:
    """What `check_placement` looks at."""

    def __init__(self, devices: list[str], dtype: torch.dtype = torch.bfloat16, device_map: Any = None) -> None:
        self._devices = [torch.device(device) for device in devices]
        self.device, self.dtype = self._devices[0], dtype
        if device_map is not None:
            self.hf_device_map = device_map

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(device=device, dtype=self.dtype) for device in self._devices]


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        (Placed(["cuda:0", "cuda:1"]), r"several devices.*cuda:0.*cuda:1.*load the model on one"),
        (Placed(["cpu", "cuda:0"]), r"several devices.*cpu.*cuda:0.*load the model on one"),
        (Placed(["meta", "cuda:0"]), r"offloaded.*meta.*device_map"),
        (Placed(["meta"], device_map={"a": "disk"}), r"offloaded.*meta.*device_map"),
        (Placed(["cuda:0"], device_map={"a": 0, "b": "cpu"}), r"offloaded.*cpu.*device_map"),
        (Placed(["cuda:0"], device_map={"a": 0, "b": "disk"}), r"offloaded.*disk.*device_map"),
        (Placed(["cpu"], device_map={"a": "cpu", "b": "disk"}), r"offloaded.*disk.*device_map"),
        (Placed(["xpu:0"]), r"xpu:0.*only CUDA devices and the CPU"),
        (Placed(["cuda:0"], torch.float32), r"torch\.float32 on CUDA.*model\.to\(torch\.bfloat16\)"),
        (Placed(["cuda:0"], torch.float64), r"torch\.float64 on CUDA.*model\.to\(torch\.bfloat16\)"),
    ],
)
@pytest.mark.usefixtures("problems")
def test_a_model_that_is_not_whole_on_one_device_in_a_fitting_type_is_refused(placed, message):
    with pytest.raises(ValueError, match=message):
        check_placement(placed, WrapConfig())


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval()
    with pytest.raises(ValueError, match=r"on the meta device, where parameters have no values; load it with from_pre"):
        compiled_llm.wrap(model)


def test_a_cpu_without_a_compiler_is_refused_except_for_eager(monkeypatch, seed):
    model = tiny_qwen3()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "which", lambda *_: None)
        with pytest.raises(RuntimeError, match=r"no C\+\+ compiler.*g\+\+.*mode='eager'"):
            compiled_llm.wrap(model)
        assert not hasattr(model, "compiled")
        compiled_llm.wrap(model, **OPTIONS)
        inputs = mixed_prompts([4], 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 3), greedy(tiny_qwen3(), inputs, 3))
    assert checks.missing_compiler() is None


def test_inductors_default_cache_that_somebody_else_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: str(tmp_path))
    model = tiny_qwen3()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks.os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        patch.setattr(checks, "ROOT", -1)
        with pytest.raises(RuntimeError, match="belongs to another user; set TORCHINDUCTOR_CACHE_DIR"):
            compiled_llm.wrap(model, **{**OPTIONS, "mode": "compile"})
        checks.check_placement(model, WrapConfig(mode="eager"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "named"))
        checks.check_inductor_cache()
    checks.check_inductor_cache()


# ---- options of wrap


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pagesize": 8}, TypeError, r"'pagesize'.*page_size"),
        ({"mode": None}, ValueError, r"mode=None.*'eager'"),
        ({"kv_memory": "0.5"}, ValueError, r"kv_memory='0.5'.*float in \(0, 1\], without quotes"),
        ({"kv_memory": "10TiB"}, ValueError, r"kv_memory='10TiB'.*unit \(B, KB, MB, GB, KiB, MiB, GiB or tokens\)"),
    ],
)
def test_an_impossible_option_is_refused_before_the_model_changes(options, error, message):
    """`test_config.py` has the others."""
    model = tiny_qwen3()
    with pytest.raises(error, match=message):
        compiled_llm.wrap(model, **options)
    assert not hasattr(model, "compiled")
    assert type(model).__mro__[0] is transformers.Qwen3ForCausalLM


def test_pages_that_do_not_fit_are_refused_at_first_use(seed):
    model = compiled_llm.wrap(tiny_qwen3(), mode="eager", kv_memory=10)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"kv_memory=10 holds no page \(an int is bytes: 1 is.*page_size"):
            greedy(model, mixed_prompts([4], 128, seed), 3)


# ---- prompts and what they may grow by

ids = torch.tensor

PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "no row": ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"input_ids: shape \(0, 4\)"),
    "no token": ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, r"input_ids: shape \(2, 0\)"),
    "one dimension": ({"input_ids": ids([3, 4, 5])}, r"input_ids.*\[batch, tokens\].*\(3,\)"),
    "three dimensions": ({"input_ids": ids([[[3, 4]]])}, r"input_ids.*\[batch, tokens\].*\(1, 1, 2\)"),
    "a list": ({"input_ids": [[3, 4, 5]]}, r"input_ids.*tensor.*list"),
    "a string": ({"input_ids": "hello"}, r"input_ids.*tensor.*str"),
    "floats": ({"input_ids": ids([[3.0, 4.0]])}, r"input_ids: dtype is torch.float32.*\.long\(\)"),
    "half": ({"input_ids": ids([[3.0, 4.0]]).bfloat16()}, r"input_ids: dtype is torch.bfloat16"),
    "bools": ({"input_ids": ids([[True, False]])}, r"input_ids: dtype is torch.bool"),
    "too large": ({"input_ids": ids([[3, 128]])}, r"input_ids: token id 128 is out of range 0 to 127.*tokenizer"),
    "negative": ({"input_ids": ids([[3, -1]])}, r"input_ids: token id -1 is out of range 0 to 127"),
    "all padding": (
        {"input_ids": ids([[3, 4], [5, 6]]), "attention_mask": ids([[1, 1], [0, 0]])},
        r"attention_mask: row 1 is all padding",
    ),
    "all padding, in bytes": (
        {"input_ids": ids([[3, 4], [5, 6]]), "attention_mask": ids([[1, 1], [0, 0]]).byte()},
        r"attention_mask: row 1 is all padding",
    ),
    "mask of another batch": (
        {"input_ids": ids([[3, 4]]), "attention_mask": ids([[1, 1], [1, 1]])},
        r"attention_mask: shape \(2, 2\).*\(1, 2\)",
    ),
    "short mask": ({"input_ids": ids([[3, 4]]), "attention_mask": ids([[1]])}, r"attention_mask: shape \(1, 1\)"),
    "long mask": ({"input_ids": ids([[3, 4]]), "attention_mask": ids([[1, 1, 1]])}, r"attention_mask: shape \(1, 3\)"),
    "flat mask": ({"input_ids": ids([[3, 4]]), "attention_mask": ids([1, 1])}, r"attention_mask: shape \(2,\)"),
    "mask as a list": ({"input_ids": ids([[3, 4]]), "attention_mask": [[1, 1]]}, r"attention_mask.*list.*tensor"),
    "too many rows": ({"input_ids": torch.full((5, 2), 3)}, r"5 rows.*max_batch_size=4.*max_batch_size=5"),
    "beyond the positions": (
        {"input_ids": torch.full((1, 20), 3), "max_new_tokens": 1005},
        r"max_new_tokens=1005.*prompt of 20 tokens.*1025.*1024 positions.*at most 1004",
    ),
    "a prompt beyond the positions": (
        {"input_ids": torch.full((1, 1030), 3), "max_new_tokens": 5},
        r"prompt of 1030 tokens.*1024 positions.*at most 0",
    ),
    "beyond the pages": (
        {"input_ids": torch.full((3, 20), 3), "max_new_tokens": 130},
        r"max_new_tokens=130: 3 rows of up to 150 tokens need 106 pages of 4 tokens, and 100 of 100 are available "
        r"\(400 tokens\).*kv_memory",
    ),
    "no new token": ({"input_ids": ids([[3, 4]]), "max_new_tokens": 0}, "max_new_tokens"),
    "fewer than none": ({"input_ids": ids([[3, 4]]), "max_new_tokens": -3}, "max_new_tokens"),
    "a max_length below the prompt": (
        {"input_ids": ids([[3, 4, 5]]), "max_new_tokens": None, "max_length": 2},
        "max_length",
    ),
    "an option nobody knows": ({"input_ids": ids([[3, 4]]), "max_new_token": 3}, "max_new_token"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_bad_prompt_is_refused_and_the_next_call_works(name, model, seed):
    options, message = PROMPTS[name]
    good = mixed_prompts([4, 2], 128, seed)
    expected = greedy(model, good, 3)
    before = model.compiled.stats()
    call = {"max_new_tokens": 4, "do_sample": False, **options}
    with pytest.raises(ValueError, match=message):
        model.generate(**call)
    with pytest.raises(ValueError, match=message):
        model.generate(call.pop("input_ids"), **call)
    after = model.compiled.stats()
    assert (after.pages, after.graphs, after.steps) == (before.pages, before.graphs, before.steps)
    assert_account_is_empty(model)
    torch.testing.assert_close(greedy(model, good, 3), expected)


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True}, {"repetition_penalty": 1.2}, {"num_beams": 2}, {"use_cache": False}],
    ids=["sampling", "processors", "beams", "no cache"],
)
@pytest.mark.parametrize("name", ["too large", "all padding", "beyond the positions"])
def test_a_bad_prompt_is_refused_on_slower_paths_too(name, options, model, seed):
    bad, message = PROMPTS[name]
    if name == "beyond the positions" and options.keys() & {"num_beams", "use_cache"}:
        pytest.skip("HuggingFace's own forward goes on beyond the positions")
    with pytest.raises(ValueError, match=message):
        model.generate(**{"max_new_tokens": 4, **bad, **options})
    if model.compiled.stats().pages is not None:
        assert_account_is_empty(model)
    assert model.generate(**mixed_prompts([4], 128, seed), max_new_tokens=2, **options).shape == (1, 6)


def test_everything_that_just_fits_is_taken(seed):
    plain = tiny_qwen3(eos_token_id=None, num_hidden_layers=1)
    model = compiled_llm.wrap(copy.deepcopy(plain), **{**OPTIONS, "kv_memory": "120 tokens"})
    for lengths, new in (([20], 100), ([27, 27, 27, 35], 1), ([1, 39, 20, 3], 13)):
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, new), greedy(plain, inputs, new))
        assert_account_is_empty(model)


def test_pages_promised_to_a_kept_cache_count(model, seed):
    inputs = mixed_prompts([300], 128, seed)
    kept = greedy(model, inputs, 3, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"need 76 pages.*\d+ of 100 are available.*drop caches you keep"):
        greedy(model, inputs, 5)
    del kept
    assert greedy(model, inputs, 5).shape == (1, 305)
