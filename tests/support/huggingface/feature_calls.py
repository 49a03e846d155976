"""What the features of ``generate`` and ``forward`` are called with, and how: a call takes a model, wrapped or not."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)

from support.huggingface.cache_name import CACHE
from support.in_threads import in_thread
from support.parity import mixed_prompts, next_turn
from support.tiny_models import tiny_qwen3
from support.tiny_tokenizer import tokenizer

Call = Callable[[PreTrainedModel], Any]


def paths_taken(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[set[str], Any]:
    """Make a call; return the paths that a wrapped model took meanwhile, of ``generate`` if there are any."""
    before = model.compiled.stats()
    result = call()
    after = model.compiled.stats()
    generates, forwards = (
        {path for path, count in later.items() if count > earlier.get(path, 0)}
        for earlier, later in (
            (before.generate_calls, after.generate_calls),
            (before.forward_calls, after.forward_calls),
        )
    )
    return generates or {{"compiled": "compiled forward"}.get(path, path) for path in forwards}, result


def inputs(lengths: tuple[int, ...] = (4, 9, 6)) -> dict[str, Tensor]:
    return mixed_prompts(list(lengths), 128, 0)


def on_device(model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Any]:
    """The same where the model is; an assistant, too."""
    return {name: value.to(model.device) if hasattr(value, "to") else value for name, value in given.items()}


def generate(lengths: tuple[int, ...] = (4, 9, 6), **options: Any) -> Call:
    options = {"max_new_tokens": 5, "do_sample": False, **options}

    def call(model: PreTrainedModel) -> Any:
        torch.manual_seed(0)
        given = {name: value() if getattr(value, "fresh", False) else value for name, value in options.items()}
        return model.generate(**on_device(model, {**inputs(lengths), **given}))

    return call


def batched(**options: Any) -> Call:
    sizes = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64, **options)
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def call(model: PreTrainedModel) -> Tensor:
        batch: Any = model
        outputs = batch.generate_batch([[5, 6, 7], [9, 10, 11, 12]], config, copy.copy(sizes)).values()
        return torch.tensor([output.generated_tokens for output in outputs])

    return call


def fresh(make: Callable[[], Any]) -> Callable[[], Any]:
    """An option that has to be made for each call."""
    make.fresh = True  # type: ignore[attr-defined]
    return make


@fresh
def by_a_grammar() -> LogitsProcessorList:
    """A processor of xgrammar's for HuggingFace, under which some rows end."""
    xgrammar, hf = pytest.importorskip("xgrammar"), pytest.importorskip("xgrammar.contrib.hf")
    tokens = xgrammar.TokenizerInfo([chr(33 + token % 94) for token in range(128)], vocab_size=128, stop_token_ids=[2])
    return LogitsProcessorList([hf.LogitsProcessor(xgrammar.GrammarCompiler(tokens).compile_regex("[a-z]{3,}[A-Z]*"))])


def each(**options: Any) -> list[Call]:
    return [generate(**{name: value}) for name, value in options.items()]


def drawn(**options: Any) -> list[Call]:
    return [generate(do_sample=True, **{name: value}) for name, value in options.items()]


def forward(**options: Any) -> Call:
    def call(model: PreTrainedModel) -> Any:
        with torch.no_grad():
            return model(**on_device(model, {**inputs(), "use_cache": False, **options}))

    return call


def assistant() -> PreTrainedModel:
    return tiny_qwen3(seed=1, eos_token_id=None)


def two_thirds(batch: int, ids: Tensor) -> list[int]:
    return [token for token in range(3, 128) if (token + int(ids[-1])) % 3]


def own_greedy(model: Any, input_ids: Tensor, generation_config: Any = None, **kwargs: Any) -> Tensor:
    """Take the most likely token, five times."""
    kwargs = {name: kwargs[name] for name in ("attention_mask", CACHE) if kwargs.get(name) is not None}
    new = input_ids
    for _ in range(5):
        out = model(input_ids=new, use_cache=True, **kwargs)
        new = out.logits[:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, new], dim=1)
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = torch.cat([kwargs["attention_mask"], torch.ones_like(new)], dim=1)
        kwargs[CACHE] = out[CACHE]
    return input_ids


