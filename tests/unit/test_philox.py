"""Guards against a generator that differs between workers or versions: a resumed sequence would change its tokens."""

import numpy as np
import pytest

from kvferry.runtime.model.philox import philox4x32, uniform

pytestmark = pytest.mark.core

KNOWN = [  # counter, key, answer: Random123's kat_vectors for philox4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: list[str]) -> np.ndarray:
    return np.array([[int(word, 16) for word in line.split()] for line in text], dtype=np.uint32)


def test_known_answers() -> None:
    counters, keys, answers = zip(*KNOWN, strict=True)
    np.testing.assert_array_equal(philox4x32(words(counters), words(keys)), words(answers))


def test_a_draw_is_a_function_of_its_own_key_and_counter() -> None:
    """A draw that changes with the batch around it would make batching visible."""
    seeds, indices, positions = [0, 1, 2**64 - 1, 5], [0, 3, 127, 0], [0, 9, 4000, 2**31]
    together = uniform(seeds, indices, positions)
    alone = [uniform([s], [i], [p])[0] for s, i, p in zip(seeds, indices, positions, strict=True)]
    assert together.tolist() == alone
    assert len({*alone, uniform([2**32], [0], [0])[0], uniform([0], [1], [0])[0], uniform([0], [0], [1])[0]}) == 7


def test_draws_are_uniform() -> None:
    """Also in the range's ends: 1.0 would point behind the vocabulary."""
    draws = uniform([7] * 20_000, [0] * 20_000, range(20_000))
    assert 0.0 <= draws.min() < 0.001
    assert 0.999 < draws.max() < 1.0
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 100  # chi-square, 49 degrees of freedom: 100 has probability 2e-5
