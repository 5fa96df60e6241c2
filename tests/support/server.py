"""`kvferry serve` in a process of its own, and the other commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

COMMAND = [sys.executable, "-m", "kvferry.cluster.cli"]
SMALL = ["--port", "0", "--threads", "1", "--num-blocks", "256", "--block-size", "8"]
START_TIMEOUT_S = 90
END_TIMEOUT_S = 10
CALL_TIMEOUT_S = 60


def kvferry(*arguments: str, timeout_s: float = CALL_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_s)


class Server:
    """`kvferry serve`, with its log in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("w") as stream:
            command = [*COMMAND, "serve", *arguments, "--log-json"]
            # Not what tests of this process have set for a Ray of their own.
            env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, env=env)

    def events(self) -> list[dict[str, str]]:
        lines = self._log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_for(self, event: str) -> dict[str, str]:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if found := [e for e in self.events() if e.get("event") == event]:
                return found[0]
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def wait_for_end(self, event: str) -> dict[str, str]:
        """Said by a server that has ended."""
        found = [e for e in self.events() if e.get("event") == event]
        assert found, self._log.read_text()
        return found[0]

    def wait_for_process(self, sign: str) -> None:
        """Until one of its processes is called so."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not any(sign in " ".join(process.cmdline()) for process in self.family()):
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def stop(self, number: signal.Signals) -> None:
        """All processes, Ray's too, must be gone in time."""
        family = self.family()
        begin = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(END_TIMEOUT_S)
        left = psutil.wait_procs(family, timeout=max(0.0, begin + END_TIMEOUT_S - time.monotonic()))[1]
        assert not left, f"still there after {END_TIMEOUT_S} s: {left}"
        assert code == 0
        assert "Traceback" not in self._log.read_text()

    def end(self) -> None:
        """After a failed test."""
        if self.process.poll() is None:
            for process in self.family()[::-1]:
                process.kill()
            self.process.wait()
