"""fp32 matrix product for few rows on CPUs: an LLVM kernel made at load, run on torch's own OpenMP threads.

BLAS libraries tile for square products and reach a half to a third of the memory bandwidth between 2 and 64 rows.
This kernel reads each weight once, as one stream per thread. The weight is stored in panels of `PANEL` output
features, `[panels, in, PANEL]`; a tile of up to `TILE_ROWS` input rows times one panel stays in registers while k runs.
When there are several tiles, each fetches its share of the next panel, so memory and arithmetic overlap.
"""

import ctypes
import functools
import logging

try:
    import llvmlite.binding as llvm
except ImportError:
    llvm = None

logger = logging.getLogger(__name__)

# Bytes the kernel reads ahead of itself when one tile covers all rows; 4 to 16 KiB measure the same.
READ_AHEAD = 8192


class PanelKernel:
    """The compiled kernel of this machine.

    Attributes:
        panel: output features per panel (two vector registers): 32 with AVX-512, 16 with AVX2.
    """

    def __init__(self) -> None:
        openmp = ctypes.CDLL(None)  # torch loads its OpenMP globally: its pool is shared, not doubled
        features = llvm.get_host_cpu_features()
        lanes, tile_rows = (16, 12) if features.get("avx512f") else (8, 6)
        if not (features.get("avx2") and features.get("fma")):
            raise OSError("the panel kernel needs a CPU with AVX2 and FMA")
        self.panel = 2 * lanes
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value)
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
        )
        module = llvm.parse_assembly(_module_ir(lanes, tile_rows))
        module.verify()
        self._engine = llvm.create_mcjit_compiler(module, machine)  # owns the machine code
        self._engine.finalize_object()
        self._worker = self._engine.get_function_address("worker")
        self._parallel = openmp.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def __call__(
        self, x: int, weight: int, bias: int, y: int, rows: int, in_features: int, out_features: int, threads: int
    ) -> None:
        """y = x @ weight.T + bias.

        Args:
            x: address of fp32 [rows, in_features], contiguous; rows >= 1, in_features >= 1.
            weight: address of fp32 [panels, in_features, panel], the last panel padded.
            bias: address of fp32 [panels * panel].
            y: address of fp32 [rows, out_features], contiguous; written.
            threads: OpenMP threads, the caller among them.
        """
        arguments = (ctypes.c_int64 * 7)(x, weight, bias, y, rows, in_features, out_features)
        self._parallel(self._worker, arguments, threads, 0)


@functools.cache
def panel_kernel() -> PanelKernel | None:
    """The kernel, compiled once per process in about 0.1 s; None, with a warning, where it cannot be made."""
    if llvm is None:
        logger.warning("llvmlite is not installed: CPU linears run at torch's speed (2 to 3 times slower at few rows)")
        return None
    try:
        return PanelKernel()
    except (OSError, AttributeError, TypeError, RuntimeError) as error:  # no AVX2, OpenMP under another name, old LLVM
        logger.warning("the CPU panel kernel cannot be made, linears run at torch's speed: %s", error)
        return None


