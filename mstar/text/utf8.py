"""Bytes of a text as they come, whole characters out."""

from __future__ import annotations

from codecs import utf_8_decode

_MAX_ORPHANS = 3  # continuation bytes that a character begun before the text can still claim


class Utf8Reader:
    """Reads UTF-8 in any portions; a character is returned once its last byte is there.

    Bytes that are not UTF-8 become U+FFFD as the Unicode standard recommends (one per maximal ill-formed part), except
    that up to three continuation bytes at the very start are dropped: they end a character begun before the text.

    Attributes:
        num_orphans: bytes dropped at the start so far.
    """

    __slots__ = ("_at_start", "_pending", "num_orphans")

    def __init__(self) -> None:
        self._at_start = True
        self._pending = b""
        self.num_orphans = 0

    def read(self, data: bytes) -> str:
        """The characters that ``data`` completes."""
        if self._at_start:
            data = self._without_orphans(data)
        data = self._pending + data
        text, used = utf_8_decode(data, "replace")
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """End of the bytes, or of a run of them: U+FFFD for an unfinished character, else nothing."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        self._at_start = False
        return text

    def fork(self) -> Utf8Reader:
        """A second reader that goes on from the same point."""
        twin = object.__new__(Utf8Reader)
        twin._at_start = self._at_start
        twin._pending = self._pending
        twin.num_orphans = self.num_orphans
        return twin

    def _without_orphans(self, data: bytes) -> bytes:
        start = 0
        while start < len(data) and self.num_orphans < _MAX_ORPHANS and 0x80 <= data[start] < 0xC0:
            start += 1
            self.num_orphans += 1
        self._at_start = start == len(data)
        return data[start:]
