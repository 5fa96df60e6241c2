"""Rebuilds a tokenizer from a GGUF file's metadata (`tokenizer.ggml.*`).

    model  gpt2    byte-level BPE; `pre` names how text is cut before merging
           llama   SentencePiece BPE with byte fallback; merges follow from the scores

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp (what each `model` and `pre` means); the
split patterns are those of the models' own `tokenizer.json`.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from kvferry.runtime.errors import CorruptModel, UnsupportedModel
from kvferry.runtime.model.gguf_file import GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"  # SentencePiece's visible space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "smaug-bpe": _LLAMA3, "tekken": _TEKKEN}
_SPLITS |= {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
_PLAIN = ("default", "gpt-2")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "codeshell")
# Whole words that are tokens are taken as they are, and a beginning-of-sequence token goes first by default.
_LLAMA3_LIKE = ("llama3", "llama-v3", "llama-bpe", "tekken")


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises `UnsupportedModel` for an unknown `model` or `pre`, `CorruptModel` for metadata that do not fit."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.model={model!r}; supported are gpt2 and llama")
    tokens = file.strings("tokenizer.ggml.tokens")
    kinds = [int(kind) for kind in file.numbers("tokenizer.ggml.token_type")]
    if len(kinds) != len(tokens):
        raise CorruptModel(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    try:
        tokenizer = _byte_level(file, tokens) if model == "gpt2" else _sentencepiece(file, tokens, kinds)
    except (CorruptModel, UnsupportedModel):
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CorruptModel(f"{file.path}: the tokenizer's metadata contradict each other: {error}") from error
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in added if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in added if k == _USER_DEFINED])
    return tokenizer


def adds_bos(file: GGUFFile) -> bool:
    """Whether a prompt begins with the beginning-of-sequence token."""
    llama3_like = file.metadata.get("tokenizer.ggml.pre") in _LLAMA3_LIKE
    default = file.metadata.get("tokenizer.ggml.model") == "llama" or llama3_like
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():  # the library would panic
            raise CorruptModel(f"{file.path}: merge {merge!r} names a token that the vocabulary lacks")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_LIKE))
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _PLAIN:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _SINGLE_DIGITS:
        # transformers 5 forgets the digits here, so its ids differ where a number follows several blanks.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[str(pre)]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join((*_PLAIN, *_SINGLE_DIGITS, *_SPLITS))
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.pre={pre!r}; supported are {known}")
    if _SPLITS.get(str(pre)) == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CorruptModel(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges(tokens, kinds, scores),
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose whole has the best score; as a list, that is all pairs in that order."""
    score = {t: s for t, k, s in zip(tokens, kinds, scores, strict=True) if k == _NORMAL}
    rank = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (token[:cut], token[cut:])
        for token in score
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    pairs.sort(key=lambda p: (-score[p[0] + p[1]], -len(p[0]), -len(p[1]), rank[p[0]], rank[p[1]]))
    return pairs
