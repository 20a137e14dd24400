"""A refcounted block pool in plain Python, as a serving engine's host code would write it: what kvjax is compared with.

Free blocks in a deque, a list of blocks for each row, a list of refcounts; decisions row by row.  One stream, so that a
block may be used again as soon as it is free.  `tests/pages/test_python_pool.py` holds it to the same plain model as
the page table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BlockPool:
    """Who owns which block.

    Args:
      num_pages: blocks in the pool.
      page_size: token positions a block.
      rows: sequences that can be live at once.
    """

    def __init__(self, num_pages: int, page_size: int, rows: int) -> None:
        self.page_size = page_size
        self.free = deque(range(num_pages))
        self.refcount = [0] * num_pages
        self.blocks: list[list[int]] = [[] for _ in range(rows)]
        self.length = [0] * rows

    def reserve(self, tokens: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Maps blocks for the next tokens[row] positions; (tokens granted a row, blocks to copy as (source, target)).

        A partly filled tail that others hold is replaced by a block of the row's own.  After the first row that does
        not fit, every row that needs a block is refused.
        """
        size, free, refcount, all_blocks, length = self.page_size, self.free, self.refcount, self.blocks, self.length
        granted, copies, stopped = [0] * len(tokens), [], False
        for row, wanted in enumerate(tokens):
            if not wanted:
                continue
            blocks, start = all_blocks[row], length[row]
            tail, have = start // size, len(blocks)
            fresh = (start + wanted + size - 1) // size - have
            shared = tail < have and refcount[blocks[tail]] > 1
            if fresh > 0 or shared:
                if stopped or max(fresh, 0) + shared > len(free):
                    stopped = True
                    continue
                if shared:
                    source, target = blocks[tail], free.popleft()
                    refcount[source] -= 1
                    refcount[target] = 1
                    blocks[tail] = target
                    copies.append((source, target))
                for _ in range(fresh):
                    block = free.popleft()
                    refcount[block] = 1
                    blocks.append(block)
            granted[row] = wanted
        return granted, copies

    def commit(self, tokens: Sequence[int]) -> None:
        """Lengthens each row by its computed tokens, which were granted before."""
        self.length = [have + new for have, new in zip(self.length, tokens, strict=True)]

    def fork(self, parent: Sequence[int]) -> None:
        """Each empty row with a parent in range shares its committed blocks."""
        rows, refcount = len(self.length), self.refcount
        for child, source in enumerate(parent):
            if 0 <= source < rows:
                length = self.length[source]
                blocks = self.blocks[source][: (length + self.page_size - 1) // self.page_size]
                for block in blocks:
                    refcount[block] += 1
                self.blocks[child] = blocks
                self.length[child] = length

    def truncate(self, length: Sequence[int]) -> None:
        """Rewinds rows to at most their length, and gives back what lies beyond."""
        size = self.page_size
        for row, kept in enumerate(length):
            blocks, keep = self.blocks[row], (kept + size - 1) // size
            if keep < len(blocks):
                self._drop(blocks[keep:])
                del blocks[keep:]
            self.length[row] = kept

    def release(self, rows: Sequence[bool]) -> None:
        """Empties rows."""
        for row, gone in enumerate(rows):
            if gone:
                self._drop(self.blocks[row])
                self.blocks[row] = []
                self.length[row] = 0

    def _drop(self, blocks: list[int]) -> None:
        refcount, free = self.refcount, self.free
        for block in blocks:
            left = refcount[block] - 1
            refcount[block] = left
            if not left:
                free.append(block)
