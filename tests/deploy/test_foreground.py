"""Ctrl-C on a terminal reaches the command alone; ``make`` ends as the command does."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "build" / "foreground.py"
COMMAND = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit({code}))
print("waiting", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("code", [0, 3])
def test_interrupted_make_ends_with_the_code_of_its_command(tmp_path: Path, code: int) -> None:
    (tmp_path / "command.py").write_text(COMMAND.format(code=code))
    (tmp_path / "Makefile").write_text(f"serve:\n\t@exec {sys.executable} {SCRIPT} {sys.executable} command.py\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvp("make", ["make", "serve"])
    read_until(terminal, b"waiting")
    os.write(terminal, b"\x03")
    read_until(terminal, None)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == (0 if code == 0 else 2)  # make's own code for a failed command


def read_until(terminal: int, mark: bytes | None, limit_s: float = 30.0) -> None:
    """Read a terminal until ``mark`` came, or until its other side is closed if there is none."""
    seen = b""
    deadline = time.monotonic() + limit_s
    while mark is None or mark not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                data = os.read(terminal, 4096)
            except OSError:  # how Linux reports a terminal that nobody has open any more
                data = b""
            if not data:
                assert mark is None, seen
                return
            seen += data
