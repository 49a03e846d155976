"""Reasons why a call does not take the fastest path: ids, which ``stats()`` counts, and their wording."""

from __future__ import annotations

from typing import Literal, NamedTuple

SlowPath = Literal[
    "asleep",
    "assisted_generation",
    "attention_mask_shape",
    "attn_implementation",
    "autocast",
    "beam_sample",
    "beam_search",
    "cache_implementation",
    "cannot_run",
    "custom_generate",
    "draft_layers",
    "encoder",
    "encoder_graphs",
    "fractional_positions",
    "fused_head",
    "generation_mode",
    "gradient_checkpointing",
    "gradients",
    "hidden_in_window",
    "inner_hooks",
    "inner_module",
    "inputs",
    "inputs_embeds",
    "kept_manager",
    "labels_masked",
    "labels_with_logits_to_keep",
    "logits_to_keep",
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
    "outer_compile",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "overrides",
    "own_forward",
    "packed_sequences",
    "padded_blocks",
    "past_key_values",
    "position_ids",
    "position_ids_shape",
    "prefill",
    "processors",
    "right_padding",
    "speculation_type",
    "synced_gpus",
    "training",
    "use_cache",
    "use_mtp",
]


class Wording(NamedTuple):
    """A sentence in which ``{}`` stands for the reason's detail, and advice what to change."""

    sentence: str
    advice: str


