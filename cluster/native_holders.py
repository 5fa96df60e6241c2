"""The table of holders in C++ (`kernels/cpu/holders.cpp`): all blocks of a prompt are looked up by one call, which asks
the memory for many of them before it waits for the first."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from itertools import compress

from kvferry.cluster.holders import LOOKUPS, DictTable, HolderTable
from kvferry.kernels.cpu.library import short_calls
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash
from kvferry.runtime.kv.hashing import HASH_BYTES

_WORD = 64


def holder_table() -> HolderTable:
    """In C++, or of dicts where that is not compiled."""
    code = short_calls()
    return DictTable() if code is None else NativeTable(code)


class NativeTable(HolderTable):
    """`code`: of `short_calls`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        super().__init__()
        self._code = code
        self._table = code.kvferry_holders_new()
        if not self._table:
            raise MemoryError("no memory for a table of holders")
        weakref.finalize(self, code.kvferry_holders_free, self._table)
        self._num_words = 0
        self._widen()

    def new_holder(self) -> int:
        bit = super().new_holder()
        if bit >> _WORD * self._num_words:
            self._widen()
        return bit

    def _widen(self) -> None:
        """Sets of one word more."""
        self._num_words += 1
        self._ends = (ctypes.c_int64 * LOOKUPS)()
        self._sets = (ctypes.c_uint64 * (LOOKUPS * self._num_words))()
        self._levels = (ctypes.c_uint64 * ((LOOKUPS + 2) * (1 + self._num_words)))()
        self._ends_at, self._sets_at = ctypes.addressof(self._ends), ctypes.addressof(self._sets)
        self._levels_at = ctypes.addressof(self._levels)

    def add(self, bit: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        return self._put(bit, True, hashes)

    def discard(self, bit: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        return self._put(bit, False, hashes)

    def _put(self, bit: int, held: bool, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        num, names = len(hashes), _joined(hashes)
        changed = ctypes.create_string_buffer(num)
        num_changed = self._code.kvferry_holders_put(self._table, bit.bit_length() - 1, held, names, num, changed)
        if num_changed < 0:
            raise MemoryError(f"no memory for {num} more blocks in the table of holders")
        return list(hashes) if num_changed == num else list(compress(hashes, changed.raw))

    def runs(self, hashes: Sequence[BlockHash], begin: int) -> list[tuple[int, int]]:
        part = hashes[begin : begin + LOOKUPS] if begin or len(hashes) > LOOKUPS else hashes
        num, words = len(part), self._num_words
        num_runs = self._code.kvferry_holders_runs(
            self._table, _joined(part), num, begin, words, self._ends_at, self._sets_at
        )
        sets = self._sets[:num_runs]
        for word in range(1, words):
            more = self._sets[word * num : word * num + num_runs]
            sets = [low | high << _WORD * word for low, high in zip(sets, more, strict=True)]
        return list(zip(self._ends[:num_runs], sets, strict=True))

    def narrow(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        left, found, begin, words = self.live, list[tuple[int, int]](), 0, self._num_words
        while True:
            part = hashes[begin : begin + LOOKUPS] if len(hashes) > LOOKUPS else hashes
            live = left.to_bytes(words * _WORD // 8, "little")
            num = self._code.kvferry_holders_narrow(self._table, _joined(part), len(part), live, words, self._levels_at)
            flat = self._levels[: num * (1 + words)]
            for i in range(0, len(flat), 1 + words):
                left = flat[i + 1]
                for word in range(1, words):
                    left |= flat[i + 1 + word] << _WORD * word
                found.append((left, begin + flat[i]))
            begin += len(part)
            if begin == len(hashes) or not found or found[-1][1] < begin:
                return found
            found.pop()

    def shard(self, number: int) -> dict[BlockHash, int]:
        names, found = self._names(number, -1), dict[BlockHash, int]()
        while len(found) < len(names):
            for end, holders in self.runs(names, len(found)):
                found |= dict.fromkeys(names[len(found) : end], holders)
        return found

    def _held_in(self, number: int, bit: int) -> list[BlockHash]:
        return self._names(number, bit.bit_length() - 1)

    def _sweep_shard(self, number: int, gone: int) -> int:
        num_seen: int = self._code.kvferry_holders_sweep(
            self._table, number, gone.to_bytes(self._num_words * _WORD // 8, "little")
        )
        if num_seen < 0:
            raise MemoryError("no memory to sweep the table of holders")
        return num_seen

    def _names(self, number: int, holder: int) -> list[BlockHash]:
        """`holder`: the bit's number; -1: of all."""
        num = self._code.kvferry_holders_names(self._table, number, holder, None)
        names = ctypes.create_string_buffer(HASH_BYTES * num)
        self._code.kvferry_holders_names(self._table, number, holder, names)
        joined = names.raw
        return [BlockHash(joined[i : i + HASH_BYTES]) for i in range(0, len(joined), HASH_BYTES)]


def _joined(hashes: Sequence[BlockHash]) -> bytes:
    names = b"".join(hashes)
    if len(names) != HASH_BYTES * len(hashes):
        raise InvariantBroken(f"{len(hashes)} block hashes of {len(names)} bytes: each has {HASH_BYTES}")
    return names
