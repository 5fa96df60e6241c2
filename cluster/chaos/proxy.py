"""A TCP proxy in this process, so that a client's connection can be cut without touching anybody else's."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

CONNECT_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 16


class CuttableProxy:
    """Forwards whatever comes to 127.0.0.1 to `target`. Use as an async context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> int:
        """Breaks all connections at once, in both directions. New ones are forwarded again. Returns how many broke."""
        for writer in self._writers:
            writer.transport.abort()
        return len(self._writers) // 2

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                answers, there = await asyncio.open_connection(self._host, self._port)
            self._writers.add(there)
            # The first direction to end ends both: a client that has left must be seen to have left.
            copies = [asyncio.ensure_future(_copy(reader, there)), asyncio.ensure_future(_copy(answers, writer))]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        except (OSError, TimeoutError):  # nobody answers there: the client sees its connection close
            pass
        finally:
            for end in (writer, there):
                if end is not None:
                    self._writers.discard(end)
                    end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
