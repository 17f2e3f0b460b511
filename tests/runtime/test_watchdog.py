"""A step that hangs ends its process."""

import subprocess
import sys

from mstar.runtime.watchdog import STALLED_EXIT_CODE

HANGING = """
import time
from mstar.runtime.board import Board
from mstar.runtime.watchdog import Watchdog
dog = Watchdog(Board.in_memory(), limit_s=0.3)
dog.start()
dog.step_begins(); time.sleep({first}); dog.step_ends()
time.sleep(0.8)  # idle is no hang
dog.step_begins(); time.sleep({second}); dog.step_ends()
dog.stop()
print("done")
"""


def run(first, second):
    code = HANGING.format(first=first, second=second)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_a_hanging_step_ends_the_process_and_shows_where():
    done = run(0.01, 30)
    assert done.returncode == STALLED_EXIT_CODE
    assert "Thread" in done.stderr


def test_the_limit_follows_the_longest_step():
    done = run(0.1, 1.0)
    assert (done.returncode, done.stdout) == (0, "done\n")
