"""Ending what runs on the event loop."""

import asyncio
from typing import Any


async def cancel(*futures: asyncio.Future[Any]) -> None:
    """Cancel and wait until all have ended; what they raise is read elsewhere."""
    for each in futures:
        each.cancel()
    if futures:
        await asyncio.wait(futures)
