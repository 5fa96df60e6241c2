"""Both tables of holders, in C++ and of dicts, against a plain dict of sets."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.cluster import holders
from kvferry.cluster.holders import LOOKUPS, DictTable, HolderTable, bits, longest_runs
from kvferry.cluster.native_holders import NativeTable
from kvferry.kernels.cpu.library import short_calls
from kvferry.runtime.errors import InvariantBroken
from kvferry.runtime.ids import BlockHash

pytestmark = pytest.mark.core

HASHES = [BlockHash(bytes([first]) * 8 + bytes(7) + bytes([last])) for first in (0, 1, 255) for last in range(6)]
"""Some that differ only in their last byte."""


def tables() -> list[HolderTable]:
    code = short_calls()
    return [DictTable()] if code is None else [DictTable(), NativeTable(code)]


def stored(table: HolderTable) -> dict[BlockHash, int]:
    return {h: holders for number in range(holders.NUM_SHARDS) for h, holders in table.shard(number).items()}


class DictMachine(RuleBasedStateMachine):
    """Faults guarded against: a bit given to a new holder while blocks of the old one are left, a removal that takes
    another holder's block along, blocks that nobody holds kept for ever."""

    make = staticmethod(lambda: tables()[0])

    def __init__(self) -> None:
        super().__init__()
        self.table = self.make()
        self.truth: dict[int, set[BlockHash]] = {}
        self.num_retired = 0

    blocks = st.lists(st.sampled_from(HASHES), max_size=20)

    def pick(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from(sorted(self.truth))) if self.truth else None

    @rule()
    def many_come_and_go(self) -> None:
        """Sets of more words."""
        for bit in [self.table.new_holder() for _ in range(70)]:
            self.table.retire(bit)

    @rule()
    def comes(self) -> None:
        bit = self.table.new_holder()
        assert bit.bit_count() == 1
        assert bit not in self.truth
        assert not set(self.table.held(bit)), "a newcomer holds what another held"
        self.truth[bit] = set()

    @rule(data=st.data())
    def goes(self, data: st.DataObject) -> None:
        if bit := self.pick(data):
            del self.truth[bit]
            self.table.retire(bit)
            self.num_retired += 1

    @rule(data=st.data(), hashes=blocks)
    def adds(self, data: st.DataObject, hashes: list[BlockHash]) -> None:
        if bit := self.pick(data):
            added = self.table.add(bit, hashes)
            assert len(added) == len(set(added))
            assert set(added) == set(hashes) - self.truth[bit]
            self.truth[bit] |= set(hashes)

    @rule(data=st.data(), hashes=blocks)
    def discards(self, data: st.DataObject, hashes: list[BlockHash]) -> None:
        if bit := self.pick(data):
            removed = self.table.discard(bit, hashes)
            assert len(removed) == len(set(removed))
            assert set(removed) == set(hashes) & self.truth[bit]
            self.truth[bit] -= set(hashes)
            assert self.table.missing(bit, HASHES) == [h for h in HASHES if h not in self.truth[bit]]

    @rule(budget=st.integers(1, 300))
    def sweeps(self, budget: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holders, "SWEPT_PER_CALL", budget)
            self.table.sweep()

    @invariant()
    def holds_the_truth(self) -> None:
        self.table.check_invariants()
        for bit, truth in self.truth.items():
            assert set(self.table.held(bit)) == truth

    def teardown(self) -> None:
        """Two whole rounds leave nothing of those that went, and their bits come again."""
        for _ in range(2 * holders.NUM_SHARDS + 2):
            self.table.sweep()
        assert len(stored(self.table)) == len(set().union(*self.truth.values()))
        assert self.table.new_holder() <= 1 << len(self.truth)


class NativeMachine(DictMachine):
    """Besides: a block lost where another that had pushed it aside goes, or where a shard grows or gets wider."""

    make = staticmethod(lambda: tables()[-1])


TestDict, TestNative = DictMachine.TestCase, NativeMachine.TestCase
TestDict.settings = TestNative.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_equal_sets_are_one_object() -> None:
    """Fault: an integer of its own for each block, which costs more than the rest of its entry."""
    table = DictTable()
    holders_of = [table.new_holder() for _ in range(70)]
    for bit in holders_of:
        table.add(bit, HASHES)
    assert len({id(found) for found in stored(table).values()}) == 1


