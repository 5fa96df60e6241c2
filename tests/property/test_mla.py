"""Latent attention: both forms, from blocks or not, against a naive twin that expands every key and value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.attention import Scoring, write_kv
from kvferry.kernels.mla import LatentHeads, gather_latents
from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.kv.storage import KVStorage
from kvferry.runtime.model.batch import make_batch
from kvferry.runtime.step import Row

HEADS, RANK, ROTATED, KEY, VALUE, BLOCK, LAYER = 3, 10, 4, 6, 5, 4, 1
SCALE = 0.2


def heads(generator: torch.Generator) -> LatentHeads:
    return LatentHeads(torch.randn((HEADS, KEY + VALUE, RANK), generator=generator), KEY, Scoring(SCALE))


def naive(one: LatentHeads, q_HD: torch.Tensor, latents_SW: torch.Tensor) -> torch.Tensor:
    """One query over all of `latents_SW`: `[H, V]`."""
    out = []
    for q, up in zip(q_HD, one.up, strict=True):
        keys = torch.stack([torch.cat((up[:KEY] @ t[:RANK], t[RANK:])) for t in latents_SW])
        values = torch.stack([up[KEY:] @ t[:RANK] for t in latents_SW])
        out.append(torch.softmax(keys @ q * SCALE, dim=0) @ values)
    return torch.stack(out)


@given(start=st.integers(0, 9), count=st.integers(1, 9), behind=st.integers(0, 3), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_both_forms_of_prefill(start: int, count: int, behind: int, seed: int) -> None:
    """Guards against a rotated part that one form forgets, and positions behind the last query that are read."""
    generator = torch.Generator().manual_seed(seed)
    one = heads(generator)
    latents = torch.randn((start + count, RANK + ROTATED), generator=generator)
    q = torch.randn((count, HEADS, KEY + ROTATED), generator=generator)
    expected = torch.stack([naive(one, q[i], latents[: start + i + 1]) for i in range(count)])
    padded = torch.cat((latents, torch.full((behind, RANK + ROTATED), float("nan"))))
    for form in (one.absorbed, one.expanded):
        torch.testing.assert_close(form(q, latents, start), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.prefill(q, padded, start), expected, rtol=1e-4, atol=1e-5)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(0, 100),
    st.sampled_from(["float32", "bfloat16"]),
)
@settings(max_examples=40, deadline=None)
def test_from_blocks(spans: list[tuple[int, int]], seed: int, kv_dtype: str) -> None:
    """Guards against latents of other rows, layers or unfilled slots, in ragged batches of decode and prefill; and
    latents stored in another number format than is computed in.
    """
    generator = torch.Generator().manual_seed(seed)
    one, width = heads(generator), RANK + ROTATED
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=width, block_size=BLOCK, dtype=kv_dtype, planes=1)
    storage = KVStorage(layout, 60, "cpu", dtype=torch.float32, poison=True)
    free = torch.randperm(60, generator=generator).tolist()
    rows, contexts = [], []
    for start, count in spans:
        table = [BlockId(free.pop()) for _ in range(-(-(start + count) // BLOCK))]
        rows.append(Row([0] * count, start, table, True))
        latents = torch.randn((start + count, width), generator=generator).to(storage.blocks.dtype).float()
        contexts.append(latents)
        for position in range(start):
            storage.blocks[table[position // BLOCK], LAYER, 0, 0, position % BLOCK] = latents[position]
    batch = make_batch(rows, storage)
    assert batch.contexts is None, "the CPU kernels know no latents"
    singles = sorted((r for r in rows if len(r.token_ids) == 1), key=lambda r: -len(r.block_ids))
    longer = sorted((r for r in rows if len(r.token_ids) > 1), key=lambda r: r.start == 0)
    ordered = [*singles, *longer]
    of = {id(row): latents for row, latents in zip(rows, contexts, strict=True)}
    new = torch.cat([of[id(row)][row.start :] for row in ordered])
    q = torch.randn((len(new), HEADS, KEY + ROTATED), generator=generator)
    write_kv(storage.slots[LAYER], batch.gathers.write_index, storage.format.pack(new)[:, None])
    found, paged, stored = batch.gathers.parts(None), storage.spans[LAYER], storage.format
    parts = [one.decode(q[part.tokens], paged, part.rows, stored) for part in found.decode]
    parts += [
        one.prefill(q[part.tokens], gather_latents(paged, part.spans, part.gathered, stored), part.start)
        for part in found.prefixed
    ]
    parts += [one.prefill(q[tokens], new[tokens], 0) for tokens in found.fresh]
    expected, token = [], 0
    for row in ordered:
        for position in range(row.start, row.start + len(row.token_ids)):
            expected.append(naive(one, q[token], of[id(row)][: position + 1]))
            token += 1
    torch.testing.assert_close(torch.cat(parts), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("start", "num_queries", "absorbs"), [(0, 100, False), (4096, 1, True), (4096, 4, True), (4096, 512, False)]
)
def test_the_cheaper_form_is_chosen(start: int, num_queries: int, absorbs: bool) -> None:
    """DeepSeek-V3's sizes: a check of a few speculated tokens must not expand a long context, nor a chunk absorb it."""
    one = LatentHeads(torch.empty((1, 256, 512)), 128, Scoring(1.0))
    assert one.absorbs(start, num_queries) is absorbs
