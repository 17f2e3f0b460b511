"""Which torch.compile mode a capture uses: the environment's, then the configuration's, then the default."""

from __future__ import annotations

import logging

from mstar.engine.accelerator_graph_config import check_compile_mode
from mstar.utils import knobs

log = logging.getLogger(__name__)

DEFAULT_COMPILE_MODE = "max-autotune-no-cudagraphs"
OWN_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # they capture graphs themselves


def compile_mode_override() -> str | None:
    """MSTAR_GRAPH_COMPILE_MODE, checked; ValueError names the variable and its value."""
    mode = knobs.graph_compile_mode()
    try:
        return check_compile_mode(mode)
    except ValueError:
        raise ValueError(f"MSTAR_GRAPH_COMPILE_MODE={mode!r} is not a torch.compile mode") from None


def resolve_compile_mode(name: str, override: str | None, mode: str | None) -> str:
    """The mode of the captures ``name``; warns of those that capture graphs of their own."""
    resolved = override or mode or DEFAULT_COMPILE_MODE
    if resolved in OWN_GRAPH_MODES:
        log.warning("%s: compile mode %r captures graphs of its own, which usually fails in a capture", name, resolved)
    return resolved
