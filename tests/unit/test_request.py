"""Guards against parameters that are accepted and then mean something else, or fail deep inside a running batch."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.request import SamplingParams

pytestmark = pytest.mark.core

WRONG: list[tuple[str, Any]] = [
    ("stop", "END"),
    ("stop", [1]),
    ("n", 1.5),
    ("max_tokens", 2.5),
    ("max_tokens", None),
    ("top_k", 3.0),
    ("temperature", "hot"),
    ("temperature", math.nan),
    ("top_p", math.nan),
    ("repetition_penalty", math.inf),
    ("logit_bias", {"7": 1.0}),
    ("logit_bias", {7: math.nan}),
    ("stop_token_ids", [1.5]),
    ("seed", 0.5),
    ("seed", 1 << 64),
    ("ignore_eos", "no"),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=str)
def test_wrong_types_and_numbers_are_named(field: str, value: Any) -> None:
    """Fault: `stop="END"` stopped at each E, N or D; `n=1.5` failed after others' work had begun."""
    with pytest.raises(InvalidArgument, match=field):
        SamplingParams(**{field: value})


def test_legal_parameters_are_kept_and_travel() -> None:
    params = SamplingParams(
        n=2, temperature=1, stop=["a"], logit_bias={3: 1}, seed=(1 << 64) - 1, logprobs=0, max_tokens=9, min_tokens=9
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
