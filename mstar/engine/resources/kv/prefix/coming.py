"""Pages that are not in the prefix index yet, but will be: those of prompts that are being computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Coming(NamedTuple):
    """Pages that a prompt lacks and another stream, of master row ``row``, is about to bring: how many, and the key of
    the last one."""

    row: int
    num_pages: int
    key: bytes


class ComingPages:
    """For each key of a prompt's page that a live stream is yet to offer to the index, the first such stream."""

    def __init__(self) -> None:
        self._stream_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._stream_of)

    def begin(self, stream: int, keys: Iterable[bytes]) -> None:
        """A stream is going to have pages of these keys."""
        for key in keys:
            self._stream_of.setdefault(key, stream)

    def offered(self, keys: Iterable[bytes]) -> None:
        """Pages of these keys are in the index."""
        for key in keys:
            self._stream_of.pop(key, None)

    def end(self, stream: int, keys: Iterable[bytes]) -> None:
        """A stream is not going to have pages of these keys."""
        for key in keys:
            if self._stream_of.get(key) == stream:
                del self._stream_of[key]

    def stream_of(self, key: bytes) -> int | None:
        """Who brings the page of this key."""
        return self._stream_of.get(key)

    def run(self, keys: Sequence[bytes], first: int, but: int) -> Coming | None:
        """Pages from ``keys[first]`` on that one stream brings, and which; None where it is none, or stream ``but``."""
        stream = self._stream_of.get(keys[first]) if first < len(keys) else None
        if stream is None or stream == but:
            return None
        end = first + 1
        while end < len(keys) and self._stream_of.get(keys[end]) == stream:
            end += 1
        return Coming(stream, end - first, keys[end - 1])
