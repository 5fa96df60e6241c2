"""How files spell a mixture of experts: like Qwen's and DeepSeek's, from which Mixtral differs by its words."""

from __future__ import annotations

from kvferry.runtime.model.families.family import split, usual_source
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import ModelSpec


def moe_source(spec: ModelSpec, part: str) -> Source:
    number, stem, suffix = split(part)
    block, _, inner = stem.partition(".")
    if number is None or block != "mlp" or inner in ("gate", "up", "down"):
        return usual_source(spec, part)
    where = f"model.layers.{number}.mlp"
    if inner == "router":
        return Source(f"{where}.gate.{'weight' if suffix == 'weight' else 'e_score_correction_bias'}")
    holder, _, name = inner.rpartition(".")
    return Source(f"{where}.{'shared_experts' if holder == 'shared' else holder}.{name}_proj.{suffix}")
