"""Tokenizers from folders and GGUF metadata: bos and eos, templates, SentencePiece, refusals."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from kvferry.runtime.errors import CorruptModel, InvalidArgument, UnsupportedModel
from kvferry.runtime.model.files import ModelFiles
from kvferry.runtime.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.core
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS = 256, 257


def write_folder(
    folder: Path, config: dict[str, Any], with_bos: bool = True, model: dict[str, Any] | None = None
) -> None:
    raw = tokenizers.Tokenizer(BPE({token: i for i, token in enumerate(ALPHABET)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    raw.enable_truncation(4)
    if with_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    raw.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | config))
    (folder / "config.json").write_text(json.dumps(model or {}))


def load(folder: Path, **options: Any) -> Tokenizer:
    write_folder(folder, **options)
    return load_tokenizer(ModelFiles(str(folder), "hf", "test"))


@pytest.mark.parametrize(
    ("with_bos", "config", "expected"),
    [
        (True, {}, (True, False)),
        (False, {}, (False, False)),
        (False, {"add_bos_token": True}, (True, False)),
        (True, {"add_bos_token": False}, (False, False)),
        (True, {"add_eos_token": True}, (True, True)),
        (True, {"add_bos_token": None}, (False, False)),
    ],
)
def test_bos_and_eos_as_configured(
    tmp_path: Path, with_bos: bool, config: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    """A missing or doubled first token makes a model noticeably worse."""
    tokenizer = load(tmp_path, with_bos=with_bos, config=config)
    ids = tokenizer.encode("hello world")
    assert (ids[0] == BOS, ids[-1] == EOS) == expected
    assert len(ids) == 11 + sum(expected), "the file's truncation must not apply to prompts"
    assert len(tokenizer.encode("hello world", add_special_tokens=False)) == 11
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode([*tokenizer.encode("x", False), EOS], skip_special_tokens=False).endswith("x</s>")


def test_eos_and_templates_of_a_folder(tmp_path: Path) -> None:
    """An eos id or template read from the wrong file ends answers never, or formats them wrongly."""
    assert load(tmp_path, config={}).eos_token_ids == [EOS]
    assert load(tmp_path, config={}, model={"eos_token_id": [7, 8]}).eos_token_ids == [7, 8]
    assert load(tmp_path, config={}).chat_template is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    tokenizer = load(tmp_path, config={"chat_template": named})
    assert tokenizer.chat_template == "{{ bos_token }}yes"
    ids = tokenizer.render_chat([{"role": "user", "content": ""}])
    assert ids == [BOS, *tokenizer.encode("yes", add_special_tokens=False)]
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load(tmp_path, config={"chat_template": "config"}).chat_template == "file"


def test_bad_tokenizer_files_and_text(tmp_path: Path) -> None:
    """Neither a damaged file nor a lone surrogate may surface as a library's exception."""
    tokenizer = load(tmp_path, config={})
    with pytest.raises(InvalidArgument, match="lone surrogate"):
        tokenizer.encode("a\ud800b")
    files = ModelFiles(str(tmp_path), "hf", "test")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptModel, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        load_tokenizer(files)


