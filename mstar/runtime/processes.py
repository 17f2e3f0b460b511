"""Other processes of this machine: whether the very same one still lives, and a descriptor that wakes at its end."""

from __future__ import annotations

import contextlib
import os
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
