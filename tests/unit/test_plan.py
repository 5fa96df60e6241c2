"""Memory plans: the published numbers, from a `config.json` alone; and what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cluster import cli
from kvferry.cluster.cli_plan import Plan, parse_rate
from kvferry.runtime.errors import InvalidArgument, KvferryError
from kvferry.runtime.model.plan import MemoryPlan
from tests.support.published import DEEPSEEK_V3

pytestmark = pytest.mark.core
LLAMA3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "torch_dtype": "float16",
}
LLAMA_7B = LLAMA3_70B | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
PARAMETERS_70B = 70_553_706_496
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def plan(folder: Path, config: dict[str, Any], *arguments: str) -> MemoryPlan:
    folder.joinpath("config.json").write_text(json.dumps(config))
    command = cli.parse(["plan", str(folder), *arguments])
    assert isinstance(command, Plan)
    return command.plan()


def test_llama3_70b(tmp_path: Path) -> None:
    """The formula forgets keys or values, counts query heads, or mixes MB and MiB."""
    one = plan(tmp_path, LLAMA3_70B, "--device-memory", "200GiB", "--context", "8192")
    assert one.bytes_per_token == one.ferried_bytes_per_token == 320 * KIB
    assert one.sequence_bytes == 2.5 * GIB
    assert one.weight_bytes == 2 * PARAMETERS_70B
    assert plan(tmp_path, LLAMA3_70B, "--device-memory", "200GiB").sequence_bytes == 40 * GIB  # 128 Ki tokens


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 512 * MIB), (32, 2048 * MIB)])
def test_grouped_and_full_heads(tmp_path: Path, kv_heads: int, size: int) -> None:
    """Grouped heads are not what is saved."""
    one = plan(tmp_path, LLAMA_7B | {"num_key_value_heads": kv_heads}, "--context", "4096")
    assert one.sequence_bytes == size


def test_ranks_share_or_repeat_heads(tmp_path: Path) -> None:
    """With more ranks than KV heads, each head is stored twice and yet ferried once."""
    four = plan(tmp_path, LLAMA3_70B, "--tp", "4", "--context", "8192", "--link", "10GB/s")
    sixteen = plan(tmp_path, LLAMA3_70B, "--tp", "16", "--context", "8192", "--link", "10GB/s")
    assert (four.bytes_per_token, four.all_ranks_bytes_per_token) == (80 * KIB, 320 * KIB)
    assert (sixteen.bytes_per_token, sixteen.all_ranks_bytes_per_token) == (40 * KIB, 640 * KIB)
    assert four.ferried_bytes_per_token == sixteen.ferried_bytes_per_token == 320 * KIB
    assert four.transfer_s == sixteen.transfer_s == 2.5 * GIB / 10e9


def test_all_of_the_device_is_accounted_for(tmp_path: Path) -> None:
    """Bytes that belong to nobody, or to two; sequences that would need a block more than there is."""
    one = plan(tmp_path, LLAMA3_70B, "--tp", "4", "--context", "8191", "--block-size", "32")
    assert one.weight_bytes + one.activation_bytes + one.kv_bytes + one.left_bytes == 80 * GIB
    assert 0 <= one.left_bytes < one.block_bytes == 32 * 80 * KIB
    assert one.sequence_bytes == 256 * one.block_bytes
    assert one.num_sequences * 256 <= one.num_blocks < (one.num_sequences + 1) * 256
    capped = plan(tmp_path, LLAMA3_70B, "--tp", "4", "--kv-memory", "10GiB")
    assert capped.kv_bytes == 10 * GIB
    assert capped.left_bytes > 30 * GIB


def test_quantised_weights(tmp_path: Path) -> None:
    """The embedding is quantised as well, or scales cost nothing."""
    arguments = ("--device", "cpu", "--dtype", "bfloat16", "--device-memory", "200GiB")
    rest = 128256 * 8192 + 161 * 8192
    for quantization, per_weight in (("int8", 1.0), ("int4", 0.5 + 4 / 32)):
        one = plan(tmp_path, LLAMA3_70B, *arguments, "--quantization", quantization)
        assert one.weight_bytes == pytest.approx(2 * rest + (PARAMETERS_70B - rest) * per_weight, rel=0.003)


def test_one_name_for_one_option(tmp_path: Path) -> None:
    """`serve` calls it --kv-dtype: who has tried one of them should not have to look up the other."""
    short, long = (plan(tmp_path, LLAMA3_70B, "--tp", "4", name, "int8") for name in ("--kv", "--kv-dtype"))
    assert short == long
    assert short.kv_format == "int8"


def test_larger_steps_need_more_memory(tmp_path: Path) -> None:
    """An option that is read and ignored."""
    usual = plan(tmp_path, LLAMA_7B)
    larger = plan(tmp_path, LLAMA_7B, "--max-batch-tokens", "2048")
    wider = plan(tmp_path, LLAMA_7B, "--max-batch-tokens", "2048", "--max-sequences", "512")
    assert usual.activation_bytes < larger.activation_bytes < wider.activation_bytes


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table hides a number; the JSON cannot be read."""
    expected = plan(tmp_path, LLAMA3_70B, "--tp", "4", "--context", "8192")
    arguments = ["plan", str(tmp_path / "config.json"), "--tp", "4", "--context", "8192"]
    cli.main([*arguments, "--json"])
    assert msgspec.json.decode(capsys.readouterr().out, type=MemoryPlan) == expected
    cli.main(arguments)
    shown = capsys.readouterr().out
    for word in ("34.3", "37333 blocks", "80 KiB", "320 KiB", "1.25 MiB", "640 MiB", "53.7 ms", "80 GiB", " 72 "):
        assert word in shown, word


