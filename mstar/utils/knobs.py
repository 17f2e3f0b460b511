"""Every environment variable of the project: one table, typed, refused when malformed.

A function reads the environment at each call.  Unset or empty means the default.  What a captured graph
depends on must be read once, when the graph's owner is built.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mstar.utils.errors import shorten


@dataclass(frozen=True)
class Knob:
    """One environment variable.  ``kind`` is "bool" ("0" or "1"), "int" (within ``low`` .. ``high``) or "str"."""

    name: str
    kind: str
    default: bool | int | str | None
    doc: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("MSTAR_DEVICE_LOOPBACK", "bool", True, "keep each row's last sampled token on the device"),
        Knob("MSTAR_INGRAPH_DECODE_ROPE", "bool", False, "build rotary tables inside a captured decode step"),
        Knob("MSTAR_INGRAPH_DECODE_TOKENS", "bool", False, "read last tokens inside a captured decode step"),
        Knob("MSTAR_KV_ADMISSION_FIT", "str", None, "overrides the admission fit", choices=("sum", "peak", "none")),
        Knob("MSTAR_KV_ADMISSION_ORDER", "str", None, "overrides the admission order", choices=("fifo", "backfill")),
        Knob("MSTAR_KV_BACKFILL_WINDOW", "int", None, "waiting requests that backfill looks at", 1, 2**20),
        Knob(
            "MSTAR_KV_CHAIN_LAZY_STEPS", "int", 16, "decode steps batched before prefix chains are extended", 1, 2**20
        ),
        Knob("MSTAR_KV_INGRAPH_LENGTHS", "bool", True, "move lengths on inside a captured decode step (TRITON)"),
        Knob("MSTAR_KV_PINNED_INDPTRS", "bool", False, "send FlashInfer's index arrays through a page-locked ring"),
        Knob("MSTAR_KV_PLAN_CACHE", "int", 0, "0 off, 1 incremental decode plan, 2 both, logging differences", 0, 2),
        Knob("MSTAR_SAMPLER_INGRAPH_SCATTER", "bool", False, "gather and scatter sampler state inside the graph"),
        Knob("MSTAR_SAMPLER_SLOTS", "int", 4096, "sampler master rows when the in-graph scatter is on", 1, 2**24),
        Knob("MSTAR_WORKSPACE_BUFFER_MB", "int", None, "FlashInfer's workspace per label and slot, in MiB", 1, 2**14),
        Knob("MSTAR_GRAPH_COMPILE_MODE", "str", None, "overrides the compile mode of every graph config"),
        Knob("MSTAR_GRAPH_STRICT", "bool", False, "hold CPU replays to what a real graph would have frozen (tests)"),
        Knob("MSTAR_REQUIRE_ACCELERATOR_GRAPHS", "bool", False, "a bucket that cannot be captured fails start-up"),
        Knob("MSTAR_NUM_SLOTS", "int", 2, "slots of double-buffered nodes", 1, 64),
        Knob("MSTAR_PRE_PLAN_SPEC", "bool", False, "plan the next step on a thread of its own"),
        Knob("MSTAR_KV_DEBUG_ASSERTS", "bool", False, "check page conservation at every commit"),
        Knob("MSTAR_PROGRESS_ASSERTS", "bool", False, "an engine with work in which nothing happens raises (tests)"),
        Knob("MSTAR_PYTHON", "str", None, "interpreter that runs the engine process"),
        Knob(
            "MSTAR_RUNTIME_DIR", "str", None, "folder of engine sockets, logs and records; short, for a socket's path"
        ),
    )
}


def read_bool(name: str) -> bool:
    """A "bool" knob's value.  ValueError names the variable and the value it held."""
    text = os.environ.get(name, "")
    if not text:
        return bool(KNOBS[name].default)
    if text not in ("0", "1"):
        raise ValueError(f"{name}={shorten(text)}: must be 0 or 1")
    return text == "1"


def read_int(name: str) -> int:
    """An "int" knob's value.  ValueError names the variable and the value it held."""
    knob = KNOBS[name]
    text = os.environ.get(name, "")
    if not text:
        assert isinstance(knob.default, int)
        return knob.default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{name}={shorten(text)}: must be an integer")
    value = int(digits[:20]) * (1 if digits == text else -1)  # 20 digits are beyond every bound
    if (knob.low is not None and value < knob.low) or (knob.high is not None and value > knob.high):
        allowed = f"{knob.low}..{knob.high}" if knob.high is not None else f">= {knob.low}"
        raise ValueError(f"{name}={shorten(text)}: must be {allowed}")
    return value


def read_str(name: str) -> str | None:
    """A "str" knob's value, or its default.  ValueError when the knob lists choices and this is none of them."""
    knob = KNOBS[name]
    text = os.environ.get(name, "")
    if not text:
        assert knob.default is None or isinstance(knob.default, str)
        return knob.default
    if knob.choices and text not in knob.choices:
        raise ValueError(f"{name}={shorten(text)}: must be one of {', '.join(knob.choices)}")
    return text


def check_all() -> None:
    """Reads every knob, also those that nothing may come to use.  ValueError as reading one raises."""
    readers = {"bool": read_bool, "int": read_int, "str": read_str}
    for knob in KNOBS.values():
        if os.environ.get(knob.name):
            readers[knob.kind](knob.name)


def device_loopback_enabled() -> bool:
    """MSTAR_DEVICE_LOOPBACK (default 1): whether a node may keep its loop-back token on the device (the
    sampler's slot master) instead of routing a tensor per request; also whether the sampler keeps last tokens."""
    return read_bool("MSTAR_DEVICE_LOOPBACK")


