"""A progress bar on stderr: rich's, or a line per step if rich is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], description: str) -> Iterator[T]:
    """Iterate over `items`, showing how far the loop has come."""
    try:
        from rich.console import Console
        from rich.progress import track as rich_track
    except ImportError:
        for index, item in enumerate(items, start=1):
            print(f"{description}: {index}/{len(items)}", file=sys.stderr, flush=True)
            yield item
        return
    yield from rich_track(items, description=description, console=Console(stderr=True))
