"""Random settings of `generate`: every processor and stopping rule that HuggingFace has."""

from __future__ import annotations

from random import Random
from typing import Any

Values = tuple[Any, ...]

PROCESSING: dict[str, Values] = {
    "repetition_penalty": (0.7, 1.3),
    "encoder_repetition_penalty": (1.4,),
    "no_repeat_ngram_size": (1, 2, 3),
    "encoder_no_repeat_ngram_size": (2,),
    "bad_words_ids": ([[5], [6, 7]], [[3]]),
    "sequence_bias": ([[[9], 4.0], [[4, 5], -3.0]],),
    "suppress_tokens": ([10, 11, 12],),
    "begin_suppress_tokens": ([13, 14],),
    "forced_bos_token_id": (6,),
    "forced_eos_token_id": (2, 5),
    "renormalize_logits": (True,),
    "remove_invalid_values": (True,),
    "guidance_scale": (1.5, 0.5),
    "exponential_decay_length_penalty": ((3, 1.5),),
    "watermarking_config": ({"bias": 2.5}, {"bias": 1.5, "seeding_scheme": "selfhash"}),
    "min_new_tokens": (3, 6),
    "min_length": (8, 12),
}
SAMPLING: dict[str, Values] = {
    "temperature": (0.3, 0.8, 1.7),
    "top_k": (1, 3, 20, 0),
    "top_p": (0.3, 0.9),
    "min_p": (0.05, 0.4),
    "typical_p": (0.5,),
    "top_h": (0.6,),
    "epsilon_cutoff": (0.01,),
    "eta_cutoff": (0.01,),
    "num_return_sequences": (2, 3),
}
STOPPING: dict[str, Values] = {
    "eos_token_id": (3, [2, 9], list(range(3, 24)), None),
    "max_time": (0.0, 1e6),
    "stop_strings": (["a", "bc"], ["zz"]),
}
OUTPUTS: dict[str, Values] = {
    "return_dict_in_generate": (True,),
    "output_scores": (True,),
    "output_logits": (True,),
    "output_hidden_states": (True,),
    "output_attentions": (True,),
}
PATHS: dict[str, Values] = {
    "use_cache": (False,),
    "cache_implementation": ("static", "dynamic"),
    "prefill_chunk_size": (2, 5),
    "pad_token_id": (4,),
    "disable_compile": (True,),
}
BEAMS: dict[str, Values] = {
    "length_penalty": (-1.0, 1.7),
    "early_stopping": (True, "never"),
    "num_return_sequences": (2,),
}
FORWARD: dict[str, Values] = {
    "use_cache": (True, False),
    "return_dict": (True, False),
    "output_hidden_states": (True,),
    "output_attentions": (True,),
}
WRONG = ("too large", "negative", "floats", "one row without a batch", "no token", "no row")
ATTRIBUTES: tuple[tuple[str, str, Any], ...] = (
    ("generation_config", "pad_token_id", 5),
    ("generation_config", "eos_token_id", [3, 4, 5, 6]),
    ("generation_config", "repetition_penalty", 1.2),
    ("generation_config", "temperature", 0.6),
    ("generation_config", "num_beams", 2),
    ("generation_config", "max_new_tokens", 5),
    ("generation_config", "return_dict_in_generate", True),
    ("config", "use_cache", False),
    ("config", "return_dict", False),
    ("config", "output_hidden_states", True),
    ("attention", "scaling", 0.5),
)


def random_settings(random: Random, plain: bool = False) -> dict[str, Any]:
    """Settings of one call; ``plain`` ones leave as many rows as there are prompts."""
    settings: dict[str, Any] = {"max_new_tokens": random.choice((1, 2, 5, 9, 14))}
    mode = random.choices(("greedy", "sampling", "beams", "beam-sample", "drafts"), (6, 5, 2, 0.6, 0.8))[0]
    mode = random.choice(("greedy", "sampling")) if plain else mode
    settings |= _of_mode(random, mode)
    settings |= _some(random, PROCESSING, random.choice((0, 0, 0, 1, 1, 2, 3)))
    settings |= _some(random, STOPPING, random.choice((0, 0, 0, 1, 2)))
    settings |= {} if plain else _some(random, PATHS, random.choice((0, 0, 0, 0, 1)))
    if plain or random.random() < 0.3:
        settings |= {"return_dict_in_generate": True, **_some(random, OUTPUTS, random.choice((0, 0, 1, 1, 2)))}
    if random.random() < 0.05:
        del settings["max_new_tokens"]
        settings["max_length"] = random.choice((4, 12, 30))
    if plain:
        settings.pop("num_return_sequences", None)
    return settings


def _of_mode(random: Random, mode: str) -> dict[str, Any]:
    if mode == "sampling":
        return {"do_sample": True, **_some(random, SAMPLING, random.choice((0, 1, 1, 2, 3)))}
    if mode == "beams":
        return {"num_beams": random.choice((2, 3, 4)), **_some(random, BEAMS, random.choice((0, 1, 2)))}
    if mode == "beam-sample":
        return {"num_beams": 2, "do_sample": True, **_some(random, SAMPLING, 1, without="num_return_sequences")}
    if mode == "drafts":
        draft = random.choice(({"prompt_lookup_num_tokens": 3}, {"num_assistant_tokens": 3}))
        return {**draft, "do_sample": random.random() < 0.3}
    return {}


def _some(random: Random, table: dict[str, Values], count: int, without: str = "") -> dict[str, Any]:
    names = random.sample([name for name in table if name != without], count)
    return {name: random.choice(table[name]) for name in names}


def drafts(settings: dict[str, Any]) -> str:
    """Who drafts tokens: ``"lookup"``, ``"assistant"``, or nobody."""
    if "prompt_lookup_num_tokens" in settings:
        return "lookup"
    return "assistant" if "num_assistant_tokens" in settings else ""
