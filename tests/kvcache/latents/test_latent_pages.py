"""Models of multi-head latent attention over pages of latents: HuggingFace's tokens, and nothing expanded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine, WrapConfig
from compiled_llm.kinds.full import Full
from compiled_llm.kinds.indexers.chosen import ChosenTokens
from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.latent import Latent
from compiled_llm.kinds.latent_probe import Expansion
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.spec import JoinedSpec, TokenPlaces
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.specs import allocate_pages, page_size_bytes
from compiled_llm.model.checks import check_layers, on_fastest_backend
from support.engine import tiny_engines
from support.latent_models import PLAIN, RANK, ROPE, VALUE, YARN, latent_model, needs_latents
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts

pytestmark = needs_latents


UP = Expansion("up", 128, 128)


def pair(seed: int, mode: Any = "eager", family: str = "DeepseekV3", **config: Any) -> tuple[PreTrainedModel, Any]:
    plain = latent_model(family, seed, **config)
    return plain, compiled_llm.wrap(latent_model(family, seed, **config), mode=mode, **FEW_PAGES)


# ---- the spec


def test_pages_hold_a_latent_and_its_rotated_part(seed: int) -> None:
    spec = JoinedSpec(6, 3, 4, torch.float32)
    (memory,) = allocate_pages([spec], 5, ReleasableMemory(torch.device("cpu")))
    assert memory.shape == (5, 4, 9)
    assert page_size_bytes(spec) == 4 * 9 * 4
    latents, rotated = torch.randn(2, 1, 7, 6), torch.randn(2, 1, 7, 3)
    places = TokenPlaces(7, *torch.tensor([(3, 1, 0, 6), (3, 2, 1, 0), (1, 0, 1, 6)]).T)
    spec.write(memory, places, latents, rotated)
    assert torch.equal(memory[3, 1], torch.cat([latents[0, 0, 6], rotated[0, 0, 6]]))
    assert torch.equal(memory[3, 2], torch.cat([latents[1, 0, 0], rotated[1, 0, 0]]))
    read, parts = spec.read(memory, torch.tensor([3, 1]), 5)
    assert (read.shape, parts.shape) == ((1, 5, 6), (1, 5, 3))
    assert torch.equal(read[0, 4], latents[1, 0, 6])
    assert torch.equal(parts[0, 4], rotated[1, 0, 6])


# ---- the same tokens


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "queries without a latent": {"q_lora_rank": None},
    "halves rotated": {"rope_interleave": False},
    "yarn": {"rope_parameters": YARN},
    "values larger than keys": {"v_head_dim": 40},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_huggingfaces(case: str, seed: int) -> None:
    """Alone and in batches, on and beside page boundaries of 4 tokens; some rows end early."""
    check_tokens(*pair(seed, **CASES[case]), seed)


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("family", ["AXK1", "DeepseekV2", "Glm4MoeLite", "MiniCPM3", "Mistral4", "Youtu"])
def test_families_keep_latents(family: str, seed: int) -> None:
    plain, model = pair(seed, family=family)
    kept = Latent(Expansion("kv_b_proj", PLAIN, VALUE), ROPE)
    assert [layer.kind for layer in model.compiled.facts.layers] == [kept] * 3
    check_tokens(plain, model, seed, [[5, 19, 11, 16]])


def check_tokens(
    plain: PreTrainedModel, model: Any, seed: int, batches: Sequence[list[int]] = ([5], [4, 8, 1, 5, 19, 11, 16])
) -> None:
    for lengths in batches:
        inputs = mixed_prompts(lengths, 128, seed)
        expected = greedy(plain, inputs, 12)
        torch.testing.assert_close(greedy(model, inputs, 12), expected)
    early = {"eos_token_id": int(expected[0, -8]), "pad_token_id": 0}
    torch.testing.assert_close(greedy(model, inputs, 12, **early), greedy(plain, inputs, 12, **early))
    stats = model.compiled.stats()
    assert (stats.generate_calls, stats.recompiles) == ({"fast loop": len(batches) + 1}, 0)
    assert_account_is_empty(model)


def test_new_weights_are_read(seed: int) -> None:
    """Halves of the projection are views: a weight that changes in place, or is replaced, counts at once."""
    plain, model = pair(seed)
    inputs = mixed_prompts([5, 9], 128, seed)
    before = greedy(model, inputs, 8)
    for own in (plain, model):
        projection = own.model.layers[1].self_attn.kv_b_proj
        with torch.no_grad():
            projection.weight.mul_(-1.5)
        own.model.layers[2].self_attn.kv_b_proj.weight = nn.Parameter(projection.weight.detach() * 0.5)
    after = greedy(model, inputs, 8)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, greedy(plain, inputs, 8))


# ---- what it takes


def test_a_token_takes_one_latent_a_layer(seed: int) -> None:
    _, model = pair(seed)
    with Engine(model) as engine:
        engine.generate([[5, 6, 7]], tiny_engines.greedy(2))
        described = engine.describe()
    assert described.kv_numbers_per_token == 3 * (RANK + ROPE)
    assert f"{3 * (RANK + ROPE)} numbers\n" in str(described)
    assert described.memory["pages"] == 3 * 4 * (RANK + ROPE) * 4 * (described.pages.total + 1)


def test_cached_tokens_are_never_expanded_and_weights_not_copied(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair(seed)
    cache = greedy(model, mixed_prompts([40], 128, seed), 1, return_dict_in_generate=True)
    halves = Expansion("kv_b_proj", PLAIN, VALUE).halves(model.model.layers[0].self_attn)
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    assert {half.untyped_storage().data_ptr() for half in halves} == {weight.untyped_storage().data_ptr()}
    weights = model.compiled.stats().memory["weights"]
    assert weights == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    ids = torch.cat([cache.sequences, torch.tensor([[7, 8]])], dim=1)
    linear, expanded = nn.functional.linear, []

    def noted(states: Tensor, own: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear(states, own, bias)
        if own.shape == weight.shape:
            expanded.append(out.nbytes)
        return out

    monkeypatch.setattr(nn.functional, "linear", noted)
    greedy(model, {"input_ids": ids}, 6, past_key_values=cache.past_key_values)
    token = 4 * (PLAIN + VALUE) * weight.element_size()
    assert expanded
    assert max(expanded) <= 4 * token, "three new tokens, and one of padding, alone"
    expanded.clear()
    greedy(model, mixed_prompts([40, 30], 128, seed), 6)
    assert max(expanded) == 70 * token, "once for each token of new rows"


# ---- what is refused


def refuses(model: PreTrainedModel, message: str, **options: Any) -> None:
    before = type(model)
    with pytest.raises(UnsupportedModelError, match=message):
        compiled_llm.wrap(model, **{"mode": "eager", **FEW_PAGES, **options})
    assert type(model) is before
    greedy(model, {"input_ids": torch.tensor([[5, 6]])}, 2)


def test_a_projection_that_cannot_be_absorbed_is_named() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 0.1 * nn.functional.linear(input, self.weight)

    def biased(own: nn.Linear) -> nn.Module:
        made = nn.Linear(own.in_features, own.out_features)
        made.weight = own.weight
        return made

    def doubled(own: nn.Linear) -> nn.Module:
        own.__class__ = Doubled
        return own

    for change in (biased, doubled):
        model = latent_model()
        attention = model.model.layers[1].self_attn
        attention.kv_b_proj = change(attention.kv_b_proj)
        refuses(model, r"attention layer 1 keeps something else .*latents of size 32 and 8, .*one nn\.Linear")


@pytest.mark.parametrize("wrong", ["keys last", "norm after"])
def test_another_expansion_of_the_same_sizes_is_found_by_its_numbers(wrong: str) -> None:
    model = latent_model()
    for layer in model.model.layers:
        attention, expand = layer.self_attn, layer.self_attn.expand_kv

        def other(latent: Tensor, rope: Tensor, expand: Any = expand) -> tuple[Tensor, Tensor]:
            key, value = expand(latent, rope)
            return (key.roll(ROPE, -1), value) if wrong == "keys last" else (key, nn.functional.normalize(value))

        attention.expand_kv = other
    which = "keys" if wrong == "keys last" else "values"
    refuses(model, f"the {which} of attention layer 0 are not its latents times kv_b_proj")


def test_an_adapter_that_comes_later_is_refused(seed: int) -> None:
    _, model = pair(seed)
    inputs = mixed_prompts([5], 128, seed)
    greedy(model, inputs, 2)

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, states: Tensor) -> Tensor:
            return self.base(states) * 2

    attention = model.model.layers[1].self_attn
    attention.kv_b_proj = Adapted(attention.kv_b_proj)
    with pytest.raises(UnsupportedModelError, match=r"kv_b_proj of DeepseekV3Attention has become a Adapted"):
        greedy(model, inputs, 2)


class Placed:
    device, dtype = torch.device("cuda:0"), torch.bfloat16


def test_what_a_gpu_has_no_kernel_for_is_refused_by_its_numbers() -> None:
    model: Any = Placed()
    latent = Layer(16, 1, 512, -1, 0.0, Latent(UP, 64))
    for options in ({}, {"backend": "flashinfer"}):
        check_layers(model, [latent], WrapConfig(**options))
    for changes, options, message in (
        ({"head_dim": 96}, {}, "no kernel for R=96; there are some for powers of two, 16 to 512"),
        ({"kind": Latent(UP, 8)}, {}, "no kernel for E=8"),
        (
            {},
            {"backend": "reference"},
            "backend='reference' cannot run .* 0: it has no kernels for latents",
        ),
        ({"head_dim": 256}, {"backend": "flashinfer"}, r"FlashInfer has no kernel for latents of 256 \+ 64 numbers"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            check_layers(model, [latent._replace(**changes)], WrapConfig(**options))
    check_layers(model, [latent], WrapConfig(backend="triton"))  # by the ops that need no plan, as with "auto"


@pytest.mark.usefixtures("problems")
def test_auto_is_the_backend_that_is_faster_for_so_many_heads() -> None:
    model: Any = Placed()
    for heads, size, given, expected in (
        (16, 512, "auto", "auto"),
        (20, 512, "auto", "auto"),
        (32, 512, "auto", "auto"),
        (64, 512, "auto", "flashinfer"),
        (128, 512, "auto", "flashinfer"),
        (128, 256, "auto", "auto"),
        (128, 512, "reference", "reference"),
    ):
        layer = Layer(heads, 1, size, -1, 0.0, Latent(UP, 64))
        assert on_fastest_backend(WrapConfig(backend=given), [layer] * 2, model).backend == expected
    assert on_fastest_backend(WrapConfig(), [layer._replace(kind=ChosenTokens(layer.kind))], model).backend == "auto", (
        "it reads chosen tokens"
    )
    plain = Layer(128, 128, 64, -1, 0.0, Full())
    assert on_fastest_backend(WrapConfig(), [plain], model).backend == "auto"
    assert on_fastest_backend(WrapConfig(), [layer], pair(0)[0]).backend == "auto", "on a CPU"
