"""Sparse attention alone: what reads chosen keys, beside dense decode of rows that have no others.

python tools/bench/sparse.py --json sparse.json

Shapes: B rows, K kv heads, H query heads, D head dimension, R latent size, E size of the rotated part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from attention_ops.cases import SEED
from attention_ops.measuring import LostDeviceError, check_device, reason, timed_launches
from cold_launches import NumberedLaunch
from common import Bench, Commit, DeviceName, Json, bench
from torch import Tensor

from compiled_llm.commands.bench.report import Result
from compiled_llm.commands.bench.tables import TABLES, Columns, Table, groups, number, percent
from compiled_llm_ops import block_sparse_attention, decode_attention, latent_decode
from compiled_llm_ops.attention.sparse.work_items import block_sparse_items

COPIES = 8
"""Lists that launches read in turn, each of other keys."""

PARTS = 4096
"""Partial results that the work items of a matrix may have."""


class Sizes(NamedTuple):
    """Of a model, and of what its rows have and read.

    Attributes:
        heads: H, K and D of attention over keys and values.
        latents: H, R and E of attention over latents.
        rows: batches.
        keys: that each row has.
        read: how many of them it reads.
    """

    heads: tuple[int, int, int]
    latents: tuple[tuple[int, int, int], ...]
    rows: tuple[int, ...]
    keys: int
    read: int


SIZES = {
    "full": Sizes((32, 8, 128), ((16, 512, 64), (128, 512, 64)), (8, 64), 16_384, 2048),
    "tiny": Sizes((4, 2, 16), ((4, 32, 16),), (2,), 256, 64),
}
OPS = {
    "pages": "decode_attention(visible=): {} query heads, {} kv heads of {}",
    "matrix": "block_sparse_attention: {} query heads, {} kv heads of {}",
    "tokens": "latent_decode(chosen=): {} query heads, latents of {} + {}",
}
"""By kind, what reads chosen keys."""

BLOCKS = {"pages": (16, 32, 64), "matrix": (1, 16, 64), "tokens": (1,)}
"""Keys of a block, by kind."""


class Case(NamedTuple):
    """Rows that each read some of their keys."""

    kind: str
    heads: tuple[int, int, int]
    rows: int
    block: int
    keys: int
    read: int

    @property
    def name(self) -> str:
        return f"B={self.rows}, {self.read:,} of {self.keys:,} keys in blocks of {self.block}"

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the keys that are read."""
        _, second, third = self.heads
        return self.rows * self.read * itemsize * (second + third if self.kind == "tokens" else 2 * second * third)


def cases_of(sizes: Sizes, kinds: Sequence[str]) -> list[Case]:
    return [
        Case(kind, heads, rows, block, sizes.keys, sizes.read)
        for kind in kinds
        for heads in (sizes.latents if kind == "tokens" else (sizes.heads,))
        for block in BLOCKS[kind]
        for rows in sizes.rows
    ]


