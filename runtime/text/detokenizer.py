"""One sequence's tokens to text as they come: whole characters only, up to the first stop string.

The text of a sequence is what its tokens add to the prompt's text. For byte-level vocabularies that is
`tokenizer.decode(output ids)`; SentencePiece's decoders drop the blank before a text's first word, here it stays.
"""

from __future__ import annotations

import msgspec
from tokenizers.decoders import DecodeStream

from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.text.stop import StopMatcher
from kvferry.runtime.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
"""Of the prompt's end; enough to tell a first word from a following one."""


class TextPiece(msgspec.Struct, frozen=True):
    text: str
    """New text; may lag behind the tokens, never leads."""
    num_tokens_kept: int
    """How many of the pushed tokens belong to the output; the one that completes a stop string does."""
    stopped: bool
    """A stop string was found: the sequence is over."""


class TextStream:
    """Text, and where it stops, depend on the tokens alone, not on how they are split into pushes."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = sampling.skip_special_tokens
        self._min_tokens = sampling.min_tokens
        self._matcher = StopMatcher(sampling.stop)
        self._context = self._usable_context(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._stream = DecodeStream(self._context, skip_special_tokens=self._skip_special)
        self._token_ids: list[int] = []
        self._pending: list[int] = []
        self._num_chars = 0
        self._over = False

    def push(self, token_ids: list[int], last: bool) -> TextPiece:
        """`last`: no more tokens will come; all text that was held back comes out.

        Stop strings are looked for in the text of tokens after the first `min_tokens`. Raises `InvariantBroken` after
        a push that was the last or found a stop string.
        """
        if self._over:
            raise InvariantBroken("TextStream.push: the text is already over")
        shown = []
        for count, token in enumerate(token_ids, 1):
            text, stopped = self._search(self._decode(token))
            shown.append(text)
            if stopped:
                self._over = True
                return TextPiece("".join(shown), count, stopped=True)
        stopped = False
        if last:
            self._over = True
            text, stopped = self._search(self._rest())
            shown += [text] if stopped else [text, self._matcher.flush()]
        return TextPiece("".join(shown), len(token_ids), stopped)

    def _search(self, text: str) -> tuple[str, bool]:
        self._num_chars += len(text)
        return (text, False) if len(self._token_ids) <= self._min_tokens else self._matcher.push(text)

    def _decode(self, token: int) -> str:
        """Text that is complete with `token`."""
        self._token_ids.append(token)
        self._pending.append(token)
        # A run of byte tokens is decoded as one: valid as a whole, or every byte of it is broken. So wait for its end.
        if token in self._tokenizer.byte_token_ids:
            return ""
        pending, self._pending = self._pending, []
        return self._stream.step(self._tokenizer.raw, pending) or ""

    def _rest(self) -> str:
        """Text of all tokens that has not come out of the stream: half characters, as U+FFFD."""
        before = len(self._text_of(self._context))
        return self._text_of(self._context + self._token_ids)[before + self._num_chars :]

    def _text_of(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special)

    def _usable_context(self, token_ids: list[int]) -> list[int]:
        """None if the prompt ends within a character: its text would change with the first output token."""
        ends_within = token_ids and (
            token_ids[-1] in self._tokenizer.byte_token_ids or self._text_of(token_ids).endswith(_REPLACEMENT)
        )
        return [] if ends_within else token_ids
