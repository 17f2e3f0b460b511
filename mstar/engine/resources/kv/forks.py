"""Copies of one stream into another, undone unless the step that asked for them commits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.storage import copy_pages
from mstar.engine.resources.kv.streams import Streams


@dataclass
class _PreFork:
    """``target`` already has its new pages; what it held before, still owned, is put back by an undo."""

    source_pages: np.ndarray
    target_pages: np.ndarray
    pages_before: np.ndarray
    len_before: int


@dataclass
class _PostFork:
    source: int
    pages: np.ndarray


class Forks:
    """Forks of steps that are admitted and not committed, by target stream.

    A target gets pages of its own, so that writing to it changes no other stream.  Pages are handed in by whoever
    admits; all hooks run on the step's thread.
    """

    def __init__(self, streams: Streams, arena: PageArena, cache: torch.Tensor) -> None:
        self._streams = streams
        self._arena = arena
        self._cache = cache
        self._pre: dict[int, _PreFork] = {}
        self._post: dict[int, _PostFork] = {}

    @property
    def is_empty(self) -> bool:
        return not self._pre and not self._post

    def begin(self, source: int, target: int, pages: np.ndarray) -> None:
        """Makes ``target`` as long as ``source`` on ``pages`` [pages of source's tokens]; :meth:`copy` fills them."""
        read = self._streams.page_table[source, : pages.size].copy()
        length, before = int(self._streams.stored_len[source]), int(self._streams.stored_len[target])
        self._pre[target] = _PreFork(read, pages, self._streams.take_out(target), before)
        self._streams.put_in(target, pages, length)

    def reserve(self, source: int, target: int, pages: np.ndarray) -> None:
        """Holds ``pages`` for the copy that :meth:`finish` makes once ``source`` has grown."""
        self._post[target] = _PostFork(source, pages)

    def copy(self, rows: np.ndarray) -> None:
        """Fills the pages of the begun forks of these master rows, in the order they were begun."""
        for target in self._of_rows(self._pre, rows):
            fork = self._pre[target]
            copy_pages(self._cache, fork.source_pages, fork.target_pages)

    def targets(self, rows: np.ndarray) -> np.ndarray:
        """The target streams of forks of these master rows, int64 [n]."""
        return np.array(self._of_rows(self._pre, rows) + self._of_rows(self._post, rows), np.int64)

    def finish(self, rows: np.ndarray) -> None:
        """Makes the begun forks of these rows final, then carries out the reserved ones in order."""
        for target in self._of_rows(self._pre, rows):
            self._arena.release(self._pre.pop(target).pages_before)
        for target in self._of_rows(self._post, rows):
            self._carry_out(target, self._post.pop(target))

    def undo(self, rows: np.ndarray) -> None:
        """Gives targets of these rows what they held before, and their new pages back."""
        for target in reversed(self._of_rows(self._pre, rows)):
            fork = self._pre.pop(target)
            self._arena.release(self._streams.take_out(target))
            self._streams.put_in(target, fork.pages_before, fork.len_before)
        for target in self._of_rows(self._post, rows):
            self._arena.release(self._post.pop(target).pages)

    def held_pages(self) -> list[np.ndarray]:
        """Pages owned here and by no stream."""
        return [fork.pages_before for fork in self._pre.values()] + [fork.pages for fork in self._post.values()]

    def _carry_out(self, target: int, fork: _PostFork) -> None:
        length = int(self._streams.stored_len[fork.source])
        used = self._streams.page_table[fork.source, : self._streams.pages_of(length)]
        self._arena.release(fork.pages[used.size :])
        pages = fork.pages[: used.size]
        copy_pages(self._cache, used, pages)
        self._arena.release(self._streams.take_out(target))
        self._streams.put_in(target, pages, length)

    def _of_rows(self, forks: dict[int, _PreFork] | dict[int, _PostFork], rows: np.ndarray) -> list[int]:
        wanted = set(rows.tolist())
        return [target for target in forks if target % self._streams.total_rows in wanted]
