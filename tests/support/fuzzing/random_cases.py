"""Random cases: one seed, one case."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from random import Random
from typing import Any

from support.fuzzing import random_settings as table
from support.fuzzing.callbacks import CRITERIA, PROCESSORS, STREAMERS, Callback
from support.fuzzing.calls import AROUND, Forward, Generate, InThreads
from support.fuzzing.case import CAPPED, Case
from support.fuzzing.changes import (
    OVERRIDES,
    PLACES,
    WAYS,
    Attention,
    Copied,
    CopyCache,
    Crop,
    Hide,
    Hook,
    Leave,
    Override,
    Rewrap,
    Select,
    Set,
    Undo,
    Weights,
)
from support.fuzzing.data import Prompt, Step
from support.huggingface.families import FAMILIES

_TRANSFORMERS = tuple(map(int, version("transformers").split(".")[:2]))
KNOWN: dict[str, str] = {}
if _TRANSFORMERS < (5, 18):
    KNOWN["drafts after embeddings"] = "HuggingFace hides the prompt: its mask has no columns"
"""What cases leave out: known differences, ours until they are mended, HuggingFace's in the versions that have them."""
NAMES = ("Qwen3", "Llama", *FAMILIES)
PLAIN_HEADS = frozenset(
    [
        "GPT2LMHead",
        "GPTBigCode",
        "GPTNeoX",
        "Helium",
        "OPT",
        "Olmo",
        "Olmoe",
        "Persimmon",
        "Phi",
        "Phi3",
        "Qwen2",
        "Starcoder2",
    ]
)
"""Whose head size is that of a hidden state divided by heads."""
LAST = Generate(Prompt((4, 6)), {"max_new_tokens": 4})
"""Whatever has happened: the next plain call works."""


def random_case(seed: int, steps: int, **options: Any) -> Case:
    """The case of a seed; ``options`` of ``wrap`` beside the random ones."""
    return _Maker(seed).case(steps, options)


