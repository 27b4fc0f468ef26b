"""Page accounting."""

import pytest

from dspark_ray.engine.kv_cache import PageAllocator


def test_pages_grow_to_hold_tokens_and_return_when_freed() -> None:
    allocator = PageAllocator(4, 16)
    pages: list[int] = []
    assert allocator.grow(pages, 17)
    assert len(pages) == 2
    assert allocator.num_free == 2
    assert allocator.grow(pages, 32)
    assert len(pages) == 2
    allocator.free(pages)
    assert (pages, allocator.num_free) == ([], 4)


def test_growing_past_the_pool_changes_nothing() -> None:
    allocator = PageAllocator(2, 16)
    first, second = [], []
    assert allocator.grow(first, 16)
    assert not allocator.grow(second, 17)
    assert second == []
    assert allocator.num_free == 1


def test_no_page_is_held_twice() -> None:
    allocator = PageAllocator(8, 4)
    held: list[list[int]] = [[], [], []]
    for pages in held:
        allocator.grow(pages, 8)
    flat = [page for pages in held for page in pages]
    assert len(set(flat)) == len(flat) == 6


def test_freeing_a_page_twice_is_caught() -> None:
    allocator = PageAllocator(2, 4)
    with pytest.raises(AssertionError, match="twice"):
        allocator.free([0])
