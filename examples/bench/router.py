"""Routing for a large fleet: memory of the prefix index, decisions and updates per second of one core.

    python examples/bench/router.py [--blocks N] [--groups N] [--decisions N] [--small]

The fleet (`fleet.py`) is made up; registry, index, admission, router and hashing are the production's, and so is the
garbage collector's setting. A decision is `Placer.decide`; what follows from it is that its load and its blocks are
booked, and that an older request's booking ends. Times are CPU time of the thread, so that a busy machine does not show
as a slow router. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from fleet import BLOCK_SIZE, Fleet, Shape
from stats import percentile

from kvferry.cluster.legs import Record
from kvferry.cluster.messages import StepFrame, decode_from_group, encode
from kvferry.cluster.placing import EXPECTED_BLOCKS_GRACE_S
from kvferry.cluster.router import RoutingDecision
from kvferry.cluster.router_load import Booking
from kvferry.runtime.ids import BlockHash, Peer, RequestId
from kvferry.runtime.request import Request, SamplingParams
from kvferry.runtime.timeline import Timeline

IN_FLIGHT = 16
"""Requests per group that are booked at any time."""
FRAME_BLOCKS = 8
"""Stored and removed by one step's frame."""
ARRIVALS_PER_S = 1000


@dataclass
class Spans:
    """CPU microseconds of each request."""

    hash_us: list[float] = field(default_factory=list)
    decide_us: list[float] = field(default_factory=list)
    book_us: list[float] = field(default_factory=list)
    check_us: list[float] = field(default_factory=list)
    num_hit_blocks: int = 0
    num_apart: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4_000_000, help="distinct ones, over all groups")
    parser.add_argument("--prompt-blocks", type=int, default=32)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--small", action="store_true", help="2 groups of 2000 blocks; prompts of 1, 16 and 32 blocks")
    args = parser.parse_args()
    if args.small:
        cases = [(Shape(num_groups=2, num_blocks=4000), length) for length in (1, 16, 32)]
    else:
        cases = [(Shape(num_groups=args.groups, num_blocks=args.blocks), args.prompt_blocks)]
    results = [measure(shape, length, args.decisions) for shape, length in cases]
    print(json.dumps({"bench": "router", "python": sys.version.split()[0], "cases": results}))


