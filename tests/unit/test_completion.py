"""Guards against ends that are left half done because their waiter was cancelled, twice above all."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.cluster.completion import see_through

pytestmark = pytest.mark.core


class Work:
    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.done = False

    async def run(self, error: Exception | None = None) -> str:
        await self.go_on.wait()
        self.done = True
        if error is not None:
            raise error
        return "done"


@pytest.mark.parametrize("error", [None, ValueError("broken")])
async def test_work_is_done_when_a_waiter_that_was_cancelled_goes_on(error: Exception | None) -> None:
    """Fault: a second cancellation ends `await asyncio.shield(...)`, and Ray was shut down while groups were killed."""
    work = Work()
    waiter = asyncio.create_task(see_through(work.run(error), 10))
    for _ in range(3):
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.sleep(0)
        assert not waiter.done()
    work.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert work.done


async def test_result_and_error_are_the_works() -> None:
    work = Work()
    work.go_on.set()
    assert await see_through(work.run(), 10) == "done"
    with pytest.raises(ValueError, match="broken"):
        await see_through(work.run(ValueError("broken")), 10)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_wait_is_bounded(cancelled: bool) -> None:
    """Faults: a call into a Ray that has died never returns, and with it the end of the deployment never comes; or a
    group's supervisor that was told to stop takes the timeout for the end of the matter and starts the group again."""
    work = Work()
    waiter = asyncio.create_task(see_through(work.run(ValueError("late")), 0.05))
    await asyncio.sleep(0)
    if cancelled:
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    else:
        with pytest.raises(TimeoutError, match=r"0\.05 s"):
            await waiter
    work.go_on.set()
    await asyncio.sleep(0.01)
    assert work.done
