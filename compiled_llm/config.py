"""The options of ``wrap``."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

from compiled_llm.features import check_has

if TYPE_CHECKING:
    from compiled_llm_ops.backends import ChosenBackend

Mode = Literal["eager", "compile", "reduce-overhead", "cuda-graphs", "piecewise"]
KVDtype = Literal["fp8_e4m3"]
CUDA_GRAPH_MODES = ("cuda-graphs", "piecewise")
"""The modes that capture steps as our own CUDA graphs."""
WAITING_MODES = ("eager", "piecewise")
"""The modes in which attention may wait for the device."""


OWN_BACKENDS = ("auto", "flashinfer", "triton", "flash-attn", "torch", "reference")
"""Values of ``backend`` that no other package brings; named here, too, so that checking them does not import torch."""

INVARIANT_BACKEND = "invariant"
"""The backend of ``batch_invariant``, which is not chosen by its name."""

LEAST_GRAPHS = 2
"""A step may have rows that decode and others whose prompts are computed."""

MAX_NUM_SEQS = 256
"""How many requests of an engine run at once, unless it is told otherwise, or artifacts have room for fewer."""

_QUANTITY = re.compile(r"\s*(\d*\.?\d+)\s*([A-Za-z]+)\s*")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class KVMemory:
    """A bound on the memory of pages: ``nbytes``, ``tokens`` over all rows, or a ``fraction`` of what is free then."""

    fraction: float | None = None
    nbytes: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class KVScales:
    """Scales of keys and values in pages of fp8, which hold each number divided by the scale of its layer and kv head.

    Any nested sequences of numbers will do; they are kept as tuples.

    Attributes:
        keys: of each layer, for each kv head; none of a layer without attention.
        values: likewise.

    Raises:
        ValueError: a scale is no positive, finite number of float32, or there are none.
    """

    keys: Sequence[Sequence[float]]
    values: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            given = getattr(self, name)
            try:
                layers = tuple(tuple(float(scale) for scale in heads) for heads in given)
            except (TypeError, ValueError):
                raise ValueError(
                    f"kv_scales: {name} must be numbers, [layers][kv heads]; got {_shortly(given)}"
                ) from None
            if not any(layers):
                raise ValueError(f"kv_scales: {name} must have a scale for each layer and kv head; got {given!r}")
            for layer, heads in enumerate(layers):
                for head, scale in enumerate(heads):
                    if not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
                        raise ValueError(
                            f"kv_scales: {name}[{layer}][{head}] is {scale}; scales are from {_LEAST_SCALE} to "
                            f"{_LARGEST_SCALE}"
                        )
            object.__setattr__(self, name, layers)

    def __repr__(self) -> str:
        return f"KVScales(of {len(self.keys)} layers)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for ``load``, and for ``--kv-scales`` of the command line: JSON, with keys and values."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVScales:
        """Return the scales that ``save`` has written.

        Raises:
            ValueError: the file cannot be read, or holds something else.
        """
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(read["keys"], read["values"])
        except OSError as error:
            raise ValueError(f"kv_scales: {path}: cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"kv_scales: {path}: is no JSON with keys and values, as KVScales.save writes it"
            ) from error

    @property
    def kv_heads(self) -> tuple[list[int], list[int]]:
        """How many kv heads each layer has, by the scales of keys and by those of values."""
        return [*map(len, self.keys)], [*map(len, self.values)]


_LEAST_SCALE, _LARGEST_SCALE = 1e-30, 1e30
"""Within float32, with room for what is multiplied with them."""


def _shortly(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:80]}..."


@dataclass(frozen=True, kw_only=True)
class WrapConfig:
    """Options of ``compiled_llm.wrap``: its keyword arguments are these fields.

    Attributes:
        mode: ``"eager"`` runs the ops without compiling, ``"compile"`` compiles with Inductor, ``"cuda-graphs"`` also
            captures whole steps as CUDA graphs and replays them, ``"reduce-overhead"`` leaves capturing to torch's
            cudagraph trees, which cost the host more. ``"piecewise"`` captures what lies between the attention of two
            layers, and launches attention each time: for backends that cannot be captured. On a CPU all but
            ``"eager"`` are the same.
        backend: whose kernels attend over the pages. ``"auto"`` takes the fastest: on CUDA FlashInfer for prefill and
            our own kernel for decode, on a CPU plain PyTorch. ``"flashinfer"`` decodes with FlashInfer, too; on CUDA
            only. ``"triton"`` has kernels of our own for both, which need no nvcc, and take float32, too; on CUDA only.
            ``"auto"`` takes it where FlashInfer is missing or cannot be built, and says so once. ``"flash-attn"`` and
            ``"torch"`` prefill by the package flash-attn, or by ``torch.nn.attention.varlen`` of torch 2.13, in 16
            bits, and decode by our own kernel; on CUDA only, and with ``page_size=256`` unless flash-attn 3 is
            installed. ``"reference"`` is plain PyTorch: what a CPU runs anyway, and on CUDA, with ``mode="eager"`` or
            ``mode="piecewise"``, the oracle for all others. Other packages can bring further ones, by an entry point of
            the group ``compiled_llm_ops.backends``.
        page_size: tokens in one page of the KV cache.
        max_batch_size: most rows that run at once; a call with more raises. Unless it is given, ``artifacts`` with room
            for fewer have as many as these.
        kv_memory: what the pages may take. A float up to 1.0 is a fraction of the free memory, an int is bytes, a
            string is bytes with a unit (``"8GiB"``) or tokens (``"20000 tokens"``). By default 0.8 of what is free on
            a CUDA device and 0.25 of what is free on a CPU. A fraction, the default too, never takes more than
            ``max_batch_size`` rows of the model's full length can use.
        prefill_tokens: most tokens computed at once in prefill; longer prompts are computed in chunks, so that they
            need no more memory for activations.
        cascade: in decode, read pages that several rows begin with, such as those of a system prompt, once for all of
            them. ``"auto"`` does so on CUDA where a rule that was fitted to measurements says that attention is faster,
            True wherever rows share 64 tokens or more. Results differ in their last bits from those of rows that read
            them alone. Steps of rows that share nothing run as without it. Only our own decode kernel does so, that
            of ``backend="auto"``: with others ``"auto"`` is off, and True is refused.
        batch_invariant: the bits of a row's logits depend on the row alone: not on the rest of the batch, on how many
            tokens of it are computed at a time, nor on whether they come from a prefill, a decode step or cached pages.
            So log-probabilities of an answer are, bit for bit, those that ``model(...)`` computes of it under
            ``torch.no_grad``. Matmuls, attention and sums have kernels of their own then, and one order of sums; steps
            take longer. Only compiled, with ``backend="auto"``, and without ``cascade``; the bits are those of one
            device, of these options and, on a CPU, of one number of threads.
        kv_dtype: ``"fp8_e4m3"`` stores keys and values in half the bytes of 16 bits: twice the tokens in the same
            memory, and half of what decode reads. Results differ by what rounding to 8 bits costs. On CUDA from compute
            capability 8.9 on. None stores them in the model's dtype.
        kv_scales: for ``kv_dtype``, what keys and values are divided by before they are rounded, by layer and kv head:
            ``compiled_llm.kv_scales`` measures it. None for 1.
        variants: for names of ``compiled_llm_ops.register_variant`` the layers that attend by them, as a list of
            numbers from 0 on, or ``"all"``. A layer's attention module has the variant's tensors under their names, as
            buffers or parameters, or calls its attention with them; those by query are ``[batch, tokens, ...]`` there.
            Windows of layers remain. On CUDA only with ``backend="auto"``.
        packed: whose kernels multiply weights of 4 or 8 bits that another library has made. ``"auto"`` takes ours where
            we can read the weight as it lies in memory, and leaves the rest to the library; True refuses a model with a
            layer that would be left to it, False leaves all to it. ``stats().weights`` says which are whose.
        fuse_projections: compute linear layers that read one input (queries, keys and values; gate and up) as one
            matmul. Their weights become views of one storage each, and stay the same parameters. By default on CUDA
            only. Nothing is fused with ``mode="eager"``.
        workspace_bytes: FlashInfer's scratch memory, in bytes, on CUDA. By default what any prefill needs, and up to
            256 MiB for those that are captured; prefills that need more are launched kernel by kernel.
        graph_memory: with ``mode="cuda-graphs"`` or ``"piecewise"``, most device memory that CUDA graphs may take
            together: bytes as an int, or a string of a number and a unit (``"512MiB"``). The least recently used make
            room for others, and are captured again when they are needed. By default there is no limit.
        max_graphs: with these modes, most steps that are captured at one time, at least 2; otherwise as
            ``graph_memory``.
        progress: show on stderr what is being traced, compiled or captured; with ``mode="eager"`` there is nothing to
            wait for on a CPU, and nothing is shown.
        artifacts: a folder that ``compiled-llm compile`` has written, on such a machine, for this model and these
            options: compiled code is taken from there, and nothing is compiled. As that code is run, only you and root
            may be able to write the folder.
        eager_first: on a CPU, answer uncompiled at once: ``warmup`` returns, and compiles in a thread. An answer ends
            in the mode that it began in; those that begin once all is compiled, while no other runs, use it. Without
            ``warmup`` nothing is compiled. Elsewhere, with ``artifacts``, and where projections are fused, it does
            nothing.
        images_in_steps: let steps of ours compute prompts with images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, as of
            text, and a program of ours their encoder, in place of HuggingFace's forward. None for True on CUDA with
            ``mode="cuda-graphs"``, and False elsewhere. With other models it does nothing.
    """

    mode: Mode = "cuda-graphs"
    backend: str = "auto"
    page_size: int = 16
    max_batch_size: int = 64
    kv_memory: float | int | str | None = None
    prefill_tokens: int = 8192
    cascade: bool | Literal["auto"] = "auto"
    batch_invariant: bool = False
    kv_dtype: KVDtype | None = None
    kv_scales: KVScales | None = None
    variants: Mapping[str, Sequence[int] | Literal["all"]] | None = None
    packed: bool | Literal["auto"] = "auto"
    fuse_projections: bool | None = None
    workspace_bytes: int | None = None
    graph_memory: int | str | None = None
    max_graphs: int | None = None
    progress: bool = True
    artifacts: str | os.PathLike[str] | None = None
    eager_first: bool = False
    images_in_steps: bool | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible value; the message names it and what is possible."""
        if self.mode not in get_args(Mode):
            renamed = "; 'pieces' is called 'piecewise'" if str(self.mode) == "pieces" else ""
            raise ValueError(f"mode={self.mode!r}: choose one of {', '.join(map(repr, get_args(Mode)))}{renamed}")
        if self.backend not in OWN_BACKENDS:
            _check_is_registered(self.backend)
        for name in ("page_size", "max_batch_size", "prefill_tokens", "workspace_bytes"):
            value = getattr(self, name)
            unset = value is None and name == "workspace_bytes"
            if not unset and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r}: must be a positive integer")
        self._check_switches()
        self._check_features()
        self._check_artifacts()
        self._check_kv()
        self._check_variants()
        if self.cascade is True and self.max_batch_size == 1:
            raise ValueError(
                "cascade=True with max_batch_size=1: one row shares its pages with no other; leave cascade out, or "
                "give a larger max_batch_size"
            )
        self._check_invariance()
        parse_kv_memory(self.kv_memory)
        self._check_graphs()

    def _check_switches(self) -> None:
        for name in ("progress", "eager_first", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        for name in ("cascade", "packed"):
            if (value := getattr(self, name)) != "auto" and not isinstance(value, bool):
                raise ValueError(f'{name}={value!r}: must be True, False or "auto"')
        for name in ("fuse_projections", "images_in_steps"):
            if not isinstance(value := getattr(self, name), (bool, NoneType)):
                raise ValueError(f"{name}={value!r}: must be True, False or None")

    def _check_features(self) -> None:
        """Raise ValueError if a feature that is asked for was taken out."""
        for name in ("cascade", "packed", "images_in_steps"):
            if getattr(self, name) is True:
                check_has("images" if name == "images_in_steps" else name, f"{name}=True")

    def _check_artifacts(self) -> None:
        if not isinstance(self.artifacts, (str, os.PathLike, NoneType)) or self.artifacts == "":
            raise ValueError(f"artifacts={self.artifacts!r}: must be the path of a folder, or None")
        if self.artifacts is not None and self.mode == "eager":
            raise ValueError(
                f"artifacts={os.fspath(self.artifacts)!r} hold compiled code, and mode='eager' runs none; wrap without "
                "artifacts, or with the mode that they were written for"
            )

    def _check_invariance(self) -> None:
        if not self.batch_invariant:
            return
        for name, value, reason in (
            ("mode", "eager", "PyTorch's own kernels add in an order that depends on the batch; compile"),
            ("eager_first", True, "answers would begin uncompiled; leave eager_first out"),
            ("cascade", True, "rows that share pages would add in another order; leave cascade out"),
        ):
            if getattr(self, name) == value:
                raise ValueError(f"batch_invariant=True with {name}={value!r}: {reason}")
        if self.backend != "auto":
            raise ValueError(
                f"batch_invariant=True with backend={self.backend!r}: attention has kernels of its own then; leave "
                "backend out"
            )

    def _check_variants(self) -> None:
        if self.variants is None:
            return
        check_has("variants", f"variants={self.variants!r}")
        if not isinstance(self.variants, Mapping) or not self.variants:
            raise ValueError(
                f'variants={self.variants!r}: must be a dict of layers by the names of variants, as in {{"alibi": '
                '"all"}, or None'
            )
        layers = {name: own if own == "all" else _numbers(name, own) for name, own in self.variants.items()}
        object.__setattr__(self, "variants", layers)  # a list may change later
        taken: set[int] = set()
        for name, own in layers.items():
            numbers = set() if isinstance(own, str) else set(own)
            if taken & numbers or (own == "all" and len(layers) > 1):
                raise ValueError(f"variants={layers!r}: a layer has one variant, and {name!r} is for some of others")
            taken |= numbers

    @property
    def layer_functions(self) -> Mapping[str, Sequence[int] | str]:
        """The layers that each function of logits is for, by its name."""
        return self.variants or {}

    @property
    def attention_backend(self) -> str:
        """Whose kernels attend."""
        return INVARIANT_BACKEND if self.batch_invariant else self.backend

    def backend_on(self, device: str) -> ChosenBackend:
        """Return whose kernels attend on a kind of device; artifacts may hold kernels that are not to be built then."""
        from compiled_llm_ops.backends import backend_for  # imports torch, for which `--help` should not wait

        builds = self.artifacts is None or not os.path.isdir(os.path.join(self.artifacts, "flashinfer"))
        return backend_for(self.attention_backend, device, builds)

    def _check_kv(self) -> None:
        if self.kv_dtype is not None and self.kv_dtype not in get_args(KVDtype):
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r}: must be {' or '.join(map(repr, get_args(KVDtype)))}, or None for the "
                "model's own dtype"
            )
        if self.kv_dtype is not None:
            check_has(self.kv_dtype, f"kv_dtype={self.kv_dtype!r}")
        if not isinstance(self.kv_scales, (KVScales, NoneType)):
            raise ValueError(
                f"kv_scales={_shortly(self.kv_scales)}: must be KVScales, as compiled_llm.kv_scales(model, prompts) "
                "returns them, or None for 1"
            )
        if self.kv_scales is not None and self.kv_dtype is None:
            raise ValueError(
                "kv_scales without kv_dtype: pages of the model's own dtype have no scales; give kv_dtype='fp8_e4m3', "
                "or leave kv_scales out"
            )

    def _check_graphs(self) -> None:
        for name in ("graph_memory", "max_graphs"):
            if getattr(self, name) is not None and self.mode not in CUDA_GRAPH_MODES:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} with mode={self.mode!r}: only mode='cuda-graphs' and "
                    f"mode='piecewise' capture graphs that can be bounded; leave {name} out, or use one of these"
                )
        parse_graph_memory(self.graph_memory)
        most = self.max_graphs
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < LEAST_GRAPHS):
            raise ValueError(
                f"max_graphs={most!r}: must be an integer of at least {LEAST_GRAPHS}: a step may replay a decode step "
                "and a prefill"
            )

    @property
    def graph_budget(self) -> tuple[int | None, int | None]:
        """Bytes that captured graphs may take, and how many there may be; None for any."""
        return parse_graph_memory(self.graph_memory), self.max_graphs

    def mode_on(self, device: str) -> Mode:
        """Return the mode by which a kind of device runs, ``"cpu"`` or ``"cuda"``: a CPU captures no CUDA graphs."""
        return "compile" if device == "cpu" and self.mode != "eager" else self.mode

    def fuses_on(self, device: str) -> bool:
        """Return whether projections are fused on a kind of device, ``"cpu"`` or ``"cuda"``."""
        wanted = device == "cuda" if self.fuse_projections is None else self.fuse_projections
        return wanted and self.mode != "eager"

    def eager_first_on(self, device: str) -> bool:
        """Return whether answers run uncompiled on a kind of device until all is compiled."""
        compiles = self.mode != "eager" and self.artifacts is None and not self.fuses_on(device)
        return self.eager_first and device == "cpu" and compiles

    def images_in_steps_on(self, device: str) -> bool:
        """Return whether steps compute prompts with images on a kind of device, where they can."""
        captured = device == "cuda" and self.mode == "cuda-graphs"
        return captured if self.images_in_steps is None else self.images_in_steps

    def compiles_drafts_beside_on(self, device: str) -> bool:
        """Return whether programs of steps that draft are compiled in a thread, while rows run without drafts."""
        # Elsewhere calls wait for what they compile anyway.
        return self.captures_on(device) or self.eager_first_on(device)

    def captures_on(self, device: str) -> bool:
        """Return whether we capture steps as CUDA graphs on a kind of device, whole or in pieces."""
        return device == "cuda" and self.mode in CUDA_GRAPH_MODES

    @property
    def leaves_attention_out(self) -> bool:
        """Whether captured steps launch attention between their pieces."""
        return self.mode == "piecewise"

    def traces_layers_once_on(self, device: str) -> bool:
        """Return whether one layer is traced for all that are like it on a kind of device."""
        return self.captures_on(device) or (device == "cpu" and self.mode != "eager")

    def uses_trees_on(self, device: str) -> bool:
        """Return whether torch's cudagraph trees capture and replay decode steps on a kind of device."""
        return device == "cuda" and self.mode == "reduce-overhead"

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> WrapConfig:
        """Build from the keyword arguments of ``wrap``; TypeError for an option that does not exist."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                meant = f" (did you mean {close[0]!r}?)" if close else ""
                raise TypeError(f"wrap() has no option {name!r}{meant}; its options are {', '.join(known)}")
        return cls(**options)

    def differing(self, options: dict[str, Any]) -> str:
        """Return in words which of some keyword arguments of ``wrap`` are not what they are here; empty if all are."""
        both = [(name, getattr(self, name), value) for name, value in options.items()]
        return ", ".join(
            f"{name}={mine!r} in place of {value!r}"
            for name, mine, value in both
            if (type(mine), mine) != (type(value), value)  # 1 and 1.0 are different memories
        )


def _numbers(name: str, layers: object) -> list[int]:
    numbers = [*layers] if isinstance(layers, Sequence) and not isinstance(layers, str) else []
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)
    if not numbers or not whole:
        raise ValueError(f'variants[{name!r}]={layers!r}: must be a list of layers, numbers from 0 on, or "all"')
    return numbers


def _check_is_registered(backend: str) -> None:
    from compiled_llm_ops.backends import backend_names  # imports torch, for which `--help` should not wait

    if backend not in (names := ("auto", *backend_names())):
        raise ValueError(f"backend={backend!r}: choose one of {', '.join(map(repr, names))}")


def parse_kv_memory(value: float | int | str | None) -> KVMemory | None:
    """Read the ``kv_memory`` option, None for the default; ValueError if ``WrapConfig`` documents no such form."""
    if value is None:
        return None
    if isinstance(value, float) and 0.0 < value <= 1.0:
        return KVMemory(fraction=value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return KVMemory(nbytes=value)
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        number, unit = match.groups()
        if unit.lower() in ("token", "tokens") and number.isdigit() and int(number) > 0:
            return KVMemory(tokens=int(number))
        if (nbytes := _in_bytes(number, unit)) > 0:
            return KVMemory(nbytes=nbytes)
    raise ValueError(
        f"kv_memory={value!r}: give a fraction of the free memory as a float in (0, 1], without quotes; bytes as an "
        "int; or a string of a number and a unit (B, KB, MB, GB, KiB, MiB, GiB or tokens), such as '8GiB' or "
        "'20000 tokens'"
    )


def parse_graph_memory(value: int | str | None) -> int | None:
    """Read the ``graph_memory`` option in bytes, None for no limit; ValueError as ``parse_kv_memory``."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and (nbytes := _in_bytes(*match.groups())) > 0:
        return nbytes
    raise ValueError(
        f"graph_memory={value!r}: give bytes as an int, or a string of a number and a unit (B, KB, MB, GB, KiB, MiB or "
        "GiB), such as '512MiB'"
    )


def _in_bytes(number: str, unit: str) -> int:
    """Return a quantity in bytes; 0 if there is no such unit."""
    return int(float(number) * _UNITS.get(unit.upper(), 0))
