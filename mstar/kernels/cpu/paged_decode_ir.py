"""LLVM IR of paged attention, one query token at a time.

Per item: the scores of every position, in blocks of as many positions as a vector has lanes, so that one vector holds
a block's scores; their peak; their exponentials and total; the weighted sum of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar.kernels.cpu.ir import IrFunction
from mstar.kernels.cpu.ir_math import exp
from mstar.kernels.cpu.jit import ir

# What `worker` takes, 8 bytes each.  Strides in elements; `pages` int32, the pages of all rows; `page_starts` int32
# [rows], where in it a row's pages begin; `lengths` (the position after the last one a row sees) and `firsts` (the
# first one) int64 [rows]; `costs` int64 [rows + 1], cumulative cost of one kv head of each row; `scores` fp32 [threads,
# group, scores_stride], scratch; `stores` 1 to store k and v at each row's last position first, else 0.
ARGUMENTS = (
    *("q", "k", "v", "out", "layer", "q_stride", "k_stride", "v_stride"),
    *("pages", "page_starts", "lengths", "firsts", "costs", "scores", "rows", "scores_stride", "stores"),
)
_POINTERS = frozenset({"q", "k", "v", "out", "layer", "pages", "page_starts", "lengths", "firsts", "costs", "scores"})
_ACCUMULATORS = {16: 24, 8: 12}  # vectors held at once by lanes: of 32 registers and of 16


def module_ir(group: int, kv_heads: int, dim: int, page_size: int, lanes: int) -> str:
    """The module: `worker(arguments)` and the function of one item.

    ``group``: query heads per kv head; ``dim`` is a multiple of ``lanes``.
    """
    module = ir.Module()
    item = _Item(module, group, kv_heads, dim, page_size, lanes).function
    _define_worker(module, item, group, kv_heads, dim, lanes)
    return str(module)


def _define_worker(module: Any, item: Any, group: int, kv_heads: int, dim: int, lanes: int) -> None:
    """Every thread walks over all items and takes those whose middle lies in its share of the total cost."""
    f, a = IrFunction.worker(module, lanes, ARGUMENTS, _POINTERS)
    b = f.b
    thread, threads = f.thread()
    share = b.mul(f.load(a["costs"], a["rows"], f.i64), f.long(2 * kv_heads))  # doubled: an item's middle is whole
    low = b.mul(share, thread)
    high = b.add(low, share)
    scores = f.at(a["scores"], b.mul(b.mul(a["scores_stride"], f.long(group)), thread))
    with f.loop(0, a["rows"]) as (row, _):
        begin = f.load(a["costs"], row, f.i64)
        cost = b.sub(f.load(a["costs"], b.add(row, f.long(1)), f.i64), begin)
        with f.loop(0, kv_heads) as (head, _):
            start = b.add(b.mul(begin, f.long(kv_heads)), b.mul(cost, head))
            middle = b.mul(b.add(b.mul(start, f.long(2)), cost), threads)
            is_mine = b.and_(b.icmp_signed(">=", middle, low), b.icmp_signed("<", middle, high))
            with b.if_then(is_mine):
                column = b.mul(head, f.long(dim))
                q_column = b.mul(column, f.long(group))
                out_row = b.mul(row, f.long(group * kv_heads * dim))
                arguments = [
                    f.at(f.at(a["q"], b.mul(row, a["q_stride"])), q_column),
                    f.at(f.at(a["k"], b.mul(row, a["k_stride"])), column),
                    f.at(f.at(a["v"], b.mul(row, a["v_stride"])), column),
                    f.at(f.at(a["out"], out_row), q_column),
                    f.at(a["layer"], column),
                    f.at(a["pages"], b.sext(f.load(a["page_starts"], row, f.i32), f.i64), f.i32),
                    f.load(a["firsts"], row, f.i64),
                    f.load(a["lengths"], row, f.i64),
                    scores,
                    a["scores_stride"],
                    a["stores"],
                ]
                b.call(item, arguments)
    b.ret_void()


class _Item(IrFunction):
    """Builds `item(q, k, v, out, layer, pages, first, length, scores, scores_stride, stores)`; every pointer but
    ``pages`` and ``scores`` stands at its row and head."""

    def __init__(self, module: Any, group: int, kv_heads: int, dim: int, page_size: int, lanes: int) -> None:
        self.group, self.dim, self.page_size = group, dim, page_size
        self.token = kv_heads * dim  # elements from one token of a page to the next
        pointer = ir.PointerType()
        kinds = [pointer] * 6 + [ir.IntType(64)] * 2 + [pointer] + [ir.IntType(64)] * 2
        super().__init__(module, lanes, "item", kinds)
        self.q, self.k, self.v, self.out, self.layer, self.pages = self.function.args[:6]
        self.first, self.length, self.scores, self.scores_stride, stores = self.function.args[6:]
        self.block_first = self.b.and_(self.first, self.long(-lanes))
        with self.b.if_then(self.b.icmp_signed("!=", stores, self.long(0))):
            self._store_new()
        self._score_pass()
        totals = self._exp_pass(self._peak_pass())
        self._value_pass(totals)
        self.b.ret_void()

    def _page(self, page: Any) -> Any:
        """The keys of the row's page number ``page``; its values lie ``page_size`` tokens further."""
        entry = self.load(self.pages, page, self.i32)
        return self.at(self.layer, self.b.mul(self.b.zext(entry, self.i64), self.long(2 * self.page_size * self.token)))

    def _key(self, position: Any) -> Any:
        inside = self.b.mul(self.b.urem(position, self.long(self.page_size)), self.long(self.token))
        return self.at(self._page(self.b.udiv(position, self.long(self.page_size))), inside)

    def _score_row(self, head: Any, block: Any) -> Any:
        """Where the scores of a query head's block lie."""
        offset = self.b.add(self.b.mul(self.scores_stride, head), self.b.sub(block, self.block_first))
        return self.at(self.scores, offset)

    # Passes.

    def _store_new(self) -> None:
        key = self._key(self.b.sub(self.length, self.long(1)))
        for c in range(0, self.dim, self.lanes):
            self.store(self.vector(self.k, c), key, c)
            self.store(self.vector(self.v, c), key, self.page_size * self.token + c)

    def _score_pass(self) -> None:
        """Stores all scores, -inf for positions of the outer blocks that the row does not see.

        The query heads are a loop: laid out one behind the other, they have LLVM keep a block's keys for all of them
        and run out of registers.  The first head brings a block's keys into the L1 cache, the others find them there.
        """
        b, lanes = self.b, self.lanes
        scale, low = self.fill(self.dim**-0.5), self.fill(float("-inf"))
        first, length = self.splat(self.first), self.splat(self.length)
        with self.loop(self.block_first, self.length, lanes) as (block, _):
            position = b.add(self.splat(block), self.count_up())
            is_seen = b.and_(b.icmp_signed(">=", position, first), b.icmp_signed("<", position, length))
            keys = self._block_keys(block)
            self._prefetch(block, keys)
            with self.loop(0, self.group) as (head, _):
                q = self.at(self.q, b.mul(head, self.long(self.dim)))
                query = [b.fmul(self.vector(q, c), scale) for c in range(0, self.dim, lanes)]
                products, order = self._dot_products(query, keys)
                back = [order.index(i) for i in range(lanes)]
                score = b.select(is_seen, self.shuffle(products, products, back), low)
                self.store(score, self._score_row(head, block))

    def _prefetch(self, block: Any, keys: Sequence[Any]) -> None:
        """Fetches the next block's keys into L1 and this one's values, for the last pass, into L2."""
        b = self.b
        following = b.add(block, self.long(self.lanes))
        following = b.select(b.icmp_signed("<", following, self.length), following, block)
        for next_key, key in zip(self._block_keys(following), keys, strict=True):
            for line in range(0, self.dim, 16):
                self.prefetch(self.at(next_key, line), 3)
                self.prefetch(self.at(key, self.page_size * self.token + line), 2)

    def _peak_pass(self) -> list[Any]:
        lows = [self.fill(float("-inf"))] * self.group
        with self.loop(self.block_first, self.length, self.lanes, lows) as (block, peaks):
            for g, peak in enumerate(peaks):
                peaks[g] = self.larger(self.vector(self._score_row(self.long(g), block)), peak)
        return [self.peak(peak) for peak in peaks]

    def _block_keys(self, block: Any) -> list[Any]:
        """Addresses of a block's keys.  Past the row's end they stay within its last page or repeat its last token."""
        if self.page_size % self.lanes == 0:
            key = self._key(block)
            return [self.at(key, i * self.token) for i in range(self.lanes)]
        last = self.b.sub(self.length, self.long(1))
        positions = [self.b.add(block, self.long(i)) for i in range(self.lanes)]
        return [self._key(self.smaller(p, last)) for p in positions]

    def _dot_products(self, query: list[Any], keys: Sequence[Any]) -> tuple[Any, list[int]]:
        """The products with ``keys`` in one vector, and which key each group of lanes belongs to.

        Two halves are folded into one vector at a time: a key's partial sums take half the lanes at each step, down
        to one, which costs three operations a key where a sum across lanes costs eight.
        """
        b = self.b
        if len(keys) == 1:
            total = b.fmul(query[0], self.vector(keys[0]))
            for i, x in enumerate(query[1:], 1):
                total = self.fma(x, self.vector(keys[0], i * self.lanes), total)
            return total, [0]
        half = len(keys) // 2
        (left, order), (right, _) = (self._dot_products(query, keys[i : i + half]) for i in (0, half))
        width = self.lanes // half  # lanes per key on either side
        unit = 2 if width == 2 else 1  # keys taken from one side at a time: stays within 128 bits where it can
        folded: list[int] = []
        picks: list[int] = []
        for start in range(0, half, unit):
            for side in (0, 1):
                for key in range(start, start + unit):
                    folded.append(order[key] + side * half)
                    picks += [side * self.lanes + key * width + i for i in range(width // 2)]
        upper = [pick + width // 2 for pick in picks]
        return b.fadd(self.shuffle(left, right, picks), self.shuffle(left, right, upper)), folded

    def _exp_pass(self, peaks: Sequence[Any]) -> list[Any]:
        """Replaces scores by ``exp(score - peak)``; returns each query head's total."""
        b = self.b
        tops = [self.splat(peak) for peak in peaks]
        zeros = [self.fill(0.0)] * self.group
        with self.loop(self.block_first, self.length, self.lanes, zeros) as (block, totals):
            for g, top in enumerate(tops):
                row = self._score_row(self.long(g), block)
                weight = exp(self, b.fsub(self.vector(row), top))
                self.store(weight, row)
                totals[g] = b.fadd(totals[g], weight)
        return [self.total(total) for total in totals]

    def _value_pass(self, totals: Sequence[Any]) -> None:
        b = self.b
        zero, one = self.constant(0.0), self.constant(1.0)  # without a position the total is 0, and so is the result
        inverses = [
            self.splat(b.select(b.fcmp_ordered("==", total, zero), zero, b.fdiv(one, total))) for total in totals
        ]
        held = max(1, _ACCUMULATORS[self.lanes] // self.group) * self.lanes
        for begin in range(0, self.dim, held):
            columns = range(begin, min(self.dim, begin + held), self.lanes)
            sums = self._weighted_sum(columns)
            for g, inverse in enumerate(inverses):
                for c, total in zip(columns, sums[g * len(columns) :], strict=False):
                    self.store(b.fmul(total, inverse), self.out, g * self.dim + c)

    def _weighted_sum(self, columns: Sequence[int]) -> Sequence[Any]:
        """For each query head the sum over positions of weight times the values' ``columns``."""
        b, size = self.b, self.long(self.page_size)
        zeros = [self.fill(0.0)] * (self.group * len(columns))
        pages = b.udiv(b.add(self.length, self.long(self.page_size - 1)), size)
        with self.loop(b.udiv(self.first, size), pages, carried=zeros) as (page, outer):
            values = self.at(self._page(page), self.page_size * self.token)
            begin = b.mul(page, size)
            end = b.add(begin, size)
            start = b.select(b.icmp_signed("<", begin, self.first), self.first, begin)
            stop = b.select(b.icmp_signed("<", end, self.length), end, self.length)
            with self.loop(start, stop, carried=outer) as (position, sums):
                value = self.at(values, b.mul(b.sub(position, begin), self.long(self.token)))
                vectors = [self.vector(value, c) for c in columns]
                for g in range(self.group):
                    weight = self.splat(self.load(self._score_row(self.long(g), position)))
                    for i, vector in enumerate(vectors, g * len(columns)):
                        sums[i] = self.fma(weight, vector, sums[i])
            outer[:] = sums
        return outer
