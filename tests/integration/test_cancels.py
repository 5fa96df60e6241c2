"""Clients that leave at any moment: nothing of what was done for them stays anywhere."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from kvferry.cluster.service import Delta
from kvferry.runtime.errors import DeadlineExceeded, QueueFull
from kvferry.runtime.llm import LLM
from kvferry.runtime.request import RequestOutput, SamplingParams
from tests.support.deployment import Deployment, serve_config
from tests.support.tiny_model import VOCAB

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
NUM_REQUESTS = 200
CONCURRENCY = 32


class Plan(msgspec.Struct, frozen=True):
    """What a client does. All its limits are optional: some requests run to their end."""

    prompt: list[int]
    sampling: SamplingParams
    leave_after_s: float | None = None
    leave_after_first_s: float | None = None
    """Counted from the first token."""
    leave_after_tokens: int | None = None
    timeout_s: float | None = None


def make_plans(seed: int) -> list[Plan]:
    rng = random.Random(seed)
    shared = [rng.randrange(1, VOCAB) for _ in range(100)]
    plans = []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(1, VOCAB) for _ in range(rng.choice([1, 7, 30, 150]))]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 80),
            n=rng.choice([1, 1, 2, 3]),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            ignore_eos=True,
        )
        leaves = rng.choice(
            [
                {"leave_after_s": 0.0},
                {"leave_after_s": rng.random() * 0.05},
                {"leave_after_s": rng.random() * 1.0},
                {"leave_after_first_s": rng.random() * 0.05},
                {"leave_after_tokens": 1},
                {"leave_after_tokens": rng.randint(2, 60)},
                {"timeout_s": 0.01 + rng.random() * 0.5},
                {},
            ]
        )
        plans.append(Plan(shared[: rng.choice([0, 50, 100])] + own, sampling, **leaves))
    return plans


async def read(deployment: Deployment, plan: Plan, texts: dict[int, list[int]]) -> str:
    """Returns how it ended. Fills `texts` with the tokens of each sequence."""
    num_tokens, error = 0, None
    events = deployment.client.stream(plan.prompt, plan.sampling, timeout_s=plan.timeout_s or 120.0)
    try:
        async with asyncio.timeout(plan.leave_after_s) as leave, aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    if plan.leave_after_first_s is not None and not num_tokens:
                        leave.reschedule(asyncio.get_running_loop().time() + plan.leave_after_first_s)
                    texts.setdefault(event.index, []).extend(event.token_ids)
                    num_tokens += len(event.token_ids)
                if plan.leave_after_tokens is not None and num_tokens >= plan.leave_after_tokens:
                    return "left after tokens"
    except TimeoutError:
        return "left before the first token" if num_tokens == 0 else "left in mid-stream"
    except (DeadlineExceeded, QueueFull) as caught:
        error = caught
    if error is not None:
        assert plan.timeout_s is not None, "the server took two minutes"
        assert isinstance(error, DeadlineExceeded) or "its deadline is in" in str(error)  # it could not be met
        return "deadline"
    assert num_tokens == plan.sampling.max_tokens * plan.sampling.n
    return "finished"


@pytest.mark.parametrize(
    ("seed", "fields"),
    [
        pytest.param(1, {"num_blocks": 1000}, id="room"),
        pytest.param(2, {"num_blocks": 60, "decode_tp": 2, "transport": "gloo"}, id="no-room"),
    ],
)
async def test_cancels_at_random_points(tiny_model: str, shared_ray: str, seed: int, fields: dict[str, Any]) -> None:
    """Fault: blocks stay leased, transfers stay open or sequences run on for a client that has left.

    And whoever stays must not notice: blocks given back too early would be written while others read them.
    """
    plans = make_plans(seed)
    llm = LLM(tiny_model, dtype="float32", threads=1, block_size=8, num_blocks=1000, max_batch_tokens=64)
    wanted = llm.generate([plan.prompt for plan in plans], [plan.sampling for plan in plans])
    config = serve_config(
        tiny_model,
        disaggregate="always",
        ray_address=shared_ray,
        block_size=8,
        max_batch_tokens=64,
        max_sequences=16,
        **fields,
    )
    limit = asyncio.Semaphore(CONCURRENCY)

    async with Deployment(config) as deployment:

        async def one(plan: Plan, whole: RequestOutput) -> str:
            texts: dict[int, list[int]] = {}
            async with limit:
                end = await read(deployment, plan, texts)
            for index, tokens in texts.items():
                assert tokens == whole.outputs[index].token_ids[: len(tokens)]
            return end

        ends = Counter(await asyncio.gather(*map(one, plans, wanted)))
        kinds = {"left before the first token", "left in mid-stream", "left after tokens", "deadline", "finished"}
        assert set(ends) == kinds, f"not every way to end was tried: {ends}"

        view = await deployment.assert_at_rest()
        assert view.num_resumed == 0
        assert [group.epoch for group in view.groups] == [1, 2], "a group has died"
        last = await deployment.client.generate([5] * 50, temperature=0.0, max_tokens=10, ignore_eos=True)
        assert len(last.outputs[0].token_ids) == 10