def measure(shape: Shape, prompt_blocks: int, num_decisions: int) -> dict[str, float]:
    print(f"{shape.num_groups} groups, {shape.num_blocks} blocks, prompts of {prompt_blocks} blocks", flush=True)
    fleet = Fleet(shape)
    memory = fleet.fill()
    result = {
        "groups": shape.num_groups,
        "blocks": fleet.num_distinct,
        "holdings": fleet.num_holdings,
        "prompt_blocks": prompt_blocks,
        "bytes_per_block": memory / fleet.num_distinct,
        "fill_events_per_s": fleet.num_holdings / fleet.fill_s,
    }
    decisions(fleet, prompt_blocks, num_decisions // 10)  # caches warm, some load booked
    spans = decisions(fleet, prompt_blocks, num_decisions)
    result |= summary(spans)
    if shape.num_groups > 2:
        result |= updates(fleet, 5000)
    for name, value in result.items():
        print(f"  {name:28} {value:,.1f}")
    return result


def summary(spans: Spans) -> dict[str, float]:
    num = len(spans.decide_us)
    kinds = {
        "decide": spans.decide_us,
        "decide_book": [d + b for d, b in zip(spans.decide_us, spans.book_us, strict=True)],
        "hash_decide": [h + d for h, d in zip(spans.hash_us, spans.decide_us, strict=True)],
        "hash_decide_book": [sum(t) for t in zip(spans.hash_us, spans.decide_us, spans.book_us, strict=True)],
        "check": spans.check_us,
    }
    found: dict[str, float] = {"hit_blocks": spans.num_hit_blocks / num, "apart": spans.num_apart / num}
    for kind, times in kinds.items():
        found[f"{kind}_per_s"] = 1e6 * num / sum(times)
        found |= {f"{kind}_p{p}_us": percentile(times, p) for p in (50, 99)}
        found[f"{kind}_max_us"] = max(times)
    return found


# ---------------------------------------------------------------- decisions
def decisions(fleet: Fleet, prompt_blocks: int, count: int) -> Spans:
    """One request after the other; the fleet's load is what stays booked, and what its frames report."""
    spans, booked = Spans(), deque[Booking]()
    numbers = itertools.count()
    placer, router = fleet.placer, fleet.router
    for i in range(count):
        fleet.clock.ns += 10**9 // ARRIVALS_PER_S
        request = _request(i, fleet.prompt(prompt_blocks))
        record = Record(request, Timeline(fleet.clock.ns), numbers)
        clock = time.thread_time_ns
        t0 = clock()
        placer.check(request)
        t1 = clock()
        hashes = placer.hashes(record, request.prompt_token_ids)
        t2 = clock()
        decision = placer.decide(record, record.sequences, fleet.registry.routable(), True, fleet.clock.ns)
        t3 = clock()
        assert decision is not None, "the fleet is full"
        _book(fleet, booked, decision, hashes)
        t4 = clock()
        spans.check_us.append((t1 - t0) / 1e3)
        spans.hash_us.append((t2 - t1) / 1e3)
        spans.decide_us.append((t3 - t2) / 1e3)
        spans.book_us.append((t4 - t3) / 1e3)
        spans.num_hit_blocks += (len(request.prompt_token_ids) - decision.num_prefill_tokens) // BLOCK_SIZE
        spans.num_apart += decision.prefill is not None
        if i % 16 == 0:
            fleet.report_load()
    for booking in booked:
        booking.release()
    assert router.num_bookings == 0
    return spans


def _book(fleet: Fleet, booked: deque[Booking], decision: RoutingDecision, hashes: list[BlockHash]) -> None:
    booked.append(fleet.router.book(decision))
    until_s = 2 * (decision.queue_s + decision.prefill_s) + EXPECTED_BLOCKS_GRACE_S
    for peer in {decision.prefill or decision.decode, decision.decode}:
        fleet.index.expect(peer, hashes, fleet.clock.ns, fleet.clock.ns + int(until_s * 1e9))
    if len(booked) > IN_FLIGHT * fleet.shape.num_groups:
        booked.popleft().release()
    elif len(booked) > 4:
        booked[-4].prefilled()


def _request(number: int, tokens: list[int]) -> Request:
    return Request(
        request_id=RequestId(f"r{number}"),
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=200, seed=number),
        eos_token_ids=[0],
    )


# ---------------------------------------------------------------- updates
def updates(fleet: Fleet, num_frames: int) -> dict[str, float]:
    """Frames as they come over the wire: decoded, and taken over by the index; then a group that dies."""
    frames = list(_frames(fleet, num_frames))
    clock, decode_us, apply_us = time.thread_time_ns, list[float](), list[float]()
    for peer, data in frames:
        t0 = clock()
        frame = decode_from_group(data)
        t1 = clock()
        assert isinstance(frame, StepFrame)
        untrusted = fleet.index.apply(peer, frame.seq, frame.kv)
        t2 = clock()
        assert not untrusted
        decode_us.append((t1 - t0) / 1e3)
        apply_us.append((t2 - t1) / 1e3)
    num_events = 2 * FRAME_BLOCKS * num_frames
    found = {
        "events_per_s": 1e6 * num_events / sum(apply_us),
        "events_with_decoding_per_s": 1e6 * num_events / (sum(apply_us) + sum(decode_us)),
        "apply_p99_us": percentile(apply_us, 99),
    }
    peer = fleet.peers[-1]
    hashes = list(fleet.index.hashes(peer))
    t0 = clock()
    fleet.index.forget(peer)
    t1 = clock()
    assert fleet.index.num_blocks(peer) == 0
    fleet.index.apply(peer, 5, None)
    t2 = clock()
    fleet.index.snapshot(peer, 5, hashes)
    t3 = clock()
    return found | {"group_blocks": len(hashes), "forget_ms": (t1 - t0) / 1e6, "snapshot_ms": (t3 - t2) / 1e6}


def _frames(fleet: Fleet, count: int) -> Iterator[tuple[Peer, bytes]]:
    """The oldest of a group's private blocks make room for new ones."""
    names = [fleet.names(peer) for peer in fleet.peers[:8]]
    for i in range(count):
        j = i % len(names)
        new = [BlockHash(fleet.random.bytes(16)) for _ in range(FRAME_BLOCKS)]
        old = [names[j].popleft() for _ in range(FRAME_BLOCKS)]
        yield fleet.peers[j], encode(fleet.frame(fleet.peers[j], new, old))


if __name__ == "__main__":
    main()
