"""lm-eval gets the same choices, flags and texts by our model as by its own of the same weights."""

from __future__ import annotations

import copy
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import compiled_llm
from support.engine.text_tokenizers import SAMPLES, byte_level
from support.imports import CHECKOUT
from support.tiny_models import tiny_qwen3

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from compiled_llm.integrations.lm_eval import model as ours

POSITIONS = 256
GIVEN: dict[str, Any] = {"device": "cpu", "batch_size": 4, "max_length": POSITIONS}


def harness(model: PreTrainedModel, kind: Any = None, **given: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return (kind or HFLM)(pretrained=model, tokenizer=byte_level(), **{**GIVEN, **given})


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny_qwen3(vocab_size=len(byte_level()), max_position_embeddings=POSITIONS, eos_token_id=1)


@pytest.fixture(scope="module")
def theirs(plain: PreTrainedModel) -> Any:
    return harness(plain)


@pytest.fixture(scope="module")
def lm(plain: PreTrainedModel) -> Iterator[Any]:
    made = harness(copy.deepcopy(plain), ours.CompiledLM, mode="eager", kv_memory="4000 tokens", max_num_seqs=8)
    yield made
    made.engine.close()


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def texts(count: int, seed: int, longest: int = 90) -> list[str]:
    draw, words = random.Random(seed), "".join(SAMPLES)
    return [words[(at := draw.randrange(60)) : at + draw.randint(5, longest)] for _ in range(count)]


@pytest.fixture
def count(whole: bool) -> int:
    """How many texts a test asks about."""
    return 75 if whole else 12


def test_choices_have_the_same_scores_and_flags(lm: Any, theirs: Any, count: int, seed: int) -> None:
    """Four choices of each question, and examples that questions share; some are as likely as any token."""
    shots = "The fox is quick.\nThe dog is lazy.\n"
    pairs: list[tuple[Any, ...]] = [
        (f"{shots}{question}", f" {choice}") for question in texts(count, seed) for choice in texts(4, seed, 12)
    ]
    greedy = theirs.generate_until(requests("generate_until", [(pairs[0][0], {"until": [], "max_gen_toks": 3})]))
    pairs += [("", " x"), (pairs[0][0], greedy[0]), ("x", texts(1, 3, 90)[0])]
    before = lm.engine.stats().cached_tokens
    found = lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    expected = theirs.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [flag for _, flag in found] == [flag for _, flag in expected]
    assert lm.engine.stats().cached_tokens > before + count * 3 * len(shots) // 4, "what choices share is computed once"


def test_texts_longer_than_the_model_are_scored_alike(lm: Any, theirs: Any, whole: bool, seed: int) -> None:
    asked = [(text * 9,) for text in texts(300 if whole else 8, seed)]
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", asked), disable_tqdm=True)
    assert found == pytest.approx(
        theirs.loglikelihood_rolling(requests("loglikelihood_rolling", asked), disable_tqdm=True), abs=1e-3, rel=1e-6
    )


@pytest.mark.parametrize("length", [POSITIONS - 1, POSITIONS, POSITIONS + 1, POSITIONS + 40])
def test_a_context_is_cut_from_the_left(lm: Any, theirs: Any, length: int) -> None:
    ids = (byte_level()("".join(SAMPLES) * 4)["input_ids"] * 4)[:length]
    asked = [(("", ""), ids[:-5], ids[-5:])]
    (found,), (expected,) = (each._loglikelihood_tokens(asked, disable_tqdm=True) for each in (lm, theirs))
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert found[1] == expected[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"until": ["\n", "z"], "max_gen_toks": 12},
        {"until": "e", "max_new_tokens": 20, "do_sample": False, "temperature": 0.7},
        {"until": [], "max_gen_toks": 9, "repetition_penalty": 1.3},
        {"until": ["a"], "max_gen_toks": 6, "num_beams": 2},  # by HuggingFace's beams
    ],
    ids=repr,
)
def test_texts_are_answered_alike(lm: Any, theirs: Any, settings: dict[str, Any], count: int, seed: int) -> None:
    asked = requests("generate_until", [(text, settings) for text in [*texts(count, seed), "x" * (POSITIONS + 9)]])
    assert lm.generate_until(asked, disable_tqdm=True) == theirs.generate_until(asked, disable_tqdm=True)


