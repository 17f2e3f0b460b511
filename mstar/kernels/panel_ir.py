"""LLVM IR of the panel kernel: `y = x @ weight.T + bias` over panels of any format."""

from collections.abc import Sequence

from mstar.kernels.panel_formats import BLOCK, FLOAT, PanelFormat

# Bytes the kernel reads ahead of itself when one tile covers all rows; 4 to 16 KiB measure the same.
READ_AHEAD = 8192


def module_ir(weights: PanelFormat, lanes: int, tile_rows: int) -> str:
    """LLVM IR of `worker(arguments)`, which every OpenMP thread runs over its share of the panels."""
    heights = range(1, tile_rows + 1)
    functions = [_tile_ir(f"tile{rows}", weights, rows, lanes) for rows in heights]
    table = ", ".join(f"ptr @tile{rows}" for rows in heights)
    unpacked_table, unpack = table, ""
    if weights is not FLOAT:
        functions += [_tile_ir(f"float{rows}", FLOAT, rows, lanes) for rows in heights] + [_unpack_ir(weights, lanes)]
        unpacked_table = ", ".join(f"ptr @float{rows}" for rows in heights)
        unpack = "call void @unpack(ptr %w_panel, ptr %scratch_own, i64 %in)"
    panel = 2 * lanes
    k_bytes = weights.header_bytes(panel) // BLOCK + weights.step_bytes(panel)
    names = {
        "x": "ptr",
        "w": "ptr",
        "bias": "ptr",
        "y": "ptr",
        "rows": "i64",
        "in": "i64",
        "out": "i64",
        "scratch": "ptr",
    }
    arguments = "\n".join(
        f"  %a{i} = getelementptr i64, ptr %arguments, i64 {i}\n  %{name} = load {kind}, ptr %a{i}"
        for i, (name, kind) in enumerate(names.items())
    )
    return f"""
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare <{lanes} x float> @llvm.fma.v{lanes}f32(<{lanes} x float>, <{lanes} x float>, <{lanes} x float>)
declare void @llvm.masked.store.v{lanes}f32.p0(<{lanes} x float>, ptr, i32, <{lanes} x i1>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
@tiles = internal constant [{tile_rows} x ptr] [{table}]
@unpacked_tiles = internal constant [{tile_rows} x ptr] [{unpacked_table}]

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
  %direct = or i1 %one_tile, {str(weights is FLOAT).lower()}
  %panel_bytes = mul i64 %in, {k_bytes}
  %share = udiv i64 {k_bytes}, %tiles             ; bytes of the next panel a tile fetches per k
  %scratch_bytes = mul i64 %in, {panel * 4}
  %scratch_offset = mul i64 %scratch_bytes, %thread
  %scratch_own = getelementptr i8, ptr %scratch, i64 %scratch_offset
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
  br i1 %direct, label %panel_body, label %unpack
unpack:
  {unpack}
  br label %panel_body
panel_body:
  %w_tile = phi ptr [ %w_panel, %panel ], [ %scratch_own, %unpack ]
  %table = phi ptr [ @tiles, %panel ], [ @unpacked_tiles, %unpack ]
  br label %tile
tile:
  %t = phi i64 [ 0, %panel_body ], [ %t_next, %tile ]
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
  %entry = getelementptr ptr, ptr %table, i64 %index
  %function = load ptr, ptr %entry
  call void %function(ptr %x_tile, ptr %w_tile, ptr %bias_panel, ptr %y_tile, i64 %in, i64 %out, i64 %left,
                      ptr %fetch, i64 %share)
  %t_more = icmp ult i64 %t_next, %tiles
  br i1 %t_more, label %tile, label %panel_end
panel_end:
  %p_next = add i64 %p, 1
  br label %panel_head
done:
  ret void
}}
{"".join(functions)}
attributes #0 = {{ nounwind "prefer-vector-width"="{lanes * 32}" "min-legal-vector-width"="{lanes * 32}" }}
"""


