"""The one table of request parameters, from which parsing, errors, tensors and documentation come."""

from __future__ import annotations

from collections.abc import Mapping

from mstar.conductor.request import MAX_LOGPROBS, MAX_PRIORITY
from mstar.engine.resources.grammar.config import GUIDE_KINDS, MAX_GUIDE_BYTES
from mstar.runtime.fields import FLOAT32_MAX, INT32_MAX, INT64_MAX, Field

MAX_REPETITION_WINDOW = 1024  # what the samplers of the text models have room for
MAX_NAME = 256  # characters of what a client names: a tenant, a salt

SAMPLING_PARAMETERS: tuple[Field, ...] = (
    Field(
        name="max_tokens",
        kind="int",
        low=0,
        high=INT64_MAX,
        unit="tokens",
        aliases=("request_output_len", "max_new_tokens", "max_completion_tokens"),
        doc="Most tokens to generate; cut to what the context leaves. Unset: the option default_max_tokens, else the "
        "model's own, else what the context leaves.",
    ),
    Field(
        name="min_tokens",
        kind="int",
        low=0,
        high=INT64_MAX,
        unit="tokens",
        aliases=("min_length", "min_new_tokens"),
        doc="Before so many tokens no stop string ends the text, nor an end token or stop id unless nothing else may "
        "be drawn; at most max_tokens. Unset: the model's own, else 0.",
    ),
    Field(
        name="temperature",
        kind="float",
        low=0.0,
        high=FLOAT32_MAX,
        doc="Sampling temperature; 0 (and anything below 1e-5) is greedy. Unset: the option default_temperature, else "
        "the model's own, else 0.6.",
    ),
    Field(
        name="top_k",
        kind="int",
        low=-1,
        high=INT64_MAX,
        aliases=("runtime_top_k",),
        doc="Sample among this many most likely tokens; -1, 0 and anything from the vocabulary's size up are off. "
        "Unset: the option default_top_k, else the model's own, else off.",
    ),
    Field(
        name="top_p",
        kind="float",
        low=0.0,
        high=1.0,
        above_low=True,
        aliases=("runtime_top_p",),
        doc="Sample among the most likely tokens that hold this share of the probability; 1 is off. Unset: the option "
        "default_top_p, else the model's own, else off.",
    ),
    Field(
        name="min_p",
        kind="float",
        low=0.0,
        high=1.0,
        doc="Drop tokens less likely than this share of the most likely one; 0 is off. Unset: the option "
        "default_min_p, else the model's own, else off.",
    ),
    Field(
        name="repetition_penalty",
        kind="float",
        low=0.0,
        high=FLOAT32_MAX,
        above_low=True,
        doc="Divides the positive logits of tokens seen in prompt and output and multiplies the negative ones; 1 is "
        "off. Unset: the option default_repetition_penalty, else the model's own, else off.",
    ),
    Field(
        name="presence_penalty",
        kind="float",
        default=0.0,
        low=-2.0,
        high=2.0,
        doc="Taken off the logit of every token generated so far.",
    ),
    Field(
        name="frequency_penalty",
        kind="float",
        default=0.0,
        low=-2.0,
        high=2.0,
        doc="Taken off the logit of a token once for each time it was generated so far.",
    ),
    Field(
        name="repetition_window",
        kind="int",
        default=0,
        low=0,
        high=MAX_REPETITION_WINDOW,
        unit="tokens",
        doc="Above 0, repetition_penalty counts among so many last generated tokens, once per occurrence, and looks at "
        "nothing else.",
    ),
    Field(
        name="penalize_prompt",
        kind="bool",
        default=True,
        doc="repetition_penalty looks at the prompt too.",
    ),
    Field(
        name="top_p_first",
        kind="bool",
        default=False,
        doc="Apply top_p before top_k, both to the whole distribution.",
    ),
    Field(
        name="top_p_min_keep",
        kind="int",
        default=1,
        low=1,
        high=INT32_MAX,
        unit="tokens",
        doc="top_p keeps at least so many tokens.",
    ),
    Field(
        name="seed",
        kind="int",
        low=-1,
        high=INT64_MAX,
        aliases=("random_seed",),
        doc="Makes the draws repeatable; -1 or unset draws differently every time.",
    ),
    Field(
        name="n",
        kind="int",
        default=1,
        low=1,
        high=INT32_MAX,
        unit="texts",
        aliases=("num_return_sequences",),
        doc="Independent texts for the prompt, each with a seed of its own; at most the option max_n, and not greedy.",
    ),
    Field(
        name="ignore_eos",
        kind="bool",
        default=False,
        doc="Generate on after the model's end-of-sequence tokens.",
    ),
    Field(
        name="stop",
        kind="strings",
        default=(),
        low=1,
        high=1024,
        aliases=("stop_words", "stop_sequences", "stop_strings"),
        doc="Strings that end the text; neither they nor what follows is returned.",
    ),
    Field(
        name="stop_token_ids",
        kind="ints",
        default=(),
        low=0,
        high=INT32_MAX,
        doc="Token ids of the vocabulary that end the text, also with ignore_eos; not returned. Under a guide they are "
        "drawn only where it lets the text end.",
    ),
    Field(
        name="include_stop_str_in_output",
        kind="bool",
        default=False,
        doc="Return the stop string or stop id that ended the text too.",
    ),
    Field(
        name="bad_words",
        kind="strings",
        default=(),
        low=1,
        high=1024,
        max_items=256,
        doc="Words never generated, neither as given nor after a space: the token sequences that the tokenizer makes "
        "of the word without its leading spaces, and of it behind one space, are never completed. Other tokens can "
        "still spell it.",
    ),
    Field(
        name="allowed_token_ids",
        kind="ints",
        default=(),
        low=0,
        high=INT32_MAX,
        min_items=1,
        max_items=2**18,
        doc="The only token ids of the vocabulary that may be generated. Unset: all.",
    ),
    Field(
        name="logit_bias",
        kind="biases",
        low=-100.0,
        high=100.0,
        max_items=1024,
        doc="Added to the logits of these token ids of the vocabulary; each number is cut to -100 .. 100.",
    ),
    Field(
        name="logprobs",
        kind="int",
        low=0,
        high=MAX_LOGPROBS,
        unit="tokens",
        doc="Return the log-probability of each generated token in the model's own distribution, and those of so many "
        "most likely tokens; 0 is the token alone. Unset: none.",
    ),
    Field(
        name="prompt_logprobs",
        kind="int",
        low=0,
        high=MAX_LOGPROBS,
        unit="tokens",
        doc="The same of the prompt's tokens.",
    ),
    Field(
        name="guided_decoding_guide_type",
        kind="str",
        choices=GUIDE_KINDS,
        doc="What the whole text must be: json (any object), json_schema, regex, ebnf_grammar or choice.",
    ),
    Field(
        name="guided_decoding_guide",
        kind="json",
        low=0,
        high=MAX_GUIDE_BYTES,
        doc="The schema, pattern, grammar, or JSON list of strings that guided_decoding_guide_type tells of.",
    ),
    Field(
        name="timeout_ms",
        kind="int",
        default=0,
        low=0,
        high=INT32_MAX,
        unit="ms",
        doc="From arrival: a text that runs ends then with what exists, a request that still waits is refused; of n "
        "texts those that wait end empty once another has begun. 0 is no limit.",
    ),
    Field(
        name="request_priority",
        kind="int",
        default=0,
        low=-MAX_PRIORITY,
        high=MAX_PRIORITY,
        doc="Of the requests that wait, those of a higher priority run sooner; each gains a level for every "
        "priority_ageing_s (an option of the engine) that it waits.",
    ),
    Field(
        name="tenant",
        kind="str",
        default="",
        low=0,
        high=MAX_NAME,
        doc="Whose request it is: of equal priority those of the tenant that was served least run sooner, and no "
        "tenant gets a cached prefix out of another's requests.",
    ),
    Field(
        name="cache_salt",
        kind="str",
        default="",
        low=0,
        high=MAX_NAME,
        doc="Requests of one tenant share cached prefixes only under equal salts.",
    ),
    Field(
        name="no_cache",
        kind="bool",
        default=False,
        doc="Compute the whole prompt, and leave nothing in the prefix cache.",
    ),
    Field(
        name="skip_special_tokens",
        kind="bool",
        default=True,
        doc="Leave special tokens out of the text.",
    ),
    Field(
        name="spaces_between_special_tokens",
        kind="bool",
        default=True,
        doc="The same text either way: decoding is exact to the byte, so no space is ever put between tokens, as with "
        "every fast tokenizer.",
    ),
)

RESPONSE_PARAMETERS: tuple[Field, ...] = (
    Field(
        name="stream",
        kind="bool",
        default=False,
        aliases=("streaming",),
        doc="Answer with one response per piece of text instead of a single response.",
    ),
    Field(name="return_token_ids", kind="bool", default=False, doc="Also return the generated token ids."),
    Field(
        name="exclude_input_in_output",
        kind="bool",
        aliases=("sampling_param_exclude_input_from_output",),
        doc="False puts the prompt in front of the text (not with stream). Unset: the completion alone.",
    ),
    Field(
        name="return_log_probs",
        kind="bool",
        default=False,
        doc="Also return the log-probability of every generated token.",
    ),
    Field(
        name="return_cumulative_logprob",
        kind="bool",
        default=False,
        doc="Also return the sum of the generated tokens' log-probabilities.",
    ),
)

PARAMETERS: tuple[Field, ...] = SAMPLING_PARAMETERS + RESPONSE_PARAMETERS
FIELDS: Mapping[str, Field] = {field.name: field for field in PARAMETERS}
BY_ANY_NAME: Mapping[str, Field] = {name: field for field in PARAMETERS for name in (field.name, *field.aliases)}
