"""Every test runs captured steps strictly, in child processes too: what a real graph would freeze raises, and so does
a conductor with work in which nothing happens.

Where there is no GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("MSTAR_GRAPH_STRICT", "1")
os.environ.setdefault("MSTAR_PROGRESS_ASSERTS", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read as triton is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the other workers have the other cores


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one worker's: its tests share fixtures.  Real servers, whose tests measure time, come when all else is
    done or under way, on one worker.

    On a GPU tests wait for kernels to compile rather than for one another, so xdist's own ways serve.
    """
    if torch.cuda.is_available():
        return None
    from xdist.scheduler import LoadFileScheduling  # where tests run without workers, xdist may be missing

    alone = "alone"

    class FileByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return alone if nodeid.startswith("tests/server/") else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if alone in self.workqueue:
                self.workqueue.move_to_end(alone)
            super()._assign_work_unit(node)

    return FileByFile(config, log)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """An empty folder; `tmp_path` is too long for a socket, whose path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="mstar-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
