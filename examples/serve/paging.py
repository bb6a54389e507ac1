# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Who has which page of the cache: requests share the pages of a common prefix.

A full page is known by the tokens in it and before it. A request that begins with known pages takes
them as they are; pages that no request has any more stay known until their room is needed, the one
that lay unused for longest first.
"""

from __future__ import annotations

from collections import OrderedDict


class NoPageError(Exception):
    """Every page belongs to a request that is running."""


class Pages:
    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.free = list(range(num_pages))
        self.users = [0] * num_pages
        self.known: dict[int, int] = {}  # prefix -> page
        self.prefix_of: dict[int, int] = {}  # page -> prefix
        self.prefixes: dict[
            tuple[int, tuple[int, ...]], int
        ] = {}  # (prefix before, tokens) -> prefix
        self.unused: OrderedDict[int, None] = OrderedDict()  # known pages that nobody has

    def prefix(self, before: int, tokens: list[int]) -> int:
        """The number of a prefix that ends with a full page: equal numbers, equal tokens."""
        return self.prefixes.setdefault((before, tuple(tokens)), len(self.prefixes) + 1)

    def shared(self, tokens: list[int], multiple: int = 1) -> list[int]:
        """The known pages that `tokens` begin with, now used once more; not the last token's.

        As many as hold a multiple of so many tokens.
        """
        found, before = [], 0
        for first in range(0, len(tokens) - self.page_size, self.page_size):
            before = self.prefix(before, tokens[first : first + self.page_size])
            if before not in self.known:
                break
            found.append(self.known[before])
        del found[len(found) * self.page_size // multiple * multiple // self.page_size :]
        for page in found:
            self.users[page] += 1
            self.unused.pop(page, None)
        return found

    def take(self) -> int:
        """A page for one request; a known one that nobody has is forgotten, if need be.

        Raises:
            NoPageError: there is none.
        """
        if not self.free and self.unused:
            page, _ = self.unused.popitem(last=False)
            del self.known[self.prefix_of.pop(page)]
            self.free.append(page)
        if not self.free:
            raise NoPageError
        page = self.free.pop()
        self.users[page] = 1
        return page

    def learn(self, tokens: list[int], pages: list[int], num_cached: int) -> None:
        """Makes the full pages of a request known, for those that come after it."""
        before = 0
        for index in range(num_cached // self.page_size):
            first = index * self.page_size
            before = self.prefix(before, tokens[first : first + self.page_size])
            if before not in self.known and pages[index] not in self.prefix_of:
                self.known[before] = pages[index]
                self.prefix_of[pages[index]] = before

    def release(self, pages: list[int]) -> None:
        """A request needs these no longer."""
        for page in reversed(pages):  # a prefix outlives what follows it
            self.users[page] -= 1
            if self.users[page] == 0:
                if page in self.prefix_of:
                    self.unused[page] = None
                else:
                    self.free.append(page)
