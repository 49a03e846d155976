"""Each feature of ``generate`` and ``forward``, as a call: what docs/paths.md lists, and what test_paths.py runs.

``python tests/support/huggingface/generate_features.py`` writes the tables of the page again, from what the calls do.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import output_capturing

import compiled_llm
from compiled_llm.execution.reporting.slow_paths import WORDINGS
from support.huggingface import vision
from support.huggingface.callbacks import Halve, LaterLength, SecondEos, Silent, Until
from support.huggingface.feature_calls import (
    Call,
    a_step_over_a_cache,
    a_step_over_theirs,
    assistant,
    batched,
    by_a_grammar,
    changed,
    checkpointing,
    compiled_by_the_user,
    drawn,
    dynamic_cache,
    each,
    embedded_forward,
    embedded_turns,
    forward,
    fresh,
    from_a_folder,
    generate,
    going_on,
    going_on_over_theirs,
    healed,
    in_a_thread,
    in_training_mode,
    inputs,
    inside,
    of_embeddings,
    on_device,
    over_a_paged_cache,
    own_greedy,
    padded_lookup,
    paths_taken,
    right_padded,
    score_of,
    static_cache,
    steps_over_theirs,
    two_thirds,
    under_another_device,
    under_autocast,
    under_gradients,
    with_holes,
    with_hook,
)
from support.huggingface.overriding import ask_for_hidden_states, prefer_tokens, shift_ids
from support.huggingface.vision import with_images
from support.tiny_models import ONE_LAYER, WINDOWS, tiny_qwen3
from support.tiny_tokenizer import tokenizer

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "4000 tokens", "max_batch_size": 16}
PAGE = Path(__file__).parents[3] / "docs" / "paths.md"
PATHS = ("fast loop", "engine", "processed loop", "compiled forward", "original", "outside", "refused")

DROPOUT = {"attention_dropout": 0.5}
_OBSERVED = "what sees or changes each operation: `FlopCounterMode`, `torch.func.vmap`, `torch.jit.trace`"


class Feature(NamedTuple):
    """One line of a table."""

    name: str  # as the page has it
    calls: list[Call]  # what to run on a wrapped model and on its unwrapped twin; all of them take the same path
    draws: bool = False  # the tokens are drawn by us, and so differ from HuggingFace's
    refused: bool = False  # a wrapped model raises
    model: Mapping[str, Any] = {}  # what the models are made with
    family: str = ""  # of a vision-language model; Qwen3 if empty
    because: str = ""  # why it does not take the fast loop, where that could be


CHOSEN = [0, -1] if hasattr(output_capturing, "selected_hidden_states") else True
"""Of hidden states. Transformers 5.17 counts them from the first layer's output on, and none from the end."""
SKIPS_PROMPTS = "prompt_ignore_length" in inspect.getsource(GenerationMixin._get_logits_processor)
"""Whether ``repetition_penalty`` knows where an answer to embeddings begins: those of transformers 5.17 do not."""
LABELS_FIRST_UNMASKED = inputs()["input_ids"].masked_fill(inputs()["attention_mask"] == 0, -100)
POSITIONS = torch.arange(2, 20, 2)[None], torch.arange(9) + torch.tensor([[0], [3], [40]])
HALVES = torch.arange(9)[None] / 2
EARLY = {"eos_token_id": list(range(64))}
SEVERAL = {"return_dict_in_generate": True}