WORDINGS: dict[SlowPath, Wording] = {
    "asleep": Wording("the model is asleep, and has no pages", "Call wake() on its engine."),
    "assisted_generation": Wording(
        "HuggingFace's loop accepts and rejects the drafts",
        "Leave assistant_model and prompt_lookup_num_tokens out unless drafts are worth it: the fast loop may be "
        "faster.",
    ),
    "attention_mask_shape": Wording(
        "the attention_mask is not [batch, tokens], with a column for each token of the cache and of the call",
        "Give the mask that the tokenizer makes.",
    ),
    "attn_implementation": Wording(
        "the model attends by a function that you registered ({})",
        "Call model.set_attn_implementation('sdpa') if it is softmax attention, or wrap the model with variants.",
    ),
    "autocast": Wording(
        "torch.autocast is on, under which some operations of the model compute in another type",
        "Leave torch.autocast out, and load the model in the type that you want (dtype=torch.bfloat16).",
    ),
    "beam_sample": Wording(
        "HuggingFace's loop draws the beams",
        "Leave num_beams out unless you need beams; each of their steps is compiled.",
    ),
    "beam_search": Wording(
        "HuggingFace's loop chooses the beams",
        "Leave num_beams out unless you need beams; each of their steps is compiled.",
    ),
    "cache_implementation": Wording(
        "cache_implementation names another cache than the model's own",
        "Leave cache_implementation out: the pages are the cache.",
    ),
    "cannot_run": Wording(
        "the model cannot run over pages now: {}",
        "Change what it names; the next call is then compiled.",
    ),
    "custom_generate": Wording(
        "the loop is that of custom_generate",
        "Leave custom_generate out, or let it call model.generate.",
    ),
    "draft_layers": Wording(
        "some of the layers draft (assistant_early_exit)",
        "Leave assistant_early_exit out unless drafts are worth it: the fast loop may be faster.",
    ),
    "encoder": Wording(
        "HuggingFace's own encoder computes images, because {}",
        "Remove the hooks (handle.remove()), or merge the adapters (merge_and_unload) of the encoder.",
    ),
    "encoder_graphs": Wording(
        "the encoder of images is not captured where max_graphs or graph_memory bound CUDA graphs",
        "Leave both out if the device has room for the encoder's graphs.",
    ),
    "fractional_positions": Wording(
        "position_ids are not whole numbers",
        "Round them, or leave them out: they are counted from the mask.",
    ),
    "fused_head": Wording(
        "the module inside was called by itself, as {} does",
        "Nothing while you train: gradients need HuggingFace's forward. Else leave fused_lm_head out.",
    ),
    "generation_mode": Wording(
        "the generation mode is {}",
        "Choose greedy decoding or sampling, which take the fast loop.",
    ),
    "gradient_checkpointing": Wording(
        "gradients are checkpointed in training mode, where layers use no cache: {}",
        "Call model.gradient_checkpointing_disable() before generate, as TRL does, or model.eval().",
    ),
    "gradients": Wording("gradients are recorded", "Call the model under torch.no_grad() or torch.inference_mode()."),
    "hidden_in_window": Wording(
        "hidden tokens lie between others in a sliding window, which counts them",
        "Pad prompts on the left, and give each row's text without gaps.",
    ),
    "inner_hooks": Wording(
        "hooks are on inner modules ({})",
        "Remove the hooks (handle.remove()) once you have seen enough, or declare them by compiled_llm.traced_hook, "
        "which compiles them into the steps.",
    ),
    "inner_module": Wording(
        "{} was called by itself, which is HuggingFace's own code",
        "Call model(...) or model.generate(...).",
    ),
    "inputs": Wording(
        "the model is given {}",
        "Give input_ids [batch, tokens] of integers, or inputs_embeds [batch, tokens, hidden] of the model's type.",
    ),
    "inputs_embeds": Wording(
        "inputs_embeds are given together with what reads the prompts' tokens",
        "Give input_ids, or leave out guidance_scale, prefill_chunk_size, and for padded prompts repetition_penalty.",
    ),
    "kept_manager": Wording(
        "HuggingFace's own manager is kept from an earlier call (persistent_manager)",
        "Call model.destroy_cached_continuous_batching_manager(); the next one runs over the engine.",
    ),
    "labels_masked": Wording("labels follow masked tokens", "Set labels that follow masked tokens to -100."),
    "labels_with_logits_to_keep": Wording("labels are given together with logits_to_keep", "Leave logits_to_keep out."),
    "logits_to_keep": Wording(
        "logits_to_keep is {}",
        "Give model(...) a number, a slice or a list of columns, and generate a number, or leave it out.",
    ),
    "loss_function": Wording(
        "the model computes a loss of its own",
        "Leave labels out, and compute the loss from the logits.",
    ),
    "max_batch_size": Wording(
        "there are more rows than max_batch_size",
        "Split the batch, or wrap(model, max_batch_size=...) with a larger one.",
    ),
    "mixed_tokens": Wording(
        "{} makes each token depend on all others of a call",
        "Leave that module out if you can: rows that are computed together would change each other.",
    ),
    "model_hooks": Wording(
        "forward hooks are on the model itself",
        "Remove the hooks unless you need them at each step; a streamer sees the tokens, too.",
    ),
    "model_inputs": Wording(
        "the model is given inputs that pages do not cover ({})",
        "Leave these inputs out if the model does not need them.",
    ),
    "no_new_tokens": Wording(
        "the cache already holds every input token",
        "Give tokens that the cache does not hold yet, or take the last one out of it with crop(-1). With recurrent "
        "layers, whose states have no earlier tokens, crop raises: give the whole text without the cache, or keep a "
        "copy.deepcopy of the cache from before its last token.",
    ),
    "no_position_ids": Wording(
        "no position_ids are given, and the model numbers tokens in a way of its own",
        "Give position_ids.",
    ),
    "observed": Wording("each operation is seen or changed by {}", "Call the model outside of it."),
    "out_of_pages": Wording(
        "there are more tokens than pages are free",
        "Drop caches that you hold, give fewer rows or tokens, or wrap(model, kv_memory=...) with more memory.",
    ),
    "out_of_positions": Wording("there are more tokens than the model has positions", "Shorten the text."),
    "outer_compile": Wording(
        "a torch.compile or torch.export of yours traces HuggingFace's own forward",
        "Call the wrapped model itself: wrap has compiled it.",
    ),
    "output_attentions": Wording("output_attentions is on", "Turn it off wherever you do not read them."),
    "output_hidden_states": Wording(
        "hidden states are asked for where only HuggingFace's own forward gives them",
        "Pad prompts on the left, leave out prefill_chunk_size, and ask in the call rather than in the model's config.",
    ),
    "output_router_logits": Wording("output_router_logits is on", "Turn it off wherever you do not read them."),
    "overrides": Wording(
        "the model overrides what our loop stands in for ({})",
        "Take the override back if you do not need it.",
    ),
    "own_forward": Wording(
        "the object has a forward of its own ({})",
        "Take it off if you do not need it; wrap compiles the model without model.compile().",
    ),
    "packed_sequences": Wording(
        "position_ids pack several sequences into a row",
        "Give each sequence a row of its own.",
    ),
    "padded_blocks": Wording(
        "position_ids do not count each row's own tokens, and an indexer chooses blocks of them",
        "Give position_ids that count them: (attention_mask.cumsum(1) - 1).clamp(min=0).",
    ),
    "past_key_values": Wording("the cache is a {}", "Pass no cache, or one of model.compiled.new_cache()."),
    "position_ids": Wording(
        "position_ids do not count each row's unmasked tokens",
        "Leave position_ids out: they are counted from the mask.",
    ),
    "position_ids_shape": Wording("position_ids are not [batch, tokens]", "Give [batch, tokens], or leave them out."),
    "prefill": Wording(
        "HuggingFace's own forward computes the prompts, because {}",
        "Set tokenizer.padding_side = 'left', and pass no cache of HuggingFace's. Images stay so; the tokens after "
        "the first are compiled.",
    ),
    "processors": Wording(
        "a logits processor has to see each step ({})",
        "Leave out those that you do not need; temperature, top_k, top_p, min_p and repetition_penalty run in the "
        "graph, and so does what bars, forces or biases tokens and short sequences.",
    ),
    "right_padding": Wording("prompts are padded on the right", "Set tokenizer.padding_side = 'left'."),
    "speculation_type": Wording("speculation_type is {}", "Leave speculation_type out."),
    "synced_gpus": Wording("synced_gpus is on", "Leave synced_gpus out: the model lies whole on one device."),
    "training": Wording("a module in training mode acts otherwise: {}", "Call model.eval()."),
    "use_cache": Wording(
        "use_cache is False",
        "Leave use_cache=False out: without a cache each step computes the whole text again.",
    ),
    "use_mtp": Wording("use_mtp is on", "Leave use_mtp out."),
}


class Reason(NamedTuple):
    """The reason of one slower call: the key in ``Stats.slow_paths``, and which mode, inputs or processors."""

    id: SlowPath
    detail: str = ""

    def __str__(self) -> str:
        return WORDINGS[self.id].sentence.format(self.detail)

    @property
    def advice(self) -> str:
        return WORDINGS[self.id].advice
