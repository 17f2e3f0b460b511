"""The tensor table and what is made from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from mstar.runtime.options import OPTIONS
from mstar.serving import contract
from mstar.serving.parse import RawRequest, parse
from mstar.serving.pbtxt import render_config
from mstar.utils.errors import LoadError

ENTRY = Path(__file__).resolve().parents[2] / "model_repository" / "smollm2"


def parsed(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def as_dicts(tensors) -> list[dict]:
    return [
        {
            "name": tensor.name,
            "data_type": model_config_pb2.DataType.Name(tensor.data_type),
            "dims": list(tensor.dims),
            **({"optional": True} if getattr(tensor, "optional", False) else {}),
        }
        for tensor in tensors
    ]


def test_shipped_config_has_the_contracts_tensors():
    config = parsed((ENTRY / "config.pbtxt").read_text())
    assert as_dicts(config.input) == contract.input_configs()
    assert as_dicts(config.output) == contract.output_configs()
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0


def test_shipped_config_is_what_its_own_options_render_to():
    text = (ENTRY / "config.pbtxt").read_text()
    options = {key: value.string_value for key, value in parsed(text).parameters.items()}
    assert render_config(options) == text


def test_every_config_warms_its_front_end_up_with_a_request_that_no_engine_refuses():
    (sample,) = parsed(render_config({"model": "smollm2-135m"})).model_warmup
    assert sample.batch_size == 1  # 0 would be skipped
    assert all(each.zero_data for each in sample.inputs.values())
    tensors = {
        name: np.zeros(list(each.dims), contract.INPUT_BY_NAME[name].numpy_type) for name, each in sample.inputs.items()
    }
    asked = parse(RawRequest(tensors))
    assert asked.input_ids.tolist() == [0]  # any vocabulary has it, and any context has room for it
    assert asked.params.max_tokens == 0


def test_every_option_stands_in_the_config_with_its_default():
    text = render_config({"model": "smollm2-135m"})
    for field in OPTIONS:
        assert f'key: "{field.name}"' in text
        assert field.doc.split()[0] in text
    assert set(parsed(text).parameters) == {"model"}


def test_commented_options_load_when_the_mark_is_removed():
    text = render_config({"model": "smollm2-135m"}).replace("# parameters {", "parameters {")
    options = {key: value.string_value for key, value in parsed(text).parameters.items()}
    assert set(options) == {field.name for field in OPTIONS}
    render_config(options)


def test_option_values_are_quoted():
    odd = 'a"b\\c'
    assert parsed(render_config({"model": odd})).parameters["model"].string_value == odd


def test_config_of_an_unknown_option_is_refused_by_name():
    with pytest.raises(LoadError, match="max_seq_length"):
        render_config({"model": "smollm2-135m", "max_seq_length": "5"})


def test_no_input_is_called_parameters():
    # generate() treats the JSON key "parameters" as an object to walk
    assert "parameters" not in contract.INPUT_BY_NAME


@pytest.mark.parametrize("tensors", [contract.INPUTS, contract.OUTPUTS])
def test_names_are_unique(tensors):
    names = [tensor.name for tensor in tensors]
    assert len(names) == len(set(names))
