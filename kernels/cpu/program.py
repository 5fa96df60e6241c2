"""A step program: operations put down once, then run for every step by one native call.

Operations read and write numbered buffers, whose place and number of rows are the step's. What is computed is what the
single operations compute, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from kvferry.kernels.attention import Scoring
from kvferry.kernels.cpu.linear import Packed, PackedIntegers
from kvferry.kernels.cpu.operations import ACTIVATIONS, DTYPES
from kvferry.kernels.cpu.threads import program_threads
from kvferry.kernels.embedding import Embedding

NUM_BUFFERS, MAX_ATTENTIONS = 6, 8
"""As in `program.h`."""
_EMBED, _ADD_NORM, _QUANTIZE, _LINEAR, _GATED, _ROTATE, _ATTEND, _REDUCE, _ARGMAX, _SELECT = range(10)


class Exchange(ctypes.Structure):
    """`Exchange` of `program.h`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("published", "data")],
        *[(name, ctypes.c_int64) for name in ("rank", "size", "buffer_bytes", "timeout_ns", "seq", "late")],
    ]


class _Op(ctypes.Structure):
    """`Op` of `program.h`."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("kind", "x", "out", "delta", "in_width", "width", "wanted", "of_all")],
        *[(name, ctypes.c_int64) for name in ("packed", "activation", "form", "contexts", "angles")],
        *[(name, ctypes.c_void_p) for name in ("weight", "bias", "after", "q_norm", "k_norm", "cache", "exchange")],
        *[(name, ctypes.c_float) for name in ("eps", "scale", "softcap")],
    ]


class _Step(ctypes.Structure):
    """`Step` of `program.h`."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("num_wanted", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p * NUM_BUFFERS),
        ("contexts", ctypes.c_void_p * MAX_ATTENTIONS),
        ("angles", ctypes.c_void_p * MAX_ATTENTIONS),
        ("num_angles", ctypes.c_int64 * MAX_ATTENTIONS),
    ]


