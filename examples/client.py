"""A streaming client: start `kvferry serve …`, then `.venv/bin/python examples/client.py [HOST:PORT]`."""

from __future__ import annotations

import asyncio
import sys

import kvferry
from kvferry.cluster.service import Completed, Delta


async def main(target: str) -> None:
    async with kvferry.AsyncClient(target) as client:
        await client.wait_ready(60)
        messages = [{"role": "user", "content": "Why do ferries float? Answer in one sentence."}]
        async for event in client.stream(messages=messages, max_tokens=64, temperature=0.0):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
            elif isinstance(event, Completed):
                print(f"\n{event.usage}\n{event.timeline}")
        for group in (await client.cluster()).groups:
            print(
                f"{group.group}: {group.num_free_blocks} of {group.num_blocks} blocks free, {group.hit_rate:.0%} cached"
            )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
