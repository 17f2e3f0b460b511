"""One child process and what it leaves behind, watched with signals and stopped by pid."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
WATCHED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})


class WatchedProcess:
    """A child in a session of its own, whose orphans come to us.

    The watched signals are blocked for as long as this object lives and are read with ``wait_signal``, so that the
    watcher needs no handlers: it sleeps until a signal, the child's end, or a timeout. If we are killed, the kernel
    sends SIGTERM to the child. To be used from the main thread, one at a time.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, exit codes would be lost
        parent = os.getpid()

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED_SIGNALS)
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:  # we died before the line above
                os._exit(1)

        self.returncode: int | None = None
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=in_child,
            )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
            raise
        self.pid = self._process.pid

    def wait_signal(self, timeout_s: float) -> int | None:
        """Wait for SIGINT or SIGTERM to us; None after ``timeout_s`` or as soon as the child has ended."""
        deadline = time.monotonic() + timeout_s
        while not self.has_ended():
            left = deadline - time.monotonic()
            info = signal.sigtimedwait(WATCHED_SIGNALS, max(left, 0.0))
            if info is not None and info.si_signo != signal.SIGCHLD:
                return info.si_signo
            if left <= 0:
                break
        return None

    def has_ended(self) -> bool:
        """Reap what has ended; ``returncode`` is set once the child itself has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self.pid:
                self.returncode = self._process.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode is not None

    def send(self, number: int) -> None:
        """Send a signal to the child, if it is still there (it is ours to reap, so its pid is its own)."""
        if not self.has_ended():
            os.kill(self.pid, number)

    def clear_orphans(self, patience_s: float) -> list[int]:
        """Wait for the child's own children to end, then kill those that did not; returns the pids killed."""
        deadline = time.monotonic() + patience_s
        killed: list[int] = []
        while True:
            self.has_ended()
            orphans = [pid for pid in child_pids() if pid != self.pid]
            if not orphans:
                return killed
            if time.monotonic() >= deadline + 5.0:  # killed and still there: stuck in the kernel
                return killed
            if time.monotonic() >= deadline:
                for pid in orphans:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
            time.sleep(0.05)

    def close(self) -> None:
        """Kill the child if it still runs, clear what it leaves, and give the signals back."""
        self.send(signal.SIGKILL)
        while not self.has_ended():
            time.sleep(0.02)
        self.clear_orphans(0.0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)


def child_pids(parent: int | None = None) -> list[int]:
    """Pids of the direct children of ``parent`` (default: this process), without zombies."""
    parent = os.getpid() if parent is None else parent
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(ppid) == parent and state not in "ZX":
                    found.append(int(entry.name))
    return found