class _Maker:
    """Makes steps that mostly fit what was done before.

    Attributes:
        rows: how many rows the conversation has; 0 if there is none.
        eager, wide: whether the model had HuggingFace's eager attention, or float64: it makes NaN of padding with both.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.random, self.rows = seed, Random(seed), 0
        self.family, self.eager, self.wide = "", False, False

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def number(self, most: int) -> int:
        return self.random.randrange(most)

    def case(self, steps: int, options: dict[str, Any]) -> Case:
        self.family = family = random_family(self.random)
        self.eager = family in CAPPED
        config = random_config(self.random, family)
        options = {**self.wrap_options(), **options}
        chosen = tuple(self.step() for _ in range(steps))
        return Case(family, config, options, (*chosen, LAST), self.seed % 1000)

    def wrap_options(self) -> dict[str, Any]:
        return {
            "page_size": self.pick(1, 2, 4, 7, 16),
            "max_batch_size": self.pick(1, 2, 4, 8, 16, 16, 16, 16),
            "kv_memory": self.pick("60 tokens", "200 tokens", *["4000 tokens"] * 5),
            "prefill_tokens": self.pick(1, 5, 16, 8192, 8192),
        }

    def step(self) -> Step:
        kinds = {
            self.generate: 10,
            self.turn: 4,
            self.forward: 5,
            self.threads: 0.4,
            self.hook: 1.2,
            self.change: 2,
            self.cache_step: 2 if self.rows else 0,
        }
        (kind,) = self.random.choices(list(kinds), list(kinds.values()))
        step: Step = kind()
        return step

    # ---- calls

    def generate(self) -> Step:
        settings = table.random_settings(self.random)
        prompt = self.prompt()
        drafting = table.drafts(settings)
        cached = settings.get("use_cache", True) and self.chance(0.15)
        if drafting and self.chance(0.9):
            prompt = Prompt(prompt.lengths[:1], period=self.pick(0, 3, 4), seed=prompt.seed)
        step = Generate(
            prompt,
            settings,
            cache=self.pick("new", "new", "dynamic", "static") if cached else "",
            embedded=self.chance(0.07) and not prompt.wrong and self.may_be_embedded(settings),
            positions=self.pick(1, 1, 2) if self.chance(0.1) and not prompt.wrong else 0,
            assistant=self.number(3) if drafting == "assistant" else None,
            around=self.around() if self.chance(0.15) else "",
            seed=self.number(1000),
            **self.callbacks(0.25),
        )
        return _in_float32_if_biased(_where_signals_go(step))

    def may_be_embedded(self, settings: dict[str, Any]) -> bool:
        chunked = "prefill_chunk_size" in settings
        return not chunked and ("drafts after embeddings" not in KNOWN or not table.drafts(settings))

    def turn(self) -> Step:
        """The next turn of a conversation, or its first."""
        goes_on = bool(self.rows) and self.chance(0.9)
        self.rows = self.rows if goes_on else self.pick(1, 2, 2, 3)
        prompt = self.prompt(self.rows, short=goes_on)
        if self.chance(0.25):
            around = self.pick("no_grad", "inference_mode")
            return Forward(prompt, goes_on=goes_on, keeps=True, around=around)
        step = Generate(
            prompt,
            table.random_settings(self.random, plain=True),
            goes_on=goes_on,
            keeps=True,
            around=self.around() if self.chance(0.15) else "",
            seed=self.number(1000),
            **self.callbacks(0.1),
        )
        return _in_float32_if_biased(_where_signals_go(step))

    def forward(self) -> Step:
        prompt = self.prompt()
        fits = not prompt.wrong
        settings = {name: self.pick(*values) for name, values in table.FORWARD.items() if self.chance(0.15)}
        if fits and self.chance(0.15):
            last = prompt.columns - 1
            settings["logits_to_keep"] = self.pick(1, 2, [last, 0], [last])
        training = self.chance(0.1)
        backward = self.chance(0.5 if training else 0.05)
        cacheable = not backward and settings.get("use_cache", True)
        around = "" if backward else self.pick("no_grad", "no_grad", "no_grad", "", self.around())
        return Forward(
            prompt,
            settings,
            labels=self.pick("ids", "ids", "all") if fits and self.chance(0.2) else "",
            cache=self.pick("new", "dynamic", "static") if self.chance(0.1) and cacheable else "",
            embedded=fits and self.chance(0.1),
            positions=self.pick(1, 2) if fits and self.chance(0.15) else 0,
            square=prompt.even and fits and self.chance(0.1),
            training=training,
            backward=backward,
            around=around,
            seed=self.number(1000),
        )

    def threads(self) -> Step:
        calls = (Generate(self.prompt(), {"max_new_tokens": self.pick(3, 9)}) for _ in range(self.pick(2, 3)))
        return InThreads(tuple(calls))

    def callbacks(self, probability: float) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if not self.chance(probability):
            return own
        if self.chance(0.5):
            own["processors"] = tuple(self.callback(PROCESSORS) for _ in range(self.pick(1, 1, 2)))
        if self.chance(0.4):
            own["criteria"] = tuple(self.callback(CRITERIA) for _ in range(self.pick(1, 1, 2)))
        if self.chance(0.4):
            own["streamer"] = self.callback(STREAMERS)
        return own

    def callback(self, kinds: Any) -> Callback:
        return Callback(self.pick(*kinds), self.number(5))

    # ---- changes

    def hook(self) -> Step:
        if self.chance(0.35):
            return Undo(self.pick("hook", "hook", *OVERRIDES))
        if self.chance(0.3):
            return Override(self.pick(*OVERRIDES))
        place = self.pick(*PLACES)
        before = self.chance(0.25)
        return Hook(place, "looks" if before else self.pick("looks", "scales", "adds", "raises"), before)

    def change(self) -> Step:
        kind = self.pick("weights", "weights", "set", "set", "attention", "rewrap", "copied")
        if kind == "set":
            return Set(*self.pick(*table.ATTRIBUTES))
        if kind == "attention":
            return self.attention()
        self.rows = 0
        if kind == "weights":
            return self.weights()
        return Rewrap(self.wrap_options()) if kind == "rewrap" else Copied(self.pick("deepcopy", "pickle"))

    def attention(self) -> Step:
        name = "eager" if self.family in CAPPED else "sdpa" if self.wide else self.pick("eager", "sdpa")
        self.eager = self.eager or name == "eager"
        return Attention(name)

    def weights(self) -> Step:
        way = self.pick(*(way for way in WAYS if way != "to float64" or not self.eager))
        self.wide = self.wide or way == "to float64"
        return Weights(way)

    def cache_step(self) -> Step:
        kind = self.pick("crop", "crop", "select", "select", "copy", "hide", "leave")
        if kind == "crop":
            return Crop(self.pick(1, 2, 5))
        if kind == "select":
            return self.select()
        if kind == "hide":
            return Hide(self.number(self.rows), self.pick(1, 2))
        self.rows = self.rows if kind == "copy" else 0
        return CopyCache() if kind == "copy" else Leave()

    def select(self) -> Step:
        how = self.pick("reorder_cache", "batch_select_indices", "batch_repeat_interleave")
        counts = {"batch_repeat_interleave": 2, "batch_select_indices": 1 + self.number(self.rows)}
        rows = tuple(self.number(self.rows) for _ in range(counts.get(how, self.rows)))
        self.rows = 2 * self.rows if how == "batch_repeat_interleave" else len(rows)
        return Select(how, rows)

    # ---- inputs

    def prompt(self, rows: int | None = None, short: bool = False) -> Prompt:
        rows = rows or self.pick(1, 1, 2, 2, 3, 4, 5)
        longest = self.pick(1, 2, 3) if short else self.pick(2, 5, 9, 17, 33)
        equal = self.chance(0.3)
        lengths = tuple(longest if equal else 1 + self.number(longest) for _ in range(rows))
        if short:
            return Prompt(lengths, seed=self.number(1000))
        with_hole = self.chance(0.1)
        holes = ((self.number(rows), self.number(longest)),) if with_hole else ()
        return Prompt(
            lengths,
            "right" if self.chance(0.1) else "left",
            holes,
            period=3 if self.chance(0.1) else 0,
            masked=len(set(lengths)) > 1 or with_hole or self.chance(0.5),
            wrong=self.pick(*table.WRONG) if self.chance(0.04) else "",
            seed=self.number(1000),
        )

    def around(self) -> str:
        return str(self.pick(*AROUND, "thread"))


def _where_signals_go(call: Generate) -> Generate:
    """A call that presses Ctrl-C in the main thread: only that one sees it, and would leave another one behind."""
    return replace(call, around="") if call.around == "thread" and "'signals'" in repr(call) else call


def _in_float32_if_biased(call: Generate) -> Generate:
    """A call that HuggingFace can run: its biases have the default type, and its table of them is float32."""
    biased = {"bad_words_ids", "sequence_bias"} & set(call.settings)
    return replace(call, around="") if biased and call.around == "default float64" else call


# ---- models


def random_family(random: Random) -> str:
    """The two that most tests use as often as all others together."""
    return random.choice(NAMES[:2]) if random.random() < 0.3 else random.choice(NAMES)


def random_config(random: Random, family: str) -> dict[str, Any]:
    """Settings over ``support.huggingface.families.TINY``."""
    config = {**FAMILIES.get(family, {}), **_heads(random, family)}
    layers = random.choice((1, 2, 2, 3))
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
    config["n_positions" if "n_positions" in config else "max_position_embeddings"] = random.choice((48, 64, 256, 256))
    config["vocab_size"] = random.choice((40, 97, 128, 200))
    config["tie_word_embeddings"] = random.random() < 0.3
    config["eos_token_id"] = random.choice((None, None, 2, [2, 7, 11], list(range(2, 20))))
    if "sliding_window" in config:
        config["sliding_window"] = random.choice((2, 3, 5, 8, 13, 40))
    if family == "Gemma2":
        config["attn_logit_softcapping"] = random.choice((None, 2.0, 50.0))
        config["final_logit_softcapping"] = random.choice((None, 3.0, 30.0))
    return config


def _heads(random: Random, family: str) -> dict[str, Any]:
    kv, group = random.choice((1, 2, 3)), random.choice((1, 1, 2, 3, 4))
    heads, size = kv * group, random.choice((8, 16, 24))
    if "n_head" in FAMILIES.get(family, {}):
        return {"n_head": heads, "n_embd": heads * size}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": heads * size}
    if "kv_lora_rank" in FAMILIES.get(family, {}):  # HuggingFace turns heads of head_dim, which are the rotated parts
        rotated = random.choice((8, 16))
        return {**sizes, "num_key_value_heads": heads, "head_dim": rotated, "qk_rope_head_dim": rotated}
    if family == "OPT":
        return {**sizes, "word_embed_proj_dim": heads * size}
    head_dim = size if family in PLAIN_HEADS else random.choice((8, 16, 20, 32))
    more = {"query_pre_attn_scalar": head_dim} if family in ("Gemma2", "Gemma3") else {}
    return {**sizes, "head_dim": head_dim, **more}
