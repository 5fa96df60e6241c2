"""Model families: one file each says how a `config.json` becomes a `ModelSpec` and how the files spell its parts.

`FAMILIES` is the table of what is supported, by the name in a config's `architectures`. A new family is one file here
and one row there. Not here: arithmetic (`decoder.py`, `layers.py`), GGUF's own spelling (`gguf_model.py`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from kvferry.runtime.errors import UnsupportedModel
from kvferry.runtime.model.families import (
    deepseek,
    gemma,
    gpt2,
    llama,
    mistral,
    mixtral,
    phi,
    qwen,
    qwen3_moe,
)
from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family
from kvferry.runtime.model.families.rope import reach
from kvferry.runtime.model.parts import Source
from kvferry.runtime.model.spec import ModelSpec, checked

T = TypeVar("T")
FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek.DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": deepseek.DEEPSEEK_V3,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma3ForConditionalGeneration": gemma.GEMMA3_MULTIMODAL,
    "GPT2LMHeadModel": gpt2.GPT2,
    "LlamaForCausalLM": llama.LLAMA,
    "MistralForCausalLM": mistral.MISTRAL,
    "MixtralForCausalLM": mixtral.MIXTRAL,
    "Phi3ForCausalLM": phi.PHI3,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "Qwen3MoeForCausalLM": qwen3_moe.QWEN3_MOE,
}
_BY_NAME = {family.name: family for family in FAMILIES.values()}


def from_hf_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    """From `config.json` (of any transformers version) and, if there is one, `generation_config.json`.

    Raises `UnsupportedModel` naming what kvferry lacks, `CorruptModel` for a missing or impossible value.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"config.json: architectures={names!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    spec = checked(family.read(Config(family.defaults | config, generation or {}, family.name)), "config.json")
    return msgspec.structs.replace(spec, max_context=reach(spec))


def renamed(spec: ModelSpec, tensors: dict[str, T]) -> dict[str, T]:
    """A folder's tensors by the names that `hf_source` uses."""
    renames = _BY_NAME[spec.architecture].renames
    return {_rename(name, renames): tensor for name, tensor in tensors.items()}


def _rename(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for old, new in renames:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def hf_source(spec: ModelSpec, part: str) -> Source:
    """Where a Hugging Face folder of this model has a part."""
    return _BY_NAME[spec.architecture].source(spec, part)
