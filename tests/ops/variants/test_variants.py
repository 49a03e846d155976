"""Attention as its user writes it: each example against a dense computation that shares nothing with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import (
    append_paged_kv,
    decode_attention,
    decode_attention_lse,
    decode_attention_variant,
    decode_attention_variant_lse,
    paged_attention_variant,
    paged_attention_variant_lse,
    register_variant,
)
from compiled_llm_ops.variants import plain
from compiled_llm_ops.variants.registry import _variants, variant_named
from support.ops.op_cases import MIXES, SCALES, Batch, fp8_arguments, preparation
from support.ops.variants import EXAMPLES, alibi, expected, registered, slopes_of

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def few_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MOST_LOGITS", 100)


def tensors_for(name: str, batch: Batch) -> list[Tensor]:
    return EXAMPLES[name].tensors(len(batch.lengths), *batch.query.shape[:2])


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mix", ["mixed", "extend", "a row without queries", "page boundaries"])
def test_packed_queries(name: str, mix: str, seed: int) -> None:
    batch = Batch(*MIXES[mix], group=3, padded=16, seed=seed).filled()
    query, pages, qo_indptr, *table, _, _, scale = batch.arguments()
    tensors, variant = tensors_for(name, batch), registered(name)
    for window in (-1, 4):
        arguments = (query, pages, qo_indptr, *table, variant.name, tensors, scale, window)
        outputs, sums = expected(batch, EXAMPLES[name], tensors, window)
        torch.testing.assert_close(paged_attention_variant(*arguments), outputs, **TOLERANCE)
        if variant.softmax:
            out, lse = paged_attention_variant_lse(*arguments)
            torch.testing.assert_close(out, outputs, **TOLERANCE)
            torch.testing.assert_close(lse, sums, **TOLERANCE)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mix", ["decode", "several new tokens"])
def test_decode_writes_the_newest_tokens_and_attends(name: str, mix: str, seed: int) -> None:
    batch = Batch(*MIXES[mix], group=2, padded=16, seed=seed).filled()
    *arguments, scale = batch.decode_arguments()
    tensors, variant = tensors_for(name, batch), registered(name)
    outputs, sums = expected(batch, EXAMPLES[name], tensors)
    torch.testing.assert_close(decode_attention_variant(*arguments, variant.key, tensors, scale), outputs, **TOLERANCE)
    torch.testing.assert_close(arguments[3], batch.pages)
    if variant.softmax:
        out, lse = decode_attention_variant_lse(*batch.decode_arguments()[:-1], variant.name, tensors, scale)
        torch.testing.assert_close(out, outputs, **TOLERANCE)
        torch.testing.assert_close(lse, sums, **TOLERANCE)


def test_a_query_that_sees_no_key_has_zeros_and_minus_infinity(seed: int) -> None:
    batch = Batch([4, 5], [4, 1], seed=seed).filled()
    query, pages, qo_indptr, *table, _, _, scale = batch.arguments()
    out, lse = paged_attention_variant_lse(query, pages, qo_indptr, *table, registered("blind").name, [], scale)
    assert bool((out[:4] == 0).all())
    assert bool((lse[:4] == -math.inf).all())
    assert bool(lse[4, 0].isfinite())
    assert bool(lse[4, 1] == -math.inf)


def test_parts_of_a_row_add_up_without_a_softmax(seed: int) -> None:
    """As keys are divided among programs: those before a position, and the rest."""
    batch = Batch([9], [2], seed=seed).filled()
    query, pages, qo_indptr, *table, _, _, scale = batch.arguments()
    tensors, weigh = tensors_for("sigmoid", batch), EXAMPLES["sigmoid"].options["logits"]
    parts = []
    for number in range(2):

        def part(row, head, query_position, key_position, shift, number=number):
            return (key_position < 5) if number == 0 else (key_position >= 5)

        options = {**EXAMPLES["sigmoid"].options, "visible": part, "logits": weigh}
        variant = register_variant(f"part_{number}", **options)
        parts.append(paged_attention_variant(query, pages, qo_indptr, *table, variant.name, tensors, scale))
    torch.testing.assert_close(sum(parts), expected(batch, EXAMPLES["sigmoid"], tensors)[0], **TOLERANCE)


def test_sinks_are_a_factor_of_the_log_sum_exp(seed: int) -> None:
    """A sink is one more logit of each head, without a value."""
    batch, sinks = Batch(*MIXES["mixed"], seed=seed).filled(), torch.randn(4)
    query, pages, qo_indptr, *table, _, _, scale = batch.arguments()
    variant = register_variant("no_change")
    out, lse = paged_attention_variant_lse(query, pages, qo_indptr, *table, variant.name, [], scale)
    out = out * torch.sigmoid(lse * math.log(2) - sinks)[..., None]
    taken = 0
    for row, (length, count) in enumerate(zip(batch.lengths, batch.queries, strict=True)):
        keys, values = (states[row].repeat_interleave(2, 1) for states in (batch.keys, batch.values))
        for last in range(length - count + 1, length + 1):
            logits = torch.einsum("hd,lhd->hl", query[taken], keys[:last]) * scale
            weights = torch.softmax(torch.cat([logits, sinks[:, None]], 1), 1)[:, :-1]
            torch.testing.assert_close(out[taken], torch.einsum("hl,lhd->hd", weights, values[:last]), **TOLERANCE)
            taken += 1


def test_inklings_bias_is_that_of_huggingface(seed: int) -> None:
    inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    batch, bank = Batch([9], [9], seed=seed).filled(), inkling.InklingRelativeLogits(5, 6)
    torch.nn.init.normal_(bank.proj)
    states, positions = torch.randn(1, 9, 4, 5), torch.arange(9)
    bias = bank(states, positions, positions)[0]
    query, pages, qo_indptr, *table, _, _, scale = batch.arguments()
    tensors = [(states @ bank.proj)[0].detach().contiguous()]
    out = paged_attention_variant(query, pages, qo_indptr, *table, registered("inkling").name, tensors, scale)
    keys, values = (states[0].repeat_interleave(2, 1) for states in (batch.keys, batch.values))
    logits = torch.einsum("qhd,khd->hqk", query, keys) * scale + bias
    logits = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    dense = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1), values)
    torch.testing.assert_close(out, dense, **TOLERANCE)


def test_values_of_another_size_and_sixteen_bits(seed: int) -> None:
    for options in ({"value_dim": 6}, {"dtype": torch.bfloat16}):
        batch = Batch(*MIXES["mixed"], seed=seed, **options).filled()
        query, pages, qo_indptr, *table, _, _, scale = batch.arguments()
        tensors = [slopes_of(4)]
        out = paged_attention_variant(query, pages, qo_indptr, *table, registered("alibi").name, tensors, scale)
        outputs, _ = expected(batch, EXAMPLES["alibi"], tensors)
        tolerance = 2e-2 if query.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(out.float(), outputs, rtol=tolerance, atol=tolerance)
        assert out.dtype == query.dtype


def test_pages_of_fp8(seed: int) -> None:
    batch = Batch(*MIXES["decode"], seed=seed).in_fp8().filled()
    others = [(*batch.decode_arguments(),) for _ in range(2)]
    *scales, count = fp8_arguments()
    variant = register_variant("no_change")
    how = {"key_scale": scales[0], "value_scale": scales[1], "saturated": count}
    out, lse = decode_attention_variant_lse(*others[0][:-1], variant.name, [], others[0][-1], 3, **how)
    plain_out = decode_attention_lse(*others[1], 3, key_scale=SCALES[0], value_scale=SCALES[1])
    torch.testing.assert_close((out, lse), plain_out)
    torch.testing.assert_close(others[0][3].view(torch.uint8), others[1][3].view(torch.uint8))


def test_queries_and_keys_are_normed_and_rotated_first(seed: int) -> None:
    batch = Batch(*MIXES["several new tokens"], padded=16, seed=seed).filled()
    own = dict(zip(("query_norm", "key_norm", "epsilon", "cos", "sin"), preparation(batch.query), strict=True))
    *arguments, scale = batch.decode_arguments()
    out = decode_attention_variant(*arguments, register_variant("no_change").name, [], scale, **own)
    others = batch.decode_arguments()
    torch.testing.assert_close(out, decode_attention(*others, **own))
    torch.testing.assert_close(arguments[3], others[3])


def test_compiled_whole_and_once_for_all_shapes(seed: int) -> None:
    variants = registered("alibi").key, registered("inkling").key

    def layer(batch: tuple[Tensor, ...], pages: Tensor, tensors: list[Tensor], scale: float) -> tuple[Tensor, ...]:
        query, key, value, rows, positions, qo_indptr, indptr, indices, last, lengths = batch
        append_paged_kv(key * 2, value, pages, rows, positions, indptr, indices, last)
        table = (qo_indptr, indptr, indices, last)
        out, lse = paged_attention_variant_lse(query + 1, pages, *table, variants[0], tensors[:1], scale)
        other = paged_attention_variant(query + 1, pages, *table, variants[1], tensors[1:], scale)
        newest = qo_indptr[1:] - 1
        states = (query[newest], key[newest], value[newest])
        third = decode_attention_variant(*states, pages, indptr[:-1], lengths, indices, variants[0], tensors[:1], scale)
        return out + other, lse * 2, third

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, (lengths, queries) in enumerate(
        [([9, 6, 4, 3, 2], [3, 6, 2, 2, 1]), ([5, 11], [2, 4]), ([30, 2, 2, 7], [1, 2, 1, 5])]
    ):
        results = []
        tensors = [slopes_of(4), torch.randn(sum(queries), 4, 12)]
        for function in (compiled, layer):
            batch = Batch(lengths, queries, head_dim=16, seed=seed + number)
            arguments = (
                batch.query, torch.cat(batch.keys), torch.cat(batch.values),
                *batch.slots([0] * len(lengths), lengths), batch.qo_indptr, *batch.table,
                torch.tensor(lengths, dtype=torch.int32),
            )  # fmt: skip
            stance = "fail_on_recompile" if number and function is compiled else "default"
            with torch.compiler.set_stance(stance):
                results.append((*function(arguments, batch.pages, tensors, batch.scale), batch.pages))
        torch.testing.assert_close(*results)


# ---- what is refused


def _logit(function: Callable[..., Any]) -> dict[str, Any]:
    return {
        "logits": function,
        "tensors": {"slopes": ("head", torch.float32), "doc": (("row", "position"), torch.int64)},
    }


_STRAY = torch.ones(3)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an operation": (
        _logit(lambda logit, row, head, query, key, slopes, doc: torch.sin(logit)),
        r"logits of 'refused' at .*test_variants.py:\d+: `.*torch.sin.*`: no kernel has .*sin; a variant has arith",
    ),
    "a method": (_logit(lambda logit, *others, **tensors: logit.cumsum(0)), r"no kernel has \.cumsum\(\)"),
    "if": (
        _logit(lambda logit, row, head, query, key, slopes, doc: logit if query > key else 0),
        r"test_variants.py:\d+: .*: Python's if, and, or.*use torch.where",
    ),
    "math": (
        _logit(lambda logit, *others, **tensors: math.exp(logit)), "use torch's functions in place of math's",
    ),
    "a constant": (_logit(lambda logit, *others, **tensors: torch.minimum(logit, 3)), r"torch.clamp\(x, max=\.\.\.\)"),
    "a tensor of its own": (_logit(lambda logit, *others, **tensors: logit + _STRAY), "name it in tensors="),
    "a whole tensor": (
        _logit(lambda logit, row, head, query, key, slopes, doc: logit + slopes),
        r"read entries of it, as in slopes\[head\]",
    ),
    "too few indices": (
        _logit(lambda logit, row, head, query, key, slopes, doc: logit + doc[row]), r"as in doc\[row, position\]"
    ),
    "an index that is no integer": (
        _logit(lambda logit, row, head, query, key, slopes, doc: slopes[logit]), "indices of integers; got a number"
    ),
    "another row": (
        _logit(lambda logit, row, head, query, key, slopes, doc: doc[row + 1, key]), "a row reads its own"
    ),
    "a slice": (_logit(lambda logit, row, head, query, key, slopes, doc: slopes[head:]), "entry by entry"),
    "a truth value": (_logit(lambda logit, *others, **tensors: logit > 0), "returns a truth value"),
    "nothing": (_logit(lambda logit, *others, **tensors: None), "returns NoneType; it must return a number"),
    "integers divided by a number": (
        _logit(lambda logit, row, head, query, key, **tensors: logit // 2),
        "divides integers by a constant other than 0",
    ),
    "a large integer": (_logit(lambda logit, *others, **tensors: logit + 2**40), "does not fit int32"),
    "bits of numbers": (_logit(lambda logit, row, head, query, key, **tensors: query & 3), "compare numbers first"),
    "a power": (_logit(lambda logit, *others, **tensors: logit**0.5), "constant exponent of 1 to 8"),
    "a function of other arguments": (_logit(lambda logit: logit), "cannot be traced"),
    "a number of visible": (
        {"visible": lambda row, head, query, key: query - key},
        "visible of 'refused' returns an integer; it must return a truth",
    ),
    "an index": ({"tensors": {"slopes": ("layer", torch.float32)}}, "index='layer': must be one of"),
    "rows after heads": ({"tensors": {"slopes": (("head", "row"), torch.float32)}}, "must be the first axis"),
    "a dtype": ({"tensors": {"slopes": ("head", torch.complex64)}}, "dtype=torch.complex64"),
    "no dtype": ({"tensors": {"slopes": "head"}}, "must be its index and its dtype"),
    "a tensor's name": ({"tensors": {"logit": ("head", torch.float32)}}, "other than logit, row"),
    "softmax": ({"softmax": 1}, "softmax=1 of 'refused': must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_has_is_refused_before_anything_is_registered(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        register_variant("refused", **options)
    assert "refused" not in _variants


def test_a_name_has_one_meaning() -> None:
    tensors = {"slopes": ("head", torch.float32)}
    first = register_variant("one_meaning", alibi, tensors=tensors)
    assert register_variant("one_meaning", alibi, tensors=tensors) is first
    for options in (
        {"logits": lambda logit, row, head, query, key, slopes: logit + slopes[head], "tensors": tensors},
        {"logits": alibi, "tensors": {"slopes": ("head", torch.float16)}},
        {"logits": alibi, "tensors": tensors, "softmax": False},
    ):
        with pytest.raises(ValueError, match=r"registered with another meaning \(\w{16}, and now \w{16}\)"):
            register_variant("one_meaning", **options)
    with pytest.raises(ValueError, match="name='a b': must be an identifier"):
        register_variant("a b")
    with pytest.raises(ValueError, match=r"variant 'missing' is not registered \(registered: .*'one_meaning'"):
        variant_named("op", "missing")
    with pytest.raises(ValueError, match=r"op: variant 'one_meaning' means something else"):
        variant_named("op", "one_meaning@0123456789abcdef")
    assert variant_named("op", first.key) is first


def test_equal_functions_have_equal_hashes_and_constants_count() -> None:
    def hash_of(name: str, factor: float) -> str:
        return register_variant(name, lambda logit, *others: logit * factor).hash

    assert hash_of("first", 2.0) == hash_of("second", 2.0)
    assert len({hash_of(f"times_{number}", factor) for number, factor in enumerate((2.0, 3.0, 0.0, -0.0))}) == 4
    assert hash_of("third", 2) == hash_of("first", 2.0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "takes 1 tensors .slopes.; got 0"),
        ([torch.ones(3)], r"slopes of variant 'example_alibi' must be \[4\] torch.float32, by head; got \(3,\)"),
        ([torch.ones(4).half()], r"got \(4,\) torch.float16"),
        ([torch.ones(4, 1)], r"got \(4, 1\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(tensors, message, seed: int) -> None:
    batch = Batch(*MIXES["decode"], seed=seed).filled()
    *arguments, scale = batch.decode_arguments()
    before = arguments[3].clone()
    with pytest.raises(ValueError, match=f"decode_attention_variant: .*{message}"):
        decode_attention_variant(*arguments, registered("alibi").name, tensors, scale)
    with pytest.raises(ValueError, match="decode_attention_variant: variant 'missing' is not registered"):
        decode_attention_variant(*arguments, "missing", tensors, scale)
    torch.testing.assert_close(arguments[3], before)


def test_without_a_softmax_there_is_no_log_sum_exp(seed: int) -> None:
    batch = Batch(*MIXES["decode"], seed=seed).filled()
    *arguments, scale = batch.decode_arguments()
    with pytest.raises(ValueError, match="has no softmax, and no log-sum-exp; call decode_attention_variant"):
        decode_attention_variant_lse(*arguments, registered("sigmoid").name, [torch.zeros(4)], scale)


def test_a_variant_that_changes_nothing_is_attention(seed: int) -> None:
    batch = Batch(*MIXES["decode"], seed=seed).filled()
    *arguments, scale = batch.decode_arguments()
    out = decode_attention_variant(*arguments, register_variant("no_change").name, [], scale)
    torch.testing.assert_close(out, decode_attention(*batch.decode_arguments()))
