"""Tables in plain text, for machines and logs without a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``title`` over right-aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (headings, *rows)]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:]])
