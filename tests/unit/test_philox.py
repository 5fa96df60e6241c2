"""Guards against a generator that differs between workers or versions: a resumed sequence would change its tokens."""

import numpy as np
import pytest

from kvferry.runtime.model.philox import Draw, gumbel, philox4x32

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
    draws = [Draw(0, 0, 0), Draw(1, 3, 9), Draw(2**64 - 1, 127, 4000), Draw(5, 0, 2**31)]
    items = np.array([[0, 5], [1, 5], [2, 5], [3, 2**31]])
    together = gumbel(draws, items, 1)
    alone = [gumbel([draw], row[None], 1)[0] for draw, row in zip(draws, items, strict=True)]
    assert np.array_equal(together, alone)
    others = [gumbel([draw], items[:1], 1)[0] for draw in (Draw(2**32, 0, 0), Draw(0, 1, 0), Draw(0, 0, 1))]
    others += [gumbel([Draw(0, 0, 0)], items[:1], 2)[0]]
    assert len({*together.flat, *np.array(others).flat}) == together.size + 8


def test_noise_is_gumbel_and_each_token_has_its_own() -> None:
    """The token with the largest noisy logit is drawn by its probability only if the noise is just this one."""
    noise = gumbel([Draw(3, 0, 9), Draw(4, 1, 9)], np.arange(50_000).reshape(1, -1).repeat(2, axis=0), 0)
    assert len(np.unique(noise)) == noise.size
    for row in noise:
        counts, _ = np.histogram(np.exp(-np.exp(-row)), bins=50, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 100  # chi-square, 49 degrees of freedom: 100 has probability 2e-5
