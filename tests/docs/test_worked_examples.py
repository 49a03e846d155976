"""The worked examples of CONTRIBUTING and of their page do what these say, from the code as it stands there."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

import compiled_llm
from compiled_llm import features
from compiled_llm.kinds import latent, registry, support as table, uneven
from compiled_llm.kinds.registry import CODECS
from compiled_llm_ops import backends
from compiled_llm_ops.contracts import SCALED_DTYPES
from compiled_llm_ops.reference.backend import Reference
from support.docs.pages import CHECKOUT, DOCS
from support.features import Feature, Parted, python, taken_out
from support.tiny_models import TINY, randomised, tiny_qwen3

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "400 tokens", "progress": False}
SECTION = (CHECKOUT / "CONTRIBUTING.md").read_text().partition("## Worked examples\n")[2].partition("\n## ")[0]
PAGE = (DOCS / "design" / "worked-examples.md").read_text()


def example(word: str, text: str = SECTION, language: str = "python") -> str:
    """The block of code that has a word."""
    blocks = re.findall(rf"```{language}\n(.+?)```", text, re.DOTALL)
    (code,) = (code for code in blocks if word in code)
    return str(code)


def module_of(code: str, imported: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A module of some code, which may use names that it does not import itself."""
    module = ModuleType("worked_example")
    vars(module).update({**imported, **vars(module)})
    exec(compile(code, "CONTRIBUTING.md", "exec", dont_inherit=True), vars(module))
    return module


def test_pages_of_int8(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    ((name, codec),) = module_of(example("int8")).CODECS
    monkeypatch.setitem(SCALED_DTYPES, codec.dtype, codec.largest)
    monkeypatch.setattr(Reference, "kv_dtypes", frozenset(SCALED_DTYPES))
    monkeypatch.setitem(features.FEATURES, name, [])
    monkeypatch.setitem(CODECS, name, codec)
    monkeypatch.setattr(compiled_llm.config, "KVDtype", Literal["fp8_e4m3", "int8"])
    plain, prompt = tiny_qwen3(eos_token_id=None), torch.randint(3, 30, (1, 9))
    scales = compiled_llm.kv_scales(plain, prompt.tolist())
    expected = plain(prompt).logits.detach()
    model: Any = compiled_llm.wrap(plain, kv_dtype="int8", kv_scales=scales, **OPTIONS)
    cache = model.compiled.new_cache()
    logits = torch.cat([model(token, past_key_values=cache).logits for token in prompt.split(1, dim=1)], dim=1)
    assert model.compiled.model_runner().state.pages[0].dtype == torch.int8
    assert not torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.1 * float(expected.abs().max()))


LATENTS = [12, 8]
"""Sizes of the latents of keys and of values."""


class TwoLatentAttention(LlamaAttention):
    """Attention that hands HuggingFace's cache two latents of each token, and expands what that returns."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.k_proj, self.v_proj
        self.num_key_value_groups = 1
        self.down = nn.Linear(config.hidden_size, sum(LATENTS), bias=False)
        heads = config.num_attention_heads * self.head_dim
        self.key_up, self.value_up = (nn.Linear(size, heads, bias=False) for size in LATENTS)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        shape = hidden_states.shape[:-1]
        latents = self.down(hidden_states)[:, None].split(LATENTS, dim=-1)
        if (kept := past_key_values if cache is None else cache) is not None:  # its name since transformers 5.24
            latents = kept.update(*latents, self.layer_idx)
        made = self.q_proj(hidden_states), self.key_up(latents[0][:, 0]), self.value_up(latents[1][:, 0])
        states = [own.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for own in made]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, *states, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape, -1)), weights


class TwoLatentLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = TwoLatentAttention(config, number)
        self.post_init()


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_a_kind_with_two_latents(mode: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    module = module_of(example("TwoLatents"), {**vars(uneven), **vars(latent)})
    monkeypatch.setitem(sys.modules, "worked_example", module)  # Dynamo looks for it there
    before = registry.KINDS.index(latent.Latent)
    monkeypatch.setattr(registry, "KINDS", (*registry.KINDS[:before], *module.KINDS, *registry.KINDS[before:]))
    monkeypatch.setitem(table.BY_NAME, "two latents", module_of(example("UNEVEN.cells"), vars(table)).TWO_LATENTS)
    plain = randomised(TwoLatentLlama, LlamaConfig(**{**TINY, "eos_token_id": None}), seed)
    prompts = torch.randint(3, 128, (2, 9))
    expected = plain.generate(prompts, max_new_tokens=12, do_sample=False)
    model: Any = compiled_llm.wrap(plain, **{**OPTIONS, "mode": mode})
    assert torch.equal(model.generate(prompts, max_new_tokens=12, do_sample=False), expected)
    stats = model.compiled.stats()
    assert (stats.generate_calls, stats.graph_breaks) == ({"fast loop": 1}, 0)
    assert {tuple(own.shape[1:]) for own in model.compiled.model_runner().state.pages} == {(1, 4, sum(LATENTS))}


def test_a_tap_that_records_entropy() -> None:
    tap = module_of(example("Entropy(Tap)")).Entropy()
    model: Any = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **OPTIONS)
    loop = model.compiled.generate_loop()
    loop.admit([5, 9, 3], 4)
    with loop.watched([tap]):
        for _ in range(4):
            loop.step()
    loop.close()
    assert [tuple(own.shape) for own in tap.found] == [(1,)] * 4


def changed_copy(folder: Path, own: Mapping[str, str], diff: str, most_files: int) -> Parted:
    """A copy of the packages with modules of its own, by their paths, and lines more in at most so many files."""
    parted = taken_out(Feature("", (), ()), folder)
    for file, code in own.items():
        path = parted.folder / file
        path.parent.mkdir(exist_ok=True)
        assert not path.exists()
        path.write_text(code)
    changed = diff.split("--- ")[1:]
    assert len(changed) <= most_files
    for each in changed:
        file, _, lines = each.partition("\n")
        path = parted.folder / file.removeprefix("ops/")
        path.write_text(changed_text(path.read_text(), lines))
    return parted


def changed_text(text: str, diff: str) -> str:
    """A file's text with lines of ``+``: below the one before them, or in place of all that are like one of ``-``."""
    changes = re.findall(r"^([ -])(.*\n)((?:\+.*\n)+)", diff, re.MULTILINE)
    assert sum(new.count("\n") + 1 for _, _, new in changes) == diff.count("\n")
    for sign, old, new in changes:
        count = text.count(f"\n{old}")
        assert count > 0 if sign == "-" else count == 1
        kept = "" if sign == "-" else old
        text = text.replace(f"\n{old}", f"\n{kept}{re.sub('^[+]', '', new, flags=re.MULTILINE)}")
    return text


