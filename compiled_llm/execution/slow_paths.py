"""Why a call does not take the fastest path: an id for each reason, which ``stats()`` counts, and its sentence."""

from __future__ import annotations

from typing import Literal, NamedTuple

SlowPath = Literal[
    "assisted_generation",
    "attention_mask_shape",
    "autocast",
    "beam_sample",
    "beam_search",
    "cache_implementation",
    "cannot_run",
    "custom_generate",
    "draft_layers",
    "generation_mode",
    "gradients",
    "hidden_in_window",
    "inner_hooks",
    "inputs",
    "inputs_embeds",
    "labels_masked",
    "labels_with_logits_to_keep",
    "loss_function",
    "max_batch_size",
    "mixed_tokens",
    "model_hooks",
    "model_inputs",
    "no_new_tokens",
    "no_position_ids",
    "observed",
    "out_of_pages",
    "out_of_positions",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "overrides",
    "own_forward",
    "packed_sequences",
    "past_key_values",
    "position_ids",
    "position_ids_shape",
    "prefill",
    "processors",
    "right_padding",
    "scores",
    "speculation_type",
    "synced_gpus",
    "training",
    "use_cache",
    "use_mtp",
]

SENTENCES: dict[SlowPath, str] = {
    "assisted_generation": "HuggingFace's loop accepts and rejects the drafts",
    "attention_mask_shape": "the attention_mask is not [batch, tokens]",
    "autocast": "torch.autocast is on",
    "beam_sample": "HuggingFace's loop draws the beams",
    "beam_search": "HuggingFace's loop chooses the beams",
    "cache_implementation": "cache_implementation names another cache than the model's own",
    "cannot_run": "the model cannot run over pages now: {}",
    "custom_generate": "the loop is that of custom_generate",
    "draft_layers": "some of the layers draft (assistant_early_exit)",
    "generation_mode": "the generation mode is {}",
    "gradients": "gradients are recorded",
    "hidden_in_window": "hidden tokens lie between others in a sliding window, which counts them",
    "inner_hooks": "hooks are on inner modules",
    "inputs": "the model is given {}",
    "inputs_embeds": "inputs_embeds are given in place of token ids",
    "labels_masked": "labels follow masked tokens",
    "labels_with_logits_to_keep": "labels are given together with logits_to_keep",
    "loss_function": "the model computes a loss of its own",
    "max_batch_size": "there are more rows than max_batch_size",
    "mixed_tokens": "{} makes each token depend on all others of a call",
    "model_hooks": "forward hooks are on the model itself",
    "model_inputs": "the model is given inputs that pages do not cover ({})",
    "no_new_tokens": "the cache already holds every input token",
    "no_position_ids": "no position_ids are given, and the model numbers tokens in a way of its own",
    "observed": "each operation is seen or changed by {}",
    "out_of_pages": "there are more tokens than pages are free",
    "out_of_positions": "there are more tokens than the model has positions",
    "output_attentions": "output_attentions is on",
    "output_hidden_states": "output_hidden_states is on",
    "output_router_logits": "output_router_logits is on",
    "overrides": "the model overrides what our loop stands in for ({})",
    "own_forward": "the forward is one of your own ({})",
    "packed_sequences": "position_ids pack several sequences into a row",
    "past_key_values": "past_key_values is a {}",
    "position_ids": "position_ids do not count each row's unmasked tokens",
    "position_ids_shape": "position_ids are not [batch, tokens]",
    "prefill": "HuggingFace's own forward computes the prompts, because {}",
    "processors": "a logits processor has to see each step ({})",
    "right_padding": "prompts are padded on the right",
    "scores": "output_scores or output_logits is on",
    "speculation_type": "speculation_type is {}",
    "synced_gpus": "synced_gpus is on",
    "training": "the model is in training mode",
    "use_cache": "use_cache is False",
    "use_mtp": "use_mtp is on",
}
"""What is said of each; ``{}`` stands for the reason's detail."""


class Reason(NamedTuple):
    """Why one call took a slower path.

    Attributes:
        id: stable; the key in ``Stats.slow_paths``.
        detail: which mode, inputs or processors.
    """

    id: SlowPath
    detail: str = ""

    def __str__(self) -> str:
        """The sentence."""
        return SENTENCES[self.id].format(self.detail)
