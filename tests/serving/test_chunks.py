"""Chunks as output tensors."""

from __future__ import annotations

from mstar.serving.chunks import ONE_EACH, SEVERAL_EACH, Chunk, tensors_of
from mstar.serving.contract import OUTPUT_BY_NAME

FULL = Chunk(
    "é", (1, 2), 3, 2, "stop", "END", cumulative_logprob=-1.5, logprobs="[]", log_probs=(-1.0, -0.5),
    prompt_logprobs="[null]", sequence_index=0,
)  # fmt: skip


def test_tensors_have_the_contracts_types():
    tensors = tensors_of([FULL])
    assert set(tensors) == set(OUTPUT_BY_NAME) == {*ONE_EACH, *SEVERAL_EACH}
    for name, array in tensors.items():
        assert array.dtype == OUTPUT_BY_NAME[name].numpy_type
        assert array.ndim == 1
        assert array.size == 1 or OUTPUT_BY_NAME[name].is_list
    assert tensors["text_output"][0] == "é".encode()


def test_outputs_not_asked_for_are_absent():
    assert set(tensors_of([Chunk("a", None, 3, 1)])) == {"text_output", "num_input_tokens", "num_output_tokens"}
    assert set(tensors_of([FULL], {"finish_reason"})) == {"finish_reason"}


def test_several_sequences_stand_in_one_response_in_their_order():
    chunks = [
        Chunk("one", (1, 2), 3, 2, "length", log_probs=(-1.0, -2.0), prompt_logprobs="[null]", sequence_index=0),
        Chunk("", (), 3, 0, "stop", "END", log_probs=(), sequence_index=1),
        Chunk("two", (5,), 3, 1, "stop", log_probs=(-5.0,), sequence_index=2),
    ]
    tensors = {name: array.tolist() for name, array in tensors_of(chunks).items()}
    assert tensors == {
        "text_output": [b"one", b"", b"two"],
        "finish_reason": [b"length", b"stop", b"stop"],
        "stop_reason": [b"", b"END", b""],
        "prompt_logprobs": [b"[null]"],
        "sequence_index": [0, 1, 2],
        "num_input_tokens": [3, 3, 3],
        "num_output_tokens": [2, 0, 1],
        "output_ids": [1, 2, 5],  # split by num_output_tokens
        "output_log_probs": [-1.0, -2.0, -5.0],
    }
