"""Random cases: one seed, one case."""

from __future__ import annotations

from random import Random
from typing import Any

from support.fuzzing import random_settings as settings_of
from support.fuzzing.callbacks import CRITERIA, PROCESSORS, STREAMERS, Callback
from support.fuzzing.case import Case
from support.fuzzing.changes import (
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
from support.fuzzing.forward import Forward
from support.fuzzing.generate import Generate, InThreads
from support.fuzzing.known import may
from support.fuzzing.models import WINDOWED, random_config, random_family

STEPS = 6
OWN_CONFIG = "modules with a config of their own"


def random_case(seed: int, steps: int = STEPS, **options: Any) -> Case:
    """The case of a seed; ``options`` go before those that ``wrap`` would get."""
    return _Maker(seed).case(steps, options)


class _Maker:
    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.chat_rows, self.family = 0, ""
        self.options: dict[str, Any] = {}

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def case(self, steps: int, options: dict[str, Any]) -> Case:
        self.family = family = random_family(self.random)
        config = random_config(self.random, family)
        self.options = {**self.wrap_options(), **options}
        chosen = (*(self.step() for _ in range(steps)), Generate(Prompt((4, 6)), {"max_new_tokens": 4}))
        return Case(family, config, self.options, chosen, self.seed % 1000)

    def wrap_options(self) -> dict[str, Any]:
        return {
            "page_size": self.random.choice((1, 2, 4, 7, 16)),
            "max_batch_size": self.random.choice((1, 2, 3, 4, 8, 16, 16)),
            "kv_memory": self.random.choice(("60 tokens", "200 tokens", "4000 tokens", "4000 tokens", "4000 tokens")),
            "prefill_tokens": self.random.choice((1, 5, 16, 8192, 8192)),
        }

    # ---- steps

    def step(self) -> Step:
        kinds = {
            self.generate: 10,
            self.chat: 4,
            self.forward: 5,
            self.threads: 0.4,
            self.hook: 1.2,
            self.change: 2,
            self.cache_step: 2 if self.chat_rows else 0,
        }
        (kind,) = self.random.choices(list(kinds), list(kinds.values()))
        return kind()

    def generate(self) -> Step:
        settings = settings_of.random_settings(self.random)
        prompt = self.prompt()
        drafting = settings_of.drafts(settings)
        if drafting and self.chance(0.9):
            prompt = Prompt(prompt.lengths[:1], seed=prompt.seed, period=self.random.choice((0, 3, 4)))
        call = {
            "prompt": prompt,
            "settings": settings,
            "embedded": self.chance(0.07) and not prompt.wrong,
            "positions": self.random.choice((1, 1, 2)) if self.chance(0.1) and not prompt.wrong else 0,
            "cache": self.random.choice(("new", "new", "dynamic", "static")) if self.chance(0.15) else "",
            "around": self.around(),
            "assistant": self.random.randrange(3) if drafting == "assistant" else None,
            "seed": self.random.randrange(1000),
            **self.callbacks(),
        }
        return Generate(**call)

    def callbacks(self) -> dict[str, Any]:
        if not self.chance(0.25):
            return {}
        own: dict[str, Any] = {}
        if self.chance(0.5):
            own["processors"] = tuple(self.callback(PROCESSORS) for _ in range(self.random.choice((1, 1, 2))))
        if self.chance(0.4):
            kinds = (*CRITERIA, "patient", "shorter") if may("subclassed criteria") else CRITERIA
            own["criteria"] = tuple(self.callback(kinds) for _ in range(self.random.choice((1, 1, 2))))
        if self.chance(0.4):
            own["streamer"] = self.callback(STREAMERS)
        return own

    def callback(self, kinds: tuple[str, ...]) -> Callback:
        return Callback(self.random.choice(kinds), self.random.randrange(5))

    def chat(self) -> Step:
        """The next turn of a conversation, or its first."""
        settings = settings_of.random_settings(self.random, plain=True)
        goes_on = bool(self.chat_rows) and self.chance(0.9)
        rows = self.chat_rows if goes_on else self.random.choice((1, 2, 2, 3))
        prompt = self.prompt(rows, short=goes_on)
        self.chat_rows = rows
        common: dict[str, Any] = {
            "prompt": prompt,
            "goes_on": goes_on,
            "keeps": True,
            "seed": self.random.randrange(99),
        }
        if self.chance(0.25):
            return Forward(**common, around=self.random.choice(("no_grad", "inference_mode")))
        return Generate(
            **common, settings=settings, around=self.around(), **(self.callbacks() if self.chance(0.3) else {})
        )

    def forward(self) -> Step:
        prompt = self.prompt()
        training = self.chance(0.1)
        backward = self.chance(0.5 if training else 0.05)
        settings: dict[str, Any] = {}
        for name, values in settings_of.FORWARD.items():
            if self.chance(0.15):
                settings[name] = self.random.choice(values)
        if self.chance(0.15) and not prompt.wrong:
            last = prompt.columns - 1
            settings["logits_to_keep"] = self.random.choice((1, 2, [last, 0], [last]))
        return Forward(
            prompt,
            settings,
            labels=self.random.choice(("ids", "ids", "all")) if self.chance(0.2) and not prompt.wrong else "",
            cache=self.random.choice(("new", "dynamic", "static")) if self.chance(0.1) else "",
            embedded=self.chance(0.1) and not prompt.wrong,
            positions=self.random.choice((1, 2)) if self.chance(0.15) and not prompt.wrong else 0,
            square=self.chance(0.04)
            and prompt.padding == "left"
            and not prompt.wrong
            and len(set(prompt.lengths)) == 1,
            training=training,
            backward=backward,
            around=""
            if backward
            else self.random.choice(("no_grad", "no_grad", "no_grad", "inference_mode", "autocast", "", "thread")),
            seed=self.random.randrange(1000),
        )

    def threads(self) -> Step:
        calls = [
            Generate(self.prompt(), {"max_new_tokens": self.random.choice((3, 9))}, seed=self.random.randrange(99))
            for _ in range(self.random.choice((2, 3)))
        ]
        return InThreads(tuple(calls))

    def hook(self) -> Step:
        if self.chance(0.35):
            return Undo(self.random.choice(("hook", "hook", "forward", "prepare_inputs_for_generation")))
        if self.chance(0.25) and may("overridden methods"):
            return Override(
                self.random.choice(("forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"))
            )
        places = ["model"]
        if may("inner hooks"):
            places += ["base", "layer", "attention", "head", "embeddings"]
        does = ("looks", "scales", "adds", "raises")
        before = self.chance(0.25)
        return Hook(self.random.choice(places), "looks" if before else self.random.choice(does), before)

    def change(self) -> Step:
        kind = self.random.choice(("weights", "weights", "set", "set", "rewrap", "copied", "attention"))
        if kind == "weights":
            self.chat_rows = 0
            return Weights(self.random.choice([way for way in WAYS if way != "swapped module" or may(OWN_CONFIG)]))
        if kind == "set":
            return Set(*self.random.choice(settings_of.ATTRIBUTES))
        if kind == "attention":
            return Attention(self.random.choice(("eager", "sdpa")))
        self.chat_rows = 0
        return Rewrap(self.wrap_options()) if kind == "rewrap" else Copied(self.random.choice(("deepcopy", "pickle")))

    def cache_step(self) -> Step:
        rows = self.chat_rows
        kind = self.random.choice(("crop", "crop", "select", "select", "copy", "hide", "leave"))
        if kind == "crop":
            return Crop(self.random.choice((1, 2, 5)))
        if kind == "select":
            how = self.random.choice(("reorder_cache", "batch_select_indices", "batch_repeat_interleave"))
            count = 2 if how == "batch_repeat_interleave" else rows
            count = self.random.randrange(1, rows + 1) if how == "batch_select_indices" else count
            self.chat_rows = rows * 2 if how == "batch_repeat_interleave" else count
            return Select(how, tuple(self.random.randrange(rows) for _ in range(count)))
        if kind == "copy":
            return CopyCache()
        if kind == "hide":
            return Hide(self.random.randrange(rows), self.random.choice((1, 2)))
        self.chat_rows = 0
        return Leave()

    # ---- inputs

    def prompt(self, rows: int | None = None, short: bool = False) -> Prompt:
        rows = rows or self.random.choice((1, 1, 2, 2, 3, 4, 5))
        longest = self.random.choice((1, 2, 3) if short else (2, 5, 9, 17, 33))
        equal = self.chance(0.3)
        lengths = tuple(longest if equal else self.random.randint(1, longest) for _ in range(rows))
        padding = "right" if self.chance(0.1) and not short else "left"
        holes: tuple[tuple[int, int], ...] = ()
        if self.chance(0.1) and not short and (self.family not in WINDOWED or may("windows and holes")):
            holes = ((self.random.randrange(rows), self.random.randrange(longest)),)
        even = len(set(lengths)) == 1 and not holes
        wrong = self.random.choice(settings_of.WRONG) if self.chance(0.04) and not short else ""
        return Prompt(
            lengths,
            padding,
            holes,
            period=3 if self.chance(0.1) else 0,
            masked=not (even and self.chance(0.5) and not short),
            wrong=wrong,
            seed=self.random.randrange(1000),
        )

    def around(self) -> str:
        around = ("no_grad", "inference_mode", "enable_grad", "thread", "autocast", "default float64")
        if may("another default device"):
            around += ("default device",)
        return self.random.choice(around) if self.chance(0.15) else ""