def ingraph_decode_rope() -> bool:
    """MSTAR_INGRAPH_DECODE_ROPE (default 0): a captured decode step builds its rotary tables inside the graph
    from the planned positions instead of staging them before the replay."""
    return read_bool("MSTAR_INGRAPH_DECODE_ROPE")


def ingraph_decode_tokens() -> bool:
    """MSTAR_INGRAPH_DECODE_TOKENS (default 0): a captured decode step reads each row's last token from the sampler's
    master inside the graph instead of from a buffer gathered before the replay."""
    return read_bool("MSTAR_INGRAPH_DECODE_TOKENS")


def kv_admission_fit() -> str | None:
    """MSTAR_KV_ADMISSION_FIT (default unset): "sum", "peak" or "none" instead of the cache's own admission fit."""
    return read_str("MSTAR_KV_ADMISSION_FIT")


def kv_admission_order() -> str | None:
    """MSTAR_KV_ADMISSION_ORDER (default unset): "fifo" or "backfill" instead of the cache's own admission order."""
    return read_str("MSTAR_KV_ADMISSION_ORDER")


def kv_backfill_window() -> int | None:
    """MSTAR_KV_BACKFILL_WINDOW (default unset, at least 1): how many waiting requests backfill looks at, instead of
    the cache's own number."""
    return read_int("MSTAR_KV_BACKFILL_WINDOW") if os.environ.get("MSTAR_KV_BACKFILL_WINDOW") else None


def kv_chain_lazy_steps() -> int:
    """MSTAR_KV_CHAIN_LAZY_STEPS (default 16, at least 1): decode steps of sampled tokens that are batched before
    the requests' prefix chains are extended; 1 extends every step."""
    return read_int("MSTAR_KV_CHAIN_LAZY_STEPS")


def kv_ingraph_lengths() -> bool:
    """MSTAR_KV_INGRAPH_LENGTHS (default 1): under the TRITON attention backend a captured decode step takes lengths and
    write addresses from the device's state and moves the lengths on, inside the graph; 0 sends them before the
    replay."""
    return read_bool("MSTAR_KV_INGRAPH_LENGTHS")


def kv_pinned_indptrs() -> bool:
    """MSTAR_KV_PINNED_INDPTRS (default 0): the KV plan writes its index arrays into a ring of page-locked host
    buffers, so that their copies to the device are asynchronous."""
    return read_bool("MSTAR_KV_PINNED_INDPTRS")


def kv_plan_cache() -> int:
    """MSTAR_KV_PLAN_CACHE (default 0): 1 plans a leased decode step from the previous step's plan when the batch
    is unchanged; 2 does both and logs any difference; 0 plans every step from the streams."""
    return read_int("MSTAR_KV_PLAN_CACHE")


def sampler_ingraph_scatter() -> bool:
    """MSTAR_SAMPLER_INGRAPH_SCATTER (default 0): the captured sampler gathers its draw offsets from the masters
    and scatters advanced offsets and sampled tokens back inside the graph."""
    return read_bool("MSTAR_SAMPLER_INGRAPH_SCATTER")


def sampler_slots() -> int:
    """MSTAR_SAMPLER_SLOTS (default 4096, at least 1): master rows allocated up front when
    :func:`sampler_ingraph_scatter` is on."""
    return read_int("MSTAR_SAMPLER_SLOTS")


def workspace_buffer_mb() -> int | None:
    """MSTAR_WORKSPACE_BUFFER_MB (default unset, at least 1): MiB of device memory per label and slot for FlashInfer's
    partial results, instead of what the model's largest step can take."""
    return read_int("MSTAR_WORKSPACE_BUFFER_MB") if os.environ.get("MSTAR_WORKSPACE_BUFFER_MB") else None


def graph_compile_mode() -> str | None:
    """MSTAR_GRAPH_COMPILE_MODE (default unset): overrides every graph config's compile mode; whoever builds the
    captures checks the value."""
    return read_str("MSTAR_GRAPH_COMPILE_MODE")


def graph_strict() -> bool:
    """MSTAR_GRAPH_STRICT (default 0): on the CPU, a captured forward that reads a tensor on the host, or whose replay
    differs from its capture, raises; slow, for tests."""
    return read_bool("MSTAR_GRAPH_STRICT")


def require_accelerator_graphs() -> bool:
    """MSTAR_REQUIRE_ACCELERATOR_GRAPHS (default 0): a bucket that cannot be captured fails start-up."""
    return read_bool("MSTAR_REQUIRE_ACCELERATOR_GRAPHS")


def num_slots() -> int:
    """MSTAR_NUM_SLOTS (default 2): slots of double-buffered nodes."""
    return read_int("MSTAR_NUM_SLOTS")


def pre_plan_spec() -> bool:
    """MSTAR_PRE_PLAN_SPEC (default 0): the engine plans a step ahead on a thread of its own instead of inline."""
    return read_bool("MSTAR_PRE_PLAN_SPEC")


def kv_debug_asserts() -> bool:
    """MSTAR_KV_DEBUG_ASSERTS (default 0): the KV manager checks that free and owned pages add up, every commit."""
    return read_bool("MSTAR_KV_DEBUG_ASSERTS")


def progress_asserts() -> bool:
    """MSTAR_PROGRESS_ASSERTS (default 0): a conductor that has work, and finds nothing to run in 100 calls, raises
    instead of ending a request after 2,000."""
    return read_bool("MSTAR_PROGRESS_ASSERTS")


def engine_python() -> str | None:
    """MSTAR_PYTHON (default unset): the interpreter that runs the engine process."""
    return read_str("MSTAR_PYTHON")


def runtime_dir() -> str | None:
    """MSTAR_RUNTIME_DIR (default unset): folder of engine sockets, logs and records."""
    return read_str("MSTAR_RUNTIME_DIR")
