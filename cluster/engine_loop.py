"""The one thread that owns a group's engine: messages go in through a bounded inbox, one output per step comes out.

    gateways' streams ─┐                                   ┌─▶ tokens, to the gateway that submitted the sequence
    link threads ──────┴─▶ inbox ─▶ engine-loop (step) ────┴─▶ KV events, transfers, load, to all gateways

What a message does stands in `engine_driver.py`. The engine is touched by no other thread. An exception
in it ends the process: never "continue and hope".
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from kvferry.cluster import messages as m
from kvferry.cluster.engine_driver import EngineDriver, EngineLike, GatewayClosed, Sink
from kvferry.cluster.group import exit_process
from kvferry.runtime.transfer.ticket import LinkReport

MAX_INBOX = 16384
MAX_MESSAGES_PER_TURN = 1024
"""So that a flood of messages cannot hold up the steps."""
IDLE_S = 0.5
POST_TIMEOUT_S = 15.0

_log = structlog.get_logger(__name__)


class EngineLoop:
    """`post` and `report` are thread-safe; all else belongs to the loop's own thread, which also calls the sink.

    `on_rest`: called before it waits with nothing to do.
    """

    def __init__(
        self,
        engine: EngineLike,
        sink: Sink,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        max_inbox: int = MAX_INBOX,
        on_crash: Callable[[str], None] = exit_process,
        on_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver = EngineDriver(engine, sink.reply, sink.output, now_ns)
        self._sink = sink
        self._now_ns = now_ns
        self._on_crash = on_crash
        self._on_rest = on_rest
        self._inbox: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=max_inbox)
        self._stopping = False
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # ------------------------------------------------------------ from other threads
    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop at a step border. False: it did not come to one within `timeout_s`."""
        self._stopping = True
        with contextlib.suppress(queue.Full):
            self._inbox.put_nowait(("", m.Cancel(keys=[])))  # wakes an idle loop
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, gateway: str, message: m.ToGroup | GatewayClosed, timeout_s: float = 0.0) -> bool:
        """False: the inbox stayed full for `timeout_s`."""
        try:
            self._inbox.put((gateway, message), block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Full:
            return False
        return True

    def report(self, report: LinkReport) -> None:
        """From a link's thread: a report must not be lost, so an inbox that stays full ends the process."""
        try:
            self._inbox.put(("", report), timeout=POST_TIMEOUT_S)
        except queue.Full:
            self._on_crash(f"the engine has read nothing for {POST_TIMEOUT_S} s")

    def silent_s(self) -> float:
        """How long ago the engine's thread last came around."""
        return time.monotonic() - self._last_turn

    # ------------------------------------------------------------ the engine's thread
    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # noqa: BLE001  whatever it is, the process ends
            _log.exception("engine_failed")
            self._on_crash(f"engine: {type(error).__name__}: {error}")

    def _turn(self) -> None:
        self._last_turn = time.monotonic()
        self._read_inbox()
        now_ns = self._now_ns()
        if self._driver.due(now_ns):
            self._sink.output(self._driver.step(now_ns))

    def _read_inbox(self) -> None:
        """Reads what is there; waits for the first message when the engine has nothing else to do."""
        wait_s = self._driver.wait_s(self._now_ns(), IDLE_S)
        if wait_s > 0:
            self._on_rest()
        elif not self._inbox.queue:  # what comes just now is read before the next step
            return
        try:
            item = self._inbox.get(block=wait_s > 0, timeout=wait_s or None)
            for _ in range(MAX_MESSAGES_PER_TURN):
                self._driver.handle(*item)
                item = self._inbox.get_nowait()
            self._driver.handle(*item)
        except queue.Empty:
            return
