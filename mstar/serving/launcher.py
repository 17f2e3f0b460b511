"""Run a tritonserver in the foreground: start it, wait until it is ready, watch it, drain it, report how it ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console

from mstar.serving.control import ServerControl
from mstar.serving.ports import choose_ports, format_address, reachable_host
from mstar.serving.process import WatchedProcess
from mstar.serving.tritonserver import (
    ServerOptions,
    find_models,
    find_server,
    prepare_backend,
    server_arguments,
    server_environment,
)
from mstar.serving.watch import Presence
from mstar.utils.errors import LoadError

WATCH_INTERVAL_S = 0.25
HEALTH_INTERVAL_S = 5.0
HEALTH_FAILURES = 3  # unanswered liveness probes in a row before a server counts as hung
EXIT_MARGIN_S = 15.0  # past its own exit timeout, before a server that drains by itself is killed
SEND_MARGIN_S = 0.5
EXIT_PATIENCE_S = 2.0  # for a drained server, which may wait for idle connections
ORPHAN_PATIENCE_S = 5.0  # an engine ends by itself once the server is gone
FOLDER_PREFIX = "mstar-serve-"
SHM_FOLDER = Path("/dev/shm")
SHM_PREFIX = "mstar_"
FAILED = 1


@dataclass(frozen=True)
class LaunchOptions:
    """Options of ``mstar serve``.  A port of 0 picks a free one; ``models`` empty means every model folder."""

    repository: Path
    models: tuple[str, ...] = ()
    address: str = "0.0.0.0"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    grace_s: float = 3.0
    exit_timeout_s: int = 60
    binary: Path | None = None
    log_file: Path | None = None
    ready_file: Path | None = None
    extra: tuple[str, ...] = ()


def launch(options: LaunchOptions) -> int:
    """Run the server until it ends, is told to stop, or loses an engine or a stub; returns the exit code.

    0: stopped by SIGINT or SIGTERM and drained.  1: an engine or a stub was lost, the server hung, or it was killed
    by a second signal.  Otherwise the server's own code, ``128 + n`` if signal n ended it.

    Raises:
        LoadError: it cannot be started; the message names the option or what is missing.
    """
    if options.grace_s < 0:
        raise LoadError(f"--grace: at least 0 seconds, got {options.grace_s}")
    if options.exit_timeout_s < 1:
        raise LoadError(f"--exit-timeout: at least 1 second, got {options.exit_timeout_s}")
    repository = options.repository.resolve()
    if len(str(repository).split()) != 1:
        raise LoadError(f"--repository: a path without spaces (Triton cannot start its stubs there), got {repository}")
    known = find_models(repository)
    for name in options.models:
        if name not in known:
            raise LoadError(f"--model: one of {', '.join(known)}, got {name}")
    install = find_server(options.binary)
    environment = server_environment(install)
    http_port, grpc_port, metrics_port = choose_ports(
        options.address, options.http_port, options.grpc_port, options.metrics_port
    )
    clear_leftovers()
    with ExitStack() as stack:
        work_dir = stack.enter_context(private_folder())
        server_options = ServerOptions(
            repository=repository,
            models=options.models or known,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            address=options.address,
            exit_timeout_s=options.exit_timeout_s,
            shm_prefix=shared_memory_prefix(work_dir),
            log_info=options.log_file is not None or not sys.stderr.isatty(),  # a person wants the warnings
        )
        arguments = server_arguments(server_options, prepare_backend(install, work_dir), options.extra)
        output = stack.enter_context(open_log(options.log_file))
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)
            stack.callback(options.ready_file.unlink, missing_ok=True)
        stack.callback(remove_shared_memory, work_dir)
        process = WatchedProcess([str(install.binary), *arguments], environment, output)
        stack.callback(process.close)
        return Launcher(options, server_options, process).run()


class Launcher:
    """The life of one started server."""

    def __init__(self, options: LaunchOptions, server: ServerOptions, process: WatchedProcess) -> None:
        self._options = options
        self._server = server
        self._process = process
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._presence = Presence(process.pid)
        self._control = ServerControl(reachable_host(server.address), server.http_port)

    def run(self) -> int:
        """Wait until ready, watch, stop; returns the exit code."""
        signal_number = self._wait_ready()
        if signal_number is not None:
            self._say(f"{signal.Signals(signal_number).name} while loading: stopping")
            self._stop()
            return 0
        failure = None
        if not self._process.has_ended():
            self._announce()
            signal_number, failure = self._watch()
        if failure is not None:
            self._say(f"{failure}; exiting after a grace of {self._options.grace_s:g} s")
            self._show_crash_logs()
            if self._process.wait_signal(self._options.grace_s) is None:
                self._presence.kill_stale_engines()
                self._drain(failed=True)
            self._stop()
            return FAILED
        if signal_number is not None:
            self._say(f"{signal.Signals(signal_number).name}: draining, at most {self._options.exit_timeout_s} s")
            is_drained = self._drain(failed=False)
            self._stop()
            return 0 if is_drained else FAILED
        code = self._exit_code()
        self._clear_orphans()
        self._show_log_end()
        self._say(f"tritonserver ended by itself, exit code {code}")
        return code

    def _wait_ready(self) -> int | None:
        """Until every model is loaded; returns a signal that came first, None if ready or ended."""
        started = time.monotonic()
        next_line = started + 10.0
        models = ", ".join(self._server.models)
        with self._console.status(f"loading {models}") as status:
            while not self._process.has_ended():
                seconds = time.monotonic() - started
                if self._control.is_ready():
                    self._say(f"ready after {seconds:.1f} s: {models}")
                    return None
                status.update(f"loading {models} ({seconds:.0f} s)")
                if not self._console.is_terminal and time.monotonic() >= next_line:
                    next_line += 10.0
                    self._say(f"loading {models} ({seconds:.0f} s)")
                number = self._process.wait_signal(0.1)
                if number is not None:
                    return number
        return None

    def _announce(self) -> None:
        address = self._server.address
        addresses = {
            "http": format_address(address, self._server.http_port),
            "grpc": format_address(address, self._server.grpc_port),
            "metrics": format_address(address, self._server.metrics_port),
        }
        self._say(f"HTTP     http://{addresses['http']}")
        self._say(f"gRPC     {addresses['grpc']}")
        self._say(f"metrics  http://{addresses['metrics']}/metrics")
        if self._options.ready_file is not None:
            record = {**addresses, "models": list(self._server.models), "server_pid": self._process.pid}
            partial = self._options.ready_file.with_name(self._options.ready_file.name + ".part")
            partial.write_text(json.dumps(record) + "\n")
            partial.replace(self._options.ready_file)

    def _watch(self) -> tuple[int | None, str | None]:
        """Until something happens: (a signal to us, None), (None, what failed), or (None, None) if the server ended."""
        unanswered = 0
        next_probe = time.monotonic() + HEALTH_INTERVAL_S
        while True:
            number = self._process.wait_signal(WATCH_INTERVAL_S)
            if number is not None or self._process.has_ended():
                return number, None
            lost = self._presence.lost()
            if lost:
                return None, f"gone without a word: {', '.join(lost)}"
            if time.monotonic() >= next_probe:
                unanswered = 0 if self._control.answers() else unanswered + 1
                next_probe = time.monotonic() + HEALTH_INTERVAL_S
                if unanswered >= HEALTH_FAILURES:
                    return None, f"the server did not answer {unanswered} health probes in a row"

    def _drain(self, failed: bool) -> bool:
        """Unload every model, which refuses new requests and lets the open ones end; False if that was cut short.

        Told to stop, the server itself goes on taking gRPC requests while a single idle HTTP connection is open,
        until its exit timeout ends them all: so it is drained first and told then.
        After a failure the streams of a dead stub never end, so it is only waited for while a stub lives.
        The engines are told to drain too: they end what still runs after their own drain time, and once they are gone
        only idle client streams can keep a model from being unloaded.
        """
        deadline = time.monotonic() + self._options.exit_timeout_s
        models = self._control.busy_models()
        unloading = [self._control.unload(name) for name in models or ()]
        if models is None or not all(unloading):  # another model control mode: the server drains as it can
            return self._terminate(self._options.exit_timeout_s + EXIT_MARGIN_S)
        has_engines = self._presence.drain_engines()
        while not self._process.has_ended():
            number = self._process.wait_signal(WATCH_INTERVAL_S)
            if number is not None:
                self._say(f"second {signal.Signals(number).name}: stopping at once")
                return False
            if self._control.busy_models() == [] or (failed and not self._presence.has_live_stubs()):
                return True
            if (failed or has_engines) and not self._presence.has_live_engines():
                self._process.wait_signal(SEND_MARGIN_S)  # the last responses are on their way
                return True
            if time.monotonic() >= deadline:
                self._say(f"not drained within {self._options.exit_timeout_s} s: stopping at once")
                return False
        return True

    def _stop(self) -> None:
        """End a server that is drained, or need not be."""
        if not self._terminate(EXIT_PATIENCE_S):
            self._process.send(signal.SIGKILL)
            self._process.wait_signal(5.0)
        self._clear_orphans()

    def _terminate(self, patience_s: float) -> bool:
        """SIGTERM; True if the server ended within the time and no second signal came."""
        self._process.send(signal.SIGTERM)
        self._process.wait_signal(patience_s)
        return self._process.has_ended()

    def _clear_orphans(self) -> None:
        killed = self._process.clear_orphans(ORPHAN_PATIENCE_S)
        self._presence.remove()
        if killed:
            self._say(f"killed what the server left behind: pid {', '.join(map(str, killed))}")

    def _exit_code(self) -> int:
        code = self._process.returncode
        assert code is not None
        return code if code >= 0 else 128 - code

    def _show_crash_logs(self) -> None:
        for name, lines in self._presence.crash_logs().items():
            self._say(f"the last lines of engine {name}:")
            self._console.print("\n".join(lines), markup=False)

    def _show_log_end(self, lines: int = 30) -> None:
        if self._options.log_file is not None:
            with self._options.log_file.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
                end = file.read().decode(errors="replace").splitlines()[-lines:]
            self._say(f"the last lines of {self._options.log_file}:")
            self._console.print("\n".join(end), markup=False)

    def _say(self, text: str) -> None:
        self._console.print(f"mstar serve: {text}", markup=False)


@contextmanager
def open_log(path: Path | None) -> Iterator[IO[bytes] | None]:
    """The file the server's output goes to, or None to let it share ours."""
    if path is None:
        sys.stdout.flush()
        yield None
        return
    try:
        file = path.open("ab")
    except OSError as error:
        raise LoadError(f"--log-file: cannot write {path}: {error.strerror}") from None
    with file:
        yield file


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder only we can read, named after our pid, gone when we are."""
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers() -> None:
    """Remove the folders and shared memory of this user's launchers that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        with suppress(OSError, ValueError):
            if stat.S_ISDIR(folder.lstat().st_mode) and is_leftover(folder, FOLDER_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)
    for region in SHM_FOLDER.glob(f"{SHM_PREFIX}*-*"):
        with suppress(OSError, ValueError):
            if is_leftover(region, SHM_PREFIX):
                region.unlink()


def is_leftover(path: Path, prefix: str) -> bool:
    """Whether a path named ``<prefix><pid>-...`` is this user's and its process is gone."""
    pid = int(path.name.removeprefix(prefix).partition("-")[0])
    return path.lstat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists()


def shared_memory_prefix(folder: Path) -> str:
    """Prefix of the shared memory regions of the server that runs with this private folder."""
    return f"{SHM_PREFIX}{folder.name.removeprefix(FOLDER_PREFIX)}_"


def remove_shared_memory(folder: Path) -> None:
    """Remove the regions the server left; a clean exit leaves none."""
    for path in SHM_FOLDER.glob(f"{shared_memory_prefix(folder)}*"):
        with suppress(OSError):
            path.unlink()
