"""A look at whether kernels compute here what torch's operations do. Milliseconds; the tests are what proves them."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch.nn.functional as F

from kvferry.kernels.attention import Scoring
from kvferry.kernels.cpu.attention import Contexts, Geometry, Workspace
from kvferry.kernels.cpu.linear import Packed
from kvferry.kernels.cpu.operations import DTYPES, add_norm_, gated
from kvferry.kernels.packing import Quantization
from kvferry.kernels.quantized import QuantizedLinear

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06}


def wrong_results(lib: ctypes.CDLL) -> list[str]:
    """What disagrees: names of operations with their dtypes."""
    wrong = []
    for dtype in DTYPES:
        for name, got, expected in (
            _norm(lib, dtype),
            _silu(lib, dtype),
            _linear(lib, dtype),
            _quantized(lib, dtype, "int8"),
            _quantized(lib, dtype, "int4"),
            _attention(lib, dtype),
        ):
            if not torch.allclose(got.float(), expected, rtol=0, atol=_TOLERANCE[dtype]):
                wrong.append(f"{name} in {str(dtype).removeprefix('torch.')}")
    return wrong


def _wave(*shape: int, step: float) -> torch.Tensor:
    """Numbers between -1 and 1 without a generator, whose state is the program's."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul_(step).sin_().view(shape)


def _norm(lib: ctypes.CDLL, dtype: torch.dtype) -> tuple[str, torch.Tensor, torch.Tensor]:
    x, delta, weight = (_wave(3, 64, step=step).to(dtype) for step in (0.7, 1.1, 1.9))
    expected = F.rms_norm((x + delta).float(), (64,), weight[0].float(), 1e-6)
    return "norm", add_norm_(lib, x, delta, weight[0], 1e-6), expected


def _silu(lib: ctypes.CDLL, dtype: torch.dtype) -> tuple[str, torch.Tensor, torch.Tensor]:
    gate_up = (_wave(3, 128, step=0.7) * 4).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=1)
    product = F.silu(gate) * up
    return "silu", gated(lib, gate_up, "silu") / 16, product / 16


def _linear(lib: ctypes.CDLL, dtype: torch.dtype) -> tuple[str, torch.Tensor, torch.Tensor]:
    x, weight = _wave(13, 64, step=0.7).to(dtype), (_wave(40, 64, step=1.1) / 8).to(dtype)
    return "linear", Packed(lib, weight)(x, x[0, :40]), F.linear(x.float(), weight.float(), x[0, :40].float())


def _quantized(lib: ctypes.CDLL, dtype: torch.dtype, kind: Quantization) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Of integers that are their own steps."""
    x, weight = torch.arange(13 * 64).view(13, 64) * 11 % 255 - 127, torch.arange(40 * 64).view(40, 64) * 7
    x[:, ::32] = 127
    weight = weight % 16 if kind == "int4" else weight % 255 - 127
    weight[:, 0] = 15 if kind == "int4" else 127
    size = 2.0**13 if kind == "int4" else 2.0**16
    got = QuantizedLinear(lib, kind, weight.to(dtype))(x.to(dtype))
    return f"{kind} linear", got / size, F.linear(x.float(), weight.float()) / size


def _attention(lib: ctypes.CDLL, dtype: torch.dtype) -> tuple[str, torch.Tensor, torch.Tensor]:
    """A prompt of 40 tokens in blocks of 16 in reverse order, 4 query heads on 2 KV heads."""
    tokens, heads, kv_heads, size, dim = 40, 4, 2, 16, 64
    qkv = _wave(tokens, heads + 2 * kv_heads, dim, step=0.7).to(dtype)
    angles = torch.stack((torch.ones(tokens, 1, dim // 2), torch.zeros(tokens, 1, dim // 2))).to(dtype)
    q, k, v = torch.split(qkv.float().transpose(0, 1), [heads, kv_heads, kv_heads])
    expected = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    cache = torch.full((3, 2, kv_heads, size, dim), float("nan"), dtype=dtype)
    stored, width = str(dtype).removeprefix("torch."), cache.element_size()
    geometry = Geometry(kv_heads, dim, size, dim * width, cache[0].numel() * width, stored)
    tables = np.array([2, 1, 0]), np.array([0]), np.array([tokens]), np.array([0])
    contexts = Contexts(lib, *tables, geometry, Workspace())
    return "attention", contexts.attend(qkv, angles, cache, Scoring(dim**-0.5)), expected.transpose(0, 1)
