"""What precedes a message's payload on a link, and the checks that it must pass."""

from __future__ import annotations

import msgspec

from kvferry.runtime.ids import BlockHash, BlockId, TransferId
from kvferry.runtime.transfer.secret import TAG_BYTES, is_tag, tag

VERSION = 1
MAX_BLOCKS = 256


class MessageHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Everything that both ends must agree on before a byte of payload is believed."""

    version: int = VERSION
    link: str
    """`LinkName`: both groups with their epochs, both ranks."""
    link_seq: int
    """Counts the messages of this link from 0."""
    fingerprint: bytes
    transfer_id: TransferId
    attempt: int
    seq: int
    hashes: list[BlockHash]
    block_ids: list[BlockId]
    """At the destination."""
    num_bytes: int
    crc: int | None
    """CRC-32 of the payload."""


class BlockRange(msgspec.Struct, frozen=True):
    """Block ids of one block group, from `first` to before `stop`."""

    first: int
    stop: int
    block_bytes: int
    """That one of its blocks takes on this link."""


class Expected(msgspec.Struct):
    """What the receiving end of one link knows by itself."""

    link: str
    fingerprint: bytes
    ranges: list[BlockRange]
    """Of the destination's pools."""
    secret: bytes


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MessageHeader).decode


def seal(header: MessageHeader, secret: bytes) -> bytes:
    """The header as it travels. It names its link and its place there, so it is good for once."""
    data = encode(header)
    return tag(secret, data) + data


def parse(data: bytes, payload_bytes: int, link_seq: int, expected: Expected) -> MessageHeader | str:
    """The header, or what is wrong with it. Nothing is read of a header that does not bear the secret's tag."""
    given, data = data[:TAG_BYTES], data[TAG_BYTES:]
    if not is_tag(given, expected.secret, data):
        return "it does not know the cluster's secret"
    try:
        header = _decode(data)
    except msgspec.DecodeError as error:
        return f"unreadable header: {error}"
    count = len(header.block_ids)
    checks = (
        ("version", header.version, VERSION),
        ("link name", header.link, expected.link),
        ("link sequence number", header.link_seq, link_seq),
        ("layout fingerprint", header.fingerprint, expected.fingerprint),
        ("number of hashes", len(header.hashes), count),
    )
    for what, got, wanted in checks:
        if got != wanted:
            return f"{what} is {_shown(got)}, expected {_shown(wanted)}"
    if not 1 <= count <= MAX_BLOCKS:
        return f"{count} blocks, must be 1 to {MAX_BLOCKS}"
    first, last = min(header.block_ids), max(header.block_ids)
    ranges = [of for of in expected.ranges if of.first <= first and last < of.stop]
    if len(set(header.block_ids)) != count or not ranges:
        return f"block ids must differ and be below {expected.ranges[-1].stop}, and of one block group"
    if header.num_bytes != count * ranges[0].block_bytes:
        return f"payload size is {header.num_bytes}, expected {count * ranges[0].block_bytes}"
    if payload_bytes != header.num_bytes:
        return f"announced size is {payload_bytes}, expected {header.num_bytes}"
    return header


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
