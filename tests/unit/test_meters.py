"""What an engine measures of itself."""

from __future__ import annotations

import pytest

from kvferry.runtime.ids import TransferId
from kvferry.runtime.meters import Meters
from kvferry.runtime.transfer.ticket import TransferEvent, TransferState

pytestmark = pytest.mark.core


def test_link_rate_leaves_out_the_wait_for_prefill() -> None:
    """A transfer is open while its blocks are computed; that time says nothing about the link."""
    meters = Meters()
    meters.transfers(
        [
            TransferEvent(
                transfer_id=TransferId("t"),
                attempt=0,
                state=TransferState.COMPLETE,
                num_bytes=1000,
                link_s=0.001,
                begin_ns=0,
                end_ns=10**9,
            )
        ]
    )
    assert meters.link_bytes_per_s == pytest.approx(1e6)


def test_a_transfer_without_bytes_measures_nothing() -> None:
    """All blocks were there already, or none came: a rate of zero would make the link look dead."""
    meters = Meters()
    meters.transfers([TransferEvent(transfer_id=TransferId("t"), attempt=0, state=TransferState.COMPLETE, end_ns=1)])
    assert meters.link_bytes_per_s == 0.0