def _module_ir(lanes: int, tile_rows: int) -> str:
    """LLVM IR of `worker(arguments)`, which every OpenMP thread runs over its share of the panels."""
    tiles = [_tile_ir(rows, lanes) for rows in range(1, tile_rows + 1)]
    table = ", ".join(f"ptr @tile{rows}" for rows in range(1, tile_rows + 1))
    panel = 2 * lanes
    arguments = "\n".join(
        f"  %a{i} = getelementptr i64, ptr %arguments, i64 {i}\n  %{name} = load {kind}, ptr %a{i}"
        for i, (name, kind) in enumerate(
            [("x", "ptr"), ("w", "ptr"), ("bias", "ptr"), ("y", "ptr"), ("rows", "i64"), ("in", "i64"), ("out", "i64")]
        )
    )
    return f"""
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare <{lanes} x float> @llvm.fma.v{lanes}f32(<{lanes} x float>, <{lanes} x float>, <{lanes} x float>)
declare void @llvm.masked.store.v{lanes}f32.p0(<{lanes} x float>, ptr, i32, <{lanes} x i1>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
@tiles = internal constant [{tile_rows} x ptr] [{table}]

define void @worker(ptr %arguments) nounwind {{
start:
{arguments}
  %thread32 = call i32 @omp_get_thread_num()
  %threads32 = call i32 @omp_get_num_threads()
  %thread = zext i32 %thread32 to i64
  %threads = zext i32 %threads32 to i64
  %out_up = add i64 %out, {panel - 1}
  %panels = udiv i64 %out_up, {panel}
  %first_scaled = mul i64 %panels, %thread
  %first = udiv i64 %first_scaled, %threads
  %last_scaled = add i64 %first_scaled, %panels
  %last = udiv i64 %last_scaled, %threads
  %rows_up = add i64 %rows, {tile_rows - 1}
  %tiles = udiv i64 %rows_up, {tile_rows}
  %one_tile = icmp eq i64 %tiles, 1
  %panel_bytes = mul i64 %in, {panel * 4}
  %share = udiv i64 {panel * 4}, %tiles           ; bytes of the next panel a tile fetches per k
  br label %panel_head
panel_head:
  %p = phi i64 [ %first, %start ], [ %p_next, %panel_end ]
  %p_more = icmp ult i64 %p, %last
  br i1 %p_more, label %panel, label %done
panel:
  %w_offset = mul i64 %p, %panel_bytes
  %w_panel = getelementptr i8, ptr %w, i64 %w_offset
  %column = mul i64 %p, {panel}
  %bias_panel = getelementptr float, ptr %bias, i64 %column
  %left = sub i64 %out, %column
  br label %tile
tile:
  %t = phi i64 [ 0, %panel ], [ %t_next, %tile ]
  %t_next = add i64 %t, 1
  %row_scaled = mul i64 %rows, %t                 ; tiles of equal height, not full ones and a rest
  %row = udiv i64 %row_scaled, %tiles
  %row_end_scaled = mul i64 %rows, %t_next
  %row_end = udiv i64 %row_end_scaled, %tiles
  %height = sub i64 %row_end, %row
  %share_offset = mul i64 %share, %t
  %share_start = mul i64 %share_offset, %in
  %next_panel_share = add i64 %share_start, %panel_bytes
  %ahead = select i1 %one_tile, i64 {READ_AHEAD}, i64 %next_panel_share
  %fetch = getelementptr i8, ptr %w_panel, i64 %ahead
  %x_offset = mul i64 %row, %in
  %x_tile = getelementptr float, ptr %x, i64 %x_offset
  %y_row = mul i64 %row, %out
  %y_offset = add i64 %y_row, %column
  %y_tile = getelementptr float, ptr %y, i64 %y_offset
  %index = sub i64 %height, 1
  %entry = getelementptr ptr, ptr @tiles, i64 %index
  %function = load ptr, ptr %entry
  call void %function(ptr %x_tile, ptr %w_panel, ptr %bias_panel, ptr %y_tile, i64 %in, i64 %out, i64 %left,
                      ptr %fetch, i64 %share)
  %t_more = icmp ult i64 %t_next, %tiles
  br i1 %t_more, label %tile, label %panel_end
panel_end:
  %p_next = add i64 %p, 1
  br label %panel_head
done:
  ret void
}}
{"".join(tiles)}
attributes #0 = {{ nounwind "prefer-vector-width"="{lanes * 32}" "min-legal-vector-width"="{lanes * 32}" }}
"""


