"""Text to token ids and back, from `tokenizer.json` or from a GGUF file's metadata."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from kvferry.runtime.errors import CorruptModel, InvalidArgument, UnsupportedModel
from kvferry.runtime.model.families.config import hf_eos_token_ids
from kvferry.runtime.model.files import ModelFiles
from kvferry.runtime.model.gguf_file import GGUFFile
from kvferry.runtime.model.gguf_reader import eos_token_ids, token_id
from kvferry.runtime.model.safetensors_file import read_json
from kvferry.runtime.text.chat import ChatTemplate
from kvferry.runtime.text.gguf_tokenizer import adds_bos, build_tokenizer


class Tokenizer:
    """Safe to use from several threads at once."""

    def __init__(
        self, raw: tokenizers.Tokenizer, *, eos_token_ids: list[int], special: dict[str, str], chat_template: str | None
    ) -> None:
        """`special`: texts of named special tokens (`bos_token`, `eos_token`, …), as chat templates see them."""
        raw.no_padding()
        raw.no_truncation()
        self.raw = raw
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self._chat = ChatTemplate(chat_template, special)

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows; a model's embedding may have more rows (padding)."""
        return int(self.raw.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Tokens that stand for one byte each (`<0x00>` to `<0xFF>`); empty for a byte-level vocabulary."""
        found = (self.raw.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token for token in found if token is not None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises `InvalidArgument` for text that is no valid Unicode."""
        try:
            # `encode` would keep all other threads of the process from running meanwhile; this lets them.
            return list(self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except TypeError as error:
            raise InvalidArgument("prompt", text, "must be valid Unicode text; it holds a lone surrogate") from error

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self.raw.decode(ids, skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids up to where the assistant's answer begins. Raises `InvalidArgument` for refused messages."""
        return self.encode(self._chat.render(messages), add_special_tokens=False)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises `UnsupportedModel` for a kind of tokenizer kvferry lacks, `CorruptModel` for damaged files."""
    return _from_gguf(files.path) if files.kind == "gguf" else _from_folder(Path(files.path))


def _from_gguf(path: str) -> Tokenizer:
    with GGUFFile(path) as file:
        raw = build_tokenizer(file)
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: token_id(file, key) for name, key in names.items()}
        special = {name: str(raw.id_to_token(i)) for name, i in ids.items() if i is not None and raw.id_to_token(i)}
        _set_template(raw, special, adds_bos(file), bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)))
        template = file.metadata.get("tokenizer.chat_template")
        return Tokenizer(
            raw,
            eos_token_ids=eos_token_ids(file),
            special=special,
            chat_template=template if isinstance(template, str) else None,
        )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(f"{folder}: no tokenizer.json; save it with transformers' AutoTokenizer.save_pretrained")
    try:
        raw = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CorruptModel(f"{path}: not a tokenizer: {error}") from error
    config = _optional_json(folder / "tokenizer_config.json")
    named = _optional_json(folder / "special_tokens_map.json") | config
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in named.items()
        if name in ("bos_token", "eos_token", "unk_token", "pad_token") and token
    }
    now = _adds(raw, special)
    wanted = tuple(bool(config.get(f"add_{name}_token", adds)) for name, adds in zip(("bos", "eos"), now, strict=True))
    if wanted != now:
        _set_template(raw, special, *wanted)
    model_config = _optional_json(folder / "config.json")
    eos = hf_eos_token_ids(model_config, _optional_json(folder / "generation_config.json"))
    own_eos = raw.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Tokenizer(
        raw,
        eos_token_ids=eos or ([] if own_eos is None else [own_eos]),
        special=special,
        chat_template=_folder_template(folder, config),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _adds(raw: tokenizers.Tokenizer, special: dict[str, str]) -> tuple[bool, bool]:
    """Whether the tokenizer puts the bos and eos tokens around a text by itself."""
    tokens = raw.encode("a").tokens
    return tokens[:1] == [special.get("bos_token")], tokens[-1:] == [special.get("eos_token")]


def _set_template(raw: tokenizers.Tokenizer, special: dict[str, str], bos: bool, eos: bool) -> None:
    first = [special["bos_token"]] if bos and "bos_token" in special else []
    last = [special["eos_token"]] if eos and "eos_token" in special else []
    raw.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last], special_tokens=[(token, raw.token_to_id(token)) for token in {*first, *last}]
    )