def run_in(parted: Parted, script: str, *arguments: str) -> None:
    run = python(parted, "-c", script, str(parted.folder), *arguments)
    assert run.returncode == 0, run.stderr


ASK = """
import sys
from pathlib import Path

import torch

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.client import Client
from support.server.engine_processes import engine_that_names_its_tokenizer
from support.server.running_servers import chat_tokenizer, running_server
from support.tiny_models import tiny_qwen3

assert compiled_llm.__file__.startswith(sys.argv[1])
plain = tiny_qwen3(eos_token_id=None, num_hidden_layers=1, vocab_size=380)
prompt = [5, 6, 7]
model = compiled_llm.wrap(plain, mode="eager", kv_memory="2000 tokens", max_batch_size=4, progress=False)
with Engine(model, tokenizer=chat_tokenizer()) as engine, engine_that_names_its_tokenizer(engine) as process:
    params = SamplingParams(max_tokens=6, temperature=0.0, entropy=True)
    (without, found) = (each.outputs[0] for each in engine.generate([prompt, prompt], [SamplingParams(), params]))
    assert without.entropies is None
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + found.token_ids])).logits[0, 2:-1].float()
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(torch.tensor(found.entropies), expected, rtol=1e-4, atol=1e-4)
    with Client(process.server._path) as client:
        sent = client.generate([prompt], params)[0].outputs[0].entropies
        torch.testing.assert_close(torch.tensor(sent), expected, rtol=1e-4, atol=1e-4)
    with running_server(process.server._path) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0, "seed": 1}
        asked = {**body, "entropy": True}
        (choice,) = server.post("/v1/chat/completions", **asked)["choices"]
        chunks = [chunk["choices"][0] for chunk in server.events("/v1/chat/completions", **asked)]
        streamed = [number for chunk in chunks for number in chunk.get("entropies", [])]
        assert len(streamed) == 6
        torch.testing.assert_close(torch.tensor(streamed), torch.tensor(choice["entropies"]), rtol=1e-4, atol=1e-4)
        (choice,) = server.post("/v1/chat/completions", **body)["choices"]
        assert choice.get("entropies") is None
"""


def test_a_number_of_each_token(tmp_path: Path) -> None:
    own = {
        "compiled_llm/engine/entropy.py": example("TAP = EntropyTap"),
        "compiled_llm/client/entropy.py": example("COLUMN = EntropyColumn"),
        "compiled_llm/server/entropy/columns.py": example("WRITERS = "),
    }
    run_in(changed_copy(tmp_path, own, example("entropy", language="diff"), most_files=4), ASK)