def write_gguf(path: Path, model: str, tokens: list[str], kinds: list[int], **metadata: Any) -> ModelFiles:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if "merges" in metadata:
        writer.add_token_merges(metadata["merges"])
    if "scores" in metadata:
        writer.add_token_scores(metadata["scores"])
    if "pre" in metadata:
        writer.add_tokenizer_pre(metadata["pre"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key in ("add_bos_token", "add_space_prefix"):
        if key in metadata:
            writer.add_bool(f"tokenizer.ggml.{key}", metadata[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(str(path), "gguf", "test")


def sentencepiece(path: Path, **metadata: Any) -> Tokenizer:
    words = ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello", "\u2581h", "\u2581he"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<mark>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    # Later words have worse scores, as SentencePiece numbers them.
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0]
    return load_tokenizer(write_gguf(path, "llama", tokens, kinds, scores=scores, **metadata))


def test_sentencepiece(tmp_path: Path) -> None:
    """Llama 2 and Mistral files: merges by score, blanks, bytes for what the vocabulary lacks."""
    tokenizer = sentencepiece(tmp_path / "m.gguf")
    pieces = lambda text: tokenizer.raw.encode(text).tokens  # noqa: E731
    assert pieces("hello") == ["<s>", "\u2581hello"]
    assert pieces("hellohello") == ["<s>", "\u2581hello", "hello"]
    assert pieces(" hello") == ["<s>", "\u2581", "\u2581hello"]
    assert pieces("é") == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert pieces("hello</s>")[-1] == "</s>"
    assert pieces("hello<mark>")[-1] == "<mark>"
    for text in ("hello hello", " hello", "héllo 😀\n\thello  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == [2]
    assert tokenizer.vocab_size == 272
    assert len(tokenizer.byte_token_ids) == 256
    plain = sentencepiece(tmp_path / "p.gguf", add_bos_token=False, add_space_prefix=False)
    assert plain.raw.encode("hello").tokens == ["hello"]
    assert plain.decode(plain.encode(" hello")) == " hello"


@pytest.mark.parametrize(
    ("pre", "first", "pieces"),
    [
        ("gpt-2", False, ["123", "Ġ", "Ġa"]),
        ("smollm", False, ["1", "2", "3", "Ġ", "Ġa"]),
        ("qwen2", False, ["1", "2", "3", "Ġ", "Ġa"]),
        ("llama-bpe", True, ["123", "Ġ", "Ġa"]),
        ("tekken", True, ["1", "2", "3", "Ġ", "Ġa"]),
    ],
)
def test_byte_level_splits(tmp_path: Path, pre: str, first: bool, pieces: list[str]) -> None:
    """Numbers and blanks are cut differently by each family; the wrong cut gives tokens the model rarely saw."""
    merges = ["1 2", "12 3", "Ġ a"]
    tokens = ["<unk>", "<s>", "</s>", *ALPHABET, "12", "123", "Ġa"]
    files = write_gguf(tmp_path / "m.gguf", "gpt2", tokens, [3, 3, 3] + [1] * (len(tokens) - 3), merges=merges, pre=pre)
    assert load_tokenizer(files).raw.encode("123  a").tokens == ["<s>"] * first + pieces


def test_unknown_gguf_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    """A tokenizer that is nearly right makes a model that is nearly wrong."""
    path = tmp_path / "m.gguf"
    with pytest.raises(UnsupportedModel, match="tokenizer.ggml.model='bert'"):  # noqa: RUF043
        load_tokenizer(write_gguf(path, "bert", ["a"], [1]))
    with pytest.raises(UnsupportedModel, match="tokenizer.ggml.pre='viking'; supported are default"):  # noqa: RUF043
        load_tokenizer(write_gguf(path, "gpt2", ["a", "b", "ab"], [1, 1, 1], merges=["a b"], pre="viking"))
    with pytest.raises(CorruptModel, match="merge 'a b' names a token"):
        load_tokenizer(write_gguf(path, "gpt2", ["a", "b"], [1, 1], merges=["a b"]))
    with pytest.raises(CorruptModel, match="2 tokens but 1 token types"):
        load_tokenizer(write_gguf(path, "gpt2", ["a", "b"], [1], merges=["a b"]))
    with pytest.raises(CorruptModel, match="tokenizer.ggml.merges must be an array"):  # noqa: RUF043
        load_tokenizer(write_gguf(path, "gpt2", ["a", "b"], [1, 1]))


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """Fault: one client's long prompt holds the interpreter's lock, and all streams stand still for seconds."""
    tokenizer, ticks, done = load(tmp_path, config={}), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        before = ticks
        tokenizer.encode("one two three " * 40_000)
        assert ticks - before >= 10
    finally:
        done.set()
        ticker.join(5)