@pytest.mark.parametrize("table", tables(), ids=lambda table: type(table).__name__)
def test_growth_keeps_all(table: HolderTable) -> None:
    """Thousands of blocks come, half of them go, others come: nothing lost, nothing left over."""
    truth = set[BlockHash]()
    bit = table.new_holder()
    for i in range(20_000):
        block_hash = BlockHash((i * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 2)
        table.add(bit, [block_hash])
        truth.add(block_hash)
        if i % 2:
            table.discard(bit, [block_hash])
            truth.remove(block_hash)
    assert set(table.held(bit)) == truth
    table.check_invariants()


@given(
    held=st.lists(st.lists(st.integers(0, 99), max_size=60), min_size=1, max_size=70),
    asked=st.lists(st.integers(0, 99), min_size=1, max_size=150),
)
@settings(max_examples=100, deadline=None)
def test_both_tables_answer_alike(held: list[list[int]], asked: list[int]) -> None:
    """Runs of one table are the other's, for prompts longer than one call looks at and more holders than a word has
    bits; so are the blocks that are missing."""
    names = [BlockHash(bytes([i // 10]) * 15 + bytes([i])) for i in range(100)]
    answers = []
    for table in tables():
        for numbers in held:
            table.add(table.new_holder(), [names[i] for i in numbers])
        prompt, sets = [names[i] for i in asked], list[int]()
        while len(sets) < len(prompt):
            for end, whose in table.runs(prompt, len(sets)):
                assert end > len(sets)
                sets += [whose] * (end - len(sets))
        assert sets == [sum(1 << j for j, numbers in enumerate(held) if i in numbers) for i in asked]
        answers.append((table.runs(prompt, 0), table.missing(1, prompt)))
        assert answers[0] == answers[-1]
        assert answers[-1][0][-1][0] <= LOOKUPS


@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 128, 140, 150]) | st.integers(0, 150), max_size=70),
    holes=st.sets(st.tuples(st.integers(0, 69), st.integers(0, 149)), max_size=5),
    gone=st.sets(st.integers(0, 69), max_size=5),
    num_asked=st.sampled_from([0, 1, 63, 64, 65, 128, 129, 150]),
)
@settings(max_examples=150, deadline=None)
def test_the_ever_fewer_holders_of_a_prompt(
    lengths: list[int], holes: set[tuple[int, int]], gone: set[int], num_asked: int
) -> None:
    """Faults: a holder that counts beyond its first gap or is dropped before it, where one call's part of a long prompt
    ends, or beyond a word of bits; one that is retired but not swept."""
    chain = [BlockHash(bytes([i]) * 16) for i in range(150)]
    for table in tables():
        depths = dict[int, int]()
        for number, length in enumerate(lengths):
            bit = table.new_holder()
            kept = [i for i in range(length) if (number, i) not in holes]
            table.add(bit, [chain[i] for i in kept])
            if number in gone:
                table.retire(bit)
            else:
                depths[bit] = next(i for i in range(num_asked + 1) if i == num_asked or i not in kept)
        levels = table.narrow(chain[:num_asked])
        assert levels == [
            (sum(b for b, d in depths.items() if d >= depth), depth) for depth in sorted(set(depths.values()))
        ]


def test_names_of_another_length_are_refused() -> None:
    """Fault: C++ reads beyond what it was given."""
    table = tables()[-1]
    if isinstance(table, NativeTable):
        with pytest.raises(InvariantBroken, match="2 block hashes of 31 bytes"):
            table.add(table.new_holder(), [HASHES[0], BlockHash(HASHES[1][1:])])


@given(sets=st.lists(st.integers(0, 7), max_size=12), num_window=st.integers(1, 14))
@settings(max_examples=300)
def test_longest_runs_are_those_of_every_length_tried(sets: list[int], num_window: int) -> None:
    naive = {}
    for bit in (1, 2, 4):
        ends = [n for n in range(1, len(sets) + 1) if all(s & bit for s in sets[max(0, n - num_window) : n])]
        naive |= {bit: ends[-1]} if ends else {}
    assert longest_runs(sets, num_window) == naive


def test_bits_are_lowest_first() -> None:
    assert list(bits(0b1011 << 70)) == [1 << 70, 1 << 71, 1 << 73]