class Program:
    """Not safe for several threads. Keeps the weights that it reads."""

    def __init__(self, lib: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._lib, self._dtype = lib, DTYPES[dtype]
        self._ops: list[_Op] = []
        self._list = (_Op * 0)()
        self._step = _Step()
        self._largest, self._places = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
        self._kept: list[object] = []
        self._bound: tuple[torch.Tensor, ...] = ()
        self._finds = self._selected = False

    def embed(self, embedding: Embedding, out: int) -> None:
        """Rows for the step's tokens; those that the embedding does not have become NaN."""
        table = embedding.table
        if packed := isinstance(table, Packed):
            rows, memory = table.outputs, table.weight
        else:
            rows, memory = len(table), table.contiguous()
        sizes = {"in_width": rows, "width": embedding.width, "packed": packed}
        self._add(kind=_EMBED, out=out, **sizes, weight=self._pointer(memory), scale=embedding.scale)

    def add_norm(
        self, x: int, delta: int | None, weight: torch.Tensor, eps: float, out: int, *, of_all: bool = False
    ) -> None:
        """`out` = norm of x, after delta, if any, was added to x. of_all: x holds all rows, after `select` too."""
        self._add(
            kind=_ADD_NORM,
            of_all=of_all and self._selected,
            x=x,
            delta=-1 if delta is None else delta,
            out=out,
            width=len(weight),
            weight=self._pointer(weight),
            eps=eps,
        )

    def linear(
        self,
        x: int,
        packed: Packed | PackedIntegers,
        bias: torch.Tensor | None,
        out: int,
        steps: int,
    ) -> None:
        """steps: a buffer of int32 for rows that are quantised first."""
        form = -1
        if isinstance(packed, PackedIntegers):
            form = packed.form
            self._add(kind=_QUANTIZE, x=x, out=steps, in_width=packed.inputs, form=form)
            x = steps
        pointers = {"weight": self._pointer(packed.weight), "bias": self._pointer(bias)}
        sizes = {"in_width": packed.inputs, "width": packed.outputs, "form": form}
        self._add(kind=_LINEAR, x=x, out=out, **sizes, **pointers)

    def gated(self, x: int, width: int, activation: str, out: int) -> None:
        """`activation` is one of `operations.ACTIVATIONS`; width: of `out`, half of x's."""
        self._add(kind=_GATED, x=x, out=out, width=width, activation=ACTIVATIONS[activation])

    def attend(
        self,
        qkv: int,
        angles: int,
        scoring: Scoring,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        out: int,
        *,
        wanted: bool = False,
    ) -> int:
        """As `Contexts.attend`, with the step's angles of this number. Returns its place for `place`.

        wanted: `out` may lack rows that are not.
        """
        q_norm, k_norm = norms or (None, None)
        for kind in (_ROTATE, _ATTEND):
            self._add(
                kind=kind,
                x=qkv,
                out=out,
                angles=angles,
                of_all=wanted,
                q_norm=self._pointer(q_norm),
                k_norm=self._pointer(k_norm),
                eps=eps,
                scale=scoring.scale,
                softcap=scoring.softcap or 0.0,
            )
        return len(self._ops) - 2

    def reduce(self, x: int, width: int, exchange: Exchange) -> None:
        """Sums x over the ranks of the group. If one is late, the rest is left out and `exchange.late` set."""
        self._kept.append(exchange)
        self._add(kind=_REDUCE, x=x, width=width, exchange=ctypes.addressof(exchange))

    def select(self, x: int, width: int, out: int) -> None:
        """`out` = the step's wanted rows of x. From here on, all is done for these alone."""
        self._selected = True
        self._add(kind=_SELECT, x=x, out=out, width=width)

    def argmax(self, x: int, width: int) -> None:
        """What `run` returns, of x."""
        self._finds = True
        self._add(kind=_ARGMAX, x=x, width=width)

    def finish(self) -> None:
        """All operations are put down."""
        after = None
        for op in reversed(self._ops):
            if op.kind == _LINEAR:
                op.after, after = after, op.weight
        self._list = (_Op * len(self._ops))(*self._ops)

    def place(self, attention: int, contexts: int, cache: int) -> None:
        """An attention's number of contexts in a step, and the address of its layer of block 0."""
        for op in self._list[attention], self._list[attention + 1]:
            op.contexts, op.cache = contexts, cache

    def bind(
        self,
        token_ids: torch.Tensor,
        wanted: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        contexts: Sequence[int],
        angles: Sequence[torch.Tensor],
    ) -> None:
        """What the next runs read and write. Buffers and contexts must be kept by the caller.

        token_ids, wanted: contiguous int64. Buffers hold as many rows of whatever operations put there.
        contexts: addresses (`Contexts.address`); angles: by position, as `Contexts.attend` takes them.
        """
        self._bound = (token_ids, wanted, *angles)
        step = self._step
        step.rows, step.num_wanted = len(token_ids), len(wanted)
        step.token_ids, step.wanted = token_ids.data_ptr(), wanted.data_ptr()
        for i, buffer in enumerate(buffers):
            step.buffers[i] = buffer.data_ptr()
        for i, address in enumerate(contexts):
            step.contexts[i] = address
        for i, angle in enumerate(angles):
            step.angles[i], step.num_angles[i] = angle.data_ptr(), angle.shape[1]
        self._largest = np.empty(len(wanted), dtype=np.float32)
        self._places = np.empty(len(wanted), dtype=np.int64)
        step.largest, step.places = self._largest.ctypes.data, self._places.ctypes.data

    def run(self) -> tuple[list[float], list[int]] | None:
        """Returns what `kernels.sampling.argmax` would, if there is an operation for it."""
        threads = program_threads(torch.get_num_threads())
        self._lib.kvferry_run(self._list, len(self._list), ctypes.byref(self._step), self._dtype, threads)
        return (self._largest.tolist(), self._places.tolist()) if self._finds else None

    def _add(self, **fields: float | None) -> None:
        self._ops.append(_Op(wanted=self._selected, **fields))

    def _pointer(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()
