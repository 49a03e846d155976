"""A judge of answers: by logits in float32, in units of the noise that the dtype of model and pages has."""

# Shapes: N tokens of an answer, V vocabulary.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from compiled_llm.requests.outputs import Completion, RequestOutput
from support.combined.asked import Asked
from support.execution.twins import rms
from support.huggingface.vision_gpu import in_dtype

BEYOND_NOISE = 8.0
BURSTS = 4.0
"""States of recurrent layers carry a rounding on, and a burst of it is so many times as far beyond noise."""
FLOOR = 1e-4
"""The noise of sums in float32 in another order."""


class _RoundingCache(DynamicCache):
    """Keeps keys and values as pages of fp8 do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rounded = (states.to(torch.float8_e4m3fn).to(states.dtype) for states in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


class _Computed(NamedTuple):
    logits: Tensor  # [T, V] float32
    hidden: Tensor  # [T, hidden] float32


class Judge:
    """Judges what a model is said to have answered.

    Attributes:
        rounds: whether its pages are fp8.
    """

    def __init__(self, exact: Any, bare: Any, rounds: bool) -> None:
        """``bare`` is the model in the dtype that it is served in."""
        self._exact, self._bare, self.rounds = exact, bare, rounds
        layers = getattr(exact.config.get_text_config(decoder=True), "layer_types", None) or ()
        self._beyond = BEYOND_NOISE * (BURSTS if "linear_attention" in layers else 1)

    def faults(self, asked: Asked, output: RequestOutput, processed: bool) -> list[str]:
        """Return what is wrong with an answer, in words; nothing if nothing is.

        ``processed`` if log-probabilities are of what tokens are drawn from: these are not judged.
        """
        return [fault for answer in output.outputs for fault in self._faults(asked, output, answer, processed)]

    def _faults(self, asked: Asked, output: RequestOutput, answer: Completion, processed: bool) -> list[str]:
        prompt, tokens = len(asked.ids), list(answer.token_ids)
        text = torch.tensor([[*asked.ids, *tokens]], device=self._exact.device)
        exact, bare = self._run(self._exact, asked, text), self._run(self._bare, asked, text, self.rounds)
        noise = rms(bare.logits - exact.logits)
        noise = noise.clamp(min=float(noise.mean())) + FLOOR
        found = []
        behind = self._behind(asked, text, exact.logits[prompt - 1 : -1]) / noise[prompt - 1 : -1].cpu()
        if tokens and not float(behind.max()) <= self._beyond:
            places = (~(behind <= self._beyond)).nonzero()[:, 0].tolist()
            found.append(f"tokens {places} of {tokens} are up to {float(behind.max()):.1f} times the noise behind")
        of_text = torch.log_softmax(exact.logits, dim=-1)
        scored = [(at, entries) for at, entries in enumerate(output.prompt_logprobs or ()) if entries]
        if not processed:
            scored += [(prompt + at, entries) for at, entries in enumerate(answer.logprobs or ())]
        for at, entries in scored:
            for token, entry in entries.items():
                off = abs(entry.logprob - float(of_text[at - 1, token])) / float(noise[at - 1])
                if off > 2 * self._beyond:  # the sum of all is off, too
                    found.append(f"the log-probability of {token} at {at} is off by {off:.1f} times the noise")
        if answer.hidden_states is not None and answer.finish_reason != "cancelled":
            ours = answer.hidden_states[-1].float().to(exact.hidden.device)
            expected = exact.hidden[: len(ours)]
            off = rms(ours - expected) / (rms(bare.hidden[: len(ours)] - expected) + FLOOR * (1 + rms(expected)))
            if len(ours) != prompt + len(tokens) - 1 or float(off.max()) > self._beyond:
                found.append(f"hidden states of {len(ours)} tokens are off by {float(off.max()):.1f} times the noise")
        return found

    @torch.no_grad()
    def _run(self, model: Any, asked: Asked, text: Tensor, rounds: bool = False) -> _Computed:
        given: dict[str, Any] = {"input_ids": text, "output_hidden_states": True, "use_cache": rounds}
        if rounds:
            given["past_key_values"] = _RoundingCache(config=model.config)
        if asked.inputs is not None:
            new = text.shape[1] - len(asked.ids)
            of_images = {name: tensor.to(text.device) for name, tensor in asked.inputs.items() if name != "input_ids"}
            for name in ("attention_mask", "mm_token_type_ids"):
                of_images[name] = pad(of_images[name], (0, new), value=int(name == "attention_mask"))
            given |= in_dtype(of_images, model.dtype)
        output = model(**given)
        return _Computed(output.logits[0].float(), output.hidden_states[-1][0].float())

    @staticmethod
    def _behind(asked: Asked, text: Tensor, logits: Tensor) -> Tensor:
        """Return ``[N]``, how far each token is behind the last of those that it may be."""
        text, logits, prompt = text.cpu(), logits.cpu().clone(), len(asked.ids)
        processors = [make() for make in asked.processors]
        for at in range(len(logits)):
            for processor in processors:
                logits[at : at + 1] = processor(text[:, : prompt + at], logits[at : at + 1])
        chosen = logits.gather(1, text[0, prompt:, None])[:, 0]
        return logits.topk(asked.choices).values[:, -1] - chosen
