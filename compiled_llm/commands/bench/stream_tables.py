"""Results of ``bench serve`` as tables: one stream, and many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compiled_llm.commands.bench.results import ManyStreams, OneStream
from compiled_llm.commands.bench.table import Table, pair, percentiles
from compiled_llm.commands.bench.timing import Spread


def one_stream_tables(results: Sequence[OneStream]) -> Iterator[Table]:
    """Yield a table of requests one after the other: a row for each prompt length and contender."""
    if results:
        group = sorted(results, key=lambda result: result.prompt)  # stable: contenders stay in order
        base = results[0].contender
        columns = ["contender", "prompt", "first token, ms", f"over {base}, ms", "between tokens, ms", "tokens a piece"]
        rows = [_one_stream_row(result, _base(result, base, results)) for result in group]
        note = (
            f"Half of all / 99 of 100: of the first tokens of {len(results[0].first_s)} requests, from sending each, "
            "and of what passes between two pieces; a piece is what comes at once."
        )
        yield Table(f"One stream, answers of {results[0].new} tokens", columns, rows, note)


def _base(result: OneStream, base: str, results: Sequence[OneStream]) -> OneStream | None:
    return next((other for other in results if (other.contender, other.prompt) == (base, result.prompt)), None)


def _one_stream_row(result: OneStream, base: OneStream | None) -> list[str]:
    return [
        result.contender,
        str(result.prompt),
        percentiles(result.first),
        "" if base is None else f"{1e3 * (result.first.p50 - base.first.p50):+.2f}",
        percentiles(result.between_s),
        f"{result.together:.2f}",
    ]


def many_streams_tables(results: Sequence[ManyStreams]) -> Iterator[Table]:
    """Yield a table of many requests at once: a row for each number of them and contender."""
    if results:
        group = sorted(results, key=lambda result: result.streams)
        base = results[0].contender
        columns = ["contender", "streams", "tokens/s", f"of {base}", "seconds", "first token, ms", "tokens a piece"]
        rows = [_many_streams_row(result, base, results) for result in group]
        note = (
            f"Best / median of {results[0].rate.runs} runs over the whole, prompts included; shares are of medians. "
            "Half of all / 99 of 100 of the first tokens, from when all are asked."
        )
        title = f"Streams at once, prompts of {results[0].prompt} tokens, answers of {results[0].new}"
        yield Table(title, columns, rows, note)


def _many_streams_row(result: ManyStreams, base: str, results: Sequence[ManyStreams]) -> list[str]:
    same = (other for other in results if (other.contender, other.streams) == (base, result.streams))
    first = next(same, None)
    return [
        result.contender,
        str(result.streams),
        pair(result.rate),
        "" if first is None else f"{result.rate.median / first.rate.median:.1%}",
        pair(Spread.of_times(result.seconds)),
        percentiles(result.first_s),
        f"{result.together:.2f}",
    ]
