"""``mstar generate``: answer prompts on this machine, without a server."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mstar
from mstar.cli.assignments import parse_assignments
from mstar.cli.errors import InputError
from mstar.cli.requests import Request, parse_ids, read_requests, request_of
from mstar.runtime.params import coerce_parameters
from mstar.runtime.requests import split_request
from mstar.utils.errors import InvalidArgument, MstarError, Unsupported

if TYPE_CHECKING:
    from mstar.llm import LLM, Completion
    from mstar.runtime.logprobs import Logprob


def generate(
    model: Annotated[
        str, typer.Option(help="A folder, a .gguf file, a Hugging Face id, or an alias such as smollm2-135m.")
    ] = "smollm2-135m",
    prompt: Annotated[str | None, typer.Option(help="Prompt text; special tokens in it are recognised.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Prompt as token ids: 1,2,3.")] = None,
    messages: Annotated[
        str | None,
        typer.Option(help='Chat as JSON: [{"role": "user", "content": "Hi"}]; the model\'s template applies.'),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="JSON lines: a line is one request (prompt, prompt_ids or messages, and any request option, which "
            "wins over the same one given here); all run as one batch.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate. Default: what the context leaves.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's own, else 0.6.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many tokens; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the tokens that hold this share; 1 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; repeat for several.")] = None,
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Show special tokens in the text.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one object a line, in input order: output_ids, text, finish_reason, num_input_tokens, and what "
            "parameters ask for (index, stop_reason, logprobs, cumulative_logprob, prompt_logprobs).",
        ),
    ] = False,
    param: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE of any other request parameter (min_p=0.05, n=2, logprobs=3, stop_token_ids=1,2, "
            'guided_json=\'{"type": "object"}\'); repeat for several.'
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of an engine option, as in config.pbtxt (device=cpu); repeat for several."),
    ] = None,
) -> None:
    """Generate text with a model loaded into this process.

    A single text streams to the terminal; several, and --json, are printed when all are done.
    """
    named = coerce_parameters(
        {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "ignore_eos": ignore_eos or None,
            "stop": stop or None,
            "skip_special_tokens": False if special_tokens else None,
        }
    )
    parameters = _joined(named, coerce_parameters(parse_assignments(param or [], "--param")))
    prompts = {
        "prompt": prompt,
        "prompt_ids": None if prompt_ids is None else parse_ids(prompt_ids),
        "messages": messages,
    }
    requests = _requests(prompts, input_file)
    options: dict[str, Any] = dict(parse_assignments(option or []))
    if "model" in options:
        raise InputError("--option: the model is named by --model")
    with mstar.LLM(model, **options) as llm:
        if len(requests) == 1 and not as_json and _num_texts(requests[0], parameters) == 1:
            _print_stream(llm, requests[0], parameters)
            return
        for completion in _complete(llm, requests, parameters):
            print(json.dumps(_shown(completion), ensure_ascii=False) if as_json else completion.text)


def _joined(named: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    for name in named.keys() & others.keys():
        raise InvalidArgument(name, "given once, not also by --param", others[name])
    return named | others


def _num_texts(request: Request, parameters: dict[str, Any]) -> int:
    _, own = split_request(request.options)
    return (parameters | own).get("n", 1)


def _shown(completion: Completion) -> dict[str, Any]:
    """A completion as JSON has it: what was not asked for is left out, a log-probability is an object."""
    shown = {
        field.name: value for field in fields(completion) if (value := getattr(completion, field.name)) != field.default
    }
    for name in ("logprobs", "prompt_logprobs"):
        if name in shown:
            shown[name] = [position and _by_name(position) for position in shown[name]]
    return shown


def _by_name(position: dict[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {token_id: logprob._asdict() for token_id, logprob in position.items()}


def _requests(prompts: dict[str, Any], input_file: Path | None) -> list[Request]:
    if input_file is None:
        return [request_of(prompts)]
    if any(value is not None for value in prompts.values()):
        raise InputError("--input: the prompts are in the file, give none beside it")
    return read_requests(input_file)


def _complete(llm: LLM, requests: list[Request], parameters: dict[str, Any]) -> list[Completion]:
    try:
        return llm.generate([request.options for request in requests], parameters)
    except (InvalidArgument, Unsupported) as error:
        raise _placed(llm, requests, parameters, error) from None


def _placed(llm: LLM, requests: list[Request], parameters: dict[str, Any], error: MstarError) -> MstarError:
    """The error with the line of the request it is about: a batch is refused as a whole, by its first bad one."""
    for request in requests:
        try:
            llm.check(request.options, parameters)
        except MstarError as refusal:
            return InputError(f"{request.place}: {refusal}") if request.place else refusal
    return error


def _print_stream(llm: LLM, request: Request, parameters: dict[str, Any]) -> None:
    for piece in llm.stream(request.options, parameters):
        print(piece.text, end="", flush=True)
    print()
