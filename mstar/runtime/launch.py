"""How an engine process is started: its interpreter, its environment, its output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

import mstar
from mstar.runtime.options import EngineOptions
from mstar.runtime.presence import EngineFolder, EngineRecord
from mstar.runtime.processes import start_ticks
from mstar.utils import knobs
from mstar.utils.errors import LoadError

KEPT_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "HOSTNAME",
    "CPATH", "CC", "CXX", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy",
    "no_proxy", "all_proxy", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT",
})  # fmt: skip
KEPT_PREFIXES = (
    "MSTAR_", "HF_", "HUGGINGFACE_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_",
    "OMP_", "KMP_", "MKL_", "XDG_", "SSL_CERT_", "LC_",
)  # fmt: skip

# Between two parallel regions a compute thread spins for about 0.1 ms, then sleeps.  On two cores, 8 rows, ms per
# step: 39 alone and 55 beside one busy process; sleeping at once 68 and 59; the library's own spin 33-43 and 800.
SPIN_COUNT = "2000"


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables an engine gets: the user's own, none of those that bend the stub's interpreter and loader."""
    kept = {name: value for name, value in environ.items() if name in KEPT_NAMES or name.startswith(KEPT_PREFIXES)}
    package_parent = Path(mstar.__file__).resolve().parent.parent
    if package_parent.name not in ("site-packages", "dist-packages"):
        kept["PYTHONPATH"] = str(package_parent)  # a source tree: nothing else in it shadows a module
    kept["PYTHONUNBUFFERED"] = "1"
    return kept | thread_waiting(kept)


def thread_waiting(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make OpenMP threads wait as engines need it; empty if ``environ`` says how.

    They count only if set before torch is loaded.
    """
    if environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return {}
    return {"GOMP_SPINCOUNT": SPIN_COUNT}


def engine_python() -> str:
    """``MSTAR_PYTHON``, which the launcher sets, else the ``python3`` of this interpreter's prefix.

    ``sys.executable`` is no help: inside a Triton stub it names the stub.

    Raises:
        LoadError: there is no such file.
    """
    python = knobs.engine_python() or str(Path(sys.prefix) / "bin" / "python3")
    if not os.access(python, os.X_OK):
        raise LoadError(f"engine interpreter {python} is not executable; set MSTAR_PYTHON to a python3 that has mstar")
    return python


def start_engine(
    folder: EngineFolder, name: str, options: EngineOptions, server_pid: int
) -> tuple[EngineRecord, subprocess.Popen[bytes]]:
    """Starts the engine of ``folder`` in a session of its own and records it.  Call it with the folder locked.

    Its output goes to the folder's log; warnings go to this process's stderr too.

    Raises:
        LoadError: it could not be started.
    """
    folder.load_error_path.unlink(missing_ok=True)
    (folder.path / "options.json").write_bytes(msgspec.json.encode(options))
    command = [engine_python(), "-P", "-m", "mstar.runtime.engine_process", str(folder.path)]
    command += ["--name", name, "--server", str(server_pid), str(start_ticks(server_pid) or 0)]
    warnings_fd = _duplicate_stderr()
    try:
        with folder.log_path.open("wb") as log:
            child = subprocess.Popen(
                command + ([] if warnings_fd is None else ["--warnings-fd", str(warnings_fd)]),
                env=engine_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=() if warnings_fd is None else (warnings_fd,),
                start_new_session=True,
            )
    except OSError as error:
        raise LoadError(f"engine process: cannot start {command[0]}: {error.strerror}") from None
    finally:
        if warnings_fd is not None:
            os.close(warnings_fd)
    record = EngineRecord(pid=child.pid, started=start_ticks(child.pid) or 0, name=name)
    folder.write_engine(record)
    return record, child


def load_failure(folder: EngineFolder) -> str:
    """Why an engine that never became ready is gone: its own words, else the end of its log."""
    if folder.load_error_path.exists():
        return folder.load_error_path.read_text(errors="replace")
    tail = folder.log_path.read_bytes()[-2000:].decode(errors="replace").strip() if folder.log_path.exists() else ""
    return f"engine process ended while loading; its log ends with:\n{tail or '(nothing)'}"


def _duplicate_stderr() -> int | None:
    try:
        return os.dup(2)
    except OSError:
        return None
