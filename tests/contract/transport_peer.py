"""The other end of a link in a process of its own, to be killed or stopped by the tests."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from kvferry.runtime.config import TransportName
from kvferry.runtime.kv.shared import shared_empty
from kvferry.runtime.transfer.factory import make_transport
from kvferry.runtime.transfer.transport import LinkName


def run(pipe: Connection, transport_name: TransportName, name: LinkName, sends: bool, action: str) -> None:
    """Opens one end, says `open`, then: `idle` waits for ever; `middle` stops in mid-message; `lend` sends 7s.

    `flows`: receives one message after the other.
    """
    torch.set_num_threads(1)
    transport = make_transport(transport_name, "127.0.0.1")
    pipe.send(transport.address())
    other: Any = pipe.recv()
    if sends:
        end = transport.connect(name, other, 20)
        pipe.send("open")
        if action == "middle":
            end.send(b"header", [torch.zeros(512 << 20, dtype=torch.uint8)], 60)
        if action == "lend":
            end.send(b"header", [shared_empty((5 << 20,), torch.uint8).fill_(7)], 60)
    else:
        receiver = transport.accept(name, other, 20)
        pipe.send("open")
        if action == "middle":
            header = receiver.receive_header(20)
            assert header is not None
            pipe.send("header")
        while action == "flows":
            receiver.receive_header(20)
            receiver.receive_payload(20).free()
    pipe.recv()  # for ever
