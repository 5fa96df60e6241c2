"""What each family's file provides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import ModelSpec

_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def split(part: str) -> tuple[int | None, str, str]:
    """`layers.3.attention.q.weight` is `(3, "attention.q", "weight")`; outside of layers the number is `None`."""
    stem, _, suffix = part.rpartition(".")
    if not stem.startswith("layers."):
        return None, stem, suffix
    _, number, inner = stem.split(".", 2)
    return int(number), inner, suffix


def usual_source(_spec: ModelSpec, part: str) -> Source:
    """Llama's spelling, which most families follow."""
    number, stem, suffix = split(part)
    return Source(
        f"{_TOP[stem]}.{suffix}" if number is None else f"model.layers.{number}.{_LAYER[stem]}.{suffix}",
    )


class Family(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """`ModelSpec.architecture`."""
    read: Callable[[Config], ModelSpec]
    """Refuses by name, with `UnsupportedModel`, whatever of a config it does not understand."""
    source: Callable[[ModelSpec, str], Source] = usual_source
    """Where a part (`parts.py`) lies in the files."""
    renames: tuple[tuple[str, str], ...] = (("model.", "model."), ("lm_head.", "lm_head."), ("", "model."))
    """From how tensors' names begin in files (the first that fits) to how `source` has it.

    Files of the bare decoder, saved without its head, leave a beginning out.
    """
    defaults: dict[str, Any] = {}
    """What transformers assumes where a config.json of the family is silent."""