def _tile_ir(name: str, weights: PanelFormat, rows: int, lanes: int) -> str:
    """LLVM IR of a tile: rows x panel outputs, all accumulators in registers, one pass over k."""
    vector, panel = f"<{lanes} x float>", 2 * lanes
    cells = [(r, h) for r in range(rows) for h in (0, 1)]  # h: half of the panel
    # One row has nothing to wait for but memory, so it fetches into L1; more rows would crowd x out of there.
    locality = 3 if rows == 1 else 2
    ir = [
        f"define internal void @{name}(ptr %x, ptr %w, ptr %bias, ptr %y, i64 %in, i64 %out, i64 %left, "
        "ptr %fetch, i64 %share) #0 {\nstart:"
    ]
    ir += [f"%b{h}p = getelementptr float, ptr %bias, i64 {h * lanes}" for h in (0, 1)]
    ir += [f"%b{h} = load {vector}, ptr %b{h}p, align 4" for h in (0, 1)]
    ir += ["%x0 = getelementptr i8, ptr %x, i64 0"]
    ir += [f"%x{r} = getelementptr float, ptr %x{r - 1}, i64 %in" for r in range(1, rows)]
    body = ["%fetch_offset = mul i64 %k, %share", "%line0 = getelementptr i8, ptr %fetch, i64 %fetch_offset"]
    for line in range(max(weights.step_bytes(panel) // 64, 1)):
        body += [f"%line{line}p = getelementptr i8, ptr %line0, i64 {64 * line}"]
        body += [f"call void @llvm.prefetch.p0(ptr %line{line}p, i32 0, i32 {locality}, i32 1)"]
    for r in range(rows):
        body += [f"%x{r}p = getelementptr float, ptr %x{r}, i64 %k", f"%x{r}k = load float, ptr %x{r}p"]
        body += [f"%x{r}i = insertelement {vector} undef, float %x{r}k, i32 0"]
        body += [f"%x{r}v = shufflevector {vector} %x{r}i, {vector} undef, <{lanes} x i32> zeroinitializer"]
    fma = f"call {vector} @llvm.fma.v{lanes}f32"
    body += [f"%sum{r}_{h} = {fma}({vector} %x{r}v, {vector} %w{h}, {vector} %acc{r}_{h})" for r, h in cells]
    ir += _over_k(weights, lanes, [(vector, f"%acc{r}_{h}", f"%b{h}", f"%sum{r}_{h}") for r, h in cells], body)
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


def _unpack_ir(weights: PanelFormat, lanes: int) -> str:
    """LLVM IR of `unpack`: the weights of one panel as fp32 [in, panel]."""
    vector = f"<{lanes} x float>"
    body = [
        f"%to1 = getelementptr float, ptr %to, i64 {lanes}",
        f"%to_next = getelementptr float, ptr %to1, i64 {lanes}",
    ]
    body += [f"store {vector} %w0, ptr %to, align 4", f"store {vector} %w1, ptr %to1, align 4"]
    ir = ["define internal void @unpack(ptr %w, ptr %scratch, i64 %in) #0 {\nstart:"]
    ir += _over_k(weights, lanes, [("ptr", "%to", "%scratch", "%to_next")], body)
    return "\n".join([*ir, "ret void\n}\n"])


def _over_k(
    weights: PanelFormat, lanes: int, carried: Sequence[tuple[str, str, str, str]], body: Sequence[str]
) -> list[str]:
    """Runs `body` for every %k from 0 to %in with that k's weights in %w0 and %w1, from the panel at %w.

    `carried`: (type, name, value at first, value for the next k) of what passes from one k to the next.
    """
    panel = 2 * lanes
    ir = ["br label %blocks\nblocks:", "%block = phi ptr [ %w, %start ], [ %step_next, %block_end ]"]
    ir += ["%k_block = phi i64 [ 0, %start ], [ %k_next, %block_end ]"]
    ir += [
        f"{name}_block = phi {kind} [ {first}, %start ], [ {next_}, %block_end ]"
        for kind, name, first, next_ in carried
    ]
    ir += weights.headers_ir(lanes)
    ir += [f"%step_first = getelementptr i8, ptr %block, i64 {weights.header_bytes(panel)}"]
    # Without headers nothing divides the row: it is one block.
    ir += [f"%k_end = add i64 %k_block, {BLOCK}" if weights.headers else "%k_end = add i64 %in, 0"]
    ir += ["br label %loop\nloop:", "%k = phi i64 [ %k_block, %blocks ], [ %k_next, %loop ]"]
    ir += ["%step = phi ptr [ %step_first, %blocks ], [ %step_next, %loop ]"]
    ir += [f"{name} = phi {kind} [ {name}_block, %blocks ], [ {next_}, %loop ]" for kind, name, _, next_ in carried]
    ir += [*weights.weights_ir(lanes), *body]
    ir += [f"%step_next = getelementptr i8, ptr %step, i64 {weights.step_bytes(panel)}", "%k_next = add i64 %k, 1"]
    ir += ["%k_more = icmp ult i64 %k_next, %k_end", "br i1 %k_more, label %loop, label %block_end\nblock_end:"]
    return [*ir, "%more = icmp ult i64 %k_next, %in", "br i1 %more, label %blocks, label %end\nend:"]
