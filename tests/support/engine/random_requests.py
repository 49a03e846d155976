"""Random requests, and what they are asked of: kinds of layers, of weights, and modes; answers that must be equal."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from compiled_llm.config import Mode
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.sampling_settings import COMBINED, ENDS, GREEDY, VOCABULARY, together
from support.engine.tiny_engines import PATIENCE
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.execution.stand_in_piecewise import let_a_cpu_capture_pieces
from support.huggingface.families import FAMILIES, make
from support.huggingface.recurrent_families import recurrent_model
from support.indexed_models import block_model, indexed_model
from support.latent_models import latent_model
from support.tiny_models import tiny_qwen3
from support.uneven_heads import uneven_llama

WORDS: dict[str, Any] = {"eos_token_id": ENDS, "vocab_size": VOCABULARY}

SOME = ("repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids", "structured_outputs", "ignore_eos")


def requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of one to three chunks, some of which begin alike, with settings of every kind."""
    chance = random.Random(seed)
    shared = [chance.randrange(3, VOCABULARY) for _ in range(40)]
    found = []
    for number in range(count):
        ids = shared[: chance.choice([0, 0, 32, 40])]
        ids = ids + [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(1, 50))]
        params = together(COMBINED).params if chance.random() < 0.1 else GREEDY[chance.choice(SOME)].params
        drawn = {"temperature": 0.0} if chance.random() < 0.6 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
        scored = chance.choice([{}, {}, {"logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 2}])
        found.append((ids, SamplingParams(**{"max_tokens": chance.randint(10, 24), **params, **drawn, **scored})))
    return found


def answers(engine: Engine, asked: list[tuple[list[int], SamplingParams]], seed: int) -> list[RequestOutput]:
    """Requests come while others run, and some are cancelled; those are left out."""
    chance = random.Random(seed)
    handles = []
    for ids, params in asked:
        handles.append(engine.submit(ids, params, priority=chance.choice([0, 0, 1])))
        if chance.random() < 0.4:
            next(iter(handles[-1]))
        if chance.random() < 0.1:
            engine.submit(ids[::-1], params).cancel()
    return [handle.result(PATIENCE) for handle in handles]


def assert_same(output: RequestOutput, expected: RequestOutput, within: float = 1e-3) -> None:
    """The tokens are equal, and log-probabilities ``within`` so much."""
    answer, wanted = output.outputs[0], expected.outputs[0]
    assert (answer.token_ids, answer.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    for scores, others in ((answer.logprobs, wanted.logprobs), (output.prompt_logprobs, expected.prompt_logprobs)):
        assert (scores is None) == (others is None)
        for place, other in zip(scores or (), others or (), strict=True):
            assert (place is None) == (other is None)
            values = [
                {} if of is None else {token: entry.logprob for token, entry in of.items()} for of in (place, other)
            ]
            assert values[0] == pytest.approx(values[1], abs=within)


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    **{
        family: lambda family=family: make(family, {**FAMILIES[family], **WORDS}, 0)  # type: ignore[misc]
        for family in ("Gemma2", "Gemma3", "GptOss", "Qwen2Moe")
    },
    "GPT2LMHead": lambda: make("GPT2LMHead", {**FAMILIES["GPT2LMHead"], **WORDS, "n_layer": 1}, 0),
    "values that are no keys": lambda: uneven_llama(**WORDS),
    "latents": lambda: latent_model(**WORDS),
}
"""Soft caps and windows in some layers, windows in all, sinks, experts, learned positions, values of another size
than the keys, and latents.
"""


CHOOSING: dict[str, Callable[[], PreTrainedModel]] = {
    "chosen tokens": lambda: indexed_model(**WORDS, max_position_embeddings=256),
    "chosen blocks": lambda: block_model(**WORDS, max_position_embeddings=256),
}
"""Layers with indexers, which newer versions of transformers have."""


KEEPING_STATES: dict[str, Callable[[], PreTrainedModel]] = {
    "recurrent layers": lambda: recurrent_model("Qwen3_5", **WORDS),
    "recurrent and attending": lambda: recurrent_model("FalconH1", **WORDS),
    "recurrent layers alone": lambda: recurrent_model("Mamba2", **WORDS),
}
"""Layers of which a row has a state."""


CAPTURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "cuda-graphs": let_a_cpu_capture,
    "piecewise": let_a_cpu_capture_pieces,
}
MODES = [pytest.param(mode, marks=[pytest.mark.whole] * (mode not in CAPTURES)) for mode in get_args(Mode)[1:]]
"""All but "eager", in which the other tests run; on a CPU, "reduce-overhead" is "compile"."""


def adapted(merged: bool, **config: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapter: Any = get_peft_model(tiny_qwen3(**WORDS, **config), lora).eval()
    if merged:
        adapter.merge_adapter()
    model: PreTrainedModel = adapter.get_base_model()
    return model


def of_16_bits() -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated in favour of torchao
        model: PreTrainedModel = torch.ao.quantization.quantize_dynamic(
            tiny_qwen3(**WORDS), {nn.Linear}, dtype=torch.float16
        )
    return model


def of_8_bits() -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_qwen3(**WORDS)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


WEIGHTS: dict[str, Callable[[], PreTrainedModel]] = {
    "an adapter": lambda: adapted(merged=False),
    "a merged adapter": lambda: adapted(merged=True),
    "16 bits": of_16_bits,
    "8 bits": of_8_bits,
}
"""No quantised activations: what they are rounded to depends on all that is computed in a launch."""


BY_WEIGHTS = [pytest.param(name, marks=[pytest.mark.whole] * (name != "an adapter")) for name in WEIGHTS]


def cases_read_early_and_late(*cases: str) -> list[Any]:
    """Each case with tokens that are read at once, and a step late; in turn, one of both with ``--whole`` alone."""
    found = []
    for number, case in enumerate(cases):
        for late, said in enumerate(("read at once", "read a step late")):
            marks = [pytest.mark.whole] * (number % 2 == late)
            found.append(pytest.param(case, bool(late), id=f"{case}, {said}", marks=marks))
    return found
