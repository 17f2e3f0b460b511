"""Where one text begins inside another."""

from __future__ import annotations


def beginning_length(text: str, whole: str) -> int:
    """Length of the longest end of ``text`` with which ``whole`` begins (and is not complete)."""
    start = text.find(whole[0], max(0, len(text) - len(whole) + 1))
    while start >= 0:
        if whole.startswith(text[start:]):
            return len(text) - start
        start = text.find(whole[0], start + 1)
    return 0


def common_length(one: str, other: str) -> int:
    """Number of characters with which both begin."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
