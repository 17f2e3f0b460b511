"""LLVM IR of paged decode attention.

Per item: the scores of every position, in blocks of as many positions as a vector has lanes, so that one vector holds
a block's scores; their peak; their exponentials and total; the weighted sum of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar.kernels.cpu_jit import ir
from mstar.kernels.ir_vector import VectorCode, i64, loop

# What `worker` takes, 8 bytes each.  Strides in elements; `pages` int32 [rows, pages_stride]; `lengths` and `firsts`
# (the first position a row sees) int64 [rows]; `costs` int64 [rows + 1], cumulative cost of one kv head of each row;
# `scores` fp32 [threads, group, scores_stride], scratch.
ARGUMENTS = (
    *("q", "k", "v", "out", "layer", "q_stride", "k_stride", "v_stride"),
    *("pages", "lengths", "firsts", "costs", "scores", "rows", "pages_stride", "scores_stride"),
)
_POINTERS = {"q", "k", "v", "out", "layer", "pages", "lengths", "firsts", "costs", "scores"}
_ACCUMULATORS = {16: 24, 8: 12}  # vectors held at once by lanes: of 32 registers and of 16


def module_ir(group: int, kv_heads: int, dim: int, page_size: int, lanes: int) -> str:
    """The module: `worker(arguments)` and the function of one item.

    ``group``: query heads per kv head; ``dim`` is a multiple of ``lanes``.
    """
    module = ir.Module()
    item = _Item(module, group, kv_heads, dim, page_size, lanes).function
    _define_worker(module, item, group, kv_heads, dim)
    return str(module)


def _define_worker(module: Any, item: Any, group: int, kv_heads: int, dim: int) -> None:
    """Every thread walks over all items and takes those whose middle lies in its share of the total cost."""
    long, pointer = ir.IntType(64), ir.PointerType()
    query = ir.FunctionType(ir.IntType(32), [])
    thread_num, num_threads = (
        ir.Function(module, query, name) for name in ("omp_get_thread_num", "omp_get_num_threads")
    )
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), "worker")
    b = ir.IRBuilder(function.append_basic_block())
    a = {
        name: b.load(b.gep(function.args[0], [i64(i)], source_etype=long), typ=pointer if name in _POINTERS else long)
        for i, name in enumerate(ARGUMENTS)
    }
    thread, threads = (b.zext(b.call(callee, []), long) for callee in (thread_num, num_threads))

    def at(base: Any, *offsets: Any) -> Any:
        for offset in offsets:
            base = b.gep(base, [offset], source_etype=ir.FloatType())
        return base

    def entry(array: str, index: Any) -> Any:
        return b.load(b.gep(a[array], [index], source_etype=long), typ=long)

    share = b.mul(entry("costs", a["rows"]), i64(2 * kv_heads))  # doubled, so that an item's middle is whole
    low = b.mul(share, thread)
    high = b.add(low, share)
    scores = at(a["scores"], b.mul(b.mul(a["scores_stride"], i64(group)), thread))
    with loop(b, i64(0), a["rows"], 1) as row:
        begin = entry("costs", row.index)
        cost = b.sub(entry("costs", b.add(row.index, i64(1))), begin)
        with loop(b, i64(0), i64(kv_heads), 1) as head:
            start = b.add(b.mul(begin, i64(kv_heads)), b.mul(cost, head.index))
            middle = b.mul(b.add(b.mul(start, i64(2)), cost), threads)
            is_mine = b.and_(b.icmp_signed(">=", middle, low), b.icmp_signed("<", middle, high))
            with b.if_then(is_mine):
                column = b.mul(head.index, i64(dim))
                q_column = b.mul(column, i64(group))
                out_row = b.mul(row.index, i64(group * kv_heads * dim))
                b.call(
                    item,
                    [
                        at(a["q"], b.mul(row.index, a["q_stride"]), q_column),
                        at(a["k"], b.mul(row.index, a["k_stride"]), column),
                        at(a["v"], b.mul(row.index, a["v_stride"]), column),
                        at(a["out"], out_row, q_column),
                        at(a["layer"], column),
                        at(a["pages"], b.mul(row.index, a["pages_stride"])),
                        entry("firsts", row.index),
                        entry("lengths", row.index),
                        scores,
                        a["scores_stride"],
                    ],
                )
    b.ret_void()


class _Item(VectorCode):
    """Builds `item(q, k, v, out, layer, pages, first, length, scores, scores_stride)`; every pointer but ``pages``
    and ``scores`` stands at its row and head."""

    def __init__(self, module: Any, group: int, kv_heads: int, dim: int, page_size: int, lanes: int) -> None:
        self.group, self.dim, self.page_size = group, dim, page_size
        self.token = kv_heads * dim  # elements from one token of a page to the next
        pointer = ir.PointerType()
        kinds = [pointer] * 6 + [ir.IntType(64)] * 2 + [pointer, ir.IntType(64)]
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "item")
        self.function.linkage = "internal"
        self.function.attributes.add("nounwind")
        super().__init__(module, self.function, lanes)
        self.q, self.k, self.v, self.out, self.layer, self.pages = self.function.args[:6]
        self.first, self.length, self.scores, self.scores_stride = self.function.args[6:]
        self.block_first = self.b.and_(self.first, i64(-lanes))
        self._store_new()
        self._score_pass()
        totals = self._exp_pass(self._peak_pass())
        self._value_pass(totals)
        self.b.ret_void()

    def _page(self, page: Any) -> Any:
        """The keys of entry ``page`` of the row's table; its values lie ``page_size`` tokens further."""
        entry = self.b.load(self.b.gep(self.pages, [page], source_etype=ir.IntType(32)), typ=ir.IntType(32))
        return self.at(self.layer, self.b.mul(self.b.zext(entry, ir.IntType(64)), i64(2 * self.page_size * self.token)))

    def _key(self, position: Any) -> Any:
        inside = self.b.mul(self.b.urem(position, i64(self.page_size)), i64(self.token))
        return self.at(self._page(self.b.udiv(position, i64(self.page_size))), inside)

    def _score_row(self, head: Any, block: Any) -> Any:
        """Where the scores of a query head's block lie."""
        offset = self.b.add(self.b.mul(self.scores_stride, head), self.b.sub(block, self.block_first))
        return self.at(self.scores, offset)

    # Passes.

    def _store_new(self) -> None:
        key = self._key(self.b.sub(self.length, i64(1)))
        for c in range(0, self.dim, self.lanes):
            self.store(self.load(self.k, c), key, c)
            self.store(self.load(self.v, c), key, self.page_size * self.token + c)

    def _score_pass(self) -> None:
        """Stores all scores, -inf for positions of the outer blocks that the row does not see.

        The query heads are a loop: laid out one behind the other, they have LLVM keep a block's keys for all of them
        and run out of registers.  The first head brings a block's keys into the L1 cache, the others find them there.
        """
        b, lanes = self.b, self.lanes
        scale, low = self.splat(self.dim**-0.5), self.splat(float("-inf"))
        lane = ir.Constant(ir.VectorType(ir.IntType(64), lanes), list(range(lanes)))
        first, length = self.broadcast(self.first), self.broadcast(self.length)
        with loop(b, self.block_first, self.length, lanes) as block:
            position = b.add(self.broadcast(block.index), lane)
            is_seen = b.and_(b.icmp_signed(">=", position, first), b.icmp_signed("<", position, length))
            keys = self._block_keys(block.index)
            self._prefetch(block.index, keys)
            with loop(b, i64(0), i64(self.group), 1) as head:
                q = self.at(self.q, b.mul(head.index, i64(self.dim)))
                query = [b.fmul(self.load(q, c), scale) for c in range(0, self.dim, lanes)]
                products, order = self._dot_products(query, keys)
                back = [order.index(i) for i in range(lanes)]
                score = b.select(is_seen, self._shuffle(products, products, back), low)
                self.store(score, self._score_row(head.index, block.index))

    def _prefetch(self, block: Any, keys: Sequence[Any]) -> None:
        """Fetches the next block's keys into L1 and this one's values, for the last pass, into L2."""
        b = self.b
        following = b.add(block, i64(self.lanes))
        following = b.select(b.icmp_signed("<", following, self.length), following, block)
        for next_key, key in zip(self._block_keys(following), keys, strict=True):
            for line in range(0, self.dim, 16):
                self._fetch(next_key, line, 3)
                self._fetch(key, self.page_size * self.token + line, 2)

    def _fetch(self, base: Any, offset: int, locality: int) -> None:
        i32 = ir.IntType(32)
        name = "llvm.prefetch.p0"
        callee = self.module.globals.get(name)
        if callee is None:
            callee = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [ir.PointerType(), i32, i32, i32]), name)
        options = [ir.Constant(i32, option) for option in (0, locality, 1)]  # to read, how near, data
        self.b.call(callee, [self.at(base, i64(offset)), *options])

    def _peak_pass(self) -> list[Any]:
        b, low = self.b, self.splat(float("-inf"))
        with loop(b, self.block_first, self.length, self.lanes, [low] * self.group) as block:
            block.next = []
            for g, peak in enumerate(block.values):
                score = self.load(self._score_row(i64(g), block.index))
                block.next.append(b.select(b.fcmp_ordered(">", score, peak), score, peak))
        return [self.intrinsic("vector.reduce.fmax", self.f32, [v]) for v in block.values]

    def _block_keys(self, block: Any) -> list[Any]:
        """Addresses of a block's keys.  Past the row's end they stay within its last page or repeat its last token."""
        if self.page_size % self.lanes == 0:
            key = self._key(block)
            return [self.at(key, i64(i * self.token)) for i in range(self.lanes)]
        last = self.b.sub(self.length, i64(1))
        positions = [self.b.add(block, i64(i)) for i in range(self.lanes)]
        return [self._key(self.b.select(self.b.icmp_signed("<", p, last), p, last)) for p in positions]

    def _dot_products(self, query: list[Any], keys: Sequence[Any]) -> tuple[Any, list[int]]:
        """The products with ``keys`` in one vector, and which key each group of lanes belongs to.

        Two halves are folded into one vector at a time: a key's partial sums take half the lanes at each step, down
        to one, which costs three operations a key where a sum across lanes costs eight.
        """
        b = self.b
        if len(keys) == 1:
            total = b.fmul(query[0], self.load(keys[0]))
            for i, x in enumerate(query[1:], 1):
                total = self.fma(x, self.load(keys[0], i * self.lanes), total)
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
        return b.fadd(self._shuffle(left, right, picks), self._shuffle(left, right, upper)), folded

    def _shuffle(self, x: Any, y: Any, lanes: list[int]) -> Any:
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), lanes))

    def _exp_pass(self, peaks: Sequence[Any]) -> list[Any]:
        """Replaces scores by ``exp(score - peak)``; returns each query head's total."""
        b = self.b
        tops = [self.broadcast(peak) for peak in peaks]
        with loop(b, self.block_first, self.length, self.lanes, [self.splat(0.0)] * self.group) as block:
            block.next = []
            for g, (top, total) in enumerate(zip(tops, block.values, strict=True)):
                row = self._score_row(i64(g), block.index)
                weight = self.exp(b.fsub(self.load(row), top))
                self.store(weight, row)
                block.next.append(b.fadd(total, weight))
        zero = ir.Constant(self.f32, 0.0)
        return [
            self.intrinsic("vector.reduce.fadd", self.f32, [zero, total], fastmath=("reassoc",))
            for total in block.values
        ]

    def _value_pass(self, totals: Sequence[Any]) -> None:
        b = self.b
        one = ir.Constant(self.f32, 1.0)
        inverses = [self.broadcast(b.fdiv(one, total)) for total in totals]
        held = max(1, _ACCUMULATORS[self.lanes] // self.group) * self.lanes
        for begin in range(0, self.dim, held):
            columns = range(begin, min(self.dim, begin + held), self.lanes)
            sums = self._weighted_sum(columns)
            for g, inverse in enumerate(inverses):
                for c, total in zip(columns, sums[g * len(columns) :], strict=False):
                    self.store(b.fmul(total, inverse), self.out, g * self.dim + c)

    def _weighted_sum(self, columns: Sequence[int]) -> Sequence[Any]:
        """For each query head the sum over positions of weight times the values' ``columns``."""
        b, size = self.b, i64(self.page_size)
        zeros = [self.splat(0.0)] * (self.group * len(columns))
        pages = b.udiv(b.add(self.length, i64(self.page_size - 1)), size)
        with loop(b, b.udiv(self.first, size), pages, 1, zeros) as page:
            values = self.at(self._page(page.index), i64(self.page_size * self.token))
            begin = b.mul(page.index, size)
            end = b.add(begin, size)
            start = b.select(b.icmp_signed("<", begin, self.first), self.first, begin)
            stop = b.select(b.icmp_signed("<", end, self.length), end, self.length)
            with loop(b, start, stop, 1, page.values) as position:
                value = self.at(values, b.mul(b.sub(position.index, begin), i64(self.token)))
                vectors = [self.load(value, c) for c in columns]
                position.next = []
                for g in range(self.group):
                    weight = self.broadcast(b.load(self._score_row(i64(g), position.index), typ=self.f32))
                    for i, vector in enumerate(vectors):
                        position.next.append(self.fma(weight, vector, position.values[g * len(columns) + i]))
            page.next = position.values
        return page.values