GUESS = """
import sys

import torch

import compiled_llm
from compiled_llm import Engine, SamplingParams
from support.tiny_models import tiny_qwen3

assert compiled_llm.__file__.startswith(sys.argv[1])
prompts = [[5, 6, 7, 5, 6], [9, 8] * 6, [3], [11, 4, 4]]
few = {"max_tokens": 60, "allowed_token_ids": [7, 8]}  # so that the text repeats itself
params = [SamplingParams(temperature=0.0, **few), SamplingParams(temperature=0.3, seed=3, **few)]
model = compiled_llm.wrap(
    tiny_qwen3(eos_token_id=None), mode=sys.argv[2], kv_memory="2000 tokens", max_batch_size=8, progress=False
)


def answers(engine):
    outputs = engine.generate([*prompts, *prompts], [each for each in params for _ in prompts])
    return [output.outputs[0].token_ids for output in outputs]


with Engine(model) as engine:
    expected = answers(engine)
for method in ("successors", "ngram"):
    with Engine(model, speculative_config={"method": method, "num_speculative_tokens": 3}) as engine:
        assert answers(engine) == expected
        counts = engine.stats().drafts
        assert counts.accepted_tokens > 20, counts
try:
    Engine(model, speculative_config={"method": "eagle"})
except ValueError as error:
    assert '"successors", which guesses from pairs of tokens' in str(error)
else:
    raise AssertionError("method='eagle'")
"""


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_a_second_drafter(mode: str, tmp_path: Path) -> None:
    own = {"compiled_llm/execution/drafts/successors.py": example("SuccessorDrafter", PAGE)}
    run_in(changed_copy(tmp_path, own, example("successors", PAGE, "diff"), most_files=1), GUESS, mode)


NARROW = """
import sys

import torch

import compiled_llm
from compiled_llm import Engine, SamplingParams, StructuredOutputsParams
from compiled_llm.client import Client
from support.server.engine_processes import engine_that_names_its_tokenizer
from support.server.running_servers import chat_tokenizer, running_server
from support.tiny_models import tiny_qwen3

assert compiled_llm.__file__.startswith(sys.argv[1])
plain, tokenizer = tiny_qwen3(eos_token_id=None, vocab_size=380), chat_tokenizer()
prompts = [[5, 6, 7], [9, 8, 9, 8]]
expected = {}
for size in (None, 1, 2, 3):
    asked = {"max_new_tokens": 30, "do_sample": False, "no_repeat_ngram_size": size}
    expected[size] = [plain.generate(torch.tensor([own]), **asked)[0, len(own) :].tolist() for own in prompts]
model = compiled_llm.wrap(plain, mode="eager", kv_memory="2000 tokens", max_batch_size=8, progress=False)


def without_repeats(size, **others):
    return SamplingParams(**{"max_tokens": 30, "temperature": 0.0, "no_repeat_ngram_size": size, **others})


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


with Engine(model, tokenizer=tokenizer) as engine, engine_that_names_its_tokenizer(engine) as process:
    for size in expected:
        assert size is None or expected[size] != expected[None]
        assert answers(engine.generate(prompts, without_repeats(size))) == expected[size]
    letters = StructuredOutputsParams(regex="[a-z]{12}")
    params = [
        without_repeats(1, structured_outputs=letters, temperature=1.0, seed=3, n=2),
        SamplingParams(structured_outputs=letters, temperature=0.0, max_tokens=30),
        SamplingParams(max_tokens=30, temperature=0.0),
        without_repeats(1, allowed_token_ids=[9, 20, 21, 22]),
    ]
    narrowed, formed, free, lost = engine.generate([[9, 8]] * 4, params)
    for answer in narrowed.outputs:
        assert len(answer.text) == 12 and len(set(answer.token_ids)) == len(answer.token_ids)
    assert len(formed.outputs[0].text) == 12 and len(free.outputs[0].token_ids) == 30
    assert sorted(lost.outputs[0].token_ids) == [20, 21, 22]
    assert str(lost.outputs[0].error).startswith("no_repeat_ngram_size: no token is left after 3 new ones; see")
    with Client(process.server._path) as client:
        assert answers(client.generate(prompts, without_repeats(2))) == expected[2]
    with running_server(process.server._path) as server:
        body = {"prompt": prompts[1], "max_tokens": 30, "temperature": 0, "return_token_ids": True}
        (choice,) = server.post("/v1/completions", **body, no_repeat_ngram_size=2)["choices"]
        assert choice["token_ids"] == expected[2][1]
        assert server.post("/v1/completions", **body)["choices"][0]["token_ids"] == expected[None][1]
"""


def test_a_late_sampler(tmp_path: Path) -> None:
    own = {"compiled_llm/engine/no_repeat.py": example("NoRepeatTap", PAGE)}
    run_in(changed_copy(tmp_path, own, example("no_repeat", PAGE, "diff"), most_files=3), NARROW)