def test_thinking_is_left_out_alike(lm: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    asked = requests("generate_until", [(text, {"until": [], "max_gen_toks": 20}) for text in texts(6, seed)])
    plain = theirs.generate_until(asked, disable_tqdm=True)
    end = byte_level()(plain[0])["input_ids"][4]
    for ends in (end, byte_level().decode([end])):
        for each in (lm, theirs):
            monkeypatch.setattr(each, "think_end_token", ends)
        found = lm.generate_until(asked, disable_tqdm=True)
        assert found == theirs.generate_until(asked, disable_tqdm=True)
        assert found != plain


def test_sampling_is_the_engines(lm: Any, seed: int) -> None:
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    asked = requests("generate_until", [("the quick", settings)] * 4)
    assert len(set(lm.generate_until(asked, disable_tqdm=True))) > 1


def test_arguments_go_to_whom_they_belong(plain: PreTrainedModel) -> None:
    import inspect

    from lm_eval.models.huggingface import HFLM

    of_theirs = set(inspect.signature(HFLM.__init__).parameters) - {"self", "pretrained", "tokenizer"}
    assert not of_theirs & (ours.OF_ENGINE | ours.OF_WRAP)
    wrapped = compiled_llm.wrap(copy.deepcopy(plain), mode="eager")
    with pytest.raises(ValueError, match=r"mode: the model is already wrapped; give them to compiled_llm\.wrap"):
        harness(wrapped, ours.CompiledLM, mode="eager")
    made = harness(wrapped, ours.CompiledLM, batch_size="auto")
    assert made.loglikelihood_rolling(requests("loglikelihood_rolling", [("the fox",)]), disable_tqdm=True)[0] < 0
    made.engine.close()


def test_no_room_for_a_prompt_is_said_before_anything_runs(lm: Any) -> None:
    asked = requests("generate_until", [("x", {"until": [], "max_gen_toks": POSITIONS})])
    with pytest.raises(ValueError, match=f"max_gen_toks={POSITIONS}: leaves no room for a prompt"):
        lm.generate_until(asked, disable_tqdm=True)


def test_lm_eval_finds_it_by_name(plain: PreTrainedModel, tmp_path: Path) -> None:
    """As `compiled-llm lm-eval run --model compiled_llm --model_args pretrained=FOLDER,mode=eager` does."""
    from lm_eval.api.registry import get_model

    from compiled_llm.commands.lm_eval import NAME, add_to_registry

    plain.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    add_to_registry()
    assert "hf" in get_model.__globals__["model_registry"], "lm-eval's own models are there, too"
    made = get_model(NAME).create_from_arg_string(
        f"pretrained={tmp_path},mode=eager,dtype=float32", {"batch_size": 1, "device": "cpu"}
    )
    assert isinstance(made, ours.CompiledLM)
    assert made.loglikelihood(requests("loglikelihood", [("the", " fox")]), disable_tqdm=True)[0][0] < 0
    made.engine.close()


def test_the_line_for_lm_evals_own_list_fits(tmp_path: Path) -> None:
    import lm_eval

    listed = Path(lm_eval.__file__).parent / "models" / "__init__.py"
    (tmp_path / "lm_eval" / "models").mkdir(parents=True)
    copied = Path(shutil.copy(listed, tmp_path / "lm_eval" / "models"))
    patch = CHECKOUT / "compiled_llm/integrations/lm_eval/lm_eval.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    found: dict[str, Any] = {}
    exec(copied.read_text().partition("def _register")[0], found)
    assert found["MODEL_MAPPING"]["compiled_llm"] == "compiled_llm.integrations.lm_eval.model:CompiledLM"
    assert len(found["MODEL_MAPPING"]) == len(__import__("lm_eval.models", fromlist=[""]).MODEL_MAPPING) + 1
