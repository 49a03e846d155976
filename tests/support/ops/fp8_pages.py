"""Pages of fp8 as a table of its numbers makes them, without PyTorch's conversions: what is stored, and what is read.

Shapes: B rows, T packed tokens, L tokens of one row, Q queries of one row, H query heads, K kv heads, D head dimension,
P pages, S page size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops import append_paged_kv
from support.ops.cascade_rows import CascadeRows
from support.ops.op_cases import Batch

LARGEST, NAN = 0x7E, 0x7F
"""The codes of 448 and NaN."""


def numbers_of_codes() -> Tensor:
    """`[127]`: what the codes without a sign mean, from 0 to 448. Four bits of exponent, three of mantissa."""
    return torch.tensor(
        [(code % 8) / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(NAN)]
    )


def codes_of(numbers: Tensor) -> Tensor:
    """The nearest codes, of two equally near ones the even one; the largest for all that is larger; NaN for NaN."""
    known = numbers_of_codes()
    between, sizes = (known[1:] + known[:-1]) / 2, numbers.abs().float().contiguous()
    codes = torch.bucketize(sizes, between)
    codes += (torch.searchsorted(between, sizes, right=True) != codes) & (codes % 2 == 1)
    codes = codes.masked_fill(numbers.isnan(), NAN)
    return (codes + 128 * numbers.signbit()).to(torch.uint8)


def numbers_of(codes: Tensor) -> Tensor:
    """What codes mean, in float32."""
    known = torch.cat([numbers_of_codes(), torch.tensor([math.nan])])
    return known[codes.long() % 128] * torch.where(codes >= 128, -1.0, 1.0)


class Fp8Scales(NamedTuple):
    """Those of keys and values, `[K]`; None is 1."""

    key: Tensor | None
    value: Tensor | None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of an op, with a new count of clamped numbers."""
        return {"key_scale": self.key, "value_scale": self.value, "saturated": torch.zeros(1, dtype=torch.int64)}


def scales_of(kind: str, kv_heads: int) -> Fp8Scales:
    """None, such as clamp nothing, or such as clamp most numbers; each head has its own."""
    if kind == "none":
        return Fp8Scales(None, None)
    key, value = torch.rand(2, kv_heads) * 0.1 + 0.02
    if kind == "small":
        key, value = key * 0.02, value * 0.03
    return Fp8Scales(None if kind == "values" else key, None if kind == "keys" else value)


KINDS = ["none", "both", "small", "keys", "values"]
"""What `scales_of` makes."""


class Stored(NamedTuple):
    """Keys or values in pages: their codes, what is read in float32, and how many were clamped."""

    codes: Tensor
    read: Tensor
    clamped: int


def stored(states: Tensor, scale: Tensor | None) -> Stored:
    """Keys or values `[..., K, D]` as pages hold them."""
    scale = torch.ones(states.shape[-2]) if scale is None else scale
    divided = states.float() / scale[:, None]
    codes = codes_of(divided)
    return Stored(codes, numbers_of(codes) * scale[:, None], int((divided.abs() > 448).sum()))


class StoredPages(NamedTuple):
    """Pages of fp8, and what is read from them in float32."""

    pages: Tensor
    read: Tensor


def stored_pages(pages: Tensor, scales: Fp8Scales) -> StoredPages:
    """Pages `[P, 2, K, S, D]` of floats, as pages of fp8 hold them."""
    parts = [stored(part.transpose(1, 2), scale) for part, scale in zip(pages.unbind(1), scales, strict=True)]
    codes, read = (torch.stack([part[at].transpose(1, 2) for part in parts], 1) for at in (0, 1))
    return StoredPages(codes.contiguous().view(torch.float8_e4m3fn), read.contiguous())


def check_codes(pages: Tensor, expected: Tensor, exact: bool = False) -> None:
    """Compare pages of fp8: NaN where it is to be, the rest equal, or up to 1 in 100 numbers next to what they are."""
    found, codes = pages.view(torch.uint8), expected.view(torch.uint8)
    unwritten = codes % 128 == NAN
    assert torch.equal(found % 128 == NAN, unwritten)
    differ = (found != codes) & ~unwritten
    if not exact:
        assert differ.float().mean() < 0.01
        steps = (found.int() - codes.int()).abs()
        differ = differ & (steps != 1) & (found % 128 + codes % 128 > 1)  # of the two zeros, either
    assert not differ.any()


