"""transformers' side: `generate` in a process of its own, so that memory and threads are not shared.

    bench ── {"prompts": [[…]], "max_new_tokens": n} ─▶ this process
    bench ◀── {"seconds": s, "token_ids": [[…]]} ────── one line of JSON each way

Run as a script it is that process; `Peer` starts it and talks to it. `fastest` gives it what suits this machine:
threads that spin at barriers are faster where nothing else runs, and several times slower where something does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 180.0, 300.0, 10.0
PROBE_TOKENS = 16


@dataclass(frozen=True)
class Generation:
    seconds: float
    token_ids: list[list[int]]
    """New tokens of each prompt."""

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


class Peer:
    """The process, seen from outside."""

    def __init__(self, model: str, threads: int, waiting: str | None) -> None:
        """`waiting`: OpenMP's wait policy; `None`: its default, which spins for a while."""
        self.waiting = waiting or "default"
        environment = {**os.environ, "TQDM_DISABLE": "1"} | ({"OMP_WAIT_POLICY": waiting} if waiting else {})
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"transformers did not answer within {timeout_s:g} s") from None
        if not line:
            raise RuntimeError(f"the transformers process ended with code {self.process.wait(STOP_TIMEOUT_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wait_loaded(self) -> None:
        self._answer(START_TIMEOUT_S)

    def generate(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Generation:
        """One greedy batch of prompts of equal length, regardless of end-of-sequence tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_new_tokens": max_new_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._answer(ANSWER_TIMEOUT_S)
        return Generation(answer["seconds"], answer["token_ids"])

    def stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # it ends at the end of its input
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def fastest(model: str, threads: int, prompts: Sequence[list[int]]) -> Iterator[Peer]:
    """The process with the wait policy that answers `prompts` sooner, warmed up."""
    peers: list[Peer] = []
    seconds: list[float] = []
    try:
        for waiting in (None, "passive"):
            peer = Peer(model, threads, waiting)
            peers.append(peer)
            peer.wait_loaded()
            peer.generate(prompts, 2)
            seconds.append(peer.generate(prompts, PROBE_TOKENS).seconds)
        best = peers.pop(seconds.index(min(seconds)))
        peers.pop().stop()
        peers.append(best)
        yield best
    finally:
        for peer in peers:
            peer.stop()


def load(model: str) -> Any:
    """In bfloat16. A GGUF file is read as transformers reads it (`from_pretrained` would want accelerate)."""
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils as gguf

    from kvferry.runtime.model.files import resolve_model

    files = resolve_model(model)
    llama: Any = transformers.LlamaForCausalLM  # transformers' own types are half there
    read: Any = gguf.load_gguf_checkpoint
    if files.kind != "gguf":
        return _endless(transformers.AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.bfloat16))
    config = transformers.LlamaConfig(**read(files.path)["config"])
    with torch.device("meta"):  # only its names count
        names = llama(config)
    state = read(files.path, return_tensors=True, model_to_load=names)["tensors"]
    decoder = llama(config).to(torch.bfloat16)
    missing, unexpected = decoder.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    decoder.tie_weights()
    return _endless(decoder)


def _endless(decoder: Any) -> Any:
    decoder.generation_config.eos_token_id = None
    decoder.generation_config.pad_token_id = 0
    return decoder.eval()


def generate(decoder: Any, prompts: list[list[int]], max_new_tokens: int) -> Generation:
    import torch

    ids = torch.tensor(prompts)
    begin = time.perf_counter()
    with torch.inference_mode():
        out = decoder.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    return Generation(time.perf_counter() - begin, out[:, ids.shape[1] :].tolist())


def main() -> None:
    import torch

    model, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed does not belong to the answers
    decoder = load(model)
    answers.write('{"loaded": true}\n')
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        result = generate(decoder, asked["prompts"], asked["max_new_tokens"])
        answers.write(json.dumps({"seconds": result.seconds, "token_ids": result.token_ids}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
