"""SmolLM2's tokenizer rebuilt from its GGUF file, against the one that transformers rebuilds."""

from __future__ import annotations

import itertools
import json
import os
import random
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, trainers
from tokenizers.models import BPE

from kvferry.runtime.model.files import ModelFiles
from kvferry.runtime.text.tokenizer import load_tokenizer
from tests.support.real_models import SMOLLM2, installed

pytestmark = pytest.mark.golden
FILES = installed(SMOLLM2)
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


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "tekken"])
def test_other_families_equal_transformers(tmp_path: Path, pre: str) -> None:
    """As above for the split patterns of Qwen, Llama 3 and Mistral, on a vocabulary learned from the test's texts."""
    from transformers.integrations.gguf import convert_gguf_tokenizer

    learned = tokenizers.Tokenizer(BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    texts = [text for text in TEXTS if "<|" not in text]  # theirs adds a special token of GPT-2's own
    learned.train_from_iterator([*texts, *(text.upper() for text in texts)] * 2, trainer)
    model = json.loads(learned.to_str())["model"]
    tokens, merges = list(model["vocab"]), [" ".join(merge) for merge in model["merges"]]
    kinds = [3, *[1] * (len(tokens) - 1)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = load_tokenizer(ModelFiles(str(tmp_path / "m.gguf"), "gguf", pre))
    metadata = {"tokens": tokens, "token_type": kinds, "merges": merges}
    metadata |= {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre}
    theirs, _ = convert_gguf_tokenizer("llama", metadata)
    for text in texts:
        text = unicodedata.normalize("NFC", text)  # theirs forgets Qwen's normaliser
        if pre in ("llama-bpe", "tekken"):  # theirs forgets that whole words are taken as they are
            theirs.model.ignore_merges = True
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
