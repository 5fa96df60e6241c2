"""Ends that must be reached although whoever waits for them is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def see_through(work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
    """What `work` returns or raises, once it is over, however often the waiting task is cancelled meanwhile.

    Raises `asyncio.CancelledError` then, or after `timeout_s`, if the waiting task was; else `TimeoutError` after
    `timeout_s`, while `work` goes on by itself.
    """
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and loop.time() < deadline:
        try:
            await asyncio.wait((task,), timeout=deadline - loop.time())
        except asyncio.CancelledError as error:  # a second one would leave a mere shield behind
            cancelled = error
    if not task.done():
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise cancelled or TimeoutError(f"not done within {timeout_s:g} s")
    if cancelled is not None:
        task.cancelled() or task.exception()
        raise cancelled
    return task.result()
