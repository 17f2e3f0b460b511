from __future__ import annotations

import pytest
import torch

from mstar.engine import strict_mode
from mstar.engine.strict_mode import StrictModeError, compare, opaque, record

X = torch.arange(4.0)


def _branch(x):
    return 1 if (x > 0).all() else 2


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: range(4)[x.long()[0]],
        _branch,
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.masked_select(x, x > 1),
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x),
        lambda x: 1.0 in x,
        lambda x: torch.where(x > 1),
        lambda x: x.repeat_interleave(x.long()),
    ],
    ids=[
        *("item", "tolist", "cpu", "numpy", "int", "float", "index", "branch", "nonzero", "bool index"),
        *("masked_select", "unique", "equal", "contains", "where without values", "ragged repeat"),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_host_read_is_refused(read, inference):
    with torch.inference_mode(inference), pytest.raises(StrictModeError, match="on the host"):
        record(lambda: read(X))


def test_reads_are_fine_outside_and_the_result_comes_back():
    result, trace = record(lambda: torch.where(X > 1, X * 2, X))
    assert result.tolist() == [0.0, 1.0, 4.0, 6.0]
    assert [name.split(".")[0] for name, *_ in trace] == ["aten::gt", "aten::mul", "aten::where"]


@pytest.mark.parametrize("inference", [False, True])
def test_what_needs_no_host_value_passes(inference):
    with torch.inference_mode(inference):
        record(lambda: X.repeat_interleave(2))
        record(lambda: X.repeat_interleave(X.long(), output_size=6))
        record(lambda: X[X.long()])
        record(lambda: X.long().clamp(max=2).to("cpu"))


def test_a_failed_record_leaves_no_mode_behind():
    with pytest.raises(StrictModeError):
        record(lambda: X.tolist())
    assert X.tolist() == [0.0, 1.0, 2.0, 3.0]
    with opaque("outside"):
        assert X[1].item() == 1.0


def test_an_opaque_region_may_read_and_counts_as_one_operator():
    def forward(pages):
        with opaque("attend"):
            y = X[: X[pages].long().item()]
            y = y + 1
        return X * 2

    traces = [record(lambda n=n: forward(n))[1] for n in (1, 3)]
    assert [name for name, *_ in traces[0]] == ["opaque::attend", "aten::mul.Tensor"]
    compare(*traces)


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        (lambda x: x + 1, "captured aten::mul.Tensor, replayed aten::add.Tensor"),
        (lambda x: (x * 2).sum(), "captured 1 operators, replayed 2"),
        (lambda x: x.double() * 2, "captured aten::mul.Tensor, replayed aten::_to_copy"),
        (lambda x: x.long() * 2, "replayed aten::_to_copy"),
        (lambda x: x[:2] * 2, "aten::slice"),
    ],
)
def test_another_operator_at_replay_is_refused(replay, message):
    captured = record(lambda: X * 2)[1]
    with pytest.raises(StrictModeError, match=message):
        compare(captured, record(lambda: replay(X))[1])


def test_another_dtype_or_shape_at_replay_is_refused():
    captured = record(lambda: X * 2)[1]
    doubles, longer = X.double(), torch.zeros(5)
    with pytest.raises(StrictModeError, match="float64"):
        compare(captured, record(lambda: doubles * 2)[1])
    with pytest.raises(StrictModeError, match=r"captured shape \(4,\), replayed \(5,\)"):
        compare(captured, record(lambda: longer * 2)[1])


@pytest.mark.parametrize(
    ("captured", "replay"),
    [
        (lambda: X * 2, lambda: X * 3),
        (lambda: X * 2, lambda: X * 2.0),
        (lambda: X[1:3] + 1, lambda: X[2:4] + 1),
        (lambda: X.sum(0, keepdim=True), lambda: X.sum(-1, keepdim=True)),
        (lambda: torch.add(X, X, alpha=2), lambda: torch.add(X, X, alpha=3)),
    ],
)
def test_another_constant_at_replay_is_refused(captured, replay):
    trace = record(captured)[1]
    compare(trace, record(captured)[1])
    with pytest.raises(StrictModeError, match="captured with"):
        compare(trace, record(replay)[1])


def test_a_real_head_of_another_length_may_change_integers_only():
    def forward(n, scale):
        return X[:n].mul(scale)

    captured = record(lambda: forward(4, 2.0))[1]
    compare(captured, record(lambda: forward(3, 2.0))[1], [(4, 3)])
    with pytest.raises(StrictModeError, match="captured with"):
        compare(captured, record(lambda: forward(3, 2.5))[1], [(4, 3)])


def test_a_tensor_that_moved_since_the_capture_is_refused():
    state = {"x": X}
    captured = record(lambda: state["x"] * 2)[1]
    X.add_(1).sub_(1)  # other contents are what replays are for
    compare(captured, record(lambda: state["x"] * 2)[1])
    state["x"] = X.clone()
    with pytest.raises(StrictModeError, match="not where the capture read it"):
        compare(captured, record(lambda: state["x"] * 2)[1])


def test_what_the_forward_makes_itself_may_lie_anywhere():
    hold = []

    def forward():
        with opaque("kernel"):
            made = torch.ones(4)
        y = made + X.clone()
        y.add_(X)
        hold.append(y)
        return y[1:] * made[1:]

    compare(record(forward)[1], record(forward)[1])


@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_from_host_values_is_refused(inference):
    with torch.inference_mode(inference), pytest.raises(StrictModeError, match="from host values"):
        record(lambda: X * torch.tensor(2.0))


def test_compiling_anew_is_refused_where_nothing_may_be_compiled():
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    compiled(X)
    with strict_mode.no_recompilation():
        assert compiled(X).tolist() == (X * 2).tolist()
        with pytest.raises(RuntimeError, match="recompile"):
            compiled(torch.ones(7))
    compiled(torch.ones(7))


@pytest.mark.parametrize(("shape", "ok"), [((4, 6), True), ((7, 6), True), ((7, 3), False), ((7,), False)])
def test_only_the_varying_sizes_may_differ(shape, ok):
    captured = record(lambda: torch.zeros(4, 6))[1]
    replayed = record(lambda: torch.zeros(shape))[1]
    if ok:
        compare(captured, replayed, [(4, 7)])
    else:
        with pytest.raises(StrictModeError):
            compare(captured, replayed, [(4, 7)])


def test_multiples_of_a_varying_size_scale_with_it():
    compare(record(lambda: torch.zeros(12))[1], record(lambda: torch.zeros(21))[1], [(4, 7)])


def test_strict_errors_are_runtime_errors():
    assert issubclass(strict_mode.StrictModeError, RuntimeError)
