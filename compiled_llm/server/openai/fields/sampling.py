"""Fields of a request that say how tokens are sampled: OpenAI's, and those that vLLM adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, create_model
from pydantic_core import PydanticCustomError

from compiled_llm.requests.default_sampling import with_defaults
from compiled_llm.requests.sampling_params import (
    NUMBERS,
    SAMPLED_BY,
    NumberField,
    SamplingParams,
)
from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Body, Entries, NoEffect, RefusedField
from compiled_llm.server.openai.fields.logprobs import LogprobFields
from compiled_llm.server.openai.fields.response_format import Form, ResponseFormat
from compiled_llm.server.openai.fields.structured_outputs import FormFields

T = TypeVar("T")
Several = Annotated[Entries[T], Field(max_length=256)]  # things that each take time in every step, or in each answer
MAX_CHARACTERS = 2**13  # of a request's stop strings together, and of its bad words
_MAX_TOKENS = 2**18  # that a request can name; the largest vocabularies have as many
_LONGEST_SALT = 1024  # characters of a salt; the prefix cache keeps it


def _of_few_characters(given: Any) -> Any:
    texts = [given] if isinstance(given, str) else given or ()
    if (characters := sum(map(len, texts))) > MAX_CHARACTERS:
        numbers = {"characters": f"{characters:,}", "most": f"{MAX_CHARACTERS:,}"}
        raise PydanticCustomError("too_long", "has {characters} characters; there can be {most}", numbers)
    return given


Short = AfterValidator(_of_few_characters)  # texts that are looked for in each answer

_NUMBERS = (*SAMPLED_BY, "seed", "min_tokens")
_SAME_NAMES = (
    *("n", *_NUMBERS, "stop", "stop_token_ids", "ignore_eos", "bad_words"),
    *("allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
)
"""Fields that ``SamplingParams`` has by the same name."""


def _field_of(field: NumberField) -> tuple[Any, None]:
    bounds: Any = field.number.http_bounds or field.number.bounds
    return Annotated[field.annotation | None, Field(**bounds)], None


if TYPE_CHECKING:
    NumberFields = FormFields
else:
    NumberFields = create_model(
        "NumberFields", __base__=FormFields, **{name: _field_of(NUMBERS[name]) for name in _NUMBERS}
    )


class StreamOptions(Body):
    """The parts of a stream besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, NoEffect("chunks are never padded")] = None


class WaitingFields(Body):
    """Fields of every kind of request for what answers it, when, and with whom it shares prefixes."""

    model: str | None = None
    user: Annotated[str | None, NoEffect("nothing is kept of users; with --salt-caches, it is a salt")] = None
    cache_salt: Annotated[str | None, Field(max_length=_LONGEST_SALT)] = None
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None


class CutFields(WaitingFields):
    """Fields of every kind of request for how its prompt is cut."""

    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    truncation_side: Literal["left", "right"] | None = None

    def cut(self, prompt: list[int], room: int, side: str = "left", kept: tuple[int, int] = (0, 0)) -> list[int]:
        """Return a prompt without its first tokens, or its last, if it is to be cut to ``room`` tokens.

        Args:
            side: whose tokens are cut unless the request says so: ``"left"``, the first, or ``"right"``.
            kept: how many tokens stay at its beginning and its end.

        Raises:
            ApiError: nothing of the prompt would be left.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        most = max(1, room) if most == -1 else most
        if most <= sum(kept):
            least = f"{sum(kept) + 1} or more" + (", since the tokenizer adds tokens to each text" if any(kept) else "")
            said = f"truncate_prompt_tokens: give {least}, or -1 for as many as fit"
            raise invalid(said, "truncate_prompt_tokens")
        if (over := len(prompt) - most) <= 0:
            return prompt
        first, last = kept
        if (self.truncation_side or side) == "left":
            return prompt[:first] + prompt[first + over :]
        return prompt[: len(prompt) - last - over] + prompt[len(prompt) - last :]


class SamplingFields(NumberFields, CutFields):
    """Fields of every kind of request for text: how its answer is sampled, and how its prompt is read."""

    stop: Annotated[str | Several[str] | None, Short] = None
    logit_bias: dict[str, int | float] | None = None
    stream: bool | None = None

    stop_token_ids: Several[int] | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[Several[str] | None, Short] = None
    allowed_token_ids: Annotated[Entries[int] | None, Field(max_length=_MAX_TOKENS)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    use_beam_search: Annotated[Any, RefusedField("answers are drawn one token after another", (False,))] = None
    length_penalty: Annotated[Any, RefusedField("it is for beam search", (1.0, 1))] = None

    def params(self, defaults: Mapping[str, int | float], form: Form | None = None, **others: Any) -> SamplingParams:
        """Return the sampling parameters, with ``others`` besides; ApiError or ValueError if they are impossible."""
        same = {name: value for name in _SAME_NAMES if (value := getattr(self, name, None)) not in (None, [])}
        held = None if form is None else form.params
        return SamplingParams(
            **with_defaults(same, defaults), logit_bias=self._biases(), structured_outputs=held, **others
        )

    def _biases(self) -> dict[int, float] | None:
        try:
            return {int(token): bias for token, bias in self.logit_bias.items()} if self.logit_bias else None
        except ValueError:
            raise invalid("logit_bias: keys are token ids, written as text", "logit_bias") from None


class ChoiceFields(LogprobFields, SamplingFields):
    """Fields of chats and completions: how many answers they want, and what else of each."""

    n: Annotated[int | None, Field(ge=1)] = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def answers(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the count of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether each chunk of a stream has the count of tokens so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def tells_of_tokens(self) -> bool:
        """Whether each chunk of a stream says something of its tokens, so that no two are alike."""
        return self.wants_usage_always or bool(self.return_token_ids)

    @property
    def form(self) -> Form | None:
        """The form of the answer; ApiError or ValueError as of ``form_beside``."""
        return self.form_beside(self.response_format)

    def check_stream(self) -> None:
        """Check that no field contradicts ``stream``; ApiError if one does."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options: only for stream=true", "stream_options")