def test_torch_stays_out(tmp_path: Path) -> None:
    """Seconds and hundreds of megabytes for a multiplication."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_70B))
    code = f"import sys; from kvferry.cluster.cli import main; main(['plan', {str(tmp_path)!r}, '--tp', '4', '--json'])"
    code += "\nassert not {'torch', 'ray', 'grpc', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-memory", "80 parsecs"], "device_memory='80 parsecs'"),
        (["--device-memory", "0"], r"device_memory=0: must be in \[1"),
        (["--device-memory", "16GiB"], "device_memory=17179869184.*weights take 141107412992.*at least"),
        (["--tp", "2", "--kv-memory", "40GiB"], "device_memory=85899345920.*smaller batch or KV memory"),
        (["--tp", "4", "--kv-memory", "1MiB"], "block 1310720"),
        (["--tp", "4", "--kv-memory", "0"], "kv_memory=0"),
        (["--tp", "0"], "tp=0"),
        (["--tp", "3"], "tensor parallel size=3.*64 attention heads"),
        (["--context", "0"], "context=0"),
        (["--context", "131073"], "context=131073: the model was trained for 131072 tokens"),
        (["--link", "50Gb/s"], "link='50Gb/s'"),
        (["--link", "0GB/s"], "link=0.0"),
        (["--block-size", "0"], "block_size=0"),
        (["--quantization", "int8"], "quantization='int8': exists on CPUs; add --device cpu"),
        (["--quantization", "int8", "--device", "cpu"], "quantization='int8': does not go with dtype float16"),
        (["--max-batch-tokens", "0"], "max_batch_tokens=0"),
        (["--max-sequences", "0"], "max_sequences=0"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    """A typing error ends in a traceback, or in a plan for something else."""
    with pytest.raises(InvalidArgument, match=message):
        plan(tmp_path, LLAMA3_70B, *arguments)


def test_a_model_that_is_none(tmp_path: Path) -> None:
    """A folder without a config, or a config without a size."""
    for model, word in ((tmp_path, "config.json"), (tmp_path / "none.gguf", "no such"), ("package:nothing", "nothing")):
        with pytest.raises(KvferryError, match=word):
            Plan(model=str(model)).plan()
    with pytest.raises(KvferryError, match="hidden_size=None"):
        plan(tmp_path, LLAMA3_70B | {"hidden_size": None})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50GB/s", 50e9),
        ("400Gbit/s", 50e9),
        ("1.5 GiB/s", 1.5 * GIB),
        ("800 kB/s", 8e5),
        ("7B/s", 7),
        ("1Tbit/s", 125e9),
    ],
)
def test_rates(text: str, expected: float) -> None:
    """Bits are taken for bytes: eight times too fast."""
    assert parse_rate("link", text) == expected


@pytest.mark.parametrize("text", ["", "50", "50GB", "50gb/s", "50Gb/s", "-1GB/s", "nanGB/s", "1e3GB/s"])
def test_bad_rates(text: str) -> None:
    """A rate that cannot be read becomes some number."""
    with pytest.raises(InvalidArgument, match="link="):
        parse_rate("link", text)


def test_experts_and_latents(tmp_path: Path) -> None:
    """DeepSeek-V3: 61 · 576 · 2 bytes a token, on every rank and ferried once; 671 billion parameters, 37 of which a
    token meets.
    """
    one = plan(tmp_path, DEEPSEEK_V3, "--device-memory", "2048GiB", "--context", "8192")
    sixteen = plan(tmp_path, DEEPSEEK_V3, "--device-memory", "141GiB", "--tp", "16", "--context", "8192")
    assert one.bytes_per_token == one.ferried_bytes_per_token == 61 * 576 * 2
    assert sixteen.bytes_per_token == sixteen.ferried_bytes_per_token == 61 * 576 * 2
    assert one.weight_bytes == pytest.approx(2 * 671.026e9, rel=1e-4)
    assert sixteen.weight_bytes < one.weight_bytes / 15
    assert sixteen.activation_bytes < one.activation_bytes < GIB * 2


def test_windows_are_planned_as_they_are_held(tmp_path: Path) -> None:
    """A model with windows is planned as if every layer kept everything, or as if none did."""
    mixed = LLAMA_7B | {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 512, "max_window_layers": 16}
    full, half = (
        plan(tmp_path, mixed | {"use_sliding_window": windows}, "--context", "4096") for windows in (False, True)
    )
    assert half.sequence_bytes == (full.sequence_bytes + 33 * full.block_bytes) / 2
    assert half.num_sequences > full.num_sequences
    mistral = LLAMA_7B | {"architectures": ["MistralForCausalLM"], "sliding_window": 512}
    flat = [plan(tmp_path, mistral, "--context", n).sequence_bytes for n in ("2048", "4096")]
    assert flat == [33 * full.block_bytes] * 2
