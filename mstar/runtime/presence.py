"""Who is there: the engines and front ends of one running server, as files that outlive a crash.

    <base>/<server pid>-<server start>/<engine>-<options key>/
        lock          held while somebody looks who starts the engine, or while the engine decides to leave
        engine.json   EngineRecord of the engine that was started last
        socket board log load_error
        fronts/<name>.json   FrontRecord, removed when the front end signs off

A record whose process is gone without having signed off tells of a crash: :func:`crashed` lists them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from mstar.runtime.processes import is_alive, start_ticks
from mstar.utils import knobs
from mstar.utils.errors import LoadError

Record = TypeVar("Record", bound=msgspec.Struct)


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An engine process; ``has_signed_off`` once it left of its own will."""

    pid: int
    started: int
    name: str
    has_signed_off: bool = False

    def is_alive(self) -> bool:
        return is_alive(self.pid, self.started)

    def signed_off(self) -> EngineRecord:
        return msgspec.structs.replace(self, has_signed_off=True)


class FrontRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a client of an engine."""

    pid: int
    started: int

    def is_alive(self) -> bool:
        return is_alive(self.pid, self.started)


@dataclass(frozen=True)
class EngineFolder:
    """The files of one engine of one server."""

    path: Path

    @property
    def socket_address(self) -> str:
        return f"ipc://{self.path / 'socket'}"

    @property
    def board_path(self) -> Path:
        return self.path / "board"

    @property
    def log_path(self) -> Path:
        return self.path / "log"

    @property
    def load_error_path(self) -> Path:
        return self.path / "load_error"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock; it falls when the process dies."""
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def engine(self) -> EngineRecord | None:
        return _read(self.path / "engine.json", EngineRecord)

    def write_engine(self, record: EngineRecord) -> None:
        _write(self.path / "engine.json", record)

    def sign_on(self, name: str) -> None:
        """Records the calling process as a front end called ``name``."""
        pid = os.getpid()
        _write(self.path / "fronts" / f"{name}.json", FrontRecord(pid=pid, started=start_ticks(pid) or 0))

    def sign_off(self, name: str) -> None:
        (self.path / "fronts" / f"{name}.json").unlink(missing_ok=True)

    def fronts(self) -> dict[str, FrontRecord]:
        """Front ends that have not signed off, dead ones too."""
        found = {path.stem: _read(path, FrontRecord) for path in (self.path / "fronts").glob("*.json")}
        return {name: record for name, record in found.items() if record is not None}

    def has_living_fronts(self) -> bool:
        return any(record.is_alive() for record in self.fronts().values())


def base_folder() -> Path:
    """``MSTAR_RUNTIME_DIR``, else a folder of this user in the system's temporary one."""
    return Path(knobs.runtime_dir() or Path(tempfile.gettempdir()) / f"mstar-{os.getuid()}")


def server_folder(server_pid: int) -> Path:
    """Where the engines of a running server are; nothing is created."""
    return base_folder() / f"{server_pid}-{start_ticks(server_pid) or 0}"


def open_engine_folder(server_pid: int, engine_name: str, options_key: str) -> EngineFolder:
    """The folder of one engine, created if need be; folders of servers that are gone are removed on the way.

    Raises:
        LoadError: the folder cannot be written, belongs to another user, or its path is too long for a socket.
    """
    base = base_folder()
    safe_name = re.sub(r"[^A-Za-z0-9._-]", "_", engine_name)[:32]
    path = server_folder(server_pid) / f"{safe_name}-{options_key}"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if base.stat().st_uid != os.getuid():
            raise LoadError(f"runtime folder {base} belongs to another user; set MSTAR_RUNTIME_DIR")
        remove_stale_servers(base)
        (path / "fronts").mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"runtime folder {path}: {error.strerror}; set MSTAR_RUNTIME_DIR to a writable one") from None
    if len(str(path)) > 90:  # a socket's path has at most 107 bytes
        raise LoadError(f"runtime folder {path} is too long for a socket; set MSTAR_RUNTIME_DIR to a shorter one")
    return EngineFolder(path)


def engine_folders(server_pid: int) -> list[EngineFolder]:
    """The engines a server has or had."""
    return [EngineFolder(path) for path in sorted(server_folder(server_pid).glob("*")) if path.is_dir()]


def crashed(server_pid: int) -> list[str]:
    """Engines and front ends of a server that are gone without having signed off, each in a few words."""
    gone = []
    for folder in engine_folders(server_pid):
        engine = folder.engine()
        if engine is not None and not engine.has_signed_off and not engine.is_alive():
            gone.append(f"engine {engine.name} (pid {engine.pid})")
        gone += [
            f"front end of {folder.path.name} (pid {record.pid})"
            for record in folder.fronts().values()
            if not record.is_alive()
        ]
    return gone


def remove_stale_servers(base: Path) -> None:
    """Removes what servers that are gone left behind, once nobody of theirs lives either."""
    for path in base.glob("*-*"):
        pid, _, started = path.name.partition("-")
        if not (pid.isdigit() and started.isdigit()) or is_alive(int(pid), int(started)):
            continue
        folders = [EngineFolder(child) for child in path.glob("*")]
        engines = [engine for folder in folders if (engine := folder.engine()) is not None]
        if not any(engine.is_alive() for engine in engines):
            shutil.rmtree(path, ignore_errors=True)


def _read(path: Path, kind: type[Record]) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, record: msgspec.Struct) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.new")
    temporary.write_bytes(msgspec.json.encode(record))
    os.replace(temporary, path)
