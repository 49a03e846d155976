"""Text in pieces is the text of all tokens, for every kind of tokenizer, and stop strings are found in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compiled_llm.compat.tokenizers import backend_of, cleans_up
from compiled_llm.engine.steps.request import Request
from compiled_llm.requests.text.answer_text import AnswerText, TextFormat
from compiled_llm.requests.text.detokenizer import TokenDecoder
from compiled_llm.requests.text.stop_strings import StopReader, StopStrings
from support.engine.text_tokenizers import SAMPLES, byte_fallback, byte_level, slow, word_pieces

KINDS = [byte_level, byte_fallback, word_pieces, slow]
END = 10**9


class OnItsOwn:
    """A tokenizer that is none of HuggingFace's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decode = tokenizer.decode
        if cleans_up(tokenizer):
            self.clean_up_tokenization_spaces = True
            self.clean_up_tokenization = tokenizer.clean_up_tokenization


def decoded(tokenizer: Any, tokens: list[int], skip: bool) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=skip))


def in_pieces(tokenizer: Any, tokens: list[int], skip: bool = True) -> tuple[list[str], str]:
    """The pieces of a text, and all of it."""
    detokenizer = TokenDecoder(tokenizer).detokenizer(skip)
    pieces = [detokenizer.add(token) for token in tokens]
    rest, whole = detokenizer.remaining(tokens, "".join(pieces))
    return [*pieces, rest], whole


def check_pieces(tokenizer: Any, tokens: list[int], skip: bool = True) -> None:
    pieces, whole = in_pieces(tokenizer, tokens, skip)
    assert whole == decoded(tokenizer, tokens, skip)
    assert "".join(pieces) == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_are_the_whole_text(kind, skip):
    tokenizer = kind()
    for sample in SAMPLES:
        tokens = tokenizer(sample).input_ids
        check_pieces(tokenizer, tokens, skip)
        check_pieces(OnItsOwn(tokenizer), tokens, skip)


def test_a_text_comes_as_soon_as_its_characters_are_complete():
    for tokenizer in (byte_level(), slow()):
        pieces, _ = in_pieces(tokenizer, tokenizer("a🙂b", add_special_tokens=False).input_ids)
        assert [piece for piece in pieces if piece] == ["a", "🙂", "b"]


def test_bytes_that_take_back_a_character_end_nothing():
    """Decoders turn a run of byte tokens into text as one: what was a character is none beside a wrong byte."""
    tokenizer = byte_fallback()
    e, wrong, a = map(tokenizer.get_vocab().__getitem__, ["<0x21>", "<0xFF>", "a"])
    for each in (tokenizer, OnItsOwn(tokenizer)):
        pieces, whole = in_pieces(each, [a, e, wrong, a])
        assert ("".join(pieces), whole) == ("a!\ufffda", "a\ufffd\ufffda")


def test_long_runs_without_a_whole_character_cost_little():
    """Special tokens that are left out, and bytes of which nothing becomes a character."""
    tokenizer, calls = byte_level(), 0

    class Counting:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            nonlocal calls
            calls += len(tokens)
            return decoded(tokenizer, tokens, skip_special_tokens)

    (wrong,) = tokenizer(b"\xff".decode("latin-1"), add_special_tokens=False).input_ids[:1]
    run = [*tokenizer("a", add_special_tokens=False).input_ids, *[wrong] * 400, *tokenizer("bcd" * 9).input_ids]
    for each in (tokenizer, Counting()):
        check_pieces(each, run)
    assert calls < 12_000
    special = [*[tokenizer.eos_token_id] * 400, *run[:1], *[tokenizer.eos_token_id] * 400, *run[:1]]
    assert [piece for piece in in_pieces(tokenizer, special)[0] if piece] == ["a", "a"]
    check_pieces(tokenizer, special)
    check_pieces(tokenizer, special, skip=False)


TOKENS = st.lists(st.integers(0, 10**6), max_size=40)


@pytest.mark.parametrize("kind", [byte_level, word_pieces, slow])
@given(numbers=TOKENS, skip=st.booleans())
def test_pieces_of_any_tokens_are_their_text(kind, numbers, skip):
    tokenizer = kind()
    check_pieces(tokenizer, [number % len(tokenizer) for number in numbers], skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=25))
def test_pieces_of_any_text_are_the_text(kind, text):
    tokenizer = kind()
    check_pieces(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)


@given(words=st.lists(st.sampled_from([" ", "  ", "'", "n", "n't", "v", "r", "re", "ve", ".", "s", "x"]), max_size=14))
def test_spaces_are_cleaned_up_in_pieces_as_in_the_whole(words):
    class Words:
        clean_up_tokenization_spaces = True
        clean_up_tokenization = word_pieces().clean_up_tokenization

        def decode(self, tokens: list[int], skip_special_tokens: bool, **options: bool) -> str:
            text = "".join(words[token] for token in tokens)
            return text if options else self.clean_up_tokenization(text)

    check_pieces(Words(), list(range(len(words))))


def test_tokenizers_that_decode_as_huggingface_does_are_streamed_by_their_library():
    class Own(type(byte_level())):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    own = Own(tokenizer_object=byte_level().backend_tokenizer)
    streamed, cleaned = [True, True, False, False, False], [False, True, False, False, False]
    each = [byte_level(), word_pieces(), slow(), own, object()]
    assert [backend_of(tokenizer) is not None for tokenizer in each] == streamed
    assert [cleans_up(tokenizer) for tokenizer in each] == cleaned
    check_pieces(own, own("abc").input_ids)
    assert in_pieces(own, own("abc").input_ids)[1] == "ABC"


