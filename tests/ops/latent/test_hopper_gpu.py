"""The kernel of latent decode for Hopper on a GPU: no interpreter runs it, so all that it may meet is met here.

For compute-sanitizer's racecheck: ``-k small_rows``.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from compiled_llm_ops import latent_decode, latent_decode_lse
from compiled_llm_ops.contracts.latent import LatentDecode
from compiled_llm_ops.kernels.latent.latent_tiling import choose_decode_tiling, reads_by_hand
from compiled_llm_ops.kernels.pdl import is_hopper
from support.gpu import captured
from support.ops.latent_rows import LatentRows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

RANK, SIZE = 512, 64
HEADS = pytest.mark.parametrize("heads", [16, 20, 128], ids="heads={}".format)


@pytest.fixture
def hopper() -> None:
    if not is_hopper(torch.device("cuda")):
        pytest.skip("needs compute capability 9.0")


def rows_of(lengths: Any, **sizes: Any) -> LatentRows:
    given = {"rank": RANK, "size": SIZE, "page_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
    return LatentRows(lengths, **{**given, **sizes})


def compare(rows: LatentRows, out: torch.Tensor, lse: torch.Tensor) -> None:
    """With float32; say which rows and heads differ."""
    expected, expected_lse = rows.expected()
    close = torch.isclose(out.float(), expected, rtol=2e-2, atol=1e-2).all(-1)
    close &= torch.isclose(lse, expected_lse, rtol=1e-2, atol=1e-2)
    found = {(row, rows.lengths[row]): heads for row, heads in enumerate((~close).tolist()) if any(heads)}
    wrong = [
        f"row {row} of {length} tokens: heads {[head for head, one in enumerate(heads) if one]}"
        for (row, length), heads in found.items()
    ]
    assert not wrong, f"{wrong}; off by up to {(out.float() - expected).abs().amax((1, 2)).tolist()}"


def check_equal(out: torch.Tensor, expected: torch.Tensor, *said: Any) -> None:
    """Bit for bit; NaN, which no kernel may write, is equal to nothing."""
    rows = (out != expected).flatten(1).any(1).nonzero().flatten().tolist()
    assert not rows, f"rows {rows} differ: {said}"


@pytest.mark.parametrize("heads", [5, 16, 20, 24, 40, 64, 128], ids="heads={}".format)
@pytest.mark.parametrize("page_size", [1, 16, 32, 64], ids="page_size={}".format)
def test_lengths_about_pages_and_blocks(heads, page_size, seed):
    """Slots past the ends of rows, and pages of nobody, hold NaN."""
    lengths = [0, 1, page_size, page_size + 1, 63, 64, 65, 0, 8191]
    decoded_by_hand(rows_of(lengths, heads=heads, page_size=page_size, seed=seed))


def decoded_by_hand(rows: LatentRows) -> LatentDecode:
    """Compare what is found and written with float32 and with further launches; return the arguments."""
    args = rows.decode_arguments()
    assert reads_by_hand(args)
    out, lse = latent_decode_lse(*args)
    compare(rows, out, lse)
    torch.testing.assert_close(args.pages, rows.written(), rtol=0, atol=0, equal_nan=True)
    for _ in range(3):
        check_equal(latent_decode(*args), out, "launched again")
    return args


@HEADS
def test_few_and_many_rows(heads, seed):
    draw = random.Random(seed)
    for count in (1, 2, 31, 32, 33, 67, 133, 200):
        lengths = [draw.choice([0, 1, 64, 65, draw.randint(0, 300)]) for _ in range(count)]
        rows = rows_of(lengths, heads=heads, seed=seed)
        args = rows.decode_arguments()
        compare(rows, *latent_decode_lse(*args))
        torch.testing.assert_close(args.pages, rows.written(), rtol=0, atol=0, equal_nan=True)


@HEADS
@pytest.mark.parametrize("page_size", [1, 5, 16, 128], ids="page_size={}".format)
@pytest.mark.parametrize("chosen", [1, 63, 64, 65, 300], ids="chosen={}".format)
def test_lists_about_blocks(heads, page_size, chosen, seed):
    """All slots that no list has hold NaN. Lists name tokens that there are not, and may name none that there is."""
    rows = rows_of([0, 1, 5, 64, 65, 130, 0, 4000], heads=heads, page_size=page_size, chosen=chosen, seed=seed)
    args = decoded_by_hand(rows)
    for programs in (8, 9, 30):
        compare(rows, *shared(args, programs))


@HEADS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_rows(heads, dtype, seed):
    """One program a row, and several; one block each, two, and three."""
    for lengths in ([64], [130, 0, 1]):
        rows = rows_of(lengths, heads=heads, dtype=dtype, seed=seed)
        compare(rows, *shared(rows.decode_arguments(), programs=len(lengths)))
        compare(rows, *shared(rows.decode_arguments(), programs=len(lengths) + 2))


@HEADS
def test_any_number_of_programs(heads, seed):
    """Shares of one block and of many, programs without any, rows that one program reads beside others."""
    for lengths, most in (
        ([1, 31, 32, 33, 0, 64, 65, 3000], 64),
        ([8191], 256),
        ([200, 1100, 0, 1, 64, 257] * 11, 200),
    ):
        rows = rows_of(lengths, heads=heads, seed=seed)
        least = -(-len(lengths) // -(-len(lengths) // 32))
        for programs in (least, least + 1, least + 7, (least + most) // 2, most):
            compare(rows, *shared(rows.decode_arguments(), programs))


def shared(args: LatentDecode, programs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel finds if so many programs share each tile of rows, as evenly as they can."""
    from compiled_llm_ops.kernels.latent.decode import decode

    count, heads, _ = args.query_latent.shape
    tiling = choose_decode_tiling(count, heads, RANK, 65_536, 132, by_hand=True)
    row_tile = -(-count // -(-count // 32))
    tiling = tiling._replace(row_tile=row_tile, programs=programs, min_share=1, few=1, equal=programs)
    lse = torch.full((count, heads), torch.nan, device="cuda")
    return decode(args, lse, tiling=tiling, pdl=False), lse


@HEADS
def test_strides_and_addresses(heads, seed):
    """Queries and new latents of any strides and addresses; pages past others."""
    rows = rows_of([1, 70, 0, 700], heads=heads, seed=seed)
    args = rows.decode_arguments()
    expected = latent_decode(*args)

    def odd(states: torch.Tensor) -> torch.Tensor:
        room = states.new_full((states.shape[0] + 1, *states.shape[1:-1], states.shape[-1] + 3), torch.nan)
        place = room[1:, ..., 1 : states.shape[-1] + 1]
        place.copy_(states)
        return place

    check_equal(latent_decode(*map(odd, args[:4]), *args[4:]), expected, "odd addresses")
    turned = [states.transpose(0, -1).contiguous().transpose(0, -1) for states in args[:4]]
    check_equal(latent_decode(*turned, *args[4:]), expected, "numbers that lie apart")
    pages = torch.empty(args.pages.numel() + 8, dtype=args.pages.dtype, device="cuda")[8:]
    compare(rows, *latent_decode_lse(*args._replace(pages=pages.view(args.pages.shape).copy_(args.pages))))


@HEADS
@pytest.mark.parametrize("overlap", [False, True], ids="overlap={}".format)
@pytest.mark.parametrize("lengths", [[3000] * 5, [400] * 70], ids=["long", "many"])
def test_replays_equal_launches(heads, overlap, lengths, seed):
    """With another table and other lengths each time, and NaN in all slots that no row has."""
    count, rows = len(lengths), rows_of(lengths, heads=heads, seed=seed)
    args = rows.decode_arguments()._replace(overlap=overlap)
    assert reads_by_hand(args)
    latents = torch.randn_like(args.pages)
    starts, numbers = args.starts.clone(), args.indices[: count * -(-lengths[0] // 16)].clone()
    graph, out = captured(lambda: latent_decode(*args))
    draw = random.Random(seed)
    for replay in range(12):
        own = [draw.choice([0, 1, 16, 17, 64, 65, draw.randint(0, lengths[0]), lengths[0]]) for _ in range(count)]
        args.lengths.copy_(torch.tensor(own))
        args.starts.copy_(starts[torch.randperm(count, device="cuda")])
        args.indices[: len(numbers)].copy_(numbers[torch.randperm(len(numbers), device="cuda")])
        args.pages.copy_(latents)
        forget_others(args, lengths[0])
        before = args.pages.clone()
        graph.replay()
        check_equal(out, latent_decode(*args._replace(pages=before)), replay, own)
        torch.testing.assert_close(args.pages, before, rtol=0, atol=0, equal_nan=True)


def forget_others(args: LatentDecode, most: int) -> None:
    """Fill with NaN all slots but those of tokens; new ones are not written yet."""
    position, page_size = torch.arange(most, device="cuda"), args.pages.shape[1]
    pages = args.indices[args.starts[:, None] + position // page_size]
    slots = pages * page_size + position % page_size
    kept = torch.zeros(args.pages.shape[0] * page_size, dtype=torch.bool, device="cuda")
    kept[slots[position < args.lengths[:, None] - 1]] = True
    args.pages.view(len(kept), -1)[~kept] = torch.nan


@HEADS
def test_launches_beside_each_other_are_equal(heads, seed):
    """Warps and programs run in another order each time, as two streams leave them room."""
    draw = random.Random(seed)
    rows = rows_of([draw.randint(0, 1500) for _ in range(20)], heads=heads, seed=seed)
    each = [rows.decode_arguments() for _ in range(2)]
    expected, streams = latent_decode(*each[0]), [torch.cuda.Stream() for _ in range(2)]
    differ = [torch.zeros(20, dtype=torch.bool, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for _ in range(100):
        for args, stream, found in zip(each, streams, differ, strict=True):
            with torch.cuda.stream(stream):
                found |= (latent_decode(*args) != expected).flatten(1).any(1)
    torch.cuda.synchronize()
    assert not torch.stack(differ).any(), f"rows {torch.stack(differ).nonzero().tolist()} of {rows.lengths}"
