"""Guards against groups that can never work together, stale incarnations, and hiccups taken for deaths."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.cluster.messages import GroupInfo, Load, StepFrame
from kvferry.cluster.registry import Change, Registry, RegistryConfig
from kvferry.runtime.errors import GroupUnavailable, IncompatiblePeer, InvalidArgument, StaleAttempt
from kvferry.runtime.ids import Epoch, GroupId, Peer
from kvferry.runtime.transfer.ticket import GroupAddress

pytestmark = pytest.mark.core

S = 1_000_000_000


def frame(peer: Peer, **load: Any) -> StepFrame:
    return StepFrame(peer.epoch, 0, [], [], None, Load(**load))


@pytest.fixture
def changes() -> list[tuple[Change, str]]:
    return []


@pytest.fixture
def registry(changes: list[tuple[Change, str]]) -> Registry:
    made = Registry(RegistryConfig(unreachable_after_s=2.0, abandon_after_s=10.0))
    made.listen(lambda change, peer, reason: changes.append((change, str(peer))))
    return made


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("model", {"model": "other"}),
        ("dtype", {"dtype": "bfloat16"}),
        ("block_size", {"block_size": 32}),
        ("hash_root", {"hash_root": b"x" * 16}),
        ("fingerprint", {"address": GroupAddress(Peer(GroupId("b"), Epoch(2)), 1, b"x" * 16, [])}),
    ],
)
def test_incompatible_groups_are_refused_when_they_register(
    toy: Any, registry: Registry, field: str, changed: Any
) -> None:
    """Fault 25: refused at transfer time, the client saw a hang. The message names both values."""
    registry.up(toy.ManualPort("a", 1, "prefill"), 0)
    other = toy.ManualPort("b", 2, "decode", **changed)
    with pytest.raises(IncompatiblePeer, match=field) as error:
        registry.up(other, 0)

    def shown(info: GroupInfo) -> str:
        value = info.address.fingerprint if field == "fingerprint" else getattr(info, field)
        return value.hex() if isinstance(value, bytes) else str(value)

    assert shown(other.info) in str(error.value)
    assert shown(registry.reference) in str(error.value)
    assert len(registry.members()) == 1


def test_a_newer_incarnation_replaces_the_older(toy: Any, registry: Registry, changes: list[Any]) -> None:
    old = registry.up(toy.ManualPort("a", 1, "prefill"), 0)
    new = registry.up(toy.ManualPort("a", 3, "prefill"), 0)
    assert changes == [(Change.UP, "a@1"), (Change.DOWN, "a@1"), (Change.UP, "a@3")]
    assert registry.get(old.peer) is None
    assert registry.up(new.port, 0) is new
    with pytest.raises(StaleAttempt):
        registry.up(toy.ManualPort("a", 2, "prefill"), 0)
    registry.down(new.peer)
    registry.down(new.peer)
    with pytest.raises(StaleAttempt):
        registry.up(toy.ManualPort("a", 3, "prefill"), 0)
    assert changes[3:] == [(Change.DOWN, "a@3")]


def test_frames_of_others_do_not_count(toy: Any, registry: Registry) -> None:
    member = registry.up(toy.ManualPort("a", 2, "prefill"), 0)
    stranger = Peer(GroupId("a"), Epoch(1))
    assert not registry.on_frame(stranger, frame(stranger), S)
    assert not registry.on_frame(member.peer, frame(stranger), S)
    assert registry.on_frame(member.peer, frame(member.peer, num_running=3), S)
    assert (member.last_frame_ns, member.load.num_running) == (S, 3)


def test_silence(toy: Any, registry: Registry, changes: list[Any]) -> None:
    """Faults 30 and 31."""
    member = registry.up(toy.ManualPort("a", 1, "prefill"), 0)
    registry.on_frame(member.peer, frame(member.peer, num_running=3), S)
    registry.check(3 * S)
    assert member.routable
    registry.check(3 * S + 1)
    assert registry.routable() == []
    assert member.load == Load()
    registry.on_frame(member.peer, frame(member.peer), 4 * S)
    assert registry.routable() == [member]
    registry.check(15 * S)
    registry.check(16 * S)
    registry.on_frame(member.peer, frame(member.peer), 17 * S)
    kinds = [change for change, _ in changes]
    assert kinds == [
        Change.UP,
        Change.UNREACHABLE,
        Change.BACK,
        Change.UNREACHABLE,
        Change.ABANDONED,
        Change.BACK,
    ]


def test_draining(toy: Any, registry: Registry) -> None:
    member = registry.up(toy.ManualPort("a", 1, "prefill"), 0)
    registry.drain(member.peer)
    assert registry.routable() == []
    registry.drain(member.peer, draining=False)
    assert registry.routable() == [member]


def test_the_reference_outlives_its_group(toy: Any, registry: Registry) -> None:
    """A cluster whose groups all died still knows what its blocks mean."""
    with pytest.raises(GroupUnavailable):
        _ = registry.hash_root
    member = registry.up(toy.ManualPort("a", 1, "prefill"), 0)
    registry.down(member.peer)
    assert (registry.hash_root, registry.block_size) == (toy.ROOT, toy.BLOCK_SIZE)
    with pytest.raises(IncompatiblePeer):
        registry.up(toy.ManualPort("b", 2, "prefill", block_size=8), 0)


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(InvalidArgument, match="abandon_after_s"):
        RegistryConfig(unreachable_after_s=5.0, abandon_after_s=1.0)


def test_silence_is_not_what_the_gateway_did_not_hear_itself(toy: Any, registry: Registry, changes: list[Any]) -> None:
    """Fault 28: a gateway that was busy for seconds took all for silent, as their frames waited in its sockets."""
    member = registry.up(toy.ManualPort("a", 1, "prefill"), 0)
    registry.check(13 * S, late_ns=12 * S)
    assert changes == [(Change.UP, "a@1")]
    registry.check(15 * S)
    assert changes[1:] == [(Change.UNREACHABLE, "a@1")]
    registry.on_frame(member.peer, frame(member.peer), 16 * S)
    registry.check(17 * S, late_ns=5 * S)
    registry.check(20 * S)
    assert changes[-1] == (Change.UNREACHABLE, "a@1"), "being late does not make it immortal"