def from_a_folder(model: PreTrainedModel) -> Any:
    """The form in which the hub has contrastive search and the like."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "custom_generate"
        code.mkdir()
        (code / "generate.py").write_text(
            "def generate(model, num_words=3, **kwargs):\n"
            "    kwargs.update(max_new_tokens=num_words, do_sample=False)\n"
            "    return model.generate(**kwargs)\n"
        )
        (Path(folder) / "config.json").write_text("{}")
        return model.generate(**on_device(model, inputs()), custom_generate=folder, trust_remote_code=True, num_words=5)


def healed(model: PreTrainedModel) -> Any:
    words = tokenizer()
    ids = words(["xyabc", "zzabe"], return_tensors="pt").input_ids.to(model.device)
    return model.generate(ids, token_healing=True, tokenizer=words, max_new_tokens=8, do_sample=False)


def of_embeddings(lengths: tuple[int, ...] = (4, 9, 6), **options: Any) -> Call:
    def call(model: PreTrainedModel) -> Any:
        given = on_device(model, inputs(lengths))
        embeddings = model.get_input_embeddings()(given["input_ids"]).detach()
        return model.generate(
            inputs_embeds=embeddings,
            attention_mask=given["attention_mask"],
            **on_device(model, {"max_new_tokens": 9, "do_sample": False, **options}),
        )

    return call


def embedded_turns(model: PreTrainedModel) -> Any:
    """Two turns of embeddings; the second has those of the whole text, and the cache of the first."""
    text, cache = inputs((6, 6))["input_ids"].to(model.device), None
    for _ in range(2):
        embeddings, options = model.get_input_embeddings()(text).detach(), {"max_new_tokens": 5, "do_sample": False}
        out: Any = model.generate(
            inputs_embeds=embeddings, past_key_values=cache, return_dict_in_generate=True, **options
        )
        text, cache = torch.cat([text, out.sequences, text.new_tensor([[7, 8]] * 2)], dim=1), out.past_key_values
    return text


def compiled_by_the_user(model: PreTrainedModel) -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model, backend="eager")(**on_device(model, inputs()), use_cache=False)


def embedded_forward(model: PreTrainedModel) -> Any:
    given = on_device(model, inputs())
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(given["input_ids"])
        return model(inputs_embeds=embeddings, attention_mask=given["attention_mask"], use_cache=False)


def going_on(model: PreTrainedModel) -> Any:
    """The last of three turns; each hands on the cache of the one before."""
    given = on_device(model, inputs())
    for _ in range(3):
        out = model.generate(**given, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        given = next_turn(given, out, out.sequences.new_tensor([[7, 8]] * 3))
    return out.sequences


def going_on_over_theirs(model: PreTrainedModel) -> Any:
    """Two turns over a cache of HuggingFace's; prompts are whole, so that no masked tokens are new."""
    cache, ids = dynamic_cache(), inputs((6, 6))["input_ids"].to(model.device)
    for _ in range(2):
        out = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
        ids = torch.cat([out, out.new_tensor([[7, 8]] * 2)], dim=1)
    return torch.cat([out, out.new_tensor([[int(cache.get_seq_length())]] * 2)], dim=1)


def dynamic_cache() -> Any:
    return DynamicCache(config=tiny_qwen3().config)


def static_cache() -> Any:
    return StaticCache(config=tiny_qwen3().config, max_cache_len=40)


def right_padded() -> dict[str, Any]:
    return {name: value.flip(1) for name, value in inputs().items()}


def with_holes() -> Tensor:
    mask = inputs()["attention_mask"]
    mask[1, 3] = mask[2, 5] = 0
    return mask


def inside(context: Callable[[], Any], call: Call) -> Call:
    def run(model: PreTrainedModel) -> Any:
        with context():
            return call(model)

    return run


