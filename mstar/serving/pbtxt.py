"""A repository entry's config.pbtxt, written from the tensor contract and the option table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from mstar.runtime.fields import Field
from mstar.runtime.options import ENGINE_OPTIONS, FRONT_OPTIONS, parse_options
from mstar.serving.contract import INPUTS, OUTPUTS, Tensor

WIDTH = 116

HEADER = """\
Inputs may also be given as request parameters or inside sampling_parameters; of one value given twice, the tensor
goes before sampling_parameters, and that before the request parameter. Numbers may be strings there. Send exactly
one of text_input, input_ids and messages; everything else is optional."""


WARM_UP_DOC = """\
A request for no tokens that each front end answers at load, so that the first client does not wait for what the server
prepares at its first response."""
WARM_UP = (
    "model_warmup [",
    "  {",
    '    name: "first_response" batch_size: 1',
    '    inputs { key: "input_ids" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }',
    '    inputs { key: "max_tokens" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }',
    "  }",
    "]",
)


def render_config(options: Mapping[str, str], *, instances: int = 1) -> str:
    """The text of a config.pbtxt whose ``parameters`` are ``options``, every other option shown with its default.

    Raises LoadError for options that a model could not load with.
    """
    parse_options(options)
    lines = [
        'backend: "python"',
        "max_batch_size: 0  # requests carry no batch dimension; batching is the engine's",
        "model_transaction_policy { decoupled: true }",
        "",
        *_comment(HEADER),
        *_block("input", INPUTS, optional=True),
        *_block("output", OUTPUTS, optional=False),
        "# Front ends (processes that read requests and send responses); all of them share one engine.",
        f"instance_group [ {{ count: {instances} kind: KIND_MODEL }} ]",
        "",
        *_comment(WARM_UP_DOC),
        *WARM_UP,
        "",
        "# The engine: entries that name the same engine must agree in these.",
        *_parameters(ENGINE_OPTIONS, options),
        "# The front end.",
        *_parameters(FRONT_OPTIONS, options),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _block(kind: str, tensors: tuple[Tensor, ...], *, optional: bool) -> Iterator[str]:
    yield f"{kind} ["
    for index, tensor in enumerate(tensors):
        yield from _about(tensor.doc, tensor.unit, tensor.allowed, tensor.default, "  ")
        end = "," if index + 1 < len(tensors) else ""
        dims = ", ".join(map(str, tensor.dims))
        flag = " optional: true" if optional else ""
        yield f'  {{ name: "{tensor.name}" data_type: TYPE_{tensor.dtype} dims: [ {dims} ]{flag} }}{end}'
    yield "]"
    yield ""


def _parameters(fields: tuple[Field, ...], options: Mapping[str, str]) -> Iterator[str]:
    for field in fields:
        default = "" if field.default in (None, ()) else str(field.default)
        yield ""
        yield from _about(field.doc, field.unit, field.allowed, default)
        off = "" if field.name in options else "# "
        value = options.get(field.name, default)
        yield f'{off}parameters {{ key: "{field.name}" value {{ string_value: "{_quoted(value)}" }} }}'
    yield ""


def _about(doc: str, unit: str, allowed: str, default: str, indent: str = "") -> list[str]:
    """What a value means, then what it may be."""
    facts = [("unit", unit), ("range", allowed), ("default", default)]
    told = "; ".join(f"{name}: {text}" for name, text in facts if text)
    return _comment(doc, indent) + _comment(told, indent)


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
