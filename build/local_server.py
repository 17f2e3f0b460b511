"""A server for the length of a ``with`` block, on free ports of the loopback."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STOP_LIMIT_S = 90.0
PR_SET_PDEATHSIG = 1


@contextmanager
def running_server(log_name: str) -> Iterator[dict[str, str]]:
    """``mstar serve`` on the shipped model repository; its log goes to ``.cache/<log_name>.log``.

    Yields: its addresses, ``host:port`` by ``http``, ``grpc`` and ``metrics``.
    Raises:
        SystemExit: it did not start, or did not stop cleanly.
    """
    log_file = ROOT / ".cache" / f"{log_name}.log"
    log_file.parent.mkdir(exist_ok=True)
    log_file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready.json"
        command = [str(Path(sys.executable).parent / "mstar"), "serve", "--model", "smollm2", "--address", "127.0.0.1"]
        command += ["--repository", str(ROOT / "model_repository"), "--log-file", str(log_file)]
        command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--ready-file", str(ready_file)]
        libc = ctypes.CDLL(None)
        # In a session of its own: Ctrl-C reaches this script alone, which then stops the server once. Should this
        # script be killed, the server is told to stop all the same.
        server = subprocess.Popen(
            command, start_new_session=True, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        )
        try:
            while not ready_file.exists():
                if server.poll() is not None:
                    sys.exit(f"the server did not start (exit code {server.returncode}); its log is {log_file}")
                time.sleep(0.1)
            yield json.loads(ready_file.read_text())
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGINT)
            code = server.wait(STOP_LIMIT_S)
        if code != 0:
            sys.exit(f"the server stopped with exit code {code}; its log is {log_file}")
