"""Guards against one client's call holding up the answers to all others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvferry.cluster.api.grpc import Calls
from kvferry.proto import kvferry_pb2 as pb


class SlowTokenizer:
    """Answers once the event loop has turned meanwhile; gives up after a while."""

    def __init__(self) -> None:
        self.turned = threading.Event()

    def _answer(self) -> bool:
        return self.turned.wait(2.0)

    def tokenize(self, _text: str, _add_special_tokens: bool) -> list[int]:
        return [int(self._answer())]

    def tokenize_chat(self, _messages: Any) -> list[int]:
        return [int(self._answer())]

    def detokenize(self, _token_ids: list[int], _skip_special_tokens: bool) -> str:
        return str(self._answer())


CHAT = pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="a")]))
CALLS = [
    ("tokenize", pb.TokenizeRequest(text="a"), pb.TokenizeResponse(token_ids=[1])),
    ("tokenize", CHAT, pb.TokenizeResponse(token_ids=[1])),
    ("detokenize", pb.DetokenizeRequest(token_ids=[1]), pb.DetokenizeResponse(text="True")),
]


@pytest.mark.parametrize(("method", "request_", "answer"), CALLS)
async def test_long_texts_do_not_stop_the_event_loop(method: str, request_: Any, answer: Any) -> None:
    """Fault: four megabytes of text stopped all streams for seconds, and live groups looked silent."""
    service: Any = SlowTokenizer()
    call = asyncio.ensure_future(getattr(Calls(service, slow_reader_s=60.0), method)(request_, None))
    await asyncio.sleep(0.01)
    service.turned.set()
    assert await call == answer
