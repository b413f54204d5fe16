"""The page pool: sharing, copy-on-write, and that no page is ever lost."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rollyard.engine.embedded.pages import PagePool, PageTable


def test_a_table_takes_pages_as_it_grows() -> None:
    pool, table = PagePool(4, 3), PageTable()
    assert pool.missing(table, 4) == 2
    assert pool.extend(table, 4) == []
    table.tokens += 4
    assert table.pages == [0, 1] and pool.available == 2 and pool.touched == 2
    assert pool.missing(table, 2) == 0 and pool.missing(table, 3) == 1
    pool.free(table)
    assert pool.available == 4 and table.pages == [] and table.tokens == 0


def test_the_first_to_write_into_a_shared_page_gets_a_copy() -> None:
    pool, first = PagePool(4, 3), PageTable()
    pool.extend(first, 4)
    first.tokens = 4
    second = pool.fork(first)
    assert pool.available == 2 and pool.missing(second, 1) == 1
    assert pool.extend(second, 1) == [(1, 2)]
    assert second.pages == [0, 2] and first.pages == [0, 1]
    assert pool.missing(first, 1) == 0 and pool.extend(first, 1) == []  # alone on its page again: no copy
    pool.free(first)
    assert pool.available == 2  # page 1 is back; page 0 has another holder
    pool.free(second)
    assert pool.available == 4


def test_full_pages_are_shared_without_a_copy() -> None:
    pool, first = PagePool(4, 3), PageTable()
    pool.extend(first, 3)
    first.tokens = 3
    second = pool.fork(first)
    assert pool.missing(second, 1) == 1 and pool.extend(second, 1) == []
    assert second.pages == [0, 1]


@given(st.integers(1, 50), st.integers(1, 9))
def test_pages_for_is_the_rounded_up_quotient(tokens: int, page_tokens: int) -> None:
    pages = PagePool(1, page_tokens).pages_for(tokens)
    assert (pages - 1) * page_tokens < tokens <= pages * page_tokens


class Memory(RuleBasedStateMachine):
    """Writes real tokens through the tables into pages, and compares with what each sequence should read."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, 3)
        self.memory: dict[tuple[int, int], int] = {}
        self.expected: list[tuple[PageTable, list[int]]] = []
        self.clock = 0

    @rule(target=tables)
    def new(self) -> tuple[PageTable, list[int]]:
        entry = (PageTable(), [])
        self.expected.append(entry)
        return entry

    @rule(entry=tables, count=st.integers(1, 5))
    def write(self, entry: tuple[PageTable, list[int]], count: int) -> None:
        table, tokens = entry
        missing = self.pool.missing(table, count)
        if missing > self.pool.available:
            return
        before = self.pool.available
        for source, target in self.pool.extend(table, count):
            for offset in range(3):
                if (source, offset) in self.memory:
                    self.memory[target, offset] = self.memory[source, offset]
        assert before - self.pool.available == missing
        for _ in range(count):
            self.clock += 1
            self.memory[table.pages[table.tokens // 3], table.tokens % 3] = self.clock
            tokens.append(self.clock)
            table.tokens += 1

    @rule(target=tables, entry=tables)
    def fork(self, entry: tuple[PageTable, list[int]]) -> tuple[PageTable, list[int]]:
        forked = (self.pool.fork(entry[0]), list(entry[1]))
        self.expected.append(forked)
        return forked

    @rule(entry=consumes(tables))
    def free(self, entry: tuple[PageTable, list[int]]) -> None:
        self.pool.free(entry[0])
        self.expected = [other for other in self.expected if other[0] is not entry[0]]

    @invariant()
    def everybody_reads_what_it_wrote(self) -> None:
        for table, tokens in self.expected:
            assert [self.memory[table.pages[at // 3], at % 3] for at in range(table.tokens)] == tokens

    @invariant()
    def no_page_is_lost(self) -> None:
        held = {page for table, _ in self.expected for page in table.pages}
        assert self.pool.available == 12 - len(held)


TestMemory = Memory.TestCase