# ---- stop strings


def naive(tokenizer: Any, tokens: list[int], stops: list[str], keeps: bool, unsearched: int) -> tuple[str, int, Any]:
    """Decode everything after each token: the text, how many tokens it has, and what has ended it."""
    known = ""
    for count in range(1, len(tokens) + 1):
        text = decoded(tokenizer, tokens[:count], True)
        if not (text.endswith("\ufffd") and count < len(tokens)):
            found = [(text.find(stop, max(0, len(known) - len(stop) + 1)), stop) for stop in stops]
            ends = [(at + len(stop), stops.index(stop), at) for at, stop in found if at >= 0]
            if ends and count > unsearched:
                end, listed, at = min(ends)
                return text[: end if keeps else at], count, stops[listed]
            known = text
    return decoded(tokenizer, tokens, True), len(tokens), None


def request_of(tokens: list[int]) -> Request:
    request = Request(prompt=np.array([1]), sampling=None, max_tokens=END, stop_token_ids=frozenset({END}))
    for token in tokens:
        request.add_run([token])
    return request


def searched(form: TextFormat, tokens: list[int]) -> tuple[str, int, Any]:
    """The same, token by token; what is shown stays."""
    request, shown = request_of([]), ""
    text = AnswerText(request, form)
    for token in tokens:
        request.add_run([token])
        text.read()
        assert text.text[: text.shown].startswith(shown)
        shown = text.text[: text.shown]
        if text.ended:
            break
    request.finish_reason = "length"
    if not text.ended:
        text.read()
    assert text.ended
    assert text.text.startswith(shown)
    return text.text, text.count, text.stop


def check_stops(tokenizer: Any, tokens: list[int], stops: list[str], keeps: bool = False, unsearched: int = 0) -> None:
    form = TextFormat(TokenDecoder(tokenizer), tuple(stops), keeps, True, unsearched)
    assert searched(form, tokens) == naive(tokenizer, tokens, stops, keeps, unsearched), (tokens, form)


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, slow])
def test_stop_strings_at_every_place_of_texts_of_every_script(kind):
    """Each length that a stop string may have at each place, cut into tokens between characters and inside them."""
    tokenizer = kind()
    for sample in ("ab 🙂👩‍👩‍👧 z", "e\u0301e\u0323\u0302x", "漢字かな。文", "한국어 नम"):
        tokens = tokenizer(sample, add_special_tokens=False).input_ids
        text = decoded(tokenizer, tokens, True)
        if kind is not byte_fallback:  # which would take back whole characters, too
            check_stops(tokenizer, tokens[:-1], ["\ufffd"])  # found once nothing follows the bytes before it
        for start in range(len(text)):
            for length in (1, 2, 5):
                check_stops(tokenizer, tokens, [text[start : start + length]], keeps=bool(start % 2))


@pytest.mark.parametrize("kind", [byte_level, slow])
@given(data=st.data())
def test_stop_strings_are_found_where_everything_is_decoded_after_each_token(kind, data):
    tokenizer = kind()
    few = st.sampled_from(list("aab 漢🙂é\u0301"))
    text = data.draw(st.text(few, max_size=20), "text")
    stops = data.draw(st.lists(st.text(few, min_size=1, max_size=4), min_size=1, max_size=3), "stops")
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    check_stops(tokenizer, tokens, stops, data.draw(st.booleans(), "kept"), data.draw(st.integers(0, 6), "unsearched"))


@given(data=st.data())
def test_stop_strings_are_found_as_a_search_for_each_finds_them(data):
    texts = st.text("ab<", max_size=12)
    strings = data.draw(st.lists(texts.filter(bool), min_size=1, max_size=5), "strings")
    reader, text = StopReader(strings), ""
    for piece in data.draw(st.lists(texts, max_size=6), "pieces"):
        counts = data.draw(st.booleans(), "counts")
        ends = [(end, string) for end in range(len(text) + 1, len(text + piece) + 1) for string in strings]
        found = [(string, end - len(string), end) for end, string in ends if (text + piece)[:end].endswith(string)]
        assert reader.take(piece, counts) == (found[0] if found and counts else None)
        if found and counts:
            return
        text += piece
        proper = (string[:size] for string in strings for size in range(1, len(string)))
        assert reader.begun == max((len(begin) for begin in proper if text.endswith(begin)), default=0)


def test_long_stop_strings_that_repeat_themselves_take_one_look_a_character(monkeypatch):
    reader = StopReader([f"{'a' * 60}{number}" for number in range(256)])
    looks, step = [], StopStrings.step
    monkeypatch.setattr(StopStrings, "step", lambda self, *given: (looks.append(given), step(self, *given))[1])
    for _ in range(1000):
        assert reader.take("a" * 4) is None
    assert reader.begun == 60
    assert len(looks) == 4000


@pytest.mark.slow
def test_the_real_tokenizer(demo_model_dir, whole):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    for sample in SAMPLES:
        tokens = tokenizer(sample).input_ids
        check_pieces(tokenizer, tokens)
        for start in range(0, len(sample), 3 if whole else 13):
            check_stops(tokenizer, tokens, [sample[start : start + 3]], keeps=bool(start % 2))
