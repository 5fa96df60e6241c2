"""The tensors that a decoder is made of, by kvferry's own names, and where a file has each.

    embedding.weight   positions.weight   norm.{weight,bias}   head.weight (absent when tied)
    layers.N.attention_norm.{weight,bias}   layers.N.attention.{q,k,v,o}.{weight,bias}
    layers.N.attention.{q,k}_norm.weight    layers.N.attention_post_norm.weight
    layers.N.mlp_norm.{weight,bias}         layers.N.mlp.{gate,up,down}.{weight,bias}   layers.N.mlp_post_norm.weight
    of latent attention: layers.N.attention.q.weight, or {q_down,q_down_norm,q_up}.weight with a latent of queries;
    layers.N.attention.{kv_down,kv_down_norm,kv_up}.weight
    of a mixture of experts: layers.N.mlp.router.{weight,correction}  layers.N.mlp.experts.E.{gate,up,down}.weight
    layers.N.mlp.shared.{gate,up,down}.weight

A linear's weight is `[out, in]`; only layer norms have a bias. The families say how files spell the parts
(`families/`, `gguf_model.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from kvferry.runtime.model.spec import AttentionSpec, LatentSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec

Shape = tuple[int, ...]


class Source(msgspec.Struct, frozen=True):
    """Where a part lies in a file."""

    name: str
    """Of the file's tensor."""
    first_row: int = 0
    """Where the part begins, in a tensor that holds several parts one after the other."""
    item: int | None = None
    """The part is `tensor[item]`: one of several stacked along a further first dimension."""
    transposed: bool = False
    """The file has `[in, out]`."""
    pair_rows: int = 0
    """Not 0: each run of so many rows has them as rotated pairs (0, 1), (2, 3), … instead of halves (i, i + n/2)."""
    unpaired_rows: int = 0
    """So many first rows of each of those runs are not rotated."""


Spelling = Callable[[str], Source]
"""From a part's name to its place in a file."""


def part_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every part the model needs."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {"embedding.weight": (spec.vocab_size, hidden)}
    if spec.num_positions is not None:
        shapes["positions.weight"] = (spec.num_positions, hidden)
    for number, layer in enumerate(spec.layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in _layer(layer, spec)}
    shapes |= _norm("norm", hidden, spec)
    if not spec.tied_embeddings:
        shapes["head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _layer(layer: LayerSpec, spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    attention, mlp, hidden = layer.attention, layer.mlp, spec.hidden_size
    yield from _norm("attention_norm", hidden, spec)
    yield from _attention(attention, spec) if isinstance(attention, AttentionSpec) else _latent(attention, hidden)
    yield from _norm("mlp_norm", hidden, spec)
    yield from _mlp("mlp", mlp, hidden) if isinstance(mlp, MLPSpec) else _experts(mlp, hidden)
    if layer.post_norms:
        yield from _norm("attention_post_norm", hidden, spec)
        yield from _norm("mlp_post_norm", hidden, spec)


def _attention(attention: AttentionSpec, spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden = spec.hidden_size
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    yield from _linear("attention.q", q, hidden, attention.qkv_bias)
    yield from _linear("attention.k", kv, hidden, attention.qkv_bias)
    yield from _linear("attention.v", kv, hidden, attention.qkv_bias)
    yield from _linear("attention.o", hidden, q, attention.output_bias)
    if attention.qk_norm:
        yield from _norm("attention.q_norm", attention.head_dim, spec)
        yield from _norm("attention.k_norm", attention.head_dim, spec)


def _latent(attention: LatentSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    q, from_q = attention.num_heads * (attention.key_dim + attention.rope_dim), attention.query_rank
    if from_q is None:
        yield "attention.q.weight", (q, hidden)
    else:
        yield "attention.q_down.weight", (from_q, hidden)
        yield "attention.q_down_norm.weight", (from_q,)
        yield "attention.q_up.weight", (q, from_q)
    yield "attention.kv_down.weight", (attention.head_dim, hidden)
    yield "attention.kv_down_norm.weight", (attention.latent_rank,)
    kv = attention.num_heads * (attention.key_dim + attention.value_dim)
    yield "attention.kv_up.weight", (kv, attention.latent_rank)
    yield "attention.o.weight", (hidden, attention.num_heads * attention.value_dim)


def _mlp(name: str, mlp: MLPSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    if mlp.gated:
        yield from _linear(f"{name}.gate", mlp.inner_size, hidden, mlp.bias)
    yield from _linear(f"{name}.up", mlp.inner_size, hidden, mlp.bias)
    yield from _linear(f"{name}.down", hidden, mlp.inner_size, mlp.bias)


def _experts(moe: MoESpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield "mlp.router.weight", (moe.num_experts, hidden)
    if moe.correction:
        yield "mlp.router.correction", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _mlp(f"mlp.experts.{expert}", MLPSpec(inner_size=moe.inner_size), hidden)
    if moe.shared_size:
        yield from _mlp("mlp.shared", MLPSpec(inner_size=moe.shared_size), hidden)


def _norm(name: str, size: int, spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if spec.norm.kind == "layer":
        yield f"{name}.bias", (size,)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def file_shapes(spec: ModelSpec, spelling: Spelling) -> dict[str, Shape]:
    """Every tensor that a file must have, by its name there: parts that share one are put together again."""
    found: dict[str, Shape] = {}
    for part, shape in part_shapes(spec).items():
        source = spelling(part)
        rows, *rest = (source.first_row + shape[0], *shape[1:])
        stored = (*reversed(rest), rows) if source.transposed else (rows, *rest)
        if source.item is not None:
            stored = (source.item + 1, *stored)
        known = found.get(source.name, ())
        found[source.name] = tuple(map(max, stored, known)) if known else stored
    return found


def num_parameters(spec: ModelSpec) -> int:
    return sum(math.prod(shape) for shape in part_shapes(spec).values())
