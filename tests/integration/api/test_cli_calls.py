"""`kvferry generate`, `chat` and `status` against a real server (`conftest.py`)."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from typing import Any

import pytest

from kvferry.cluster import cli
from kvferry.cluster.service import Drain, Restart, Scale, SetRole
from kvferry.runtime import errors

pytestmark = pytest.mark.integration


async def run(target: str, *arguments: str) -> int:
    """Exit code of a command in a thread of its own."""

    def call() -> int:
        try:
            cli.main([*arguments, "--target", target])
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return await asyncio.to_thread(call)


async def test_generate(target: str, service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is cut, decorated or repeated; or an option does not reach the server."""
    options = ("--max-tokens", "3", "--temperature", "0", "--seed", "5", "--stop", "x", "yz", "--ignore-eos")
    assert await run(target, "generate", "[bold]é", *options) == 0
    assert capsys.readouterr().out == "[bo\n"
    sampling = service.calls[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.stop, sampling.ignore_eos) == (0, 5, ["x", "yz"], True)


async def test_generate_many(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Several continuations are mixed into each other."""
    assert await run(target, "generate", "ab", "--n", "2") == 0
    assert capsys.readouterr().out == "[0] ab\n[1] ab\n"


async def test_generate_json(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts get text that is no JSON, or lacks the usage."""
    assert await run(target, "generate", "ab", "--json") == 0
    got = json.loads(capsys.readouterr().out)
    assert got["outputs"][0]["text"] == "ab"
    assert got["usage"]["num_prompt_tokens"] == 2
    assert got["timeline"]["attempts"] == 2


@pytest.mark.parametrize(("raw", "code"), [("né".encode(), 0), (b"\xff", 2)])
async def test_generate_from_standard_input(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, raw: bytes, code: int
) -> None:
    """Bytes that are no UTF-8 end in a traceback."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert await run(target, "generate", "-") == code
    out, err = capsys.readouterr()
    assert out == ("né\n" if code == 0 else "")
    assert ("prompt=" in err) == (code == 2)


async def test_refusals(target: str, service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A script cannot tell its own fault from the server's."""
    assert await run(target, "generate", "ab", "--top-p", "2") == 2
    assert capsys.readouterr().err == "kvferry: top_p=2.0: must be in (0, 1]; use 1.0 to switch it off\n"
    service.failure = errors.QueueFull("too many", 1.0)
    assert await run(target, "generate", "ab") == 1
    assert capsys.readouterr().err == "kvferry: too many\n"


async def test_status(target: str, service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure that an operator looks for is missing."""
    assert await run(target, "status", "--audit") == 0
    text = capsys.readouterr().out
    for figure in ("toy", "prefill-0", "live", "60/100", "25%", "8589.9 MB", "4 outlived", "all is well"):
        assert figure in text
    service.findings = ["block 7 has no owner"]
    assert await run(target, "status", "--audit") == 1
    assert "block 7 has no owner" in capsys.readouterr().out
    assert await run(target, "status", "--json", "--audit") == 1
    view = json.loads(capsys.readouterr().out)
    assert view["findings"] == service.findings
    assert view["groups"][0]["num_free_blocks"] == 60


async def test_chat(
    target: str, service: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversation so far, or the system prompt, does not reach the model; or /new keeps it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nho\n/new\nha\n/quit\nnever\n"))
    assert await run(target, "chat", "--system", "S", "--max-tokens", "2") == 0
    talks = [[f"{message.role}:{message.content}" for message in call.messages] for call in service.calls]
    assert talks == [
        ["system:S", "user:hi"],
        ["system:S", "user:hi", "assistant:Sh", "user:ho"],
        ["system:S", "user:ha"],
    ]


async def test_chat_survives_a_refusal(
    target: str, service: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refused message ends the conversation, or stays in it and is refused again and again."""
    service.failure, service.fail_first = errors.QueueFull("too many", 1.0), True
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))  # ends by end of input
    assert await run(target, "chat") == 0
    assert [len(call.messages) for call in service.calls] == [1, 1]
    assert capsys.readouterr().out.count("too many") == 2


@pytest.mark.parametrize(
    ("words", "operation"),
    [
        (["drain", "decode-0", "--timeout-s", "5"], Drain(group="decode-0", timeout_s=5)),
        (["drain", "decode-0"], Drain(group="decode-0", timeout_s=60)),
        (["scale", "--prefill", "2", "--decode", "0"], Scale(prefill=2, decode=0, timeout_s=60)),
        (["role", "decode-0", "mixed"], SetRole(group="decode-0", role="mixed")),
        (["restart", "--rolling", "--timeout-s", "7"], Restart(timeout_s=7)),
    ],
)
async def test_operations(
    target: str, service: Any, capsys: pytest.CaptureFixture[str], words: list[str], operation: Any
) -> None:
    """Fault: a zero is taken for "as many as now", an option does not reach the server, or a figure is not told."""
    assert await run(target, *words) == 0
    assert service.operations == [operation]
    out = capsys.readouterr().out
    assert out.startswith("started decode-1@4; ended decode-0@2; 3 answers moved while they ran; 1 answers computed")
    service.failure = errors.ResourceMissing("group decode-2 does not fit")
    assert await run(target, *words) == 1
    assert capsys.readouterr().err == "kvferry: group decode-2 does not fit\n"


async def test_restart_needs_its_flag(target: str, service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: somebody expects all groups to restart at once, and that is not what happens."""
    assert await run(target, "restart") == 2
    assert "--rolling" in capsys.readouterr().err
    assert service.operations == []