class Fp8Batch(Batch):
    """A batch whose pages are of fp8, and whose dense reference is of what is read from them.

    Slots that no token was written to hold the code `unwritten`.
    """

    def __init__(
        self, lengths: Sequence[int], queries: Sequence[int], *, kind: str = "both", unwritten: int = NAN, **sizes: Any
    ) -> None:
        super().__init__(lengths, queries, **sizes)
        kv_heads, head_dim = self.keys[0].shape[1:]
        self.scales = scales_of(kind, kv_heads)
        self.given = self.scales.given
        self.empty = torch.full(self.pages.shape, unwritten, dtype=torch.uint8)
        self.empty[..., head_dim:] = 0
        self.pages = self.empty.clone().view(torch.float8_e4m3fn)

    def append(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        key, value = (
            torch.cat([states[row][start:end] for row, (start, end) in enumerate(zip(starts, ends, strict=True))])
            for states in (self.keys, self.values)
        )
        append_paged_kv(key, value, self.pages, *self.slots(starts, ends), *self.table, **self.given)

    def read(self) -> Batch:
        """The same with the keys and values that are read, in float32."""
        other = copy.copy(self)
        other.keys = [stored(keys, self.scales.key).read for keys in self.keys]
        other.values = [stored(values, self.scales.value).read for values in self.values]
        return other

    def expected_pages(self) -> Tensor:
        """The codes `[P, 2, K, S, D']` once all is written, token by token."""
        codes = self.empty.clone()
        for row, length in enumerate(self.lengths):
            parts = zip((self.keys[row], self.values[row]), self.scales, strict=True)
            written = torch.stack([stored(states, scale).codes for states, scale in parts])
            for at in range(length):
                page = codes[int(self.indices[self.indptr[row] + at // self.page_size])]
                page[:, :, at % self.page_size, : self.query.shape[2]] = written[:, at]
        return codes

    def clamped(self, newest: int | None = None) -> int:
        """How many numbers of all tokens are clamped, or of so many of the newest of each row."""
        return sum(
            stored(states[-newest if newest else 0 :], scale).clamped
            for rows, scale in zip((self.keys, self.values), self.scales, strict=True)
            for states in rows
        )

    def expected_lse(self, scale: float, window_left: int, soft_cap: float) -> Tensor:
        """`[T, H]`, in base 2."""
        taken, rows, read = 0, [], self.read()
        for row, (length, count) in enumerate(zip(self.lengths, self.queries, strict=True)):
            keys = read.keys[row].repeat_interleave(self.group, 1)
            logits = torch.einsum("qhd,lhd->qhl", self.query[taken : taken + count].float(), keys) * scale
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            if count:
                logits = logits + self.mask(length, count, window_left)[0, 0][:, None]
            rows.append(torch.logsumexp(logits, -1) / math.log(2))
            taken += count
        return torch.cat(rows)


def fp8_written(rows: CascadeRows, scales: Fp8Scales) -> Tensor:
    """The codes `[P, 2, K, S, D']` of cascade's pages with the newest keys and values, row by row."""
    codes = rows.pages.view(torch.uint8).clone()
    newest = (stored(states, scale).codes for states, scale in zip((rows.key, rows.value), scales, strict=True))
    for part, states in enumerate(newest):
        for row, length in enumerate(rows.lengths):
            page, slot = rows.own[row][(length - 1) // rows.page_size], (length - 1) % rows.page_size
            codes[page, part, :, slot, : rows.head_dim] = states[row]
    return codes


def fp8_cascade(rows: CascadeRows, scales: Fp8Scales) -> tuple[CascadeRows, CascadeRows]:
    """Rows in pages of fp8, and the same with the keys and values that are read from them, in float32."""
    written, read = copy.copy(rows), copy.copy(rows)
    written.pages, read.pages = stored_pages(rows.pages, scales)
    read.key, read.value = stored(rows.key, scales.key).read, stored(rows.value, scales.value).read
    return written, read
