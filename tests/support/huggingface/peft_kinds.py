"""PEFT's kinds of adapters on tiny models, what is called with them, and the table of docs/reference/compatibility.md.

``python tests/support/huggingface/peft_kinds.py`` writes the table again, from what the calls do.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import UnsupportedModelError
from support.huggingface.feature_calls import paths_taken
from support.parity import mixed_prompts
from support.tiny_models import TINY, tiny_llama

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "400 tokens", "max_batch_size": 4}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
BETWEEN = re.compile(
    r"(?<=<!-- written by tests/support/huggingface/peft_kinds.py -->\n\n).*(?=\n<!-- end -->)", re.DOTALL
)
ROWS = 2

_PROMPT = {
    "num_virtual_tokens": 3,
    "num_layers": TINY["num_hidden_layers"],
    "token_dim": TINY["hidden_size"],
    "num_attention_heads": TINY["num_key_value_heads"],
    "num_transformer_submodules": 1,
}
_TASKS = {"task_ids": torch.tensor([0, 1])}


@dataclass(frozen=True, eq=False)
class Kind:
    """A line of the table."""

    type: PeftType  # PEFT's name of it
    settings: Mapping[str, Any] = field(default_factory=dict)  # its config, but for the defaults
    inputs: Mapping[str, Any] = field(default_factory=dict)  # what each call is given besides the prompts
    model: Mapping[str, Any] = field(default_factory=dict)  # what the model is made with
    name: str = ""  # the line's; PEFT's if empty

    def __str__(self) -> str:
        return self.name or self.type.value


AS_THEY_ARE = (
    *("LORA", "BOFT", "IA3", "BEFT", "LILY", "LOHA", "LOKR", "OFT", "LN_TUNING", "VERA", "FROD", "PVERA", "FOURIERFT"),
    *("GLORA", "HRA", "UNILORA", "MISS", "RANDLORA", "HIRA", "OSF", "DELORA", "GRALORA", "TINYLORA", "PSOFT", "PEANUT"),
    *("SHADOW", "SUPERTUNING", "DEFT"),
)
SETTINGS: dict[PeftType, Mapping[str, Any]] = {
    PeftType.PROMPT_TUNING: _PROMPT,
    PeftType.MULTITASK_PROMPT_TUNING: {**_PROMPT, "num_tasks": 2, "num_ranks": 1},
    PeftType.P_TUNING: {**_PROMPT, "encoder_hidden_size": 16},
    PeftType.PREFIX_TUNING: _PROMPT,
    PeftType.CPT: {**_PROMPT, "cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    PeftType.CARTRIDGE: {"num_virtual_tokens": 3},
    PeftType.ADALORA: {"total_step": 10},
    PeftType.ADAPTION_PROMPT: {"adapter_len": 3, "adapter_layers": 1},
    PeftType.VBLORA: {"vector_length": 16, "num_vectors": 8},
    PeftType.ROAD: {"group_size": 16},
    PeftType.SHIRA: {"r": 4},
    PeftType.C3A: {"block_size": 16},
    PeftType.WAVEFT: {"n_frequency": 64},
    PeftType.POLY: {"n_tasks": 2},
    PeftType.TRAINABLE_TOKENS: {"token_indices": [3, 4, 5, 6, 7, 8]},
    PeftType.XLORA: {"hidden_size": TINY["hidden_size"], "xlora_size": 16},
    PeftType.ADAMSS: {},
    **{PeftType(name): {} for name in AS_THEY_ARE},
}
"""Each kind that PEFT has, with the settings that so small a model needs."""

INPUTS = {PeftType.MULTITASK_PROMPT_TUNING: _TASKS, PeftType.POLY: _TASKS}
MODEL = {PeftType.XLORA: {"use_cache": False}}  # or PEFT refuses it
INVOCATION = mixed_prompts([4, 7], TINY["vocab_size"], seed=0)["input_ids"][1, 2:4].tolist()  # in the second row alone
VARIANTS = [
    Kind(PeftType.LORA, {"use_dora": True}, name="LORA with `use_dora`"),
    Kind(PeftType.LORA, {"use_rslora": True}, name="LORA with `use_rslora`"),
    Kind(PeftType.LORA, {"target_modules": ["embed_tokens", "lm_head"]}, name="LORA on embeddings and head"),
    Kind(PeftType.LORA, {"modules_to_save": ["lm_head"]}, name="LORA with `modules_to_save`"),
    Kind(PeftType.LORA, {"alora_invocation_tokens": INVOCATION}, name="LORA with `alora_invocation_tokens`"),
    Kind(PeftType.LORA, inputs={"adapter_names": ["default", "__base__"]}, name="LORA with `adapter_names`"),
    Kind(PeftType.LORA, {"trainable_token_indices": [5, 6, 7]}, name="LORA with `trainable_token_indices`"),
]
KINDS = [
    *(Kind(type_, given, INPUTS.get(type_, {}), MODEL.get(type_, {})) for type_, given in SETTINGS.items()),
    *VARIANTS,
]

Call = Callable[[Any], Tensor]


def prompts() -> dict[str, Tensor]:
    return mixed_prompts([4, 7], TINY["vocab_size"], seed=0)


def calls_of(kind: Kind) -> dict[str, Call]:
    """What is called, by the head of its column."""

    def generate(**options: Any) -> Call:
        return lambda model: model.generate(**prompts(), **kind.inputs, max_new_tokens=4, **options)

    return {
        "`generate`, greedy": generate(do_sample=False),
        "beams": generate(do_sample=False, num_beams=2),
        "sampling": generate(do_sample=True, top_k=1),  # where one token is left, all draw the same
        "`model(...)`": lambda model: unmasked(model(**prompts(), **kind.inputs).logits),
    }


def unmasked(logits: Tensor) -> Tensor:
    """Logits with zeros where a token is masked; virtual tokens, which come first, are not."""
    mask = prompts()["attention_mask"]
    virtual = torch.ones(ROWS, logits.shape[1] - mask.shape[1])
    return logits * torch.cat([virtual, mask], dim=1)[:, :, None]


def adapted(kind: Kind, model: PreTrainedModel) -> Any:
    """The model with an adapter whose weights are not those that change nothing."""
    settings = {**kind.settings, "adapters": experts()} if kind.type == PeftType.XLORA else kind.settings
    torch.manual_seed(0)
    adapter = get_peft_model(model, CONFIGS[kind.type](task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape) * 0.1
    return adapter


@cache
def experts() -> dict[str, str]:
    """Folders with two LoRAs, for X-LoRA to mix."""
    folders = {str(number): tempfile.mkdtemp() for number in range(2)}
    for folder in folders.values():
        get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).save_pretrained(folder)
    return folders


def plain(kind: Kind) -> PreTrainedModel:
    return tiny_llama(eos_token_id=None, **kind.model)


class Pair(NamedTuple):
    """An adapted model, and the wrapped one inside."""

    adapted: Any
    wrapped: Any


def wrapped_first(kind: Kind) -> Pair:
    model = compiled_llm.wrap(plain(kind), progress=False, **OPTIONS)
    return Pair(adapted(kind, model), model)


def adapted_first(kind: Kind) -> Pair:
    adapter = adapted(kind, plain(kind))
    return Pair(adapter, compiled_llm.wrap(adapter.get_base_model(), progress=False, **OPTIONS))


ORDERS = {"wrapped first": wrapped_first, "adapted first": adapted_first}


def run(call: Call, pair: Pair) -> tuple[str, Tensor]:
    """Make a call; return the path it took, in words, and its result."""
    with torch.no_grad():
        paths, result = paths_taken(pair.wrapped, lambda: call(pair.adapted))
    taken = sorted(paths)  # two if HuggingFace's forward goes on
    return taken[0] if len(taken) == 1 else "original", result


def paths_of(kind: Kind, make: Callable[[Kind], Pair]) -> list[str]:
    """The path of each call; a dash if HuggingFace itself raises."""
    calls = calls_of(kind)
    try:
        pair = make(kind)
    except UnsupportedModelError:
        return ["refused"] * len(calls)
    return [_path_or_dash(call, pair) for call in calls.values()]


def _path_or_dash(call: Call, pair: Pair) -> str:
    try:
        return run(call, pair)[0]
    except (RuntimeError, ValueError):
        return "-"


def lines(kind: Kind) -> Iterator[str]:
    """The kind's lines of the table: one, or two if the order makes a difference."""
    paths = {order: paths_of(kind, make) for order, make in ORDERS.items()}
    same = len(set(map(tuple, paths.values()))) == 1
    for order, cells in list(paths.items())[: 1 if same else None]:
        yield f"| {kind}{'' if same else f', {order}'} | {' | '.join(cells)} |"


def table(kinds: list[Kind]) -> str:
    heads = ["", *calls_of(KINDS[0])]
    rows = [line for kind in kinds for line in lines(kind)]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, ""])


def can_be_made(kind: Kind) -> bool:
    """Whether all is installed that the kind needs."""
    try:
        adapted(kind, plain(kind))
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    shown = [kind for kind in KINDS if can_be_made(kind)]
    PAGE.write_text(BETWEEN.sub(lambda _: table(shown), PAGE.read_text()))
