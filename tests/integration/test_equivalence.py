"""The same requests give the same tokens, texts and reasons however they are served: the promise of the design."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from kvferry.cluster.launch import Parts
from kvferry.cluster.service import ClusterView
from kvferry.runtime.config import SpeculationConfig, SpeculationMethod
from kvferry.runtime.llm import LLM
from kvferry.runtime.request import CompletionOutput, RequestOutput, SamplingParams
from tests.support.deployment import Deployment, serve_config
from tests.support.tiny_model import VOCAB

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
BLOCK = 8
MAX_BATCH_TOKENS = 64
NUM_BLOCKS = 1024
NUM_REQUESTS = 40
LOGPROB_TOLERANCE = 1e-3
REQUEST_TIMEOUT_S = 90.0


class Case(msgspec.Struct, frozen=True):
    prompt: str | list[int]
    sampling: SamplingParams


Expected = tuple[list[Case], list[RequestOutput]]


def make_prompts(rng: random.Random) -> list[str | list[int]]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(count)]

    shared = [tokens(48), tokens(90)]
    prompts: list[str | list[int]] = ["The ferry", "渡轮早上", "Паром 🚢 und Fähre", "Blocks are carried " * 20]
    prompts += [tokens(count) for count in (1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 16, 20, 31, 32, 33)]
    prompts += [tokens(count) for count in (64, 65, 100, 128, 150, 170)]  # prefilled in chunks
    prompts += [prefix + tokens(count) for count in (0, 1, 5, 8, 20, 33, 70, 75, 79) for prefix in shared]
    prompts += [shared[1][:cut] for cut in (40, 48)]
    assert len(prompts) == NUM_REQUESTS
    return prompts


def make_sampling(rng: random.Random, i: int) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 24) if i % 4 else 24}
    if i % 2:
        fields |= {"temperature": 0.0}
    else:
        fields |= {"temperature": rng.choice([0.7, 1.0]), "seed": rng.randrange(1 << 63)}
        fields |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
    fields |= [{}, {"n": 2}, {"logprobs": 3}, {}, {"n": 2, "logprobs": 0}][i % 5]
    if i % 3 == 0:
        fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.4}
    if i % 7 == 0:
        fields |= {"logit_bias": {5: 4.0, 17: -100.0}, "ignore_eos": True}
    if i % 9 == 0:
        fields |= {"min_tokens": fields["max_tokens"] // 2}
    return SamplingParams(**fields)


def crossing_stop(llm: LLM, output: CompletionOutput) -> str | None:
    """Two characters of the text, next to each other, that two different tokens end and begin."""
    for count in range(2, len(output.token_ids)):
        text = llm.tokenizer.decode(output.token_ids[:count])
        stop = output.text[len(text) - 1 : len(text) + 1]
        if text and output.text.startswith(text) and "\ufffd" not in stop and output.text.find(stop) == len(text) - 1:
            return stop
    return None


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> LLM:
    options = {"block_size": BLOCK, "num_blocks": NUM_BLOCKS, "max_batch_tokens": MAX_BATCH_TOKENS}
    return LLM(tiny_model, dtype="float32", threads=1, **options)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Expected:
    """The requests, and what one engine without a cluster makes of them."""
    rng = random.Random(20)
    prompts = make_prompts(rng)
    rng.shuffle(prompts)
    cases = [Case(prompt, make_sampling(rng, i)) for i, prompt in enumerate(prompts)]
    drafts = llm.generate(prompts, [case.sampling for case in cases])
    for i in range(0, NUM_REQUESTS, 2):
        if (stop := crossing_stop(llm, drafts[i].outputs[0])) is not None:
            sampling = msgspec.structs.replace(cases[i].sampling, stop=["never to be seen", stop], min_tokens=0)
            cases[i] = Case(cases[i].prompt, sampling)
    outputs = llm.generate(prompts, [case.sampling for case in cases])
    stopped = [
        o for o, c in zip(outputs, cases, strict=True) if c.sampling.stop and o.outputs[0].finish_reason == "stop"
    ]
    assert len(stopped) >= 10, "too few stop strings to mean anything"
    return cases, outputs


async def ask(deployment: Deployment, cases: list[Case]) -> list[RequestOutput]:
    """All at once."""
    calls = [deployment.client.generate(c.prompt, c.sampling, timeout_s=REQUEST_TIMEOUT_S) for c in cases]
    return list(await asyncio.gather(*calls))


def assert_same(got: RequestOutput, wanted: RequestOutput, case: Case) -> None:
    assert got.prompt_token_ids == wanted.prompt_token_ids
    for ours, theirs in zip(got.outputs, wanted.outputs, strict=True):
        where = f"{len(got.prompt_token_ids)} prompt tokens, {case.sampling}, sequence {ours.index}"
        assert ours.token_ids == theirs.token_ids, where
        assert (ours.index, ours.text, ours.finish_reason) == (theirs.index, theirs.text, theirs.finish_reason), where
        assert (ours.logprobs is None) == (theirs.logprobs is None), where
        for a, b in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=LOGPROB_TOLERANCE)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


async def serve_and_compare(
    expected: Expected, model: str, parts: Parts | None = None, **fields: Any
) -> tuple[list[RequestOutput], ClusterView]:
    """Returns the outputs and the cluster after them, at rest."""
    cases, wanted = expected
    options = {"disaggregate": "always", "block_size": BLOCK, "num_blocks": NUM_BLOCKS} | fields
    config = serve_config(model, max_batch_tokens=MAX_BATCH_TOKENS, **options)
    async with Deployment(config, parts=parts) as deployment:
        outputs = await ask(deployment, cases)
        for got, want, case in zip(outputs, wanted, cases, strict=True):
            assert_same(got, want, case)
        view = await deployment.assert_at_rest()
    assert (view.num_finished, view.num_failed, view.num_resumed) == (len(cases), 0, 0)
    return outputs, view


def num_ferried(outputs: list[RequestOutput]) -> int:
    return sum(output.usage.num_ferried_blocks for output in outputs if output.usage is not None)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"transport": "gloo"}, id="gloo"),
        pytest.param({"transport": "shm"}, id="shm"),
        pytest.param({"transport": "gloo", "prefill_tp": 2}, id="tp2-to-tp1"),
        pytest.param({"transport": "shm", "decode_tp": 2}, id="tp1-to-tp2"),
    ],
)
async def test_disaggregated(expected: Expected, tiny_model: str, shared_ray: str, fields: dict[str, Any]) -> None:
    """Fault: a block that arrives changed, at the wrong place or for the wrong head; a token lost at the hand-over."""
    outputs, view = await serve_and_compare(expected, tiny_model, ray_address=shared_ray, **fields)
    assert num_ferried(outputs) > 50
    decode = next(group for group in view.groups if group.role == "decode")
    assert decode.received_bytes == sum(o.usage.ferried_bytes for o in outputs if o.usage is not None)
    for output in outputs:
        usage = output.usage
        assert usage is not None
        assert usage.num_ferried_blocks <= usage.num_prompt_tokens // BLOCK
        assert usage.num_output_tokens == sum(len(o.token_ids) for o in output.outputs)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"prefill": 0, "decode": 0, "mixed": 1}, id="mixed"),
        pytest.param({"disaggregate": "never", "prefix_caching": False}, id="nothing-shared"),
    ],
)
async def test_without_hand_over(expected: Expected, tiny_model: str, shared_ray: str, fields: dict[str, Any]) -> None:
    """Fault: tokens that depend on where a request runs, or on what is cached there."""
    outputs, _ = await serve_and_compare(expected, tiny_model, ray_address=shared_ray, **fields)
    assert num_ferried(outputs) == 0
    assert any(output.num_cached_tokens for output in outputs) == fields.get("prefix_caching", True)


@pytest.mark.parametrize("method", ["ngram", "draft"])
async def test_with_speculation(
    expected: Expected, llm: LLM, tiny_model: str, shared_ray: str, method: SpeculationMethod
) -> None:
    """Fault: ranks that disagree about a row with drafts; several tokens of a step that are lost or told twice.

    Beside the usual requests, all at once, a few prompts that repeat themselves, one after another: there it pays.
    """
    sampling = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    repeating = [Case(text * 6, sampling) for text in ("The ferry leaves. ", "one two three ", "渡轮")]
    wanted = llm.generate([case.prompt for case in repeating], sampling)
    draft_model = tiny_model if method == "draft" else None
    config = serve_config(
        tiny_model,
        disaggregate="always",
        decode_tp=2,
        ray_address=shared_ray,
        block_size=BLOCK,
        num_blocks=NUM_BLOCKS,
        max_batch_tokens=MAX_BATCH_TOKENS,
        speculation=SpeculationConfig(method=method, max_tokens=4, draft_model=draft_model),
    )
    async with Deployment(config) as deployment:
        for case, want in zip(repeating, wanted, strict=True):
            (got,) = await ask(deployment, [case])
            assert_same(got, want, case)
        for got, want, case in zip(await ask(deployment, expected[0]), expected[1], expected[0], strict=True):
            assert_same(got, want, case)
        view = await deployment.assert_at_rest()
    decode = next(group for group in view.groups if group.role == "decode")
    assert decode.drafted_tokens > 0
    assert decode.accepted_tokens > 0 or method == "ngram", "the random model does not repeat its prompt"


async def test_with_a_pool_so_small_that_sequences_are_preempted(
    expected: Expected, llm: LLM, tiny_model: str, shared_ray: str
) -> None:
    """Fault: a preempted sequence repeats or changes a token; a block is evicted while somebody needs it."""
    num_blocks = 32
    growing = [
        Case([i + 1] * 9, SamplingParams(max_tokens=100, ignore_eos=True, temperature=i % 2, seed=i)) for i in range(8)
    ]
    wanted = llm.generate([case.prompt for case in growing], [case.sampling for case in growing])
    cases = growing + expected[0], wanted + expected[1]
    outputs, view = await serve_and_compare(cases, tiny_model, ray_address=shared_ray, num_blocks=num_blocks)
    assert sum(group.num_preemptions for group in view.groups) > 0
    needed = sum(len(output.prompt_token_ids) // BLOCK for output in outputs)
    assert needed > 4 * num_blocks, "the pools could hold everything: nothing was evicted"


@pytest.mark.parametrize(
    ("rank_class", "fields"),
    [
        pytest.param("CorruptingRank", {"transport": "shm", "checksum": True}, id="damaged"),
        pytest.param("CutRank", {"transport": "gloo"}, id="no-link"),
        pytest.param("MuteRank", {"transport": "shm"}, id="lost"),
    ],
)
async def test_every_transfer_fails(
    expected: Expected, tiny_model: str, shared_ray: str, rank_class: str, fields: dict[str, Any]
) -> None:
    """Fault: a request that waits for blocks that never come, or computes with blocks that came damaged."""
    parts = Parts(rank_class=f"tests.support.faulty:{rank_class}")
    outputs, view = await serve_and_compare(
        expected, tiny_model, parts, ray_address=shared_ray, timeout_s=1.0, **fields
    )
    assert num_ferried(outputs) == 0
    assert all(group.received_bytes == 0 for group in view.groups)
    prefill = next(group for group in view.groups if group.role == "prefill")
    assert prefill.output_tokens >= 25, "hardly any request was handed over"
    failed = [output for output in outputs if output.timeline.transfer_end_ns is not None]
    assert failed, "nobody has noticed that a transfer failed"


async def test_a_swapped_block_is_seen(expected: Expected, tiny_model: str, shared_ray: str) -> None:
    """Fault 19: a comparison that cannot see a block at the wrong place finds nothing when it passes."""
    parts = Parts(rank_class="tests.support.faulty:SwappingRank")
    cases = expected[0][:8], expected[1][:8]
    with pytest.raises(AssertionError, match="prompt tokens"):
        await serve_and_compare(cases, tiny_model, parts, ray_address=shared_ray, checksum=False)
