"""From a rope's description to the angles by which a step's queries and keys are turned.

A token's angles depend on its own position alone, whatever else is in its sequence: KV is shared by content (ADR 8).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvferry.kernels.rope import cos_and_sin, grow_theta, inverse_frequencies, rope_angles, scale_llama3, scale_yarn
from kvferry.runtime.model.spec import RopeSpec, is_long

_FIRST_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Rotation:
    """One kind of rope. D: head dim."""

    frequencies: torch.Tensor
    """float32 `[D/2]`, radians a position; 0 for pairs that are not rotated."""
    amplitude: torch.Tensor | None = None
    """float32 `[D/2]`: what cos and sin are multiplied by."""
    growth: tuple[int, float, int] | None = None
    """Rotated dimensions, factor and original context of a rope whose theta grows."""
    tables: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def table(self, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
        """The angles of at least the first `num_positions` positions, kept and grown as they are needed."""
        found = self.tables.get(dtype)
        if found is None or found.shape[1] < num_positions:
            count = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            found = self.angles(torch.arange(count, device=self.frequencies.device), dtype)
            self.tables[dtype] = found
        return found

    def angles(self, positions_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `kernels.rope.rope_angles`."""
        frequencies = self.frequencies
        if self.growth is not None:
            frequencies = grow_theta(positions_T, frequencies, *self.growth)
        if self.amplitude is None:
            return rope_angles(positions_T, frequencies, dtype)
        return (cos_and_sin(positions_T, frequencies) * self.amplitude).to(dtype)


def make_rotation(rope: RopeSpec | None, head_dim: int, max_context: int, device: torch.device) -> Rotation:
    """Without a rope: one that leaves everything as it is."""
    if rope is None:
        return Rotation(torch.zeros(head_dim // 2, device=device))
    scaling, dim = rope.scaling, rope.dim or head_dim
    unrotated = torch.zeros((head_dim - dim) // 2)
    amplitude = None
    if scaling.attention_factor != 1.0:
        amplitude = torch.cat((torch.full((dim // 2,), scaling.attention_factor), unrotated + 1.0)).to(device)
    return Rotation(
        frequencies=torch.cat((_frequencies(rope, dim, max_context), unrotated)).to(device),
        amplitude=amplitude,
        growth=(dim, scaling.factor, scaling.original_max_context) if scaling.kind == "dynamic" else None,
    )


def _frequencies(rope: RopeSpec, dim: int, max_context: int) -> torch.Tensor:
    frequencies, s = inverse_frequencies(dim, rope.theta), rope.scaling
    if s.kind == "linear":
        return frequencies / s.factor
    if s.kind == "llama3":
        return scale_llama3(frequencies, s.factor, s.low_freq_factor, s.high_freq_factor, s.original_max_context)
    if s.kind == "yarn":
        return scale_yarn(
            frequencies, rope.theta, s.factor, s.beta_fast, s.beta_slow, s.original_max_context, s.truncate
        )
    if s.kind == "longrope":
        return frequencies / torch.tensor(s.long_factors if is_long(rope, max_context) else s.short_factors)
    return frequencies


def rotated_order(rope: RopeSpec | None, head_dim: int) -> list[int] | None:
    """A head's dimensions in an order whose halves are the pairs to rotate; `None`: as they are.

    With fewer rotated dimensions than the head has, their halves are drawn apart and the rest fills up both. Queries
    and keys in the same order have the same products.
    """
    dim = head_dim if rope is None or rope.dim is None else rope.dim
    if dim == head_dim:
        return None
    middle = dim + (head_dim - dim) // 2
    parts = ((0, dim // 2), (dim, middle), (dim // 2, dim), (middle, head_dim))
    return [i for start, stop in parts for i in range(start, stop)]