class Drawn:
    """Random tensors of a case, from a generator of its own: a capture that fails may leave torch's in disorder."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self._generator = device, dtype, torch.Generator(device).manual_seed(SEED)

    def numbers(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.device, dtype=self.dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)

    def lists(self, lines: int, count: int, length: int) -> list[Tensor]:
        """Return lines ``[lines, length]`` int32 of different numbers below ``count``, another one a launch."""
        size = (lines, count)
        return [
            torch.rand(size, generator=self._generator, device=self.device).argsort(1)[:, :length].int().contiguous()
            for _ in range(COPIES)
        ]


class PageNumbers(NamedTuple):
    """A page table as decode takes it."""

    starts: Tensor
    lengths: Tensor
    indices: Tensor


def table_of(drawn: Drawn, rows: int, keys: int, page_size: int, first: int = 0) -> PageNumbers:
    """Return a table of rows that have equally many keys, in pages of random order."""
    count = keys // page_size
    starts = torch.arange(rows, dtype=torch.int32, device=drawn.device) * count
    lengths = torch.full((rows,), keys, dtype=torch.int32, device=drawn.device)
    return PageNumbers(starts, lengths, (first + drawn.order(rows * count)).int())


def dense_tables(case: Case, drawn: Drawn, pages: int, page_size: int) -> list[PageNumbers]:
    """Return tables of rows that have no other keys than they read, each of other pages of the pool."""
    needed = case.rows * case.read // page_size
    places = range(0, pages - needed + 1, needed)[:COPIES]
    return [table_of(drawn, case.rows, case.read, page_size, first) for first in places]


Both = tuple[NumberedLaunch, NumberedLaunch]
"""What reads chosen keys, and dense decode of as many."""


def by_pages(case: Case, drawn: Drawn) -> Both:
    """`visible`: each kv head reads a list of pages of its own, the newest page among them."""
    heads, kv_heads, dim = case.heads
    count, read = case.keys // case.block, case.read // case.block
    pages = drawn.numbers(case.rows * count, 2, kv_heads, case.block, dim)
    table = table_of(drawn, case.rows, case.keys, case.block)
    states = drawn.numbers(case.rows, heads, dim), *(drawn.numbers(case.rows, kv_heads, dim) for _ in range(2))
    older = drawn.lists(case.rows * kv_heads, count - 1, read - 1)
    newest = older[0].new_full((case.rows, kv_heads, 1), count - 1)
    visible = [torch.cat([own.view(case.rows, kv_heads, -1), newest], 2) for own in older]

    def sparse(number: int) -> Tensor:
        return decode_attention(*states, pages, *table, dim**-0.5, visible=visible[number % COPIES], overlap=True)

    return sparse, dense_decode(case, drawn, pages, states)


def dense_decode(case: Case, drawn: Drawn, pages: Tensor, states: tuple[Tensor, ...]) -> NumberedLaunch:
    """Return decode of rows whose keys are all read, each time in other pages of the same pool."""
    tables = dense_tables(case, drawn, len(pages), pages.shape[3])

    def dense(number: int) -> Tensor:
        return decode_attention(*states, pages, *tables[number % len(tables)], case.heads[2] ** -0.5, overlap=True)

    return dense


def by_matrix(case: Case, drawn: Drawn) -> Both:
    """A sparse matrix whose rows are single queries. No key is read by two, as if each had a text of its own."""
    heads, kv_heads, dim = case.heads
    every, read = case.rows * case.keys, case.read // case.block
    pages = drawn.numbers(every // 16, 2, kv_heads, 16, dim)
    key, value = drawn.numbers(every, kv_heads, dim), drawn.numbers(every, kv_heads, dim)
    query = drawn.numbers(case.rows, heads, dim)
    indptr = torch.arange(case.rows + 1, dtype=torch.int32) * read
    orders = [drawn.order(every // case.block)[: case.rows * read].int() for _ in range(COPIES)]
    processors = torch.cuda.get_device_properties(drawn.device).multi_processor_count if key.is_cuda else 1
    sizes = (case.rows, every, 1, case.block, heads, kv_heads, dim, processors, PARTS, PARTS)
    made = (block_sparse_items(indptr.numpy(), own.cpu().numpy(), *sizes) for own in orders)
    items = [torch.from_numpy(own[own[:, 2] > 0]) for own in made]  # those that are used, as wrappers pass them
    matrices = [(indptr.to(drawn.device), own, item.to(drawn.device)) for own, item in zip(orders, items, strict=True)]

    def sparse(number: int) -> Tensor:
        return block_sparse_attention(query, key, value, *matrices[number % COPIES], 1, case.block, PARTS, dim**-0.5)

    newest = (drawn.numbers(case.rows, kv_heads, dim) for _ in range(2))
    return sparse, dense_decode(case, drawn, pages, (query, *newest))


def by_tokens(case: Case, drawn: Drawn) -> Both:
    """`chosen`: each row reads single tokens of its latents."""
    heads, rank, rope = case.heads
    size, page_size = rank + rope, 16
    pages = drawn.numbers(case.rows * case.keys // page_size, page_size, size)
    states = [drawn.numbers(case.rows, *own) for own in ((heads, rank), (heads, rope), (rank,), (rope,))]
    table, scale = table_of(drawn, case.rows, case.keys, page_size), size**-0.5
    chosen = drawn.lists(case.rows, case.keys, case.read)
    tables = dense_tables(case, drawn, len(pages), page_size)

    def sparse(number: int) -> Tensor:
        return latent_decode(*states, pages, *table, scale, True, chosen[number % COPIES])

    def dense(number: int) -> Tensor:
        return latent_decode(*states, pages, *tables[number % len(tables)], scale, True)

    return sparse, dense


WAYS: dict[str, Callable[[Case, Drawn], Both]] = {"pages": by_pages, "matrix": by_matrix, "tokens": by_tokens}


def main(
    size: Annotated[str, typer.Option(help="full, or tiny for a test.")] = "full",
    only: Annotated[str, typer.Option(help=f"Kinds of cases: {', '.join(WAYS)}.")] = ",".join(WAYS),
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure sparse attention and dense decode that reads as many bytes; what cannot run is a row that says why."""
    kinds = [kind.strip() for kind in only.split(",") if kind.strip()]
    if size not in SIZES or not kinds or {*kinds} - {*WAYS}:
        raise SystemExit(f"--size {size}, --only {only}: there are {', '.join(SIZES)}, and {', '.join(WAYS)}")
    with bench("qwen3-8b", device, [], json, commit, bandwidth=True) as run, torch.inference_mode():
        try:
            for case in cases_of(SIZES[size], kinds):
                run.setup.log(f"{case.kind}, {case.name}")
                run.setup.free_memory()  # of the last case
                run.add("sparse", result_of(run, case))
        except LostDeviceError as error:
            run.report.failures.append(f"{error}; the device is unusable, so what would come after it is missing")


def result_of(run: Bench, case: Case) -> dict[str, Any]:
    """Return what a report keeps of one case, a dict that goes into JSON."""
    device, dtype, bandwidth = run.setup.device, run.setup.dtype, run.report.read_bandwidth
    figures, remark = dict[str, float](), ""
    assert bandwidth is not None
    try:
        both = WAYS[case.kind](case, Drawn(device, dtype))
        chosen, dense = (timed_launches(launch, device, COPIES)[0] for launch in both)
        of_bandwidth = case.nbytes(dtype.itemsize) * 1e6 / chosen / bandwidth
        figures = {"us": chosen, "us_dense": dense, "of_dense": dense / chosen, "of_bandwidth": of_bandwidth}
    except Exception as error:
        check_device(device)
        remark = reason(error)
    op = OPS[case.kind].format(*case.heads)
    return {**case._asdict(), "op": op, "case": case.name, "figures": figures, "remark": remark}


def sparse_tables(results: Sequence[Result]) -> Iterator[Table]:
    def of(name: str, shown: Callable[[float], str] = number) -> Callable[[Result], str]:
        return lambda result: shown(result["figures"][name]) if name in result["figures"] else ""

    columns: Columns = {
        "case": lambda result: result["case"],
        "us": of("us"),
        "us of dense decode": of("us_dense"),
        "of its bandwidth": of("of_dense", percent),
        "of the device's": of("of_bandwidth", percent),
        "remark": lambda result: result["remark"],
    }
    for of_op in groups(results, "op"):
        yield Table(of_op[0]["op"], of_op, columns, leading=1)


TABLES["sparse"] = sparse_tables

if __name__ == "__main__":
    typer.run(main)
