"""What engines, and those who serve them, ask of the parts that a request may need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from compiled_llm.features import Seam

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from compiled_llm.engine.steps.constraint import AnswerForm
    from compiled_llm.engine.steps.request import Request
    from compiled_llm.execution.lifecycle.runtime import Runtime
    from compiled_llm.execution.lifecycle.warmup import Report
    from compiled_llm.execution.model_runner import ModelRunner
    from compiled_llm.execution.reporting.slow_paths import Reason
    from compiled_llm.kinds.support import FoundKind
    from compiled_llm.model.facts import ModelFacts
    from compiled_llm.requests.outputs import RequestOutput
    from compiled_llm.requests.sampling_params import SamplingParams


class EngineGrammars(Protocol):
    """The grammars of one engine."""

    def forms_of(self, params: SamplingParams, eos: frozenset[int], vocabulary: int) -> Sequence[AnswerForm | None]:
        """Return the form of each of the ``n`` answers to a prompt, None for any text; errors as of ``ends_of``."""
        ...

    def begin(self, requests: Sequence[Request], params: SamplingParams) -> None: ...
    def compile(self, requests: Sequence[Request]) -> None: ...
    def prepare(self, vocabulary: int, eos: frozenset[int]) -> None: ...
    def close(self) -> None: ...


class GrammarsPart(Protocol):
    """The part that compiles grammars."""

    def start_worker(self) -> object | None:
        """Start a process that compiles, if its library is there."""
        ...

    def grammars_of(
        self,
        tokenizer: Any,
        worker: Any,
        timeout: float,
        arrive: Callable[..., None],
        end: Callable[..., None],
    ) -> EngineGrammars: ...
    def ends_of(
        self, eos: frozenset[int], others: Iterable[int], vocabulary: int, tokenizer: Any
    ) -> frozenset[int]: ...


class MultimodalProcessor(Protocol):
    """HuggingFace's processor of a model, which makes inputs of text and images."""

    def __call__(self, **options: object) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: list[object], **options: object) -> Mapping[str, Any]: ...


class GivenImages(Protocol):
    """The images of one prompt."""

    @property
    def ids(self) -> NDArray[np.int64]: ...
    @property
    def keys(self) -> NDArray[np.int64]:
        """Its tokens, with keys in place of those of images."""
        ...

    @property
    def slow(self) -> Reason | None: ...
    def enter(self, request: Request) -> None: ...


class ImagesPart(Protocol):
    """The part that computes prompts with images."""

    def images_of(
        self,
        prompt: object,
        processor: MultimodalProcessor | None,
        params: SamplingParams,
        model_runner: ModelRunner,
        salt: Hashable,
        cache_bytes: int,
        in_steps: bool,
    ) -> GivenImages: ...
    def inputs_of(self, prompt: object, processor: MultimodalProcessor | None, image_token: int) -> dict[str, Any]: ...
    def prepare(self, model_runner: ModelRunner, report: Report) -> None: ...
    def check_kinds(self, kinds: Sequence[FoundKind]) -> None: ...


class AnswersTexts(Protocol):
    """An engine, as whoever pools its vectors asks it."""

    def generate(self, prompts: Any, *, pooled: bool) -> list[RequestOutput]: ...


class PoolingPart(Protocol):
    """The part that gives vectors of texts."""

    def settings_of(
        self, facts: ModelFacts, params: Any, outputs: bool, pooled: bool
    ) -> tuple[SamplingParams, Callable[[Request], None]]: ...
    def served(self, facts: ModelFacts, pooling: str | None) -> Mapping[str, Any]: ...
    def embed(
        self,
        engine: AnswersTexts,
        model: PreTrainedModel,
        texts: str | Sequence[int] | Iterable[str | Sequence[int]],
        dimensions: int | None,
        prompt_name: str | None,
        pooling: str | None,
    ) -> Tensor: ...
    def classify(
        self,
        engine: AnswersTexts,
        model: PreTrainedModel,
        texts: str | Sequence[int] | Iterable[str | Sequence[int]],
    ) -> Tensor: ...


class DraftsPart(Protocol):
    """The part that guesses tokens; its settings are a ``SpeculativeConfig``."""

    def config_of(self, given: object) -> Any: ...
    def check_model(self, backend: str, batch_invariant: bool, kinds: Sequence[FoundKind]) -> None: ...
    def check_memory(self, runtime: Runtime, rows: int) -> None: ...
    def prepare(self, model_runner: ModelRunner, config: Any, rows: Iterable[int], report: Report) -> None: ...


GRAMMARS = Seam[GrammarsPart]("structured_outputs", "engine")
IMAGES = Seam[ImagesPart]("images", "engine")
POOLING = Seam[PoolingPart]("pooling", "engine")
DRAFTS = Seam[DraftsPart]("drafts", "engine")
