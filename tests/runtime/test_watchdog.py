"""What hangs ends its process; what works for long does not."""

import subprocess
import sys
import time

import pytest

from mstar.runtime import exit_codes
from mstar.runtime.processes import children_seconds, own_seconds

WATCHED = """
import subprocess, sys, time
from mstar.runtime import watchdog
from mstar.runtime.board import Board
from mstar.runtime.processes import children_seconds, own_seconds
{settings}
dog = watchdog.Watchdog(Board.in_memory(), 0.4, {worked})
def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
def compiling(seconds):
    subprocess.run([sys.executable, "-c", f"import time\\nwhile time.process_time() < {{seconds}}: pass"])
dog.start()
for step in {steps}:
    dog.begins(); step(); dog.ends()
    time.sleep(0.6)  # to have nothing to do is no hang
dog.stop()
print("done")
"""


def run(steps: str, worked: str = "children_seconds", settings: str = "") -> subprocess.CompletedProcess[str]:
    code = WATCHED.format(steps=steps, worked=worked, settings=settings)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("worked", ["children_seconds", "own_seconds"])
def test_a_step_that_waits_for_ever_ends_the_process_and_shows_where(worked):
    began = time.monotonic()
    done = run("[lambda: time.sleep(0.01), lambda: time.sleep(30)]", worked)
    assert done.returncode == exit_codes.STALLED
    assert "Thread" in done.stderr
    assert time.monotonic() - began < 10


def test_the_limit_follows_the_longest_step():
    done = run("[lambda: time.sleep(0.3), lambda: time.sleep(1.0)]")
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_thread_that_spins_while_it_waits_for_a_device_is_not_at_work():
    assert run("[lambda: busy(10)]").returncode == exit_codes.STALLED


@pytest.mark.parametrize(
    ("step", "worked"), [("lambda: busy(1.6)", "own_seconds"), ("lambda: compiling(1.6)", "children_seconds")]
)
def test_a_step_that_is_at_work_may_take_long(step, worked):
    done = run(f"[{step}]", worked)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_but_not_for_ever():
    done = run("[lambda: busy(30)]", "own_seconds", "watchdog.MOST_LIMITS = 3")
    assert done.returncode == exit_codes.STALLED


def test_the_work_of_children_and_theirs_is_counted_while_they_live_and_after():
    before, own = children_seconds(), own_seconds()
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\nimport sys; sys.stdin.read()"
    command = ["sh", "-c", f"{sys.executable} -c '{spin}'; true"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        shell.stdout.readline()
        living = children_seconds() - before
        shell.stdin.close()
    assert living >= 0.4
    assert children_seconds() - before >= 0.4
    assert own_seconds() - own >= 0.4