FEATURES: dict[str, list[Feature]] = {
    "Choosing tokens": [
        Feature("greedy", [generate(), generate(lengths=(7,))]),
        Feature(
            "`do_sample` with `temperature`, `top_k`, `top_p`, `min_p`",
            [*drawn(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02)],
            draws=True,
        ),
        Feature("`repetition_penalty`", each(repetition_penalty=1.3)),
        Feature(
            "`num_return_sequences` with `do_sample`: the prompt is computed once",
            drawn(num_return_sequences=3),
            draws=True,
        ),
        Feature(
            "`typical_p`, `top_h`, `epsilon_cutoff`, `eta_cutoff`",
            drawn(typical_p=0.8, top_h=0.6, epsilon_cutoff=0.01, eta_cutoff=0.01),
            draws=True,
            because="few calls have them; HuggingFace's own run between two forwards",
        ),
        Feature(
            "`bad_words_ids` and `sequence_bias` of at most 8 tokens each, `suppress_tokens`, `begin_suppress_tokens`",
            each(
                bad_words_ids=[[5], [6, 7]],
                sequence_bias=[[[9], 4.0], [[4, 5], -3.0]],
                suppress_tokens=[10, 11, 12],
                begin_suppress_tokens=[13, 14],
            ),
        ),
        Feature(
            "`min_new_tokens`, `min_length` with an EOS token",
            [generate(min_new_tokens=6, **EARLY), generate(min_length=15, **EARLY)],
        ),
        Feature(
            "`forced_bos_token_id`, `forced_eos_token_id`, tokens that nothing else bars or penalises",
            [*each(forced_eos_token_id=[2, 9]), generate(lengths=(1, 1), forced_bos_token_id=5)],
        ),
        Feature(
            "`remove_invalid_values`, `renormalize_logits`", each(remove_invalid_values=True, renormalize_logits=True)
        ),
        Feature(
            "`bad_words_ids` and `sequence_bias` of more tokens",
            each(bad_words_ids=[[5], [6] * 9]) + each(sequence_bias=[[[9], 4.0], [[4] * 9, -3.0]]),
            because="the choice knows a row's last 7 tokens",
        ),
        Feature(
            "`encoder_repetition_penalty`, `exponential_decay_length_penalty`",
            [
                *each(encoder_repetition_penalty=1.4),
                generate(exponential_decay_length_penalty=(3, 1.5), eos_token_id=2),
            ],
            because="likewise",
        ),
        Feature(
            "`no_repeat_ngram_size`, `encoder_no_repeat_ngram_size`",
            [
                *each(no_repeat_ngram_size=2),
                *each(encoder_no_repeat_ngram_size=2),
                generate(no_repeat_ngram_size=1, output_logits=True, **SEVERAL),
            ],
            because="they look at the whole text, which the choice does not have; they run between two forwards",
        ),
        Feature(
            "`guidance_scale`, `negative_prompt_ids`: two rows a request",
            [
                *each(guidance_scale=1.5),
                generate(guidance_scale=1.5, negative_prompt_ids=inputs()["input_ids"].flip(0)),
            ],
        ),
        Feature(
            "`watermarking_config`",
            [
                *each(watermarking_config=WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")),
                generate(watermarking_config=WatermarkingConfig(bias=2.5), output_scores=True, **SEVERAL),
                *each(watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 6, 7])),
            ],
        ),
        Feature(
            "a `LogitsProcessor` of your own, `prefix_allowed_tokens_fn`",
            each(logits_processor=LogitsProcessorList([Halve()]), prefix_allowed_tokens_fn=two_thirds),
        ),
        Feature(
            "two processors of one kind, or in another order than HuggingFace's",
            each(logits_processor=LogitsProcessorList([Halve(), Halve()])),
        ),
        Feature(
            "xgrammar's `LogitsProcessor` for HuggingFace, one in a call",
            [
                generate(logits_processor=by_a_grammar, eos_token_id=2),
                generate(logits_processor=by_a_grammar, eos_token_id=2, repetition_penalty=1.3, suppress_tokens=[70]),
            ],
        ),
        Feature(
            "xgrammar's processor with `output_scores`, or beside what forces tokens",
            [
                generate(logits_processor=by_a_grammar, eos_token_id=2, output_scores=True, **SEVERAL),
                generate(logits_processor=by_a_grammar, eos_token_id=2, forced_eos_token_id=2),
            ],
        ),
        Feature("`token_healing`", [healed]),
        Feature(
            "beam search: `num_beams`, `length_penalty`, `early_stopping`, `num_return_sequences`",
            [
                generate(num_beams=4),
                generate(num_beams=3, num_return_sequences=2, length_penalty=1.7, eos_token_id=[2, 5, 9]),
                generate(num_beams=2, early_stopping=True, eos_token_id=list(range(20))),
                generate(num_beams=3, output_scores=True, output_logits=True, **SEVERAL),
            ],
        ),
        Feature("beam search with `do_sample`", [generate(num_beams=3, do_sample=True, temperature=0.8)]),
        Feature(
            "beam search with processors, `prefix_allowed_tokens_fn`",
            [generate(num_beams=3, prefix_allowed_tokens_fn=two_thirds, no_repeat_ngram_size=2)],
        ),
        Feature(
            "`assistant_model`, also with `do_sample`",
            [
                generate(lengths=(6,), assistant_model=fresh(assistant), max_new_tokens=20),
                generate(lengths=(6,), assistant_model=fresh(assistant), do_sample=True, max_new_tokens=20),
                generate(lengths=(6,), assistant_model=fresh(assistant), output_scores=True, **SEVERAL),
            ],
        ),
        Feature("`prompt_lookup_num_tokens`", [generate(lengths=(30,), prompt_lookup_num_tokens=3, max_new_tokens=30)]),
        Feature(
            "`prompt_lookup_num_tokens` with `output_scores`",
            [generate(lengths=(6,), prompt_lookup_num_tokens=3, output_scores=True, **SEVERAL)],
        ),
        Feature(
            "`assistant_early_exit`: HuggingFace's forward drafts, ours checks",
            [generate(lengths=(6,), assistant_early_exit=1, max_new_tokens=20)],
            model={"num_hidden_layers": 2},
        ),
        Feature("`custom_generate` as a function", [generate(custom_generate=own_greedy)]),
        Feature("`custom_generate` as a folder or repository: the `generate` that it calls", [from_a_folder]),
    ],
    "Stopping and results": [
        Feature("streamers of any kind", [generate(lengths=(6,), streamer=fresh(Silent))]),
        Feature(
            "`max_new_tokens`, `max_length`, `max_time`, `eos_token_id`, `generation_config`",
            [
                generate(max_new_tokens=1),
                generate(max_new_tokens=4.5),
                generate(max_new_tokens=None, max_length=17),
                generate(max_time=0.0),
                generate(**EARLY),
                generate(generation_config=GenerationConfig(max_new_tokens=7, eos_token_id=3, pad_token_id=0)),
            ],
        ),
        Feature("`stop_strings`", [generate(stop_strings=["a", "bc"], tokenizer=fresh(tokenizer))]),
        Feature(
            "`stop_strings` with beam search", [generate(stop_strings=["a"], tokenizer=fresh(tokenizer), num_beams=2)]
        ),
        Feature(
            "a `StoppingCriteria` of your own",
            [
                generate(stopping_criteria=[LaterLength(15)]),
                generate(stopping_criteria=[lambda ids, scores, **_: ids.shape[1] >= 15]),  # one answer for all rows
                *(generate(stopping_criteria=[MaxLengthCriteria(length)]) for length in (5, 9, 14, 60)),
                generate(stopping_criteria=[SecondEos(list(range(64)))]),
                generate(stopping_criteria=StoppingCriteriaList([Until()])),
                generate(stopping_criteria=[Until()], **EARLY),
            ],
        ),
        Feature("`return_dict_in_generate`", [generate(**SEVERAL)]),
        Feature(
            "`output_scores`, `output_logits` (with `return_dict_in_generate`)",
            [
                *(generate(**{name: True}, **SEVERAL) for name in ("output_scores", "output_logits")),
                generate(output_scores=True, output_logits=True, **SEVERAL),
                generate(output_scores=True, output_logits=True, repetition_penalty=1.3, **SEVERAL, **EARLY),
            ],
        ),
        Feature(
            "`output_hidden_states` (with `return_dict_in_generate`)",
            [
                generate((6, 6, 6), output_hidden_states=True, **SEVERAL),
                generate((6, 6, 6), output_hidden_states=True, output_scores=True, **SEVERAL, **EARLY),
            ],
        ),
        Feature(
            "`output_attentions`, or hidden states that the model's config asks for",
            [generate(output_attentions=True, **SEVERAL), changed(ask_for_hidden_states, generate())],
            model={"attn_implementation": "eager"},
        ),
    ],
    "Inputs and caches": [
        Feature("prompts padded on the left", [generate()]),
        Feature("holes in the mask", [generate(attention_mask=with_holes())]),
        Feature(
            "holes in the mask, or padding on the right, if a sliding window reaches over them",
            [generate(attention_mask=with_holes()), generate(**right_padded())],
            model=WINDOWS,
        ),
        Feature(
            "prompts padded on the right: HuggingFace's forward computes them, we all further tokens",
            [generate(**right_padded()), generate(**right_padded(), output_scores=True, output_logits=True, **SEVERAL)],
        ),
        Feature(
            "images and videos: HuggingFace's forward computes the prompts, we all further tokens",
            [generate(**with_images("Qwen2VL")), generate(**with_images("Qwen2VL", seed=1), **SEVERAL)],
            family="Qwen2VL",
        ),
        Feature("text alone in a vision-language model", [generate(lengths=(4, 8, 6))], family="Gemma3"),
        Feature(
            "`position_ids` that count each row's unmasked tokens",
            [generate(position_ids=(inputs()["attention_mask"].cumsum(1) - 1).clamp(min=0))],
        ),
        Feature(
            "`position_ids` of your own",
            [generate(position_ids=positions.expand(3, -1), **SEVERAL) for positions in POSITIONS],
        ),
        Feature(
            "`position_ids` that are not whole numbers",
            [generate(position_ids=HALVES.expand(3, -1), **SEVERAL), generate(position_ids=HALVES.expand(3, -1))],
        ),
        Feature(
            "`inputs_embeds`: the compiled forward computes the prompts",
            [
                of_embeddings(),
                of_embeddings(output_scores=True, output_logits=True, **SEVERAL),
                of_embeddings((6, 6), repetition_penalty=1.4, eos_token_id=list(range(40)), min_new_tokens=5),
                of_embeddings(position_ids=torch.arange(0, 18, 2).expand(3, -1), forced_eos_token_id=9),
                of_embeddings(num_return_sequences=2, do_sample=True, top_k=1),
                embedded_turns,
            ],
        ),
        Feature(
            "`inputs_embeds` with beams, or with padding and `repetition_penalty`",
            [of_embeddings(num_beams=2), *([of_embeddings(repetition_penalty=1.4)] if SKIPS_PROMPTS else [])],
        ),
        Feature("`inputs_embeds` of a padded prompt with `prompt_lookup_num_tokens`", [padded_lookup]),
        Feature("a new or closed `PagedCache`", [over_a_paged_cache()]),
        Feature("a `PagedCache` that holds tokens: chats in several turns", [going_on]),
        Feature(
            "a `PagedCache` in a call that only HuggingFace's forward could serve",
            [over_a_paged_cache(**right_padded())],
            refused=True,
        ),
        Feature(
            "a `DynamicCache` or `StaticCache`, empty or filled",
            [
                generate(past_key_values=fresh(dynamic_cache)),
                generate(past_key_values=fresh(static_cache)),
                going_on_over_theirs,
            ],
        ),
        Feature(
            "a `DynamicCache` or `StaticCache` with beam search or drafts; caches of other classes",
            [generate(past_key_values=fresh(dynamic_cache), num_beams=2)],
        ),
        Feature(
            '`cache_implementation`: `"dynamic"`, `"static"`',
            [
                *each(cache_implementation="dynamic"),
                *each(cache_implementation="static"),
                generate(cache_implementation="static", **SEVERAL),
            ],
        ),
        Feature("`use_cache=False`", each(use_cache=False)),
        Feature("`logits_to_keep` that names columns", each(logits_to_keep=torch.tensor([0]))),
    ],
    "Surroundings": [
        Feature("`generate_batch`, also with `return_logprobs`", [batched(), batched(return_logprobs=True)]),
        Feature(
            "`no_grad`, `inference_mode`, any thread",
            [inside(torch.no_grad, generate()), inside(torch.inference_mode, generate()), in_a_thread],
        ),
        Feature("hooks on inner modules", [with_hook(lambda model: model.model, generate())]),
        Feature(
            "forward hooks on the model itself: they fire once a step", [with_hook(lambda model: model, generate())]
        ),
        Feature(
            "methods of HuggingFace's loop that a class or the object overrides, as PEFT's learned prompts do",
            [changed(shift_ids, generate())],
        ),
        Feature(
            "a `forward` of the object's own: your function, accelerate's hooks, `model.compile()`",
            [changed(prefer_tokens, generate()), changed(prefer_tokens, generate(num_beams=2))],
        ),
        Feature("`torch.autocast` that changes an operation of the model", [under_autocast(generate())]),
        Feature(_OBSERVED, [inside(lambda: FlopCounterMode(display=False), generate())]),
        Feature(
            "`torch.set_default_device`, `with torch.device(…)`: any device",
            [inside(lambda: torch.device("cpu"), generate()), under_another_device],
        ),
        Feature("training mode, if no module acts otherwise there", [in_training_mode(generate())]),
        Feature("training mode, if one does: dropout", [in_training_mode(generate())], refused=True, model=DROPOUT),
        Feature("training mode with gradient checkpointing", [in_training_mode(generate(), checkpointing)]),
        Feature(
            "values that are not valid token ids, masks that hide a whole row",
            [
                generate(input_ids=torch.tensor([[3, 500]] * 3), attention_mask=torch.ones(3, 2)),
                generate(attention_mask=torch.tensor([[0] * 9, [1] * 9, [1] * 9])),
            ],
            refused=True,
        ),
        Feature(
            "more rows than `max_batch_size`, more tokens than pages or positions",
            [
                generate(lengths=(4,) * 17),
                generate(max_new_tokens=1020),
                generate(lengths=(300,) * 16, max_new_tokens=2),
            ],
            refused=True,
        ),
    ],
    "model(...)": [
        Feature(
            "left padding, right padding, holes, none",
            [forward(), forward(**right_padded()), forward(attention_mask=with_holes()), forward(attention_mask=None)],
        ),
        Feature("holes that sliding windows reach", [forward(attention_mask=with_holes())], model=WINDOWS),
        Feature(
            "`position_ids`, `logits_to_keep`, `return_dict`",
            [
                forward(position_ids=torch.arange(9)[None] * 2),
                forward(logits_to_keep=2),
                *(forward(logits_to_keep=kept) for kept in (torch.tensor([8, 3]), [8, 3], (3, 8), slice(2, 7, 2))),
                forward(return_dict=False),
                a_step_over_a_cache([1, 0]),
                a_step_over_a_cache(slice(1)),
            ],
        ),
        Feature(
            "`logits_to_keep` of other columns in each row",
            [forward(logits_to_keep=torch.tensor([[8, 3], [7, 8], [6, 6]]))],
        ),
        Feature(
            "`position_ids` that are not whole numbers",
            [forward(position_ids=HALVES, use_cache=cached) for cached in (True, False)]
            + [a_step_over_theirs(position_ids=HALVES[:, 7:])],
        ),
        Feature(
            "masks that are narrower or wider than the text",
            [
                forward(attention_mask=torch.ones(3, width).index_fill(1, torch.tensor([0]), 0), use_cache=True)
                for width in (7, 11)
            ],
        ),
        Feature(
            "`position_ids` that pack several sequences into a row",
            [forward(attention_mask=None, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]]))],
        ),
        Feature("`inputs_embeds`", [embedded_forward]),
        Feature("`labels`", [score_of(right_padded())]),
        Feature("`labels` that follow masked tokens", [forward(labels=LABELS_FIRST_UNMASKED)]),
        Feature(
            "`use_cache`: the result holds a `PagedCache`, which goes on",
            [forward(use_cache=True), a_step_over_a_cache(1)],
        ),
        Feature(
            "a `DynamicCache`, empty or filled, which stays yours: steps of a loop of your own", [steps_over_theirs]
        ),
        Feature(
            "a `StaticCache`, caches of other classes, masked tokens that a `DynamicCache` gets",
            [
                lambda model: forward(past_key_values=static_cache(), use_cache=True)(model),
                lambda model: forward(past_key_values=dynamic_cache(), use_cache=True)(model),
            ],
        ),
        Feature(
            "`output_hidden_states`, all or chosen ones",
            [forward(output_hidden_states=asked, attention_mask=None) for asked in (True, CHOSEN)],
        ),
        Feature("`output_attentions`", [forward(output_attentions=True)], model={"attn_implementation": "eager"}),
        Feature("under gradients: training, adapters", [under_gradients]),
        Feature("training mode, if no module acts otherwise there", [in_training_mode(forward())]),
        Feature("training mode, if one does: dropout", [in_training_mode(forward())], model=DROPOUT, draws=True),
        Feature("`torch.autocast` that changes an operation of the model", [under_autocast(forward())]),
        Feature("hooks on inner modules", [with_hook(lambda model: model.model, forward())]),
        Feature(_OBSERVED, [inside(lambda: FlopCounterMode(display=False), forward())]),
        Feature(
            "masks with four dimensions", [forward(attention_mask=torch.ones(3, 1, 9, 9, dtype=torch.bool).tril())]
        ),
        Feature(
            "more tokens than the model has positions",
            [forward(input_ids=torch.ones(1, 1030, dtype=torch.long), attention_mask=None)],
        ),
        Feature(
            "the module inside, called by itself: `model.model(...)`",
            [lambda model: model.model(**on_device(model, inputs()))],
        ),
        Feature("`torch.compile` or `torch.export` around the model, once for each graph", [compiled_by_the_user]),
    ],
}


