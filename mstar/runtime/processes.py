"""Processes of this machine: whether the very same one still lives, what wakes at its end, how much they work."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

ZOMBIE_STATES = frozenset("ZXx")


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone or a zombie.

    Pid and start together name one process for ever; a pid alone is used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets
    return None if fields[0] in ZOMBIE_STATES else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Whether the process that started at ``started`` is still there."""
    return start_ticks(pid) == started


class ExitWatch:
    """Becomes readable (``fd``) when the process ends, where the kernel has pidfds; :meth:`has_ended` always works."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self.started = started
        self.fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.fd = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        return not is_alive(self.pid, self.started)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def children_seconds() -> float:
    """CPU seconds of all processes that this one has started, and of theirs; compilers, that is."""
    times = os.times()
    living = sum(_ticks_of(pid) for pid in _descendants(os.getpid()))
    return times.children_user + times.children_system + living / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process's threads, and of all processes that it has started."""
    return time.process_time() + children_seconds()


def _descendants(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                yield child
                yield from _descendants(child)


def _ticks_of(pid: int) -> int:
    """Clock ticks of a living process, and of children that it has seen end."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return sum(map(int, stat[stat.rindex(")") + 2 :].split()[11:15]))