DRAW = """
import sys

import pytest
import torch

import compiled_llm
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, Sampling
from compiled_llm_ops import sample_tokens
from compiled_llm_ops.sampling.sampling import SampleTokens
from support.ops.interpreting import INTERPRETED, take_scalars_as_numbers
from support.ops.sampling_cases import arguments

assert compiled_llm.__file__.startswith(sys.argv[1])
torch.manual_seed(0)
others = [{}, {"top_k": 20}, {"top_p": 0.95}, {"top_k": 300, "top_p": 0.9}, {"min_p": 0.02}]
cases = [(top_a, each) for top_a in (0.0, 0.05, 0.5, 1.0) for each in others] * (1 if INTERPRETED else 4)
logits, seeds = 2.5 * torch.randn(len(cases), 1500), torch.randint(2**62, (len(cases),))
largest = (logits / 0.9).softmax(dim=-1).amax(dim=-1).tolist()
alike = [max(top_a * share, each.get("min_p", 0.0)) for (top_a, each), share in zip(cases, largest)]
with_min_p = [Sampling(**{"temperature": 0.9, **each, "min_p": p}) for (_, each), p in zip(cases, alike)]
expected = sample_tokens(*arguments(logits, seeds, with_min_p))
given = arguments(logits, seeds, [Sampling(temperature=0.9, top_a=top_a, **each) for top_a, each in cases])
without = arguments(logits, seeds, [Sampling(temperature=0.9, **each) for _, each in cases])
if INTERPRETED:
    from compiled_llm_ops.sampling.kernels import sampling as kernels

    take_scalars_as_numbers(pytest.MonkeyPatch())
    sampled = kernels.sample_tokens(SampleTokens(*given), NOT_A_TOKEN)
else:
    sampled = sample_tokens(*given)
assert torch.equal(sampled, expected)
assert int((sampled != sample_tokens(*without)).sum()) >= len(cases) // 8
"""
DRAW_IN_ENGINE = """
import sys

import torch

import compiled_llm
from compiled_llm import Engine, SamplingParams
from support.server.engine_processes import engine_that_names_its_tokenizer
from support.server.running_servers import chat_tokenizer, running_server
from support.tiny_models import tiny_qwen3

assert compiled_llm.__file__.startswith(sys.argv[1])
plain, prompt = tiny_qwen3(eos_token_id=None, vocab_size=380), [9, 8, 5]
model = compiled_llm.wrap(plain, mode="eager", kv_memory="2000 tokens", max_batch_size=8, progress=False)
params = SamplingParams(top_a=0.3, temperature=2.0, seed=5, max_tokens=40, logprobs=1)
with (
    Engine(model, tokenizer=chat_tokenizer(), logprobs_mode="processed_logprobs") as engine,
    engine_that_names_its_tokenizer(engine) as process,
):
    answer = engine.generate([prompt], params)[0].outputs[0]
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    shares = (logits / 2.0).softmax(dim=-1)
    kept = torch.where(shares >= 0.3 * shares.amax(dim=-1, keepdim=True) ** 2, shares, 0.0)
    assert 40 < int((kept > 0).sum()) < 380 * 40
    tokens = torch.tensor(answer.token_ids)[:, None]
    expected = (kept / kept.sum(dim=-1, keepdim=True)).gather(1, tokens)[:, 0].log()
    found = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids)]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
    with running_server(process.server._path) as server:
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 2.0, "seed": 5, "return_token_ids": True}
        (choice,) = server.post("/v1/completions", **body, top_a=0.3)["choices"]
        assert choice["token_ids"] == answer.token_ids
        (choice,) = server.post("/v1/completions", **body)["choices"]
        assert choice["token_ids"] != answer.token_ids
try:
    SamplingParams(top_a=1.5)
except ValueError as error:
    assert "top_a=1.5 must be from 0 to 1; 0 is all tokens" in str(error)
else:
    raise AssertionError("top_a=1.5")
"""


def test_a_sampling_parameter_with_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "compiled_llm_ops/sampling/top_a.py": example("torch.where(top_a", PAGE),
        "compiled_llm_ops/sampling/kernels/top_a.py": example("tl.where(top_a", PAGE),
    }
    parted = changed_copy(tmp_path, own, example("top_a", PAGE, "diff"), most_files=5)
    run_in(parted, DRAW)
    run_in(parted, DRAW_IN_ENGINE)
    if importlib.util.find_spec("triton") is not None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        run_in(parted, DRAW)


def test_a_backend_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "windowless", module_of(example("Windowless")))
    monkeypatch.setitem(backends.BACKENDS, "windowless", "windowless")
    plain, prompt = tiny_qwen3(eos_token_id=None), torch.tensor([[5, 9, 3]])
    expected = plain.generate(prompt, max_new_tokens=5, do_sample=False)
    model: Any = compiled_llm.wrap(plain, backend="windowless", **OPTIONS)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="it has no kernels for windows"):
        compiled_llm.wrap(MistralForCausalLM(config), backend="windowless", **OPTIONS)
