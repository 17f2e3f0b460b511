"""Rows of a text model's steps: prompts and their parts, and decode rows in front of them on one token axis."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar.engine.inputs import ARNodeInputs
from mstar.model.text_rows import LOOPBACK, collate, decode_row, prompt_row, split_row

CPU = torch.device("cpu")


def prompt(*ids):
    return prompt_row(np.array(ids, np.int64), "prefill")


def looped(token):
    return ARNodeInputs({LOOPBACK: torch.tensor([token])}, walk="decode")


def test_a_prompt_row_spans_its_ids():
    row = prompt(5, 6, 7)
    assert row.input_ids.tolist() == [5, 6, 7]
    assert (row.input_seq_len, row.chunk_start, row.chunk_total, row.is_final_chunk) == (3, 0, 3, True)


@given(ids=st.lists(st.integers(0, 99), max_size=12), data=st.data())
def test_the_parts_of_a_prompt_laid_end_to_end_are_the_prompt(ids, data):
    row, parts = prompt(*ids), []
    for _ in range(data.draw(st.integers(0, 3))):
        head, row = split_row(row, data.draw(st.integers(0, row.input_seq_len)))
        parts.append(head)
    parts.append(row)
    assert [i for part in parts for i in part.input_ids.tolist()] == ids
    assert [part.chunk_start for part in parts] == np.cumsum([0, *(p.input_seq_len for p in parts[:-1])]).tolist()
    assert [part.is_final_chunk for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(part.chunk_total == len(ids) and part.input_ids.numel() == part.input_seq_len for part in parts)


def test_a_non_final_part_stays_non_final_when_it_is_split_again():
    head, _ = split_row(prompt(1, 2, 3, 4), 3)
    assert [part.is_final_chunk for part in split_row(head, 1)] == [False, False]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([prompt(1, 2), prompt(3)], [1, 2, 3]),
        ([decode_row("decode"), decode_row("decode")], [70, 71]),
        ([decode_row("decode"), decode_row("decode"), prompt(1, 2), prompt()], [70, 71, 1, 2]),
        ([decode_row("decode"), prompt(3)], [70, 3]),
    ],
)
def test_decode_rows_take_the_samplers_tokens_and_stand_first(rows, expected):
    ids = collate(rows, lambda: torch.arange(70, 70 + len(rows)), CPU)
    assert ids.dtype == torch.int64
    assert ids.tolist() == expected


def test_the_sampler_is_not_asked_for_prompts_alone():
    def last_tokens():
        raise AssertionError("no row is continued")

    assert collate([prompt(4, 5)], last_tokens, CPU).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([looped(8), looped(9)], [8, 9]),
        ([looped(8), looped(9), prompt(1, 2)], [8, 9, 1, 2]),
    ],
)
def test_without_a_sampler_that_keeps_them_tokens_come_with_the_rows(rows, expected):
    assert collate(rows, None, CPU).tolist() == expected


def test_a_row_without_its_token_names_the_input():
    with pytest.raises(KeyError, match=LOOPBACK):
        collate([looped(8), decode_row("decode")], None, CPU)
