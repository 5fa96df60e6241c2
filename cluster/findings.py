"""Does what requests own agree with what was booked, opened and is held by groups? For tests and `Admin.Audit`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvferry.cluster.legs import Record
from kvferry.cluster.messages import Audit
from kvferry.runtime.ids import Peer, TransferId


def check_invariants(records: Collection[Record], open_transfers: set[TransferId], num_bookings: int) -> None:
    """Raises `AssertionError`."""
    placements = [p for record in records for p in record.placements]
    assert len(placements) == num_bookings, "bookings differ from placements"
    needed = {transfer.transfer_id for p in placements for transfer in p.transfers if transfer.open}
    assert needed == open_transfers, "open transfers differ from those that placements need"
    for record in records:
        for s, leg in record.legs():
            assert s.index in leg.placement.active, f"{s.index}: a leg without a placement"
            assert leg.placement in record.placements, f"{s.index}: a leg with a placement that was given up"
        for s in record.sequences:
            assert s.move is None or s.move.placement in record.placements, f"{s.index}: a move without a placement"
            assert s.move is None or s.leg is not None, f"{s.index}: a move of what does not run"


def audit(
    records: Collection[Record], open_transfers: set[TransferId], num_bookings: int, groups: Mapping[Peer, Audit]
) -> list[str]:
    """What groups hold that no request owns, in words."""
    keys = {record.key(s, leg) for record in records for s, leg in record.legs()}
    findings: list[str] = []
    if not records and num_bookings:
        findings.append(f"router: {num_bookings} bookings without a request")
    for peer, held in groups.items():
        findings += [f"{peer}: {fault}" for fault in held.broken]
        findings += [f"{peer}: runs {key}, which nobody waits for" for key in held.sequences if key not in keys]
        for transfer_id in (*held.inbound, *held.outbound):
            if transfer_id not in open_transfers:
                findings.append(f"{peer}: holds transfer {transfer_id}, which nobody waits for")
        if not held.sequences and not held.inbound and not held.outbound and held.num_leased_blocks:
            findings.append(f"{peer}: {held.num_leased_blocks} blocks are leased to nobody")
    return findings