def _tile_ir(rows: int, lanes: int) -> str:
    """LLVM IR of `tile<rows>`: rows x panel outputs, all accumulators in registers, one pass over k."""
    vector, panel = f"<{lanes} x float>", 2 * lanes
    cells = [(r, h) for r in range(rows) for h in (0, 1)]  # h: half of the panel
    # One row has nothing to wait for but memory, so it fetches into L1; more rows would crowd x out of there.
    locality = 3 if rows == 1 else 2
    ir = [
        f"define internal void @tile{rows}(ptr %x, ptr %w, ptr %bias, ptr %y, i64 %in, i64 %out, i64 %left, "
        "ptr %fetch, i64 %share) #0 {\nstart:"
    ]
    ir += [f"%b{h}p = getelementptr float, ptr %bias, i64 {h * lanes}" for h in (0, 1)]
    ir += [f"%b{h} = load {vector}, ptr %b{h}p, align 4" for h in (0, 1)]
    ir += ["%x0 = getelementptr i8, ptr %x, i64 0"]
    ir += [f"%x{r} = getelementptr float, ptr %x{r - 1}, i64 %in" for r in range(1, rows)]
    ir += ["br label %loop\nloop:", "%k = phi i64 [ 0, %start ], [ %k_next, %loop ]"]
    ir += [f"%acc{r}_{h} = phi {vector} [ %b{h}, %start ], [ %sum{r}_{h}, %loop ]" for r, h in cells]
    ir += ["%fetch_offset = mul i64 %k, %share", "%line0 = getelementptr i8, ptr %fetch, i64 %fetch_offset"]
    for line in range(panel * 4 // 64):
        ir += [f"%line{line}p = getelementptr i8, ptr %line0, i64 {64 * line}"]
        ir += [f"call void @llvm.prefetch.p0(ptr %line{line}p, i32 0, i32 {locality}, i32 1)"]
    ir += [f"%wk = mul i64 %k, {panel}", "%w0p = getelementptr float, ptr %w, i64 %wk"]
    ir += [f"%w1p = getelementptr float, ptr %w0p, i64 {lanes}"]
    ir += [f"%w{h} = load {vector}, ptr %w{h}p, align 4" for h in (0, 1)]
    for r in range(rows):
        ir += [f"%x{r}p = getelementptr float, ptr %x{r}, i64 %k", f"%x{r}k = load float, ptr %x{r}p"]
        ir += [f"%x{r}i = insertelement {vector} undef, float %x{r}k, i32 0"]
        ir += [f"%x{r}v = shufflevector {vector} %x{r}i, {vector} undef, <{lanes} x i32> zeroinitializer"]
    fma = f"call {vector} @llvm.fma.v{lanes}f32"
    ir += [f"%sum{r}_{h} = {fma}({vector} %x{r}v, {vector} %w{h}, {vector} %acc{r}_{h})" for r, h in cells]
    ir += ["%k_next = add i64 %k, 1", "%k_more = icmp ult i64 %k_next, %in"]
    ir += ["br i1 %k_more, label %loop, label %store\nstore:"]
    ir += ["%y0 = getelementptr i8, ptr %y, i64 0"]
    ir += [f"%y{r} = getelementptr float, ptr %y{r - 1}, i64 %out" for r in range(1, rows)]
    ir += [f"%y{r}_{h} = getelementptr float, ptr %y{r}, i64 {h * lanes}" for r, h in cells]
    ir += [f"%full = icmp uge i64 %left, {panel}", "br i1 %full, label %plain, label %masked\nplain:"]
    ir += [f"store {vector} %sum{r}_{h}, ptr %y{r}_{h}, align 4" for r, h in cells]
    ir += ["ret void\nmasked:", f"%lefti = insertelement <{lanes} x i64> undef, i64 %left, i32 0"]
    ir += [f"%leftv = shufflevector <{lanes} x i64> %lefti, <{lanes} x i64> undef, <{lanes} x i32> zeroinitializer"]
    for h in (0, 1):
        columns = ", ".join(f"i64 {h * lanes + i}" for i in range(lanes))
        ir += [f"%mask{h} = icmp ult <{lanes} x i64> <{columns}>, %leftv"]
    store = f"call void @llvm.masked.store.v{lanes}f32.p0"
    ir += [f"{store}({vector} %sum{r}_{h}, ptr %y{r}_{h}, i32 4, <{lanes} x i1> %mask{h})" for r, h in cells]
    ir += ["ret void\n}\n"]
    return "\n".join(ir)
