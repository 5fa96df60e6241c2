"""Mistral: Llama with a window in every layer, or without one."""

from __future__ import annotations

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.families.family import Family
from kvferry.runtime.model.families.llama import llama_attention, llama_mlp, uniform
from kvferry.runtime.model.families.windows import windowed
from kvferry.runtime.model.spec import ModelSpec


def _read(config: Config) -> ModelSpec:
    config.refuse_common()
    config.refuse_windows()
    spec = uniform(config, llama_attention(config, qkv_bias=False, output_bias=False), llama_mlp(config))
    window = None if config.get("sliding_window") is None else config.positive("sliding_window")
    return windowed(spec, [window] * spec.num_layers)


def refuse_window(config: Config) -> None:
    limit = config.positive("max_position_embeddings")
    if config.get("sliding_window") is not None and config.positive("sliding_window") < limit:
        config.refuse("sliding_window", f"supported is null, or at least max_position_embeddings={limit}")


MISTRAL = Family(
    name="mistral",
    read=_read,
    defaults={"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "sliding_window": 4096},
)