def pair(feature: Feature, device: str = "cpu", **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The unwrapped and the wrapped model that a feature is run on."""
    overrides: dict[str, Any] = {**ONE_LAYER, **feature.model}
    plain, model = ((vision.make(feature.family) if feature.family else tiny_qwen3(**overrides)) for _ in range(2))
    return plain.to(device), compiled_llm.wrap(model.to(device), progress=False, **{**OPTIONS, **options})


def paths_of(feature: Feature, call: Call, model: PreTrainedModel) -> tuple[set[str], Any]:
    """Run a call on a wrapped model; return the paths it took, as ``stats()`` has them, and its result."""
    try:
        return paths_taken(model, lambda: call(model))
    except ValueError:
        if not feature.refused:
            raise
        return {"refused"}, None


def line(feature: Feature, paths: set[str]) -> str:
    """The feature's line in its table."""
    names = [name if name == "refused" else f"`{name}`" for name in PATHS if name in paths]
    return f"| {feature.name} | {', '.join(names)}{feature.because and ': ' + feature.because} |"


def tables() -> str:
    """All tables, from what the calls do."""
    parts = []
    for title, features in FEATURES.items():
        parts += [f"## {'`' + title + '`' if '(' in title else title}", ""]
        parts += ["| feature | path |", "|---|---|"]
        for feature in features:
            model = pair(feature)[1]
            paths = [paths_of(feature, call, model)[0] for call in feature.calls]
            assert all(taken == paths[0] for taken in paths), (feature.name, paths)
            parts.append(line(feature, paths[0]))
        parts.append("")
    return "\n".join(parts)


def reasons() -> str:
    """The table of reasons for slower paths; "…" differs from call to call."""
    rows = [f"| `{name}`<br>{said.sentence.format('…')} | {said.advice} |" for name, said in WORDINGS.items()]
    return "\n".join(["## Reasons", "", "| id in `slow_paths`, and reason | what to change |", "|---|---|", *rows, ""])


BETWEEN = re.compile(
    r"(?<=<!-- written by tests/support/huggingface/generate_features.py -->\n\n).*(?=\n<!-- end -->)", re.DOTALL
)

if __name__ == "__main__":
    PAGE.write_text(BETWEEN.sub((tables() + "\n" + reasons()).replace("\\", r"\\"), PAGE.read_text()))
