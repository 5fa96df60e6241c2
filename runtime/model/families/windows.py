"""How configs say which layers see a window only."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.runtime.model.families.config import Config
from kvferry.runtime.model.spec import LayerSpec, ModelSpec


def windowed(spec: ModelSpec, windows: Sequence[int | None]) -> ModelSpec:
    """The same model with each layer's window. A window as long as the context is none."""
    layers = (_windowed(layer, window, spec) for layer, window in zip(spec.layers, windows, strict=True))
    return msgspec.structs.replace(spec, layers=tuple(layers))


def _windowed(layer: LayerSpec, window: int | None, spec: ModelSpec) -> LayerSpec:
    window = None if window is None or window >= spec.max_context else window
    return msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, window=window))


def layer_types(config: Config, num_layers: int) -> list[bool] | None:
    """Which layers have a window, if the config lists them. Raises `UnsupportedModel`."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        config.refuse("layer_types", f"supported are {num_layers} of full_attention and sliding_attention")
    return [kind == "sliding_attention" for kind in kinds]
