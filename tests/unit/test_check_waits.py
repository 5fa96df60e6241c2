"""The lint of waits against planted ones: what it must catch, and what it must let pass."""

from __future__ import annotations

import pytest

from tests.check_waits import ROOT, Wait, faults, files, read
from tests.waits_allowed import ALLOWED

pytestmark = pytest.mark.core

UNBOUNDED = {
    "an event": "def f(self): self.changed.wait()",
    "an event with None": "def f(self): self.changed.wait(None)",
    "an event whose caller may give None": "def f(self, timeout_s: float | None): self.changed.wait(timeout_s)",
    "a condition": "def f(self): self.changed.wait_for(lambda: self.done)",
    "a store": "def f(self): self.store.wait([key])",
    "a thread": "def f(self): self.thread.join()",
    "a lock taken by hand": "def f(self): self.lock.acquire()",
    "a queue": "class A:\n def __init__(self): self.q = queue.Queue(4)\n def f(self): self.q.get()",
    "a full queue": "class A:\n def __init__(self): self.q: Q = queue.Queue(4)\n def f(self): self.q.put(1)",
    "a future": "def f(self): return self.future.result()",
    "a process": "def f(): subprocess.run(['true'])",
    "its output": "def f(p): p.communicate()",
    "a connection": "def f(): socket.create_connection(('h', 1))",
    "a socket": "def f(self): return self.sock.recv(1)",
    "a socket that blocks again": "def f(sock):\n sock.settimeout(None)\n sock.recv(1)",
    "a socket whose caller may give None": "def f(sock, t: float | None):\n sock.settimeout(t)\n sock.recv(1)",
    "Ray": "def f(x): return ray.get(x)",
    "a future, awaited": "async def f(x): await x",
    "a call of somebody else's": "async def f(stub): await stub.read()",
    "an asyncio event": "async def f(self): await self.changed.wait()",
    "an asyncio queue": "async def f(self): await self.queue.get()",
    "a deadline of None": "async def f(x):\n async with asyncio.timeout(None): await x",
    "a deadline that may be None": "async def f(x, s: float | None):\n async with asyncio.timeout(s): await x",
    "after the deadline's block": "async def f(x):\n async with asyncio.timeout(1): pass\n await x",
    "tasks": "async def f(tasks): await asyncio.wait(tasks)",
    "a gather of others'": "async def f(a, b): await asyncio.gather(a.read(), b.read())",
    "wait_for with None": "async def f(x): await asyncio.wait_for(x, None)",
    "a stream": "async def f(stream):\n async for x in stream: pass",
    "a shielded future": "async def f(x): await asyncio.shield(x)",
    "another's blocking call in a thread": "async def f(x): await asyncio.to_thread(x.read)",
}

BOUNDED = {
    "an event": "def f(self): self.changed.wait(1.0)",
    "a condition": "def f(self): self.changed.wait_for(lambda: self.done, timeout=2)",
    "a store": "def f(self): self.store.wait([key], seconds(2))",
    "joined text": "def f(x): return ', '.join(x)",
    "a dict": "def f(x): return x.get('a')",
    "a pool's block": "def f(self): self.store.acquire(block_id)",
    "a queue": "class A:\n def __init__(self): self.q = queue.Queue(4)\n def f(self): self.q.put(1, timeout=2)",
    "a socket": "def f(sock):\n sock.settimeout(2)\n sock.recv(1)",
    "a connection": "def f(): socket.create_connection(('h', 1), timeout=2)",
    "a coroutine of this tree": "async def f(): await g()\nasync def g(): pass",
    "a stream of this tree": "async def f():\n s = g()\n async for x in s: pass\nasync def g(): yield 1",
    "inside a deadline": "async def f(x):\n async with asyncio.timeout(3): await x",
    "wait_for": "async def f(x): await asyncio.wait_for(x, 3)",
    "a call with a deadline": "async def f(stub, timeout_s): await stub.ask('x', timeout_s)",
    "a pause": "async def f(): await asyncio.sleep(1)",
    "cancelled tasks": "async def f(t):\n t.cancel()\n await asyncio.gather(t, return_exceptions=True)",
    "a function of this tree in a thread": "async def f(): await asyncio.to_thread(g)\ndef g(): pass",
    "a finished task": "async def f(t): return t.result()",
}


@pytest.mark.parametrize("source", UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_planted_wait_is_found(source: str) -> None:
    """Fault 20: a wait without a deadline, in any of the shapes in which one is written."""
    assert read({"planted.py": "import asyncio\n" + source}), source


@pytest.mark.parametrize("source", BOUNDED.values(), ids=BOUNDED.keys())
def test_bounded_wait_passes(source: str) -> None:
    """Fault: a check that cries wolf is switched off."""
    assert read({"fine.py": "import asyncio\n" + source}) == [], source


def test_reason_is_for_one_place_only() -> None:
    """Fault: one exception lets others pass; one whose wait is gone stays for the next that takes its name."""
    wait = Wait("a.py", 7, "A.f", "await x")
    assert faults([wait], {"a.py A.f await x": "because"}) == []
    assert faults([wait], {}) == ["a.py:7: A.f: await x has no deadline"]
    assert "matches nothing" in faults([wait], {"a.py A.f await x": "because", "a.py A.g await x": "because"})[0]


def test_this_tree() -> None:
    """Fault 20, in the product itself. (`make check` says the same.)"""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files()}
    assert len(sources) > 80
    assert faults(read(sources), ALLOWED) == []
