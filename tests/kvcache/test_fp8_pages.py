"""Pages of fp8 in whole models: tokens are those of HuggingFace's models whose keys and values are rounded alike."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import compiled_llm
from compiled_llm import Engine, KVScales, WrapConfig, kv_scales
from compiled_llm.kinds.full import Full, FullAttentionSpec
from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.registry import CODECS
from compiled_llm.kinds.scales import allocate_scales
from compiled_llm.kinds.spec import TokenPlaces
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.specs import (
    allocate_pages,
    kv_cache_specs,
    page_size_bytes,
)
from compiled_llm.model import checks
from compiled_llm_ops import Geometry
from compiled_llm_ops.backends import backend_named
from compiled_llm_ops.flashinfer.versions import missing_kernel
from compiled_llm_ops.reference.backend import Reference
from support.engine import tiny_engines
from support.fp8_oracle import clamped_in, fp8_oracle, rounded_by
from support.ops.fp8_pages import codes_of, numbers_of
from support.parity import FEW_PAGES, alone, assert_account_is_empty, greedy, mixed_prompts, next_turn
from support.tiny_models import WINDOWS, tiny_qwen3

CPU = torch.device("cpu")
TEXT = [*range(3, 120)]
FP8: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "mode": "eager", **FEW_PAGES}


def uneven_scales(model: PreTrainedModel) -> KVScales:
    """Others for each layer and head, no powers of two, and a few numbers beyond them."""
    measured = kv_scales(model, [TEXT])
    keys, values = (
        [[scale * (0.3 + 0.1 * (layer + head)) for head, scale in enumerate(heads)] for layer, heads in enumerate(part)]
        for part in (measured.keys, measured.values)
    )
    return KVScales(keys, values)


def pair(seed: int, **options: Any) -> tuple[PreTrainedModel, Any]:
    """The oracle, and a wrapped model."""
    config = {"eos_token_id": None, **options.pop("config", {})}
    scales = uneven_scales(tiny_qwen3(seed, **config))
    wrapped = compiled_llm.wrap(tiny_qwen3(seed, **config), kv_scales=scales, **{**FP8, **options})
    return fp8_oracle(tiny_qwen3(seed, **config), scales), wrapped


# ---- the spec


@pytest.mark.parametrize(("head_dim", "stored"), [(16, 16), (12, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_rounded_and_nothing_else_changes(
    dtype: torch.dtype, head_dim: int, stored: int, seed: int
) -> None:
    """Two rows of 6 and 9 tokens, the second of which lacks its first column, which a window has left."""
    generator = torch.Generator().manual_seed(seed)
    scales = KVScales([[0.01, 0.02]], [[0.005, 0.03]])
    (allocated,) = allocate_scales([Layer(4, 2, head_dim, -1, 0.0, Full())], scales, CPU)
    codec = CODECS["fp8_e4m3"]
    spec: Any = codec.coded(FullAttentionSpec(2, head_dim, stored, 4, dtype), allocated, codec.dtype)
    (memory,) = allocate_pages([spec], 9, ReleasableMemory(CPU))
    assert (memory.shape, memory.dtype) == ((9, 2, 2, 4, stored), torch.float8_e4m3fn)
    assert page_size_bytes(spec) == 2 * 2 * 4 * stored
    keys, values = (3 * torch.randn(2, 2, 9, head_dim, generator=generator).to(dtype) for _ in range(2))
    before = keys.clone()
    pages, lengths = [[3, 1], [5, 2, 7]], [6, 9]
    entries = [
        (own[at // 4], at % 4, row, 9 - length + at)
        for row, (own, length) in enumerate(zip(pages, lengths, strict=True))
        for at in range(length)
    ]
    spec.write(memory, TokenPlaces(9, *torch.tensor(entries).T), keys[:, :, 1:], values[:, :, 1:])
    assert torch.equal(keys, before)
    keys[:, :, 0], values[:, :, 0] = 0, 0
    clamped = 0
    for row, (own, length) in enumerate(zip(pages, lengths, strict=True)):
        read = spec.read(memory, torch.tensor(own), length)
        for found, states, of_heads in zip(read, (keys, values), (scales.keys, scales.values), strict=True):
            expected = rounded_by(states[row : row + 1, :, 9 - length :], of_heads[0])
            torch.testing.assert_close(found, expected.read[0].transpose(0, 1).to(dtype), rtol=0, atol=0)
            clamped += expected.clamped
    assert clamped > 0
    assert spec.scales.saturated is not None
    assert spec.scales.saturated.tolist() == [clamped]
    assert not memory[[0, 4, 6, 8]].view(torch.uint8).any()


def test_numbers_that_fp8_holds_come_back_as_they_were() -> None:
    held = numbers_of(codes_of(torch.randn(2, 1, 8, 16))) * 2.0**-5
    layers = [Layer(2, 1, 16, -1, 0.0, Full())]
    scales = allocate_scales(layers, KVScales([[2.0**-5]], [[2.0**-5]]), CPU)
    (spec,) = kv_cache_specs(layers, 4, torch.float32, backend_named("reference"), CODECS["fp8_e4m3"], scales)
    (memory,) = allocate_pages([spec], 5, ReleasableMemory(CPU))
    at = torch.arange(8)
    spec.write(memory, TokenPlaces(8, 1 + at // 4, at % 4, torch.zeros_like(at), at), held[:1], held[1:])
    keys, values = spec.read(memory, torch.tensor([1, 2]), 8)
    assert torch.equal(keys, held[0])
    assert torch.equal(values, held[1])


# ---- tokens


def test_rounding_is_seen(seed: int) -> None:
    """The oracle differs from the plain model, or the tests above would show nothing."""
    inputs = mixed_prompts([5, 19, 11, 16], 128, seed)
    assert not torch.equal(greedy(pair(seed)[0], inputs, 20), greedy(tiny_qwen3(seed), inputs, 20))


def test_without_scales_they_are_1(seed: int) -> None:
    ones = KVScales([[1.0] * 2] * 2, [[1.0] * 2] * 2)
    inputs = mixed_prompts([5, 19], 128, seed)
    expected = greedy(fp8_oracle(tiny_qwen3(seed), ones), inputs, 12)
    torch.testing.assert_close(greedy(compiled_llm.wrap(tiny_qwen3(seed), **FP8), inputs, 12), expected)


# ---- caches


def test_a_copied_cache_goes_on_alone(seed: int) -> None:
    """Forks share pages until one of them writes, which copies whole pages bit by bit."""
    _, model = pair(seed)
    inputs = mixed_prompts([6, 9], 128, seed)
    out = greedy(model, inputs, 5, return_dict_in_generate=True)
    forks = [out.past_key_values, *(copy.deepcopy(out.past_key_values) for _ in range(2))]
    words = torch.full((2, 3), 7)
    answers = []
    for fork in forks:
        out.past_key_values = fork
        answers.append(greedy(model, next_turn(inputs, out, words), 6))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_copies_of_pages_are_equal_bit_by_bit(seed: int) -> None:
    _, model = pair(seed)
    state = model.compiled.model_runner().state
    generator = torch.Generator().manual_seed(seed)
    for memory in state.pages:
        memory.view(torch.uint8).random_(0, 256, generator=generator)
    before = [memory.view(torch.uint8).clone() for memory in state.pages]
    state.copy_pages([(2, 5), (3, 6)])
    for memory, old in zip(state.pages, before, strict=True):
        found = memory.view(torch.uint8)
        assert torch.equal(found[[5, 6]], old[[2, 3]])
        found[[5, 6]] = old[[5, 6]]
        assert torch.equal(found, old)


# ---- memory


def test_pages_take_a_byte_a_number(seed: int) -> None:
    model = compiled_llm.wrap(tiny_qwen3(seed).bfloat16(), **{**FP8, "kv_memory": 2**16})
    plain = compiled_llm.wrap(tiny_qwen3(seed).bfloat16(), **{**FP8, "kv_memory": 2**16, "kv_dtype": None})
    pages = []
    for own in (model, plain):
        greedy(own, mixed_prompts([5], 128, seed), 2)
        with Engine(own) as engine:
            described = engine.describe()
        assert described.memory["pages"] <= 2**16 + described.memory["pages"] // (described.pages.total + 1)
        pages.append(described.pages.total)
        assert f"pages of 4, {described.kv_dtype})" in str(described)
        assert described.kv_dtype == ("float8_e4m3fn" if own is model else "bfloat16")
    assert pages[0] == 2 * pages[1]


# ---- scales


def test_scales_are_kept_in_a_file(tmp_path: Path) -> None:
    scales = KVScales([[0.5, 1.0], [2.0, 1e-3]], [[1.0, 1.0], [0.1, 4.0]])
    scales.save(tmp_path / "scales.json")
    assert KVScales.load(str(tmp_path / "scales.json")) == scales


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff", "is no JSON with keys and values"),
        (b"{", "is no JSON with keys and values"),
        (b"[]", "is no JSON with keys and values"),
        (b'{"keys": [[1]]}', "is no JSON with keys and values"),
        (b'{"keys": [[1]], "values": [[NaN]]}', r"values\[0\]\[0\] is nan"),
    ],
)
def test_files_that_hold_no_scales_are_refused(written: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    if written is not None:
        file.write_bytes(written)
    with pytest.raises(ValueError, match=f"^kv_scales: .*{message}"):
        KVScales.load(file)


def test_scales_are_the_largest_numbers_rounded_up_to_powers_of_two(seed: int) -> None:
    plain = tiny_qwen3(seed, **WINDOWS)
    prompts = [TEXT[:40], torch.tensor(TEXT[30:])]
    scales = kv_scales(plain, prompts)
    largest = [torch.zeros(2, 2) for _ in range(2)]
    for prompt in prompts:
        cache = DynamicCache()
        tiny = tiny_qwen3(seed, **WINDOWS)
        tiny(torch.as_tensor(prompt)[None], past_key_values=cache)
        for part, name in enumerate(("keys", "values")):
            seen = torch.stack([getattr(layer, name)[0].abs().amax((1, 2)) for layer in cache.layers])
            largest[part] = torch.maximum(largest[part], seen)
    for found, wanted in zip((scales.keys, scales.values), largest, strict=True):
        times = torch.tensor(found) * 448 / wanted
        assert ((times >= 1) & (times < 2)).all()
        assert (torch.tensor(found).log2() % 1 == 0).all()
    assert kv_scales(compiled_llm.wrap(plain, **FP8), prompts) == scales


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[]], r"prompts\[0\] must be token ids of one text"),
        ([[5], torch.ones(1, 3, dtype=torch.long)], r"prompts\[1\] must be token ids of one text"),
        (torch.ones(1, 3), r"prompts\[0\] must be token ids"),
    ],
)
def test_prompts_that_are_none_are_refused(prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_scales(tiny_qwen3(0), prompts)


def test_scales_of_a_model_that_computes_nan_are_refused() -> None:
    model = tiny_qwen3(0)
    torch.nn.init.constant_(model.model.layers[1].self_attn.v_proj.weight, float("nan"))
    with pytest.raises(ValueError, match="keys or values of layer 1 are not finite"):
        kv_scales(model, [TEXT])


def test_clamped_numbers_are_counted(seed: int) -> None:
    """Of two rows, to which no padding is added."""
    scales = KVScales([[1e-3] * 2] * 2, [[5e-4] * 2] * 2)
    endless = {"eos_token_id": None}
    model = compiled_llm.wrap(tiny_qwen3(seed, **endless), kv_scales=scales, **FP8)
    oracle, total = fp8_oracle(tiny_qwen3(seed, **endless), scales), 0
    assert model.compiled.stats().kv_saturated == 0
    for length in (9, 17):
        inputs = mixed_prompts([length, length], 128, seed)
        texts = greedy(oracle, inputs, 8)
        assert torch.equal(greedy(model, inputs, 8), texts)
        total += sum(clamped_in(oracle, text[:-1].tolist(), scales) for text in texts)
        assert model.compiled.stats().kv_saturated == total
    assert total > 1000
    assert f"{total} numbers of keys and values were too large" in str(model.compiled.stats())
    with Engine(model) as engine:  # a count outlives its model runner
        engine.sleep()
        engine.wake()
        assert model.compiled.stats().kv_saturated == total


def test_new_scales_empty_the_prefix_cache_and_nothing_is_compiled(seed: int) -> None:
    first, model = pair(seed)
    others = kv_scales(tiny_qwen3(seed), [TEXT])
    prompt, running = TEXT[:41], TEXT[50:80]
    with Engine(model) as engine:
        params = tiny_engines.greedy(9)
        for cached in (0, 40):
            (output,) = engine.generate([prompt], params)
            assert (output.cached_tokens, output.outputs[0].token_ids) == (cached, alone(first, prompt, 9))
        handle = engine.submit(running, tiny_engines.greedy(400))
        next(iter(handle))
        model.compiled.set_kv_scales(others)
        assert model.compiled.config.kv_scales == others
        second = fp8_oracle(tiny_qwen3(seed, eos_token_id=None), others)
        for cached in (0, 40):
            (output,) = engine.generate([prompt], params)
            assert (output.cached_tokens, output.outputs[0].token_ids) == (cached, alone(second, prompt, 9))
        assert len(handle.result(tiny_engines.PATIENCE).outputs[0].token_ids) == 400
        engine.sleep()
        engine.wake()
        assert engine.generate([prompt], params)[0].outputs[0].token_ids == alone(second, prompt, 9)
    inputs = mixed_prompts([5, 9], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, 9), greedy(second, inputs, 9))
    assert model.compiled.stats().recompiles == 0
    assert_account_is_empty(model)


def test_new_scales_are_refused_while_a_cache_has_pages(seed: int) -> None:
    oracle, model = pair(seed)
    inputs = mixed_prompts([5, 9], 128, seed)
    out = greedy(model, inputs, 5, return_dict_in_generate=True)
    with pytest.raises(RuntimeError, match=r"set_kv_scales: caches hold .* pages"):
        model.compiled.set_kv_scales(kv_scales(tiny_qwen3(seed), [TEXT]))
    assert model.compiled.config.kv_scales == oracle.config.fp8_oracle
    assert torch.equal(out.sequences, greedy(oracle, inputs, 5))
    assert torch.equal(greedy(model, inputs, 5), out.sequences)
    del out
    gc.collect()
    model.compiled.set_kv_scales(kv_scales(tiny_qwen3(seed), [TEXT]))


# ---- bad input


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ([[1.0, float("nan")]], [[1.0, 1.0]], r"keys\[0\]\[1\] is nan; scales are from 1e-30"),
        ([[1.0, 1.0]], [[0.0, 1.0]], r"values\[0\]\[0\] is 0.0"),
        ([[1.0, 1.0]], [[1.0, -2.0]], r"values\[0\]\[1\] is -2.0"),
        ([[1.0, float("inf")]], [[1.0, 1.0]], r"keys\[0\]\[1\] is inf"),
        ([1.0, 2.0], [[1.0, 1.0]], r"keys must be numbers, \[layers\]\[kv heads\]; got \[1.0, 2.0\]"),
        ([["a"]], [[1.0]], "keys must be numbers"),
        ([], [], "keys must have a scale for each layer"),
        ([[1.0]], [[]], "values must have a scale for each layer"),
    ],
)
def test_scales_that_are_none_are_refused(keys: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVScales(keys, values)


def test_scales_may_be_tensors() -> None:
    assert KVScales(torch.full((2, 1), 0.5), [torch.ones(1), torch.ones(1)]) == KVScales([[0.5]] * 2, [[1.0]] * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "fp8"}, "kv_dtype='fp8': must be 'fp8_e4m3', or None"),
        ({"kv_dtype": "fp8_e4m3", "kv_scales": 0.5}, "kv_scales=0.5: must be KVScales"),
        ({"kv_scales": KVScales([[1.0]], [[1.0]])}, "kv_scales without kv_dtype"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WrapConfig(**options)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ([[1.0, 1.0]], [[1.0, 1.0]], "scales of keys for 1 layers, and the model has 2"),
        ([[1.0, 1.0]] * 2, [[1.0, 1.0]] * 3, "scales of values for 3 layers, and the model has 2"),
        ([[1.0, 1.0], [1.0]], [[1.0, 1.0]] * 2, "1 scales of keys for layer 1, which has 2 kv heads"),
    ],
)
def test_scales_of_another_shape_are_refused_and_the_next_call_works(keys: Any, values: Any, message: str) -> None:
    model, scales = tiny_qwen3(0), KVScales(keys, values)
    with pytest.raises(ValueError, match=f"wrap: kv_scales has {message}"):
        compiled_llm.wrap(model, kv_scales=scales, **FP8)
    inputs = mixed_prompts([5], 128, 0)
    expected = greedy(compiled_llm.wrap(model, **FP8), inputs, 6)
    with pytest.raises(ValueError, match=f"set_kv_scales: kv_scales has {message}"):
        model.compiled.set_kv_scales(scales)
    assert torch.equal(greedy(model, inputs, 6), expected)


def test_new_scales_are_refused_where_pages_have_none() -> None:
    model = compiled_llm.wrap(tiny_qwen3(0), mode="eager", **FEW_PAGES)
    with pytest.raises(ValueError, match="wrapped without kv_dtype"):
        model.compiled.set_kv_scales(KVScales([[1.0] * 2] * 2, [[1.0] * 2] * 2))
    with pytest.raises(TypeError, match="set_kv_scales: give KVScales"):
        model.compiled.set_kv_scales([[1.0]])


class Placed:
    """What the checks look at of a model on a GPU."""

    device, dtype = torch.device("cuda:1"), torch.bfloat16

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(device=self.device, requires_grad=False)]


@pytest.mark.parametrize(("capability", "refused"), [((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_gpus_without_fp8_are_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: Any = Placed()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(checks, "cuda_is_lost", lambda: False)
    config = {"backend": "reference", "mode": "eager"}
    message = "kv_dtype='fp8_e4m3' needs compute capability 8.9 or newer, and cuda:1 has 8.6"
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        checks.check_placement(placed, WrapConfig(kv_dtype="fp8_e4m3", **config))
    checks.check_placement(placed, WrapConfig(**config))


def test_a_backend_without_kernels_for_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "kv_dtypes", frozenset())
    with pytest.raises(ValueError, match="kv_dtype='fp8_e4m3': backend='reference' has no kernels for such pages"):
        compiled_llm.wrap(tiny_qwen3(0), **FP8)
    compiled_llm.wrap(tiny_qwen3(0), **{**FP8, "kv_dtype": None})


def test_the_backend_is_asked_for_kernels_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    monkeypatch.setattr(
        Reference, "missing_kernel", lambda self, geometry: asked.append(geometry.kv_dtype) or "it has none"
    )
    with pytest.raises(UnsupportedModelError, match="cannot run attention layer 0: it has none"):
        compiled_llm.wrap(tiny_qwen3(0), **FP8)
    assert asked[0] == torch.float8_e4m3fn


def test_flashinfer_has_no_kernel_for_the_largest_heads() -> None:
    geometry = Geometry(4, 2, 512, 16, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn)
    assert "no kernel for heads of size 512 in pages of torch.float8_e4m3fn" in str(missing_kernel(geometry))
    assert missing_kernel(geometry._replace(head_dim=256)) is None


def test_decode_steps_may_be_planned(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    oracle, model = pair(seed)
    inputs = mixed_prompts([5, 19, 11], 128, seed)
    torch.testing.assert_close(greedy(model, inputs, 12), greedy(oracle, inputs, 12))
