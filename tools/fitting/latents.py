"""Rules for latents: `kernels/latent/latent_tiling.py`.

Shapes: B rows, H query heads, R latent size, E size of the rotated part, N size of a key's part that is not rotated, V
size of a value; those of DeepSeek-V3 but for the heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops import latent_attention, ragged_attention
from compiled_llm_ops.contracts.latent import LatentDecode
from compiled_llm_ops.flashinfer.versions import import_flashinfer
from compiled_llm_ops.kernels.latent import latent_tiling
from compiled_llm_ops.kernels.latent.latent_tiling import (
    LatentTiling,
    RaggedTiling,
    choose_decode_tiling,
    ragged_tiling,
    worth_expanding,
)
from fitting.cases import Case, Machine, case_of, random
from fitting.measuring import captured, copies_of

RANK, ROPE, PLAIN, VALUE, PAGE = 512, 64, 128, 128, 16

HEADS, QUICK_HEADS, DECODE_HEADS = (16, 20, 64, 128), (16, 128), (16, 20, 128)

MOST_KEYS = 2**22
"""Keys of all rows, at most: 4.8 GB a layer."""

MAX_KEYS = 65_536
"""A bound on the keys of a row, as a model has it."""


# ---- latent-decode


class Tile(NamedTuple):
    """Fields of ``LatentTiling`` that make another kernel."""

    heads: int
    block: int
    stages: int
    warps: int
    keys_first: bool


TILES = {
    16: (Tile(16, 32, 5, 4, False), Tile(16, 64, 3, 8, True), Tile(64, 64, 3, 8, False)),
    32: (Tile(32, 32, 5, 8, False), Tile(64, 64, 3, 8, False), Tile(32, 64, 3, 8, True)),
    64: (Tile(64, 32, 5, 8, False), Tile(32, 64, 3, 4, True), Tile(16, 64, 3, 4, True)),
}
"""Other tiles than the rule's, by the heads of its own; the first one or two are the likely ones."""


def latent_decode_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    given = ((1, 8192), (8, 1024), (64, 1024), (64, 8192)) if quick else contexts(quick)
    for heads, (rows, keys) in itertools.product(DECODE_HEADS if quick else HEADS, given):
        chosen = choose_decode_tiling(rows, heads, RANK, MAX_KEYS, machine.processors, machine.hopper)
        prepare = functools.partial(decode_timer, rows, keys, heads)
        name = f"H={heads}, B={rows}, {keys} keys"
        yield case_of("latent-decode", name, decode_tilings(chosen, quick), chosen, prepare)


def contexts(quick: bool) -> list[tuple[int, int]]:
    both = itertools.product((1, 8, 64), (1024, 8192, 65_536) if quick else (256, 1024, 8192, 65_536))
    return [(rows, keys) for rows, keys in both if rows * keys <= MOST_KEYS]


