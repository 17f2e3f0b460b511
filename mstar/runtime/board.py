"""A page of counters that an engine writes and everybody beside it reads without asking."""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum
from pathlib import Path
from typing import Self

import numpy as np

SLOTS = 64


class EngineState(IntEnum):
    """How far an engine is in its life."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    EXITED = 3


class Slot(IntEnum):
    """Where each counter lies; new ones are added at the end."""

    BEAT_NS = 0
    STATE = 1
    RUNNING = 2
    QUEUED = 3
    QUEUED_TOKENS = 4
    STEPS = 5
    KV_PAGES_USED = 6
    KV_PAGES_TOTAL = 7
    GENERATED_TOKENS = 8
    PROMPT_TOKENS = 9
    ROW_FAULTS = 10
    OVERSHOOT_TOKENS = 11
    PREFILL_STEPS = 12
    FINISHED_STOP = 13
    FINISHED_LENGTH = 14
    FINISHED_CANCELLED = 15
    FAILED = 16
    REFUSED = 17
    DISCARDED_TOKENS = 18
    CACHED_PROMPT_TOKENS = 19
    FINISHED_TIMEOUT = 20
    EXPIRED = 21
    CONSTRAINT_FAULTS = 22


class Board:
    """int64 counters in a mapped file: one writer (the engine), many readers; each counter is one aligned word."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values  # int64 [SLOTS]

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new page of zeros.  A reader never sees a short file: it appears by renaming."""
        temporary = path.with_suffix(".new")
        temporary.write_bytes(bytes(SLOTS * 8))
        os.replace(temporary, path)
        return cls._map(path, writable=True)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The page another process writes; FileNotFoundError before it exists."""
        return cls._map(path, writable=False)

    @classmethod
    def in_memory(cls) -> Self:
        """A page of this process alone."""
        return cls(np.zeros(SLOTS, dtype=np.int64))

    @classmethod
    def _map(cls, path: Path, writable: bool) -> Self:
        with path.open("r+b" if writable else "rb") as file:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return cls(np.frombuffer(mmap.mmap(file.fileno(), SLOTS * 8, access=access), dtype=np.int64))

    def __getitem__(self, slot: Slot) -> int:
        return int(self.values[slot])

    def __setitem__(self, slot: Slot, value: int) -> None:
        self.values[slot] = value

    def beat(self) -> None:
        """Says that the engine process runs; from a thread of its own, so that no step delays it."""
        self.values[Slot.BEAT_NS] = time.monotonic_ns()

    @property
    def state(self) -> EngineState:
        return EngineState(self[Slot.STATE])

    @property
    def is_draining(self) -> bool:
        return self[Slot.STATE] >= EngineState.DRAINING

    @property
    def running(self) -> int:
        return self[Slot.RUNNING]

    @property
    def queued(self) -> int:
        return self[Slot.QUEUED]

    @property
    def queued_tokens(self) -> int:
        return self[Slot.QUEUED_TOKENS]


class StaleCheck:
    """Tells a beat that stopped from a reader that was itself stopped.

    The age counts in the reader's own time since it saw the beat move, and only after it looked ``min_looks``
    times: a frozen machine that thaws does not take its engine for dead.
    """

    def __init__(self, limit_s: float = 5.0, min_looks: int = 10) -> None:
        self._limit_s = limit_s
        self._min_looks = min_looks
        self._last = -1
        self._since = time.monotonic()
        self._looks = 0

    def is_stale(self, beat: int) -> bool:
        """Call it regularly with the current value of ``BEAT_NS``."""
        if beat != self._last:
            self._last, self._since, self._looks = beat, time.monotonic(), 0
            return False
        self._looks += 1
        return self._looks >= self._min_looks and time.monotonic() - self._since > self._limit_s
