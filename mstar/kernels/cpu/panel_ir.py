"""LLVM IR of the panel kernel: `y = x @ weight.T + bias` over panels of any format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mstar.kernels.cpu.ir import IrFunction
from mstar.kernels.cpu.jit import ir
from mstar.kernels.cpu.panel_formats import BLOCK, FLOAT, PanelFormat

# What `worker` takes, 8 bytes each.
ARGUMENTS = ("x", "weight", "bias", "y", "rows", "in", "out", "scratch")
_POINTERS = frozenset({"x", "weight", "bias", "y", "scratch"})
# Bytes the kernel reads ahead of itself when one tile covers all rows; 4 to 16 KiB measure the same.
READ_AHEAD = 8192


def module_ir(weights: PanelFormat, lanes: int, tile_rows: int) -> str:
    """The module: `worker(arguments)`, which every OpenMP thread runs over its share of the panels, and its tiles."""
    module = ir.Module()
    tiles = [_define_tile(module, f"tile{rows}", weights, rows, lanes) for rows in range(1, tile_rows + 1)]
    _define_worker(module, weights, lanes, tiles)
    return str(module)


def _define_worker(module: Any, weights: PanelFormat, lanes: int, tiles: Sequence[Any]) -> None:
    """Panels in order; tiles of equal height within each, rather than full ones and a rest."""
    unpack, float_tiles = None, tiles
    if weights is not FLOAT:
        unpack = _define_unpack(module, weights, lanes)
        float_tiles = [_define_tile(module, f"float{i}", FLOAT, i, lanes) for i in range(1, len(tiles) + 1)]
    f, a = IrFunction.worker(module, lanes, ARGUMENTS, _POINTERS)
    b, panel = f.b, 2 * lanes
    k_bytes = weights.header_bytes(panel) // BLOCK + weights.step_bytes(panel)
    num_tiles = b.udiv(b.add(a["rows"], f.long(len(tiles) - 1)), f.long(len(tiles)))
    is_one_tile = b.icmp_signed("==", num_tiles, f.long(1))
    panel_bytes = b.mul(a["in"], f.long(k_bytes))
    share = b.udiv(f.long(k_bytes), num_tiles)  # bytes of the next panel that a tile fetches per k
    thread, _ = f.thread()
    scratch = f.at(a["scratch"], b.mul(b.mul(a["in"], f.long(panel)), thread))

    def run_tiles(packed: Any, weight: Any, column: Any, functions: Sequence[Any]) -> None:
        """All rows over one panel: ``packed`` as it is stored, ``weight`` as the functions read it."""
        with f.loop(0, num_tiles) as (tile, _):
            row = b.udiv(b.mul(a["rows"], tile), num_tiles)
            row_end = b.udiv(b.mul(a["rows"], b.add(tile, f.long(1))), num_tiles)
            next_panel_share = b.add(b.mul(b.mul(share, tile), a["in"]), panel_bytes)
            ahead = b.select(is_one_tile, f.long(READ_AHEAD), next_panel_share)
            arguments = [
                f.at(a["x"], b.mul(row, a["in"])),
                weight,
                f.at(a["bias"], column),
                f.at(a["y"], b.add(b.mul(row, a["out"]), column)),
                a["in"],
                a["out"],
                b.sub(a["out"], column),
                f.at(packed, ahead, f.i8),
                share,
            ]
            _call_nth(f, functions, b.sub(row_end, row), arguments)

    panels = b.udiv(b.add(a["out"], f.long(panel - 1)), f.long(panel))
    with f.loop(*f.share(panels)) as (p, _):
        packed, column = f.at(a["weight"], b.mul(p, panel_bytes), f.i8), b.mul(p, f.long(panel))
        if unpack is None:
            run_tiles(packed, packed, column, tiles)
        else:
            with b.if_else(is_one_tile) as (directly, by_scratch):
                with directly:
                    run_tiles(packed, packed, column, tiles)
                with by_scratch:
                    b.call(unpack, [packed, scratch, a["in"]])
                    run_tiles(packed, scratch, column, float_tiles)
    b.ret_void()


def _call_nth(f: IrFunction, functions: Sequence[Any], n: Any, arguments: Sequence[Any]) -> None:
    """Calls the ``n``-th function, counted from 1."""
    end = f.b.append_basic_block()
    choice = f.b.switch(n, end)
    for i, function in enumerate(functions, 1):
        block = f.b.append_basic_block()
        choice.add_case(f.long(i), block)
        f.b.position_at_end(block)
        f.b.call(function, arguments)
        f.b.branch(end)
    f.b.position_at_end(end)


def _define_tile(module: Any, name: str, weights: PanelFormat, rows: int, lanes: int) -> Any:
    """`(x, w, bias, y, in, out, left, fetch, share)`: rows x panel outputs, all accumulators in registers, one pass
    over k.  ``left``: outputs from the panel's first on; ``share`` bytes from ``fetch`` on are fetched per k."""
    pointer, long = ir.PointerType(), ir.IntType(64)
    f = IrFunction(module, lanes, name, [*[pointer] * 4, *[long] * 3, pointer, long])
    b, panel = f.b, 2 * lanes
    x, w, bias, y, in_features, out_features, left, fetch, share = f.args
    # One row has nothing to wait for but memory, so it fetches into L1; more rows would crowd x out of there.
    locality = 3 if rows == 1 else 2
    halves = [f.vector(bias, h * lanes) for h in (0, 1)]
    x_rows = [x]
    for _ in range(rows - 1):
        x_rows.append(f.at(x_rows[-1], in_features))

    def add_products(k: Any, pair: Sequence[Any], sums: list[Any]) -> None:
        line = f.at(fetch, b.mul(k, share), f.i8)
        for i in range(max(weights.step_bytes(panel) // 64, 1)):
            f.prefetch(f.at(line, 64 * i, f.i8), locality)
        for r, x_row in enumerate(x_rows):
            value = f.splat(f.load(x_row, k))
            for h in (0, 1):
                sums[2 * r + h] = f.fma(value, pair[h], sums[2 * r + h])

    sums = _over_k(f, weights, w, in_features, halves * rows, add_products)
    y_rows = [y]
    for _ in range(rows - 1):
        y_rows.append(f.at(y_rows[-1], out_features))
    cells = [(f.at(y_row, h * lanes), sums[2 * r + h], h) for r, y_row in enumerate(y_rows) for h in (0, 1)]
    with b.if_else(b.icmp_signed(">=", left, f.long(panel))) as (whole, part):
        with whole:
            for address, total, _ in cells:
                f.store(total, address)
        with part:
            masks = [b.icmp_signed("<", f.count_up(), f.splat(b.sub(left, f.long(h * lanes)))) for h in (0, 1)]
            align = ir.Constant(f.i32, 4)
            for address, total, h in cells:
                f.call(f"llvm.masked.store.v{lanes}f32.p0", f.void, total, address, align, masks[h])
    b.ret_void()
    return f.function


def _define_unpack(module: Any, weights: PanelFormat, lanes: int) -> Any:
    """`(w, scratch, in)`: the weights of one panel as fp32 [in, panel]."""
    f = IrFunction(module, lanes, "unpack", [ir.PointerType(), ir.PointerType(), ir.IntType(64)])
    w, scratch, in_features = f.args

    def store(k: Any, pair: Sequence[Any], carried: list[Any]) -> None:
        for h in (0, 1):
            f.store(pair[h], carried[0], h * lanes)
        carried[0] = f.at(carried[0], 2 * lanes)

    _over_k(f, weights, w, in_features, [scratch], store)
    f.b.ret_void()
    return f.function


def _over_k(
    f: IrFunction,
    weights: PanelFormat,
    panel: Any,
    in_features: Any,
    carried: Sequence[Any],
    body: Callable[[Any, Sequence[Any], list[Any]], None],
) -> list[Any]:
    """``body(k, its weights as two vectors, carried values to replace)`` for every k; returns the last values."""
    width = 2 * f.lanes

    def steps(start: Any, stop: Any, first: Any, headers: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        with f.loop(start, stop, carried=[first, *values]) as (k, inner):
            own = inner[1:]
            body(k, weights.weights(f, inner[0], headers), own)
            inner[:] = [f.at(inner[0], weights.step_bytes(width), f.i8), *own]
        return inner

    if not weights.headers:  # nothing divides the row: it is one block
        return steps(0, in_features, panel, (), carried)[1:]
    with f.loop(0, in_features, BLOCK, [panel, *carried]) as (k, outer):
        first = f.at(outer[0], weights.header_bytes(width), f.i8)
        outer[:] = steps(k, f.b.add(k, f.long(BLOCK)), first, weights.header_vectors(f, outer[0]), outer[1:])
    return outer[1:]
