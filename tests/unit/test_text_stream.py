"""Incremental text and stop strings, against the whole text decoded at once."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.text.detokenizer import TextPiece, TextStream
from kvferry.runtime.text.stop import StopMatcher
from kvferry.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.core


def byte_level() -> Tokenizer:
    """256 bytes, some pairs that cut through characters, one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ã", "©"), ("©", "Ã"), ("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ"), ("Ģ", "a")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    raw = tokenizers.Tokenizer(BPE(vocabulary, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return Tokenizer(raw, eos_token_ids=[], special={}, chat_template=None)


def sentencepiece() -> Tokenizer:
    """Words and byte tokens, as Llama 2 has them."""
    words = ["<unk>", "\u2581", "a", "b", "c", "\u2581a", "\u2581b", "ab", "é"]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = tokenizers.Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return Tokenizer(raw, eos_token_ids=[], special={}, chat_template=None)


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
TOKENIZERS = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}


def run(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], sampling: SamplingParams, prompt: list[int]
) -> tuple[str, int, bool]:
    """(all text, tokens kept, stopped) when `ids` are pushed in the pieces that `cuts` makes."""
    stream = TextStream(tokenizer, sampling, prompt)
    borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    text, kept = "", 0
    for begin, end in zip(borders, borders[1:], strict=False):  # noqa: RUF007
        piece = stream.push(ids[begin:end], end == len(ids) and begin == borders[-2])
        text, kept = text + piece.text, kept + piece.num_tokens_kept
        if piece.stopped:
            return text, kept, True
    return text, kept, False


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[int]]:
    tokenizer = draw(st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
    any_token = st.integers(0, tokenizer.vocab_size - 1)
    words = st.text(alphabet="abc é😀€", max_size=6).map(lambda t: tokenizer.encode(t.replace(" ", "\u2581")))
    texts = st.text(alphabet="abc é😀€", max_size=6).map(BYTE_LEVEL.encode)
    part = st.one_of(st.lists(any_token, max_size=3), words if tokenizer is SENTENCEPIECE else texts)
    ids = draw(st.lists(part, max_size=6).map(lambda parts: [token for p in parts for token in p]))
    return tokenizer, ids, draw(st.lists(st.integers(0, 20), max_size=4))


@settings(max_examples=300, deadline=None)
@given(cases(), st.booleans())
def test_pieces_join_to_the_whole_text(case: tuple[Tokenizer, list[int], list[int]], skip: bool) -> None:
    """A half character shown too early, or lost at the end, breaks every non-Latin answer."""
    tokenizer, ids, cuts = case
    text, kept, stopped = run(tokenizer, ids, cuts, SamplingParams(skip_special_tokens=skip), [])
    assert text == tokenizer.decode(ids, skip)
    assert (kept, stopped) == (len(ids), False)


@settings(max_examples=200, deadline=None)
@given(cases(), cases())
def test_text_goes_on_where_the_prompt_ends(
    case: tuple[Tokenizer, list[int], list[int]], other: tuple[Tokenizer, list[int], list[int]]
) -> None:
    """Prompt and answer put together must read as if they had been written in one go."""
    tokenizer, ids, cuts = case
    prompt = tokenizer.encode("ab" + tokenizer.decode(other[1] if other[0] is tokenizer else [])) or [1]
    if tokenizer.decode(prompt).endswith("\ufffd") or prompt[-1] in tokenizer.byte_token_ids:
        return  # the prompt ends within a character
    text, _, _ = run(tokenizer, ids, cuts, SamplingParams(), prompt)
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


@settings(max_examples=300, deadline=None)
@given(cases(), st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 4))
def test_stop_does_not_depend_on_the_pieces(
    case: tuple[Tokenizer, list[int], list[int]], stops: list[str], min_tokens: int
) -> None:
    """A stop string that crosses tokens or pushes must be found at the same place, and never be shown."""
    tokenizer, ids, cuts = case
    sampling = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=100)
    text, kept, stopped = run(tokenizer, ids, cuts, sampling, [])
    assert (text, kept, stopped) == run(tokenizer, ids, list(range(len(ids))), sampling, [])
    whole = tokenizer.decode(ids)
    assert whole.startswith(text)
    if min_tokens == 0:
        ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
        assert stopped == bool(ends)
        assert text == (whole[: min(ends)[1]] if ends else whole)
    if stopped:
        assert kept > min_tokens
        assert any(stop in tokenizer.decode(ids[:kept]) for stop in stops)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab", max_size=20), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3))
def test_matcher_reads_as_if_by_character(text: str, stops: list[str]) -> None:
    """Overlapping stop strings: held text that is released or kept wrongly shows half a stop string."""
    whole, by_char = StopMatcher(stops), StopMatcher(stops)
    shown, found = whole.push(text)
    expected = ""
    for i, char in enumerate(text, 1):
        piece, hit = by_char.push(char)
        expected += piece
        if hit:
            break
        held = text[len(expected) : i]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert (shown, found) == (expected, any(stop in text for stop in stops))
    if not found:
        assert shown + whole.flush() == text


def test_text_is_not_held_longer_than_needed() -> None:
    """Holding back more than what may become a stop string delays every token of every stream."""
    stream = TextStream(BYTE_LEVEL, SamplingParams(stop=["abcd"]), [])
    a, b, c, x = (BYTE_LEVEL.encode(char)[0] for char in "abcx")
    assert stream.push([x, a], last=False) == TextPiece("x", 2, stopped=False)
    assert stream.push([b, c], last=False).text == ""
    assert stream.push([a], last=False).text == "abc"
    assert stream.push([], last=True).text == "a"


def test_nothing_may_follow_the_end() -> None:
    """Tokens after the end would be shown to the client though they are not part of the answer."""
    token = BYTE_LEVEL.encode("a")[0]
    for stop, last in (([], True), (["a"], False)):
        stream = TextStream(BYTE_LEVEL, SamplingParams(stop=stop), [])
        stream.push([token, token], last)
        with pytest.raises(InvariantBroken):
            stream.push([token], last=False)


def test_half_a_character_becomes_a_replacement_at_the_end() -> None:
    """Bytes that never become a character must not vanish."""
    ids = BYTE_LEVEL.encode("ok😀")[:-1]
    stream = TextStream(BYTE_LEVEL, SamplingParams(), [])
    assert stream.push(ids, last=False).text == "ok"
    assert stream.push([], last=True).text == BYTE_LEVEL.decode(ids)[2:] != ""
