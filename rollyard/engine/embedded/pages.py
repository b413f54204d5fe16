"""Pages of the key-value cache (PURE): who holds which page, and which pages are shared.

A page holds the keys and values of `page_tokens` consecutive tokens of every layer. Sequences with a common beginning
share its pages; the first to write into a shared page gets a copy of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence, in order, and how many tokens were written into them."""

    pages: list[int] = field(default_factory=list)
    tokens: int = 0


class PagePool:
    """A fixed number of pages with reference counts. Low page numbers are given out first."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.size, self.page_tokens = pages, page_tokens
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self.touched = 0  # pages below this number were in use at some time; no other needs memory yet

    @property
    def available(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages `tokens` tokens take."""
        return -(-tokens // self.page_tokens)

    def missing(self, table: PageTable, tokens: int) -> int:
        """How many pages must be taken before `tokens` more can be written, copies of shared pages included."""
        new = self.pages_for(table.tokens + tokens) - len(table.pages)
        return max(new, 0) + self._shares_open_page(table)

    def extend(self, table: PageTable, tokens: int) -> list[tuple[int, int]]:
        """Give the table pages for `tokens` more tokens.

        Returns:
            (source, target) page copies to be made before anything is written; at most one.
        """
        copies = []
        if self._shares_open_page(table):
            index = table.tokens // self.page_tokens
            source, target = table.pages[index], self._take()
            self._holders[source] -= 1
            table.pages[index] = target
            copies.append((source, target))
        for _ in range(self.pages_for(table.tokens + tokens) - len(table.pages)):
            table.pages.append(self._take())
        return copies

    def fork(self, table: PageTable) -> PageTable:
        """A second holder of the same tokens. The pages are shared until one of the two writes."""
        shared = table.pages[: self.pages_for(table.tokens)]
        for page in shared:
            self._holders[page] += 1
        return PageTable(shared, table.tokens)

    def free(self, table: PageTable) -> None:
        """Give all pages of the table back; those with no other holder become available."""
        for page in table.pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
        table.pages, table.tokens = [], 0

    def _shares_open_page(self, table: PageTable) -> bool:
        """Would the next token go into a page with another holder?"""
        index, offset = divmod(table.tokens, self.page_tokens)
        return offset != 0 and self._holders[table.pages[index]] > 1

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        self.touched = max(self.touched, page + 1)
        return page
