"""``python -m mstar.runtime.engine_process``: one engine beside a server, started by its first front end."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from mstar.runtime import exit_codes
from mstar.runtime.board import Board
from mstar.runtime.cpus import physical_cores
from mstar.runtime.options import EngineOptions
from mstar.runtime.presence import EngineFolder
from mstar.runtime.processes import ExitWatch
from mstar.utils.errors import LoadError, MstarError

log = logging.getLogger("mstar.engine")


def main(arguments: list[str]) -> int:
    """Loads and serves; returns the process's exit code.

    0: left of its own will.  1: a defect of the engine's.  Others: :mod:`mstar.runtime.exit_codes`.
    """
    given = _parse(arguments)
    faulthandler.enable()
    _set_up_logging(given.warnings_fd)
    folder = EngineFolder(given.folder)
    server = ExitWatch(*given.server)
    board = Board.create(folder.board_path)
    board.beat()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops what exceeds it; what can pile up is what the rows can make
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(folder.socket_address)
    try:
        code = _load_and_serve(given.name, folder, socket, server, board)
    finally:
        socket.close(linger=1000)
        context.term()
    if code == exit_codes.DEVICE_FAILED:
        logging.shutdown()
        os._exit(code)  # to free what lies on the device would fail, and abort
    return code


def _load_and_serve(name: str, folder: EngineFolder, socket: zmq.Socket[bytes], server: ExitWatch, board: Board) -> int:
    options = msgspec.json.decode((folder.path / "options.json").read_bytes(), type=EngineOptions)
    log.info("engine %s (pid %d) of server %d: %s", name, os.getpid(), server.pid, options)
    try:
        # imported here: torch takes seconds, and its own failure to load must reach the client as a load error
        from mstar.runtime.core import EngineCore
        from mstar.runtime.engine_server import EngineServer
        from mstar.runtime.rehearsal import rehearse

        core = EngineCore(msgspec.structs.replace(options, num_threads=options.num_threads or physical_cores()))
        rehearse(core)
        if core.engine.device_failure is not None:
            raise LoadError(f"option device: {core.info.device} has failed: {core.engine.device_failure}")
    except Exception as error:
        log.exception("the model could not be loaded")
        _leave_load_error(folder, str(error) if isinstance(error, MstarError) else f"{type(error).__name__}: {error}")
        return exit_codes.LOAD_ERROR
    gc.collect()
    gc.freeze()  # a collection over the model's objects would show as a late step
    serving = EngineServer(core, folder, socket, server, board)
    signal.signal(signal.SIGTERM, lambda *_: serving.drain(options.drain_timeout_s))
    return serving.run()


def _leave_load_error(folder: EngineFolder, message: str) -> None:
    folder.load_error_path.write_text(message)
    with folder.locked():
        record = folder.engine()
        if record is not None:
            folder.write_engine(record.signed_off())


def _set_up_logging(warnings_fd: int | None) -> None:
    """Everything to stderr, which is the folder's log; warnings to the server's stderr too."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if warnings_fd is not None:
        with contextlib.suppress(OSError):
            loud = logging.StreamHandler(os.fdopen(warnings_fd, "w"))
            loud.setLevel(logging.WARNING)
            handlers.append(loud)
    logging.basicConfig(
        level=logging.INFO, handlers=handlers, format="%(asctime)s mstar-engine %(name)s %(levelname)s %(message)s"
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mstar.runtime.engine_process")
    parser.add_argument("folder", type=Path, help="the engine's folder, with options.json")
    parser.add_argument("--name", required=True)
    parser.add_argument("--server", type=int, nargs=2, required=True, metavar=("PID", "START"))
    parser.add_argument("--warnings-fd", type=int)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
