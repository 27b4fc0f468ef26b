"""Merging keeps order within a source, ends on time, and always closes every source."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deployments.streams import merge, with_first


class Source:
    """Counts up, one number every `seconds`; remembers that it was closed."""

    def __init__(self, count: int, seconds: float = 0.0, fails: bool = False) -> None:
        self.count, self.seconds, self.fails, self.closed = count, seconds, fails, False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.count):
                await asyncio.sleep(self.seconds)
                yield number
            if self.fails:
                raise ValueError("broken")
        finally:
            self.closed = True


def test_all_items_come_in_order_within_each_source() -> None:
    async def main() -> list[tuple[int, int]]:
        return [item async for item in merge([Source(5).items(), Source(3, 0.001).items()], 10)]

    items = asyncio.run(main())
    assert [value for index, value in items if index == 0] == [0, 1, 2, 3, 4]
    assert [value for index, value in items if index == 1] == [0, 1, 2]


def test_one_failure_ends_all_and_closes_the_others() -> None:
    slow, broken = Source(1000, 0.01), Source(1, fails=True)

    async def main() -> None:
        async for _ in merge([slow.items(), broken.items()], 10):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())
    assert slow.closed


def test_the_deadline_raises_and_closes() -> None:
    slow = Source(1000, 0.01)

    async def main() -> None:
        async for _ in merge([slow.items()], 0.1):
            pass

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert slow.closed


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_consumer_that_leaves_closes_every_source(how: str) -> None:
    sources = [Source(1000, 0.005), Source(1000, 0.005)]

    async def read() -> None:
        events = merge([source.items() for source in sources], 10)
        async with aclosing(with_first(await anext(events), events)) as rest:
            async for _ in rest:
                if how == "closed":
                    return

    async def main() -> None:
        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert all(source.closed for source in sources)

    asyncio.run(main())