def changed(change: Callable[[PreTrainedModel], Callable[[], object]], call: Call) -> Call:
    """Call a model after a change, and take it back."""

    def run(model: PreTrainedModel) -> Any:
        undo = change(model)
        try:
            return call(model)
        finally:
            undo()

    return run


def with_hook(where: Callable[[PreTrainedModel], Any], call: Call) -> Call:
    return changed(lambda model: where(model).register_forward_hook(lambda *_: None).remove, call)


def in_training_mode(call: Call, more: Callable[[PreTrainedModel], object] = lambda model: None) -> Call:
    def change(model: PreTrainedModel) -> Callable[[], object]:
        more(model)
        return model.train().eval

    return changed(change, call)


def checkpointing(model: PreTrainedModel) -> None:
    """Gradients are checkpointed, without the hooks by which HuggingFace lets them reach adapters."""
    model.gradient_checkpointing_enable()
    model.disable_input_require_grads()


def in_a_thread(model: PreTrainedModel) -> Any:
    return in_thread(lambda: generate()(model))


def under_autocast(call: Call) -> Call:
    def run(model: PreTrainedModel) -> Any:
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            return call(model)

    return run


def under_another_device(model: PreTrainedModel) -> Any:
    given = on_device(model, inputs())
    with torch.device("meta"):
        return model.generate(**given, max_new_tokens=9, do_sample=False)


def under_gradients(model: PreTrainedModel) -> Any:
    given = on_device(model, inputs((6, 6)))  # labels that follow masked tokens are a reason of their own
    loss = model(**given, labels=given["input_ids"]).loss
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), "gradient": model.lm_head.weight.grad.clone()}


def over_a_paged_cache(**options: Any) -> Call:
    def run(model: PreTrainedModel) -> Any:
        paged = hasattr(model, "compiled")
        cache = model.compiled.new_cache() if paged else DynamicCache(config=model.config)
        return generate(past_key_values=cache, **options)(model)

    return run


def a_step_over_a_cache(logits_to_keep: Any) -> Call:
    def run(model: PreTrainedModel) -> Any:
        given = on_device(model, inputs())
        with torch.no_grad():
            cache = model(**given).past_key_values
            mask = torch.nn.functional.pad(given["attention_mask"], (0, 2), value=1)
            ids = mask.new_tensor([[5, 6]] * 3)
            return model(ids, mask, past_key_values=cache, logits_to_keep=logits_to_keep).logits

    return run


def a_step_over_theirs(**options: Any) -> Call:
    """Two tokens over a cache of HuggingFace's that its own forward has filled."""

    def run(model: PreTrainedModel) -> Any:
        own, ids = tiny_qwen3().to(model.device), torch.tensor([[7, 8, 9]] * 3)
        with torch.no_grad():
            cache = own(**on_device(model, {"input_ids": ids})).past_key_values
        return forward(input_ids=ids[:, 1:], attention_mask=None, past_key_values=cache, **options)(model)

    return run


def padded_lookup(model: PreTrainedModel) -> Any:
    given = on_device(model, inputs((6, 9)))
    embeddings = model.get_input_embeddings()(given["input_ids"][:1]).detach()
    mask, options = given["attention_mask"][:1], {"max_new_tokens": 5, "do_sample": False}
    return model.generate(inputs_embeds=embeddings, attention_mask=mask, prompt_lookup_num_tokens=3, **options)


def steps_over_theirs(model: PreTrainedModel) -> Any:
    """A prompt and two tokens, one after the other, over caches that begin empty and filled."""
    ids, logits = torch.tensor([[5, 6, 7, 8, 9]] * 2, device=model.device), []
    with torch.no_grad():
        for given in (DynamicCache(), DynamicCache(config=model.config), None):
            cache = model(ids, past_key_values=given).past_key_values
            logits += [model(ids[:, :1], past_key_values=cache).logits for _ in range(2)]
    return torch.cat(logits)


def score_of(given: dict[str, Any]) -> Call:
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    return forward(**given, labels=labels)
