"""Quantised weights: refused by name, kept apart from others' KV, and said when some stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

import kvferry
from kvferry.kernels.cpu.available import library
from kvferry.kernels.packing import Quantization
from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.model import families
from kvferry.runtime.model.fit import check_fit, check_quantization
from kvferry.runtime.rank import Rank
from tests.support.tiny_model import CONFIG, save_tiny_model

SPEC = families.from_hf_config(CONFIG)
needs_operations = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built or are turned off")


def test_refused_by_name() -> None:
    """A number format that no operation takes fails deep in torch, on a worker, after minutes."""
    half = EngineConfig(dtype="float16", quantization="int8")
    with pytest.raises(InvalidArgument, match="quantization='int8': does not go with dtype float16; use --dtype"):
        check_fit(half, SPEC, 1)
    with pytest.raises(InvalidArgument, match="quantization='int4': exists on CPUs, this is cuda"):
        check_quantization(EngineConfig(quantization="int4"), SPEC, "cuda")
    with pytest.raises(InvalidArgument, match="quantization='int3'"):
        EngineConfig(quantization="int3")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="int3"):
        kvferry.LLM("package:none", quantization="int3")
    check_fit(EngineConfig(), SPEC, 1)


def test_a_machine_without_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever asks for a quarter of the memory gets all of it, without a word."""
    monkeypatch.setattr("kvferry.runtime.rank.library", lambda: None)
    with pytest.raises(InvalidArgument, match="quantization='int8': needs the CPU kernels; build them"):
        Rank(str(save_tiny_model(tmp_path)), EngineConfig(quantization="int8"))


@needs_operations
def test_kv_of_other_weights_is_never_hit(tmp_path: Path) -> None:
    """KV computed with int4 weights continues an answer that bfloat16 weights began."""
    folder = str(save_tiny_model(tmp_path))
    roots = set()
    for quantization in ("none", "int8", "int4"):
        rank = Rank(folder, EngineConfig(quantization=quantization))
        roots.add(rank.hash_root)
        rank.close()
    assert len(roots) == 3


@needs_operations
@pytest.mark.parametrize(("quantization", "count"), [("int8", 0), ("int4", 3)])
def test_says_how_many_stay(tmp_path: Path, quantization: Quantization, count: int) -> None:
    """Three linears of 120 inputs that int4 cannot hold stay large, and nobody learns of it."""
    with structlog.testing.capture_logs() as logs:
        decoder = _build(CONFIG | {"intermediate_size": 120}, quantization)
    assert [log for log in logs if log["event"] == "linears_not_quantized"] == (
        [{"event": "linears_not_quantized", "log_level": "warning", "quantization": "int4", "count": count, "of": 13}]
        if count
        else []
    )
    assert len(decoder.layers) == 3


def _build(config: dict[str, Any], quantization: Quantization) -> Any:
    from kvferry.runtime.model.decoder import build_model
    from kvferry.runtime.model.families import hf_source
    from kvferry.runtime.model.loader import MemoryWeights
    from kvferry.runtime.model.parallel import SingleRank
    from kvferry.runtime.model.parts import part_shapes

    spec = families.from_hf_config(config)
    tensors = {hf_source(spec, part).name: torch.rand(shape) for part, shape in part_shapes(spec).items()}
    return build_model(spec, MemoryWeights(tensors, spec), torch.float32, 0, SingleRank(), quantization=quantization)
