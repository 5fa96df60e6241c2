"""One rank: a shard of the model, its KV storage and its links, told what to do by step plans."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import msgspec
import torch

from kvferry.kernels.cpu.available import library
from kvferry.kernels.cpu.library import REMEDY
from kvferry.kernels.cpu.threads import share_cores
from kvferry.runtime.config import EngineConfig
from kvferry.runtime.cores import CoreShare, usable_cores
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.heap import give_back
from kvferry.runtime.kv.hashing import hash_root
from kvferry.runtime.kv.pages import PageTaker
from kvferry.runtime.kv.storage import RankStorage
from kvferry.runtime.model.decoder import build_model
from kvferry.runtime.model.files import load_spec, model_identity, resolve_model
from kvferry.runtime.model.fit import check_draft, check_quantization, resolve_dtype, resolve_kv, resolve_max_context
from kvferry.runtime.model.loader import open_weights
from kvferry.runtime.model.parallel import ParallelKind, make_parallel
from kvferry.runtime.model.runner import Runner
from kvferry.runtime.speculation.draft import load_draft
from kvferry.runtime.speculation.speculator import Proposer
from kvferry.runtime.step import SampleInput, StepPlan, StepResult
from kvferry.runtime.transfer.factory import make_transport
from kvferry.runtime.transfer.links import Links
from kvferry.runtime.transfer.ticket import GroupAddress, LinkReport, RankAddress

ANSWER_NS, ANOTHER_NS, MAX_ANSWER_NS = 1_250_000, 250_000, 3_000_000
"""For so long after a step the gateway and its clients are busy with its tokens: one, each other, at most. A thread
that computes on the last core meanwhile is taken off it again and again, while the others wait for it."""


class Rank:
    """Loads its shard on construction. `execute` from one thread; reports of its links come from others.

    `parallel_kind` and `parallel_name`: how and under which name the ranks of the group find each other. `host`: where
    peers' links meet this rank; `None`: it has none, and no group to exchange blocks with. `secret`: the cluster's.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        rank: int = 0,
        tp_size: int = 1,
        parallel_kind: ParallelKind = "shm",
        parallel_name: str = "",
        host: str | None = None,
        secret: str = "",
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        files = resolve_model(model)
        spec = load_spec(files)
        spec.check_tensor_parallel(tp_size)
        self.dtype = resolve_dtype(config, spec)
        self.max_context = resolve_max_context(config, spec)
        self.spec = msgspec.structs.replace(spec, max_context=self.max_context)
        self.kv = resolve_kv(config, self.spec, tp_size)
        self.hash_root = hash_root(
            {
                "model": model_identity(files),
                "dtype": self.dtype,
                "quantization": config.quantization,
                **self.spec.content_fields,
                **self.kv.content_fields,
            }
        )
        self.rank = rank
        self._config = config
        speculation = config.speculation
        if speculation.draft_model is not None and rank == 0:
            check_draft(speculation.draft_model, files, self.spec)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        check_quantization(config, self.spec, device.type)
        if config.quantization != "none" and library() is None:
            raise InvalidArgument("quantization", config.quantization, "needs the CPU kernels", REMEDY)
        self._secret = secret.encode()
        self._transport = None if host is None else make_transport(config.transfer.transport, host, self._secret)
        self._cores = None
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        elif device.type == "cpu":
            self._cores = _core_share(parallel_name or f"{os.getpid()} {id(self)}", tp_size, rank)
            if self._cores is not None and (lib := library()) is not None:
                share_cores(lib, self._cores.native)
        self._parallel = make_parallel(parallel_kind, rank, tp_size, name=parallel_name)
        weights = open_weights(files, self.spec, on_progress)
        try:
            dtype = getattr(torch, self.dtype)
            decoder = build_model(self.spec, weights, dtype, rank, self._parallel, device, config.quantization)
        finally:
            weights.close()
        shared = host is not None and config.transfer.transport == "shm"
        self.storage = RankStorage(self.kv, device, dtype=dtype, shared=shared)
        self.proposer: Proposer | None = None
        """Guesses for the engine, which runs where rank 0 is."""
        if speculation.draft_model is not None and rank == 0:
            block_size = config.cache.block_size
            self.proposer = load_draft(speculation.draft_model, self.dtype, block_size, self.kv.num_blocks, device)
        give_back()
        serves_on_cpu = host is not None and device.type == "cpu"
        self._pages = PageTaker([group.blocks for group in self.storage.groups]) if serves_on_cpu else None
        self._runner = Runner(decoder, self.storage, self._parallel)
        self._links: Links | None = None
        self._answer_ns = 0
        """How long the tokens of the last step keep others busy."""

    @property
    def address(self) -> RankAddress:
        """Where peers' links meet this rank. Raises `InvalidArgument` for a rank made without `host`."""
        if self._transport is None:
            raise InvalidArgument("host", None, "a rank without a host has no links")
        return self._transport.address()

    def attach(self, own: GroupAddress, report: Callable[[LinkReport], None]) -> None:
        """Ready to exchange blocks, once all ranks' addresses are known. `report` is called from link threads."""
        if self._transport is None:
            raise InvalidArgument("host", None, "a rank without a host has no links")
        self._links = Links(
            self._transport,
            self.kv,
            self.rank,
            own.peer,
            [group.blocks for group in self.storage.groups],
            self._config.transfer,
            report,
            self._secret,
        )

    def execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        """One step, in the order that `step.py` states."""
        links, cores = self._links, self._cores
        if links is not None:
            links.begin(plan)
        if plan.rows and cores is not None:
            threads = cores.begin(self._answer_ns)
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
        result = self._runner.execute(plan, samples)
        if samples and links is not None:
            self._answer_ns = min(ANSWER_NS + (len(samples) - 1) * ANOTHER_NS, MAX_ANSWER_NS)
        return result

    def rest(self) -> None:
        """From the thread that executes: no step will follow for now."""
        self._answer_ns = 0
        if self._cores is not None:
            self._cores.rest()

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
        if self._links is not None:
            self._links.close()
        if self._transport is not None:
            self._transport.close()
        if self._cores is not None:
            if (lib := library()) is not None:
                share_cores(lib, None)
            self._cores.close()
        self._parallel.close()


def _core_share(group: str, size: int, rank: int) -> CoreShare | None:
    try:
        return CoreShare(usable_cores(), group, size, rank)
    except OSError as error:
        warnings.warn(f"a step uses {torch.get_num_threads()} threads whatever others do: {error}", stacklevel=2)
        return None
