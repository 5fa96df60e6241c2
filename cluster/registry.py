"""Who is there: the live incarnations of groups, and how recently each was heard of.

    up ──▶ LIVE ── silent for `unreachable_after_s` ──▶ UNREACHABLE ── silent for `abandon_after_s` ──▶ ABANDONED
            ▲                                               │                                               │
            └─────────────────────────────────── a frame ◀──┴───────────────────────────────────────────────┘
    down (told from outside: the process is gone) ──▶ forgotten, its epoch never accepted again

An unreachable group gets no new work but keeps what it has; an abandoned one loses its requests to others and still is
not dead. Only LIVE groups that do not drain are routed to.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from kvferry.cluster.messages import GroupInfo, Load, StepFrame
from kvferry.cluster.ports import GroupPort
from kvferry.runtime.config import check_range
from kvferry.runtime.errors import GroupUnavailable, IncompatiblePeer, StaleAttempt
from kvferry.runtime.ids import Epoch, GroupId, Peer


class RegistryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a group may be silent."""

    unreachable_after_s: float = 2.0
    """No new requests from then on."""
    abandon_after_s: float = 10.0
    """Its requests go on elsewhere from then on."""

    def __post_init__(self) -> None:
        check_range("unreachable_after_s", self.unreachable_after_s, 0.01, 3600)
        check_range("abandon_after_s", self.abandon_after_s, self.unreachable_after_s, 3600)


class GroupState(StrEnum):
    LIVE = "live"
    UNREACHABLE = "unreachable"
    ABANDONED = "abandoned"


class Change(StrEnum):
    UP = "up"
    BACK = "back"
    UNREACHABLE = "unreachable"
    ABANDONED = "abandoned"
    DOWN = "down"


Listener = Callable[[Change, Peer, str], None]
"""Change, whose, why."""


class Member:
    """One live incarnation."""

    def __init__(self, port: GroupPort, now_ns: int) -> None:
        self.port = port
        self.peer = port.peer
        self.info = port.info
        self.state = GroupState.LIVE
        self.last_frame_ns = now_ns
        self.load = Load(num_free_blocks=port.info.num_blocks)  # until it speaks itself
        self.draining = False
        self.stays = False
        """Until `down`, also beside its successor, which takes over from it."""
        self.role = port.info.role
        """What the router sends it; any group can do both phases."""

    @property
    def routable(self) -> bool:
        return self.state is GroupState.LIVE and not self.draining


