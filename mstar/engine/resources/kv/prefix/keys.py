"""Names of page contents: SHA-256 chains over token ids and the inputs that are no tokens."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

import numpy as np

_LENGTH = struct.Struct("<I")
_pack_length = _LENGTH.pack
_EMPTY_FIELD = _pack_length(0)


class PrefixItem(NamedTuple):
    """An input that is no token (an image, a sound) and stands for ``length`` tokens of the prompt from ``start``.

    ``digest`` identifies its content.
    """

    start: int
    length: int
    digest: bytes


class PageItem(NamedTuple):
    """The part of an item that one page holds: from page slot ``start``, the item's token ``offset`` onwards."""

    start: int
    offset: int
    length: int  # of the whole item
    digest: bytes


def fields_key(fields: Mapping[str, str | int | bytes]) -> bytes:
    """SHA-256 over named fields, 32 bytes.  Names and values carry their lengths: no two sets of fields coincide."""
    digest = sha256()
    for name, value in fields.items():
        raw = value if isinstance(value, bytes) else str(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), raw):
            digest.update(_pack_length(len(part)) + part)
    return digest.digest()


def prefix_root(
    *, checkpoint: str, config: str, layout: str, page_size: int, dtype: str, world_size: int, salt: str
) -> bytes:
    """What pages must have in common to be exchanged at all.

    ``checkpoint`` names the weights, ``config`` what else shapes keys and values (heads, layers, rope); ``salt`` is
    the cache's own.
    """
    return fields_key(
        {
            "checkpoint": checkpoint,
            "config": config,
            "layout": layout,
            "page_size": page_size,
            "dtype": dtype,
            "world_size": world_size,
            "cache_salt": salt,
        }
    )


@lru_cache(maxsize=256)
def chain_root(root: bytes, salt: str = "") -> bytes:
    """The key that the first page of a request with this ``salt`` follows."""
    return fields_key({"root": root, "request_salt": salt})


def page_key(prev: bytes, ids: np.ndarray, items: Sequence[PageItem] = ()) -> bytes:
    """The key of a full page after the page (or chain root) ``prev``: SHA-256, 32 bytes.

    Three fields, each behind its length in 4 bytes: ``prev``; ``ids`` [page_size] as 4-byte integers; the items.  All
    integers are little-endian.
    """
    return _page_key(prev, np.ascontiguousarray(ids, "<i4").tobytes(), _pack(items))


def page_keys(root: bytes, ids: np.ndarray, items: Sequence[PrefixItem], page_size: int) -> list[bytes]:
    """Keys of all full pages of ``ids`` [n], whose first page follows ``root``; ``items`` may reach past ``n``."""
    raw = np.ascontiguousarray(ids, "<i4").tobytes()
    return keys_of_raw(root, raw, len(ids) // page_size, items, page_size)


def keys_of_raw(
    prev: bytes, raw: bytes, num_pages: int, items: Sequence[PrefixItem], page_size: int, offset: int = 0
) -> list[bytes]:
    """:func:`page_keys` of ``num_pages`` pages after ``prev``, whose ids are ``raw`` from byte ``offset``."""
    width = 4 * page_size
    touched = _page_items(items, page_size) if items else {}
    keys = []
    for page in range(num_pages):
        packed = _pack(touched[page]) if page in touched else _EMPTY_FIELD
        prev = _page_key(prev, raw[offset : offset + width], packed)
        offset += width
        keys.append(prev)
    return keys


def next_keys(prevs: Sequence[bytes], raw: bytes, page_size: int) -> list[bytes]:
    """The key of one page after each of ``prevs``, whose ids lie in ``raw`` in the same order; no items."""
    width = 4 * page_size
    return [
        _page_key(prev, raw[offset : offset + width], _EMPTY_FIELD)
        for prev, offset in zip(prevs, range(0, len(raw), width), strict=True)
    ]


def _page_key(prev: bytes, ids: bytes, items: bytes) -> bytes:
    return sha256(b"".join((_pack_length(len(prev)), prev, _pack_length(len(ids)), ids, items))).digest()


def _pack(items: Sequence[PageItem]) -> bytes:
    """The items' field, behind its length."""
    if not items:
        return _EMPTY_FIELD
    packed = b"".join(
        struct.pack("<IIII", item.start, item.offset, item.length, len(item.digest)) + item.digest for item in items
    )
    return _pack_length(len(packed)) + packed


def _page_items(items: Sequence[PrefixItem], page_size: int) -> dict[int, list[PageItem]]:
    """Each page's part of the items that touch it."""
    pages: dict[int, list[PageItem]] = {}
    for item in sorted(items):
        for page in range(item.start // page_size, -(-(item.start + item.length) // page_size)):
            first = max(item.start, page * page_size)
            part = PageItem(first - page * page_size, first - item.start, item.length, item.digest)
            pages.setdefault(page, []).append(part)
    return pages
