"""Ranks that are slow, or whose links fail in one way each. For `Parts(rank_class="tests.support.faulty:…")`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.runtime.config import EngineConfig
from kvferry.runtime.rank import Rank
from kvferry.runtime.step import SampleInput, StepPlan, StepResult
from kvferry.runtime.transfer.ticket import GroupAddress, LinkReport, RankAddress
from kvferry.runtime.transfer.transport import LinkClosed, LinkName, ReceiveEnd, SendEnd, Transport


class _FaultyRank(Rank):
    """Wraps its transport before the links are made of it."""

    wrap: Callable[[Transport], Transport]

    def attach(self, own: GroupAddress, report: Callable[[LinkReport], None]) -> None:
        assert self._transport is not None
        self._transport = type(self).wrap(self._transport)
        super().attach(own, report)


class _Wrapped:
    """A transport that does what another one does."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def address(self) -> RankAddress:
        return self.inner.address()

    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> SendEnd:
        return self.inner.connect(name, destination, timeout_s)

    def accept(self, name: LinkName, source: RankAddress, timeout_s: float) -> ReceiveEnd:
        return self.inner.accept(name, source, timeout_s)

    def close(self) -> None:
        self.inner.close()


class _WrappedEnd:
    def __init__(self, inner: SendEnd) -> None:
        self._inner = inner

    @property
    def max_unfinished(self) -> int:
        return self._inner.max_unfinished

    def wait_sent(self, timeout_s: float) -> bool:
        return self._inner.wait_sent(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


class _Corrupting(_WrappedEnd):
    """A sending end that flips a byte of every payload."""

    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        damaged = torch.cat(list(pieces))
        damaged[-1] ^= 0x40
        self._inner.send(header, [damaged], timeout_s)


class _Mute(_WrappedEnd):
    """A sending end that says that all is sent, and sends nothing."""

    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        pass

    def wait_sent(self, timeout_s: float) -> bool:
        return True


class _CorruptingTransport(_Wrapped):
    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> SendEnd:
        return _Corrupting(self.inner.connect(name, destination, timeout_s))


class _MuteTransport(_Wrapped):
    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> SendEnd:
        return _Mute(self.inner.connect(name, destination, timeout_s))


class _Swapping(_WrappedEnd):
    """A sending end that exchanges the halves of every payload: whole blocks, where there are several."""

    def send(self, header: bytes, pieces: Sequence[torch.Tensor], timeout_s: float) -> None:
        payload = torch.cat(list(pieces))
        self._inner.send(header, [payload.roll(payload.numel() // 2)], timeout_s)


class _SwappingTransport(_Wrapped):
    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> SendEnd:
        return _Swapping(self.inner.connect(name, destination, timeout_s))


class _CutTransport(_Wrapped):
    def connect(self, name: LinkName, destination: RankAddress, timeout_s: float) -> Any:
        raise LinkClosed(f"{name}: no route")


class PacedRank(Rank):
    """No step is done at once: what is to happen to running streams does, however fast the machine computes."""

    STEP_S = 0.004

    def execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        if plan.rows:
            time.sleep(self.STEP_S)
        return super().execute(plan, samples)


class SlowRank(Rank):
    """Takes its time for every step, as a large model does, and notes how many it has begun: points to be hit."""

    STEP_S = 0.05

    def __init__(self, model: str, config: EngineConfig, **options: Any) -> None:
        super().__init__(model, config, **options)
        self._note = steps_file(model, os.getpid())
        self._num_steps = 0

    def execute(self, plan: StepPlan, samples: list[SampleInput]) -> StepResult:
        if plan.rows:
            self._num_steps += 1
            self._note.write_text(str(self._num_steps))
            time.sleep(self.STEP_S)
        return super().execute(plan, samples)


def steps_file(model: str, pid: int) -> Path:
    """Where a `SlowRank` notes its steps."""
    return Path(model) / f"steps-{pid}"


def num_steps(model: str, pid: int) -> int:
    try:
        return int(steps_file(model, pid).read_text() or 0)
    except FileNotFoundError:
        return 0


class CorruptingRank(_FaultyRank):
    """Payloads arrive damaged; give the deployment `checksum=True`."""

    wrap = _CorruptingTransport


class SwappingRank(_FaultyRank):
    """Blocks arrive whole, at each other's places; give the deployment `checksum=False`, or none arrives."""

    wrap = _SwappingTransport


class MuteRank(_FaultyRank):
    """Messages are lost without a trace."""

    wrap = _MuteTransport


class CutRank(_FaultyRank):
    """No link can be made."""

    wrap = _CutTransport