class Registry:
    """Membership. Listeners are told of every change after it took effect."""

    def __init__(self, config: RegistryConfig) -> None:
        self.config = config
        self._members: dict[Peer, Member] = {}
        self._routable: list[Member] | None = None
        """Made anew after every change."""
        self._epochs: dict[GroupId, Epoch] = {}
        self._reference: GroupInfo | None = None
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    # ------------------------------------------------------------ changes
    def up(self, port: GroupPort, now_ns: int) -> Member:
        """Takes in a new incarnation; an older one of the same group is down with it, unless it `stays`. Idempotent.

        Raises `IncompatiblePeer` if its blocks mean something else than the cluster's, `StaleAttempt` for an epoch
        that was superseded or declared down.
        """
        peer = port.peer
        if known := self._members.get(peer):
            return known
        newest = self._epochs.get(peer.group)
        if newest is not None and peer.epoch <= newest:
            raise StaleAttempt(f"epoch={peer.epoch} of group {peer.group}: must be newer than {newest}; start it anew")
        self._check_compatible(port.info)
        for older in [p for p, known in self._members.items() if p.group == peer.group and not known.stays]:
            self.down(older, f"replaced by {peer}")
        self._epochs[peer.group] = peer.epoch
        member = self._members[peer] = Member(port, now_ns)
        self._tell(Change.UP, peer)
        return member

    def down(self, peer: Peer, reason: str = "its process is gone") -> None:
        """The incarnation is dead. Idempotent."""
        self._epochs[peer.group] = max(peer.epoch, self._epochs.get(peer.group, peer.epoch))
        if self._members.pop(peer, None) is not None:
            self._tell(Change.DOWN, peer, reason)

    def on_frame(self, peer: Peer, frame: StepFrame, now_ns: int) -> bool:
        """A sign of life. Returns whether the frame counts: false for an unknown incarnation or a stale epoch."""
        member = self._members.get(peer)
        if member is None or frame.epoch != peer.epoch:
            return False
        member.last_frame_ns = max(member.last_frame_ns, now_ns)
        member.load = frame.load
        if member.state is not GroupState.LIVE:
            member.state = GroupState.LIVE
            self._tell(Change.BACK, peer)
        return True

    def check(self, now_ns: int, late_ns: int = 0) -> None:
        """Finds the silent ones. Call it a few times per `unreachable_after_s`.

        `late_ns`: how much later than planned this call is. Then frames wait unread as well, and that is no silence.
        """
        for member in list(self._members.values()):
            member.last_frame_ns = min(now_ns, member.last_frame_ns + max(0, late_ns))
            silent_s = (now_ns - member.last_frame_ns) / 1e9
            if member.state is GroupState.LIVE and silent_s > self.config.unreachable_after_s:
                member.state = GroupState.UNREACHABLE
                member.load = Load()
                self._tell(Change.UNREACHABLE, member.peer, f"silent for {silent_s:.1f} s")
            if member.state is GroupState.UNREACHABLE and silent_s > self.config.abandon_after_s:
                member.state = GroupState.ABANDONED
                self._tell(Change.ABANDONED, member.peer, f"silent for {silent_s:.1f} s")

    def drain(self, peer: Peer, draining: bool = True) -> None:
        """Whether the group gets no new work although it is live."""
        if member := self._members.get(peer):
            member.draining = draining
            self._routable = None
            if not draining:
                self._tell(Change.BACK, peer)

    def stay(self, peer: Peer) -> None:
        """Its successor will come up beside it."""
        if member := self._members.get(peer):
            member.stays = True

    def set_role(self, peer: Peer, role: str) -> None:
        """What the router sends there from now on; what runs there goes on."""
        if member := self._members.get(peer):
            member.role = role
            self._tell(Change.BACK, peer)

    # ------------------------------------------------------------ questions
    def get(self, peer: Peer) -> Member | None:
        return self._members.get(peer)

    def members(self) -> list[Member]:
        return list(self._members.values())

    def routable(self) -> list[Member]:
        """The same list until someone comes, goes, or changes its state or role. Not to be changed."""
        if self._routable is None:
            self._routable = [member for member in self._members.values() if member.routable]
        return self._routable

    @property
    def reference(self) -> GroupInfo:
        """The first group's description; all groups agree with it in what matters to blocks.

        Raises `GroupUnavailable` before any group came up.
        """
        if self._reference is None:
            raise GroupUnavailable("no group has registered yet; the cluster is still starting")
        return self._reference

    @property
    def hash_root(self) -> bytes:
        return self.reference.hash_root

    @property
    def block_size(self) -> int:
        return self.reference.block_size

    @property
    def num_window(self) -> int | None:
        """Blocks before a token that it needs; `None`: all."""
        window = self.reference.window
        return None if window is None else -(-(window - 1) // self.block_size)

    # ------------------------------------------------------------ inside
    def _check_compatible(self, info: GroupInfo) -> None:
        if self._reference is None:
            self._reference = info
            return
        ours = self._reference
        for field, theirs, expected in (
            ("model", info.model, ours.model),
            ("dtype", info.dtype, ours.dtype),
            ("block_size", str(info.block_size), str(ours.block_size)),
            ("layout fingerprint", info.address.fingerprint.hex(), ours.address.fingerprint.hex()),
            ("hash_root", info.hash_root.hex(), ours.hash_root.hex()),
        ):
            if theirs != expected:
                raise IncompatiblePeer(
                    f"{field}={theirs} of group {info.address.peer} differs from {expected} of group "
                    f"{ours.address.peer}; start all groups of a cluster with the same model and KV options"
                )

    def _tell(self, change: Change, peer: Peer, reason: str = "") -> None:
        self._routable = None
        for listener in self._listeners:
            listener(change, peer, reason)
