"""Page accounting: who holds which pages of the K/V cache. Knows nothing of tensors or of what is in the pages."""

from collections import deque


class PageAllocator:
    """A free list of pages 0 .. num_pages - 1. Every page is free or held once; `free` of a free page is a bug."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Extend `pages` in place to hold num_tokens tokens; False (and no change) if too few pages are free."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            return False
        pages.extend(self._free.popleft() for _ in range(missing))
        return True

    def free(self, pages: list[int]) -> None:
        """Return all pages and empty the list."""
        self._free.extend(pages)
        pages.clear()
        assert len(self._free) <= self.num_pages, "a page was freed twice"