def decode_tilings(chosen: LatentTiling, quick: bool) -> list[LatentTiling]:
    """The rule's tile with other programs for a row and sizes of shares, and other tiles: kernels to compile."""
    least, share = chosen.row_tile, chosen.min_share
    programs = [max(least, chosen.programs // 2), 2 * chosen.programs]
    shares = [max(1, share // 2), 2 * share]
    tiles = TILES[chosen.heads][:2] if quick else TILES[chosen.heads]
    if not quick:
        programs += [least * times for times in (1, 2, 3, 6, 8, 16, 32, 64)]
        shares += [4 * share, 16 * share]
    found = [chosen._replace(programs=own, equal=own) for own in programs]
    found += [chosen._replace(min_share=own, few=1) for own in shares]
    if chosen.by_hand:
        found.append(chosen._replace(by_hand=False))
    return found + [tile_as(chosen, tile) for tile in tiles]


def tile_as(chosen: LatentTiling, tile: Tile) -> LatentTiling:
    """The same shares of keys in another tile; programs that fit side by side on a multiprocessor are twice as many."""
    share = max(1, chosen.min_share * chosen.block // tile.block)
    programs = chosen.programs * (2 if tile.block < chosen.block and tile.heads < 64 else 1)
    return chosen._replace(**tile._asdict(), programs=programs, min_share=share, equal=programs, by_hand=False)


class CachedRows(NamedTuple):
    """Rows of equal lengths in pages of random order, and what a decode step gives them."""

    query: Tensor
    newest: Tensor
    pages: list[Tensor]  # as many layers as no cache holds, each `[P, S, R + E]`
    starts: Tensor
    lengths: Tensor
    indices: Tensor

    @classmethod
    def of(cls, rows: int, keys: int, heads: int) -> CachedRows:
        count = -(-keys // PAGE)
        pages = copies_of(torch.zeros(rows * count, PAGE, RANK + ROPE, device="cuda", dtype=torch.bfloat16))
        indices = torch.zeros(rows * MAX_KEYS // PAGE, dtype=torch.int32, device="cuda")
        indices[: rows * count] = torch.randperm(rows * count, device="cuda")
        starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * count
        lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
        sizes = RANK + ROPE
        return cls(random(rows, heads, sizes), random(rows, sizes), pages, starts, lengths, indices)

    def decode(self, number: int) -> LatentDecode:
        query, newest = self.query + 0, self.newest
        states = (query[..., :RANK], query[..., RANK:], newest[:, :RANK], newest[:, RANK:])
        table = (self.starts[:-1], self.lengths, self.indices)
        return LatentDecode(*states, self.pages[number % len(self.pages)], *table, (PLAIN + ROPE) ** -0.5)


def decode_timer(rows: int, keys: int, heads: int) -> Callable[[LatentTiling], float]:
    from compiled_llm_ops.kernels.latent.decode import decode

    cached = CachedRows.of(rows, keys, heads)
    return lambda tiling: captured(lambda number: decode(cached.decode(number), None, tiling=tiling, pdl=True))


# ---- latent-prefill: new rows, absorbed or expanded


def latent_prefill_cases(_: Machine, quick: bool) -> Iterator[Case]:
    for heads in QUICK_HEADS if quick else HEADS:
        for tokens in (8, 64, 1024) if quick else (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
            chosen = "expanded" if worth_expanding([tokens], [tokens]) else "absorbed"
            prepare = functools.partial(prefill_timer, tokens, heads)
            yield case_of("latent-prefill", f"H={heads}, T={tokens}", ("absorbed", "expanded"), chosen, prepare)


def prefill_timer(tokens: int, heads: int) -> Callable[[str], float]:
    """From queries, latents and their rotated parts to what the layer's output projection reads."""
    query, cached = random(tokens, heads, PLAIN + ROPE), random(tokens, RANK + ROPE)
    weights = copies_of(random(heads * (PLAIN + VALUE), RANK))
    count, scale = -(-tokens // PAGE), (PLAIN + ROPE) ** -0.5
    pages = torch.zeros(count, PAGE, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    pages.view(-1, RANK + ROPE)[:tokens] = cached
    rows, at = torch.zeros(tokens, dtype=torch.int32, device="cuda"), torch.arange(tokens, device="cuda").int()
    table = (rows, at, rows.new_tensor([0, count]), torch.arange(count, device="cuda").int())
    starts = rows.new_tensor([0, tokens])

    def absorbed(number: int) -> Tensor:
        halves = weights[number % len(weights)].unflatten(0, (heads, PLAIN + VALUE))
        key, value = halves.split([PLAIN, VALUE], dim=1)
        own = torch.bmm(query[..., :PLAIN].transpose(0, 1), key).transpose(0, 1)
        out = latent_attention(own, query[..., PLAIN:], pages, *table, scale)
        return torch.bmm(out.transpose(0, 1), value.transpose(1, 2)).transpose(0, 1)

    def expanded(number: int) -> Tensor:
        made = torch.nn.functional.linear(cached[:, :RANK], weights[number % len(weights)])
        plain, value = made.unflatten(1, (heads, PLAIN + VALUE)).split([PLAIN, VALUE], dim=2)
        key = torch.cat([plain, cached[:, None, RANK:].expand(-1, heads, -1)], dim=2)
        return ragged_attention(query, key, value, starts, scale)

    return lambda how: captured(absorbed if how == "absorbed" else expanded)


# ---- latent-ragged


def ragged_cases(_: Machine, quick: bool) -> Iterator[Case]:
    for sizes in ((192, 128),) if quick else ((192, 128), (256, 256), (96, 64)):
        chosen = ragged_tiling(*sizes)
        for tokens in (256, 2048) if quick else (32, 128, 512, 2048, 8192):
            prepare = functools.partial(ragged_timer, tokens, *sizes)
            name = f"D={sizes[0]}, E={sizes[1]}, T={tokens}"
            yield case_of("latent-ragged", name, ragged_tilings(quick), chosen, prepare)


def ragged_tilings(quick: bool) -> list[RaggedTiling]:
    if quick:
        return [RaggedTiling(128, 64, 2, 8), RaggedTiling(64, 64, 3, 4), RaggedTiling(128, 128, 2, 8)]
    return [RaggedTiling(*own) for own in itertools.product((64, 128), (32, 64, 128), (2, 3), (4, 8))]


def ragged_timer(tokens: int, head_dim: int, value_dim: int, heads: int = 16) -> Callable[[RaggedTiling], float]:
    from compiled_llm_ops.kernels.latent.ragged import attend

    query, key, value = (random(tokens, heads, size) for size in (head_dim, head_dim, value_dim))
    starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    out = torch.empty_like(value)
    given = (query, key, value, starts, head_dim**-0.5, out, None)
    return lambda tiling: captured(lambda _: attend(*given, tiling))


# ---- latent-backend: decode steps by our kernel or by FlashInfer's


def latent_backend_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """FlashInfer's are those for Hopper, ``fa3``, where there are any, and those for all, ``fa2``."""
    own, theirs = "ours", ("fa3", "fa2") if machine.hopper else ("fa2",)
    for heads, (rows, keys) in itertools.product(DECODE_HEADS if quick else HEADS, contexts(quick)):
        chosen = own if heads <= latent_tiling.OWN_HEADS else theirs[0]
        prepare = functools.partial(backend_timer, rows, keys, heads)
        yield case_of("latent-backend", f"H={heads}, B={rows}, {keys} keys", (own, *theirs), chosen, prepare)


def backend_timer(rows: int, keys: int, heads: int) -> Callable[[str], float]:
    from compiled_llm_ops import latent_decode

    cached = CachedRows.of(rows, keys, heads)
    return lambda whose: captured(
        (lambda number: latent_decode(*cached.decode(number)._replace(overlap=True)))
        if whose == "ours"
        else flashinfers(cached, whose)
    )


def flashinfers(cached: CachedRows, kernels: str) -> Callable[[int], Any]:
    """Launches of FlashInfer's kernels, planned once; the newest latent is in its page already."""
    buffer = torch.empty(2**27, dtype=torch.uint8, device="cuda")
    wrapper = import_flashinfer().BatchMLAPagedAttentionWrapper(float_workspace_buffer=buffer, backend=kernels)
    each, used = torch.arange(len(cached.query) + 1, dtype=torch.int32, device="cuda"), int(cached.starts[-1])
    wrapper.plan(
        qo_indptr=each,
        kv_indptr=cached.starts,
        kv_indices=cached.indices[:used],
        kv_len_arr=cached.lengths,
        num_heads=cached.query.shape[1],
        head_dim_ckv=RANK,
        head_dim_kpe=ROPE,
        page_size=PAGE,
        causal=True,
        sm_scale=(PLAIN + ROPE) ** -0.5,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )

    def launch(number: int) -> Any:
        query, pages = cached.query + 0, cached.pages[number % len(cached.pages)]
        parts = query[..., :RANK], query[..., RANK:], pages[..., :RANK], pages[..., RANK:]
        return wrapper.run(*parts)

    return launch
