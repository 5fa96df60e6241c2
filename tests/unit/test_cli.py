"""The command line: what it offers, what it makes of it, how it fails."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvferry
from kvferry.cluster import cli
from kvferry.cluster.cli_serve import Serve, parse_bytes
from kvferry.cluster.config import ServeConfig, ServerOptions
from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import InvalidArgument, ResourceMissing
from kvferry.runtime.request import SamplingParams

SERVER = {"target", "token-file", "tls", "tls-ca", "tls-cert", "tls-key", "timeout-s"}
DOOR = SERVER - {"timeout-s"}
SAMPLING = {
    "max-tokens",
    "min-tokens",
    "temperature",
    "top-p",
    "top-k",
    "min-p",
    "repetition-penalty",
    "presence-penalty",
    "frequency-penalty",
    "seed",
    "stop",
    "ignore-eos",
}
OPTIONS = {
    "serve": {
        *("prefill", "decode", "mixed", "prefill-tp", "decode-tp", "mixed-tp", "host", "port", "token-file"),
        *("tls-cert", "tls-key", "tls-client-ca", "max-message", "ray-address", "dtype", "threads", "block-size"),
        "kv-dtype",
        *("kv-memory", "num-blocks", "prefix-caching", "max-batch-tokens", "max-sequences", "max-waiting"),
        *("max-context", "transport", "transfer-timeout-s", "blocks-per-message", "checksum", "quantization"),
        *("metrics-port", "log-json", "disaggregate", "priority-step-s", "max-bypass", "drain-s"),
        *("max-requests", "max-queue-s", "retry-budget", "max-unread", "slow-reader-s"),
        *("eviction", "fetch-prefix", "isolate-tenants", "speculation", "speculation-tokens", "draft-model"),
    },
    "generate": {"n", "json", "timeline", "priority", "retry-budget"} | SAMPLING | SERVER,
    "chat": {"system"} | SAMPLING | SERVER,
    "status": {"json", "audit"} | SERVER,
    "chaos": {"minutes", "clients", "faults", "every-s", "seed", "max-tokens", "yes", "json"} | SERVER,
    "drain": SERVER,
    "scale": {"prefill", "decode", "mixed"} | SERVER,
    "role": DOOR,
    "restart": {"rolling"} | SERVER,
    "plan": {
        *("device-memory", "device", "tp", "context", "link", "dtype", "block-size", "kv-memory", "quantization"),
        *("max-batch-tokens", "max-sequences", "kv-dtype", "json"),
    },
    "sim": {"seed", "seeds", "minutes", "shrink", "trace"},
    "version": set(),
}
ENTRY = r"^[│ ] (?=--[a-z])"


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def config_of(*arguments: str) -> ServeConfig:
    command = cli.parse(["serve", *arguments])
    assert isinstance(command, Serve)
    return command.config()


@pytest.mark.parametrize("command", OPTIONS)
def test_options_are_frozen(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """An option appears, vanishes or changes its name unnoticed: scripts break."""
    shown = set(re.findall(ENTRY + r"--([a-z-]+)", help_of(capsys, command), re.MULTILINE))
    assert shown == OPTIONS[command]


def test_every_option_of_serve_is_documented() -> None:
    """An option that only its author knows."""
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    assert [option for option in sorted(OPTIONS["serve"]) if f"`--{option}`" not in page] == []


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_explained(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """A newcomer meets an option without a word, or Python's notation."""
    text = help_of(capsys, command)
    assert "{None}" not in text
    assert "(default: None)" not in text
    entries = re.split(ENTRY + r"(?=--)", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(OPTIONS[command])
    for entry in entries:
        words = re.sub(r"[│╭╮╰╯─\s]+", " ", entry).partition(" ")[2]
        assert re.search(r"[a-z]{2,} [a-z]+.*\.", words), entry


def test_overview_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvferry --help` hides a command."""
    text = help_of(capsys)
    assert all(f"• {command} " in text for command in OPTIONS)


def test_defaults_are_the_configs() -> None:
    """The command line has defaults of its own."""
    assert config_of("m") == ServeConfig(model="m")


def test_every_field_can_be_set() -> None:
    """An option is read and ignored, or a config's field cannot be reached."""
    changed = config_of(
        *("model", "--prefill", "2", "--decode", "3", "--mixed", "4", "--prefill-tp", "5", "--decode-tp", "6"),
        *("--mixed-tp", "7", "--host", "::1", "--port", "8", "--token-file", "t", "--tls-cert", "c", "--tls-key", "k"),
        *("--tls-client-ca", "a", "--max-message", "9MiB", "--ray-address", "auto", "--dtype", "float32"),
        *("--kv-dtype", "int8"),
        *("--threads", "10", "--block-size", "11", "--kv-memory", "12MiB", "--no-prefix-caching"),
        *("--max-batch-tokens", "13", "--max-sequences", "14", "--max-waiting", "15", "--max-context", "16"),
        *("--transport", "gloo", "--transfer-timeout-s", "17", "--blocks-per-message", "18", "--checksum"),
        *("--metrics-port", "19", "--log-json", "--disaggregate", "never", "--priority-step-s", "20"),
        *("--max-bypass", "21", "--max-requests", "22", "--max-queue-s", "23", "--retry-budget", "24"),
        *("--max-unread", "25MiB", "--slow-reader-s", "26", "--drain-s", "27", "--quantization", "int8"),
        *("--eviction", "lru", "--fetch-prefix", "never", "--isolate-tenants"),
        *("--speculation", "draft", "--speculation-tokens", "28", "--draft-model", "small"),
    )
    blocks = config_of("m", "--num-blocks", "5").engine.cache
    assert blocks.num_blocks == 5

    def same(left: Any, right: Any, path: str) -> list[str]:
        if isinstance(left, msgspec.Struct):
            names = left.__struct_fields__
            return [p for name in names for p in same(getattr(left, name), getattr(right, name), f"{path}.{name}")]
        return [path] if left == right else []

    assert same(changed, ServeConfig(model="m"), "") == [".engine.cache.num_blocks"]
    assert (changed.engine.cache.kv_memory_bytes, changed.server.max_message_bytes) == (12 << 20, 9 << 20)
    assert changed.limits.max_unread_bytes == 25 << 20
    assert changed.engine.transfer.timeout_s == 17


def test_groups() -> None:
    """Groups get wrong names or sizes."""
    groups = config_of("m", "--prefill", "2", "--decode", "1", "--mixed", "1", "--decode-tp", "3").groups()
    assert [(g.group, g.role, g.tp_size) for g in groups] == [
        ("prefill-0", "prefill", 1),
        ("prefill-1", "prefill", 1),
        ("decode-0", "decode", 3),
        ("mixed-0", "mixed", 1),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["serve", "m", "--prefill", "0", "--decode", "0"],
        ["serve", "m", "--prefill", "-1"],
        ["serve", "m", "--prefill", "two"],
        ["serve", "m", "--decode-tp", "0"],
        ["serve", "m", "--port", "65536"],
        ["serve", "m", "--dtype", "int3"],
        ["serve", "m", "--kv-memory", "3 parsecs"],
        ["serve", "m", "--kv-memory", "1MiB", "--num-blocks", "3"],
        ["serve", "m", "--tls-cert", "c"],
        ["serve", "m", "--no-such-option"],
        ["serve", ""],
        ["status", "--target", "localhost"],
        ["generate", "x", "--token-file", "/no/such/file"],
        ["frobnicate"],
        [],
    ],
    ids=" ".join,
)
def test_callers_faults(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """A typing error ends in a traceback, or in the exit code of a failure that may be retried."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err
    assert "Traceback" not in err


def test_failures_end_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed start ends in a traceback, or looks like success; or the config does not arrive."""
    seen: list[ServeConfig] = []

    def serve(config: ServeConfig) -> None:
        seen.append(config)
        raise ResourceMissing("the cluster lacks 3 GPUs")

    monkeypatch.setattr("kvferry.cluster.cli_serve.configure_logging", lambda _json: None)
    monkeypatch.setitem(sys.modules, "kvferry.cluster.launch", types.SimpleNamespace(serve=serve))  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "m", "--decode", "3"])
    assert caught.value.code == 1
    assert capsys.readouterr() == ("", "kvferry: the cluster lacks 3 GPUs\n")
    assert seen == [ServeConfig(model="m", decode=3)]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is not the package's."""
    cli.main(["version"])
    assert capsys.readouterr().out == f"kvferry {kvferry.__version__}\n"


@pytest.mark.parametrize("module", ["kvferry.cluster.cli", "kvferry.cluster.client", "kvferry.cluster.api.grpc"])
def test_doors_are_light(module: str) -> None:
    """`kvferry --help` or a client loads torch or Ray: seconds, and hundreds of megabytes."""
    heavy = ["torch", "ray", "numpy", "transformers", *(["grpc"] if module.endswith("cli") else [])]
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("384MiB", 384 << 20), ("1.5 GiB", 3 << 29), ("2gb", 2 * 10**9), ("4096", 4096), ("1kB", 1000), ("7 B", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    """MB and MiB are mixed up."""
    assert parse_bytes("f", text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1 MiB 2", "1e9", "nan", "1TiBi"])
def test_bad_sizes(text: str) -> None:
    """A size that cannot be read becomes some number."""
    with pytest.raises(InvalidArgument, match="f="):
        parse_bytes("f", text)


def test_sampling_options_are_sampling_parameters() -> None:
    """An option of `generate` is none that the server knows."""
    assert {name.replace("-", "_") for name in SAMPLING} <= set(SamplingParams.__struct_fields__)
    assert EngineConfig() == ServeConfig(model="m").engine
    assert ServerOptions() == ServeConfig(model="m").server
