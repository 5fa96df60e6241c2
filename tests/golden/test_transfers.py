"""Prefill in one group, blocks ferried, decode in a group of another tensor-parallel size: transformers' tokens."""

from __future__ import annotations

import contextlib

import pytest

from tests.support.golden import BLOCK, NEW_TOKENS, expected_tokens, prompts
from tests.support.golden_groups import GoldenGroup, ferry, fetch

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("name", ["gqa-tied", "gemma3", "mixtral", "deepseek-v2-lite", "deepseek-v3"])
@pytest.mark.parametrize(("source_tp", "destination_tp"), [(2, 1), (1, 2)])
def test_tokens_after_a_transfer(name: str, source_tp: int, destination_tp: int) -> None:
    """Heads that arrive in the wrong place, latents shipped once per copy, blocks computed again for want of them."""
    expected = expected_tokens(name)
    with contextlib.ExitStack() as stack:
        source, destination = (
            stack.enter_context(contextlib.closing(GoldenGroup(role, name, size)))
            for role, size in (("prefill", source_tp), ("decode", destination_tp))
        )
        assert ferry(source, destination, prompts(), NEW_TOKENS) == expected
        num_blocks = sum(len(prompt) // BLOCK for prompt in prompts())
        assert destination.engine.load().cached_tokens_total == num_blocks * BLOCK
        assert destination.num_received_bytes == [num_blocks * destination.layout.block_bytes] * destination_tp


@pytest.mark.parametrize("name", ["gqa-tied", "deepseek-v2-lite"])
@pytest.mark.parametrize(("source_tp", "destination_tp"), [(2, 1), (1, 2)])
def test_what_is_left_of_a_prefix_is_fetched(name: str, source_tp: int, destination_tp: int) -> None:
    """A few blocks that were evicted cost all the others, or what did not come is read."""
    prompt, expected = prompts()[-1], expected_tokens(name)[-1]
    num_lost = 3
    num_left = len(prompt) // BLOCK - num_lost
    with contextlib.ExitStack() as stack:
        source, destination = (
            stack.enter_context(contextlib.closing(GoldenGroup(role, name, size)))
            for role, size in (("prefill", source_tp), ("decode", destination_tp))
        )
        assert fetch(source, destination, prompt, num_lost, NEW_TOKENS) == expected
        assert destination.engine.load().cached_tokens_total == num_left * BLOCK
        assert destination.num_received_bytes == [num_left * destination.layout.block_bytes] * destination_tp
        for group in (source, destination):
            audit = group.engine.audit()
            assert (audit.broken, audit.inbound, audit.outbound, audit.num_leased_blocks) == ([], [], [], 0)
