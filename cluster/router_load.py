"""What the router has measured and booked per group. Not: how it weighs them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvferry.cluster.messages import Load
from kvferry.runtime.ids import Peer

WEIGHT = 0.2
"""Of a new measurement in an exponentially weighted mean."""
PRIOR_OUTPUT_TOKENS = 128.0
PRIOR_SLOPE = 0.05
"""Share of a step's time that each further sequence adds, before two different batches were measured."""
ENOUGH_STEPS = 32
"""Until a group's first steps, which may take thirty times as long as later ones, no longer weigh in its means."""


class _StepTime:
    """Step seconds as a line over the batch, `base + slope * batch`, fitted to exponentially weighted moments."""

    def __init__(self) -> None:
        self.x = self.y = self.xx = self.xy = 0.0
        self.num_seen = 0

    def add(self, batch: int, step_s: float) -> None:
        x, y = float(batch), step_s
        w = WEIGHT if self.num_seen else 1.0
        self.num_seen += 1
        self.x += w * (x - self.x)
        self.y += w * (y - self.y)
        self.xx += w * (x * x - self.xx)
        self.xy += w * (x * y - self.xy)

    def line(self, prior_s: float) -> tuple[float, float]:
        """`(base, slope)`, both at least 0."""
        if not self.num_seen:
            return prior_s * (1 - PRIOR_SLOPE), prior_s * PRIOR_SLOPE
        variance = self.xx - self.x * self.x
        measured = variance > 0.25  # batches that differ by one now and then
        slope = (self.xy - self.x * self.y) / variance if measured else PRIOR_SLOPE * self.y
        slope = min(max(slope, 0.0), self.y / max(1.0, self.x))
        return self.y - slope * self.x, slope


class GroupRates:
    """Measured rates; for a group without any, the mean of the others', or the prior."""

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float, link_bytes_per_s: float) -> None:
        self._prior = (prefill_tokens_per_s, decode_step_s, link_bytes_per_s)
        self._prefill: dict[Peer, float] = {}
        self._link: dict[Peer, float] = {}
        self._step: dict[Peer, _StepTime] = {}
        self.output_tokens = PRIOR_OUTPUT_TOKENS
        """Mean length of outputs."""

    def observe(self, peer: Peer, load: Load) -> None:
        for means, value in ((self._prefill, load.prefill_tokens_per_s), (self._link, load.link_bytes_per_s)):
            if value > 0:
                means[peer] = means.get(peer, value) + WEIGHT * (value - means.get(peer, value))
        if load.decode_step_s > 0 and load.num_running > 0:
            self._step.setdefault(peer, _StepTime()).add(load.num_running, load.decode_step_s)

    def observe_output(self, num_tokens: int) -> None:
        self.output_tokens += WEIGHT / 4 * (num_tokens - self.output_tokens)

    def forget(self, peer: Peer) -> None:
        for known in (self._prefill, self._link, self._step):
            known.pop(peer, None)

    @property
    def measured(self) -> bool:
        """Whether any group's prefill and decode were measured well enough to refuse somebody for it."""
        return bool(self._prefill) and any(step.num_seen >= ENOUGH_STEPS for step in self._step.values())

    def prefill_tokens_per_s(self, peer: Peer) -> float:
        return _known(self._prefill, peer, self._prior[0])

    def link_bytes_per_s(self, peer: Peer) -> float:
        return _known(self._link, peer, self._prior[2])

    def knows(self, peer: Peer) -> bool:
        """Whether all its rates are its own."""
        return peer in self._prefill and peer in self._link and peer in self._step

    def step_line(self, peer: Peer) -> tuple[float, float]:
        """Seconds of a decode step of nobody, and what each sequence adds to it."""
        if own := self._step.get(peer):
            return own.line(self._prior[1])
        known = list(self._step.values()) or [_StepTime()]
        lines = [step.line(self._prior[1]) for step in known]
        return sum(base for base, _ in lines) / len(lines), sum(slope for _, slope in lines) / len(lines)


