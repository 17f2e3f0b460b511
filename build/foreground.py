"""Run a command as the terminal's foreground job, so that Ctrl-C reaches it and not the ``make`` that started it.

``make`` ends with an error when it is interrupted, whatever its command makes of Ctrl-C; this keeps it out of it.
"""

import os
import signal
import subprocess
import sys

TERMINAL = 0


def give_terminal(group):
    """Make ``group`` the terminal's foreground job, from a process that may itself be in the background."""
    old = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(TERMINAL, group)
    signal.signal(signal.SIGTTOU, old)


def take_terminal():
    os.setpgid(0, 0)
    give_terminal(os.getpid())


def main(command):
    if not os.isatty(TERMINAL) or os.tcgetpgrp(TERMINAL) != os.getpgrp():
        os.execvp(command[0], command)
    child = subprocess.Popen(command, preexec_fn=take_terminal)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    try:
        return child.wait()
    finally:
        give_terminal(os.getpgrp())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
