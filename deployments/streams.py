"""Several streams as one, in order of arrival and with a deadline. Knows nothing of what is streamed."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    index: int
    value: T


async def merge(
    sources: Sequence[AsyncGenerator[T, None]], timeout_seconds: float
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield `(index of the source, item)` as items come. The first error of any source ends all.

    Raises TimeoutError `timeout_seconds` after the start. However it ends (also if the consumer is cancelled or goes
    away), every source is closed.
    """
    queue: asyncio.Queue[_Item[T] | _End] = asyncio.Queue()
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    pumps = [asyncio.create_task(_pump(index, source, queue)) for index, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            async with asyncio.timeout_at(deadline):
                item = await queue.get()
            if isinstance(item, _Item):
                yield item.index, item.value
                continue
            if item.error is not None:
                raise item.error
            running -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, source: AsyncGenerator[T, None], queue: "asyncio.Queue[_Item[T] | _End]") -> None:
    try:
        async with aclosing(source):
            async for value in source:
                queue.put_nowait(_Item(index, value))
    except Exception as error:
        queue.put_nowait(_End(error))
    else:
        queue.put_nowait(_End())


async def with_first(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """`first`, then the rest; closes the rest."""
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item