def _known(means: dict[Peer, float], peer: Peer, prior: float) -> float:
    if peer in means:
        return means[peer]
    return sum(means.values()) / len(means) if means else prior


class Booked(msgspec.Struct, frozen=True):
    """Load that was placed on a group and is not done."""

    num_tokens: int = 0
    """To prefill."""
    num_sequences: int = 0
    """That decode there, or will."""
    num_blocks: int = 0
    """That these are expected to hold in the end."""


class Booking:
    """Load of one placement: tokens to prefill here, sequences that decode (or will) there, and their blocks.

    Has one owner, who calls `release` in the end, whatever happens.
    """

    def __init__(
        self, book: LoadBook, prefill: Peer, num_tokens: int, decode: Peer, num_sequences: int, num_blocks: int
    ) -> None:
        self._book = book
        self.prefill = prefill
        self.num_tokens = num_tokens
        self.decode = decode
        self.num_sequences = num_sequences
        self.num_blocks = num_blocks

    def prefilled(self) -> None:
        """The prompt is computed. Idempotent."""
        if self.num_tokens:
            self._book.add(self.prefill, -self.num_tokens, 0, 0)
            self.num_tokens = 0

    def sequence_left(self) -> None:
        """One of the sequences ended, or goes on elsewhere."""
        if self.num_sequences:
            share = -(-self.num_blocks // self.num_sequences)
            self.num_sequences -= 1
            self.num_blocks -= share
            self._book.add(self.decode, 0, -1, -share)

    def move_decode(self, decode: Peer) -> None:
        """Another group will decode."""
        self._book.add(self.decode, 0, -self.num_sequences, -self.num_blocks)
        self._book.add(decode, 0, self.num_sequences, self.num_blocks)
        self.decode = decode

    def release(self) -> None:
        """Idempotent."""
        self.prefilled()
        if self.num_sequences or self.num_blocks:
            self._book.add(self.decode, 0, -self.num_sequences, -self.num_blocks)
            self.num_sequences = self.num_blocks = 0
        self._book.bookings.discard(self)


class LoadBook:
    """All bookings that are not released, and their sums per group.

    `on_change(peer)`: what is booked there has changed. `on_less()`: some group has less to do.
    """

    def __init__(self) -> None:
        self.bookings: set[Booking] = set()
        self.on_change: Callable[[Peer], None] = _nothing
        self.on_less: Callable[[], None] = _nothing
        self._sums: dict[Peer, Booked] = {}

    def book(self, prefill: Peer, num_tokens: int, decode: Peer, num_sequences: int, num_blocks: int) -> Booking:
        booking = Booking(self, prefill, num_tokens, decode, num_sequences, num_blocks)
        self.bookings.add(booking)
        self.add(prefill, num_tokens, 0, 0)
        self.add(decode, 0, num_sequences, num_blocks)
        return booking

    def add(self, peer: Peer, num_tokens: int, num_sequences: int, num_blocks: int) -> None:
        """For `Booking` only."""
        old = self.booked(peer)
        total = Booked(old.num_tokens + num_tokens, old.num_sequences + num_sequences, old.num_blocks + num_blocks)
        if total == NOTHING_BOOKED:
            self._sums.pop(peer, None)
        else:
            self._sums[peer] = total
        self.on_change(peer)
        if num_sequences < 0:
            self.on_less()

    def booked(self, peer: Peer) -> Booked:
        return self._sums.get(peer, NOTHING_BOOKED)

    def check_invariants(self) -> None:
        """Recomputes the sums."""
        sums: dict[Peer, list[int]] = {}
        for booking in self.bookings:
            sums.setdefault(booking.prefill, [0, 0, 0])[0] += booking.num_tokens
            sums.setdefault(booking.decode, [0, 0, 0])[1] += booking.num_sequences
            sums[booking.decode][2] += booking.num_blocks
        truth = {peer: Booked(*values) for peer, values in sums.items() if any(values)}
        assert truth == self._sums, f"booked load differs: {self._sums}, should be {truth}"


NOTHING_BOOKED = Booked()


def _nothing(*_: Peer) -> None:
    """Nobody listens."""
