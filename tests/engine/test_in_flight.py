"""A launched step: its host values come once, in the forward's order, and an error on the device fails all its rows."""

import numpy as np
import pytest

from mstar.engine.batch import Batch
from mstar.engine.in_flight import InFlight, Part
from mstar.engine.inputs import RequestInfo


class Copy:
    def __init__(self, error=None, **values):
        self.values = {name: np.array(value) for name, value in values.items()}
        self.error, self.waits = error, 0

    def wait(self):
        self.waits += 1
        if self.error is not None:
            raise self.error
        return self.values


def flight(*parts, ids=(4, 2)):
    return InFlight(Batch("LLM", "decode", [RequestInfo(i) for i in ids]), ids, list(parts))


def test_padding_is_cut_off():
    result = flight(Part(Copy(new_token=[7, 8, 0, 0]), 2)).result()
    assert result.request_ids == (4, 2)
    assert result.host["new_token"].tolist() == [7, 8]


def test_rows_that_dropped_out_after_the_forward_shift_nobody():
    part = Part(Copy(new_token=[7, 8, 9, 0], scores=[[1], [2], [3], [0]]), 3, dropped=(1,))
    host = flight(part).result().host
    assert host["new_token"].tolist() == [7, 9]
    assert host["scores"].tolist() == [[1], [3]]


def test_rows_that_ran_one_by_one_come_in_order_with_what_all_of_them_have():
    parts = [Part(Copy(new_token=[7], extra=[1]), 1), Part(Copy(new_token=[8]), 1)]
    assert {name: value.tolist() for name, value in flight(*parts).result().host.items()} == {"new_token": [7, 8]}


def test_values_are_waited_for_once():
    copy = Copy(new_token=[7, 8])
    step = flight(part := Part(copy, 2))
    part.wait()  # a later step needed the slot
    assert step.result() is step.result()
    assert copy.waits == 1


@pytest.mark.parametrize("at", [0, 1])
def test_a_device_error_of_any_part_fails_every_row_that_ran(at):
    parts = [Part(Copy(new_token=[7]), 1), Part(Copy(new_token=[8]), 1)]
    lost = RuntimeError("device lost")
    parts[at] = Part(Copy(lost), 1)
    step = flight(*parts)
    step.errors[9] = early = ValueError("bad row")
    step.outputs[4] = {"image": [1]}
    result = step.result()
    assert result.errors == {9: early, 4: lost, 2: lost}
    assert (result.request_ids, result.host, result.outputs) == ((), {}, {})


def test_waiting_for_a_slot_does_not_raise_what_its_step_will():
    part = Part(Copy(RuntimeError("device lost")), 2)
    part.wait()
    with pytest.raises(RuntimeError, match="device lost"):
        part.values()


def test_a_step_that_ran_nothing_has_no_values():
    step = flight(ids=())
    assert step.result().host == {}
