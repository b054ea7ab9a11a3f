"""OPTIONS: a table with one entry for every keyword of `generate`, `stream` and `submit`.

The parser, the command line, the server, the ranks and docs/options.md read this table. `GenerateOptions` has the
keywords' types for type checkers; a test keeps both equal. This file does not import torch, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict

from fastspec.adaptive.controller import AUTO

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
MAX_PENALTY = 2.0  # limit of presence and frequency penalties in both directions, as in vLLM
MAX_REPETITION = 1e4
MAX_RETURN_SEQUENCES = 2**16
RAW, PROCESSED = "raw", "processed"
LOGPROBS_MODES = (RAW, PROCESSED)

# one value, or one per prompt
Numbers: TypeAlias = "float | Sequence[float | None] | Tensor | np.ndarray[Any, Any] | None"
Wholes: TypeAlias = "int | Sequence[int | None] | Tensor | np.ndarray[Any, Any] | None"
Texts: TypeAlias = "str | Sequence[str | None] | None"
Schema: TypeAlias = "str | Mapping[str, Any] | type[Any] | None"  # a schema as JSON, as a dict, or as a pydantic class
Biases: TypeAlias = "Mapping[int, float] | Sequence[Mapping[int, float] | None] | None"


class ScoreOptions(TypedDict, total=False):
    """Types of the keywords of `generate` that `score` has, too. They change the distribution of tokens."""

    do_sample: bool | None
    temperature: Numbers
    top_k: Wholes
    top_p: Numbers
    min_p: Numbers
    repetition_penalty: Numbers
    presence_penalty: Numbers
    frequency_penalty: Numbers
    logit_bias: Biases
    sequence_bias: Any
    bad_words_ids: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]] | None] | None
    suppress_tokens: Sequence[int] | Sequence[Sequence[int] | None] | None
    allowed_token_ids: Sequence[int] | Sequence[Sequence[int] | None] | None
    min_new_tokens: Wholes
    eos_token_id: int | Sequence[int] | Tensor | None


class GenerateOptions(ScoreOptions, total=False):
    """Types of the keywords of `generate`, for `Unpack`.

    `return_dict_in_generate` is left out, because it determines the type of the result.
    """

    inputs: Any
    max_new_tokens: int | None
    max_length: int | None
    min_length: int | None
    stop_strings: str | Sequence[str] | None
    stop_across_prompt: bool | None
    pad_token_id: int | None
    seed: Wholes
    num_return_sequences: int | None
    json_schema: Schema | Sequence[Schema]
    regex: Texts
    grammar: Texts
    num_speculative_tokens: int | str | Sequence[int | str | None] | None
    predictions: str | Sequence[int] | Sequence[str | Sequence[int] | None] | None
    session: Texts
    logprobs: bool | int | None
    logprobs_mode: str | None
    prompt_logprobs: bool | int | None
    tokenizer: PreTrainedTokenizerBase | None


@dataclass(frozen=True, slots=True)
class Number:
    """Properties of an option that is one number per row.

    Attributes:
        fills: name of the tensor in `DecodeState` that gets the value when a row joins the batch.
        neutral: value that changes nothing, also used for None. If it is an int, the option takes whole numbers only.
        low, high: smallest and largest value.
        changes_greedy: True if the option changes logits, and so the tokens of a greedy row. False if it changes only
            sampling.
    """

    fills: str
    neutral: float
    low: float
    high: float
    changes_greedy: bool = False


class Form(Enum):
    """Notation of a flag's value on the command line."""

    VALUE = "one value, of the option's own type"
    IDS = "token ids with commas"
    BIASES = "ID=BIAS, repeatable"
    TEXTS = "a text, repeatable"
    FILE = "the name of a file that holds the value"


@dataclass(frozen=True, slots=True)
class Flag:
    """Flag of `fastspec generate` for an option.

    Attributes:
        help: help text, one line.
        kind: type of the value on the command line.
        form: notation of the value.
        default: value if the flag is not given. None: the checkpoint's default applies.
        name: name of the flag with its dashes. Empty: the keyword with dashes.
        metavar: name of the value in the help text. Empty: typer's default.
    """

    help: str
    kind: type = str
    form: Form = Form.VALUE
    default: float | None = None
    name: str = ""
    metavar: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One keyword of `generate`.

    Attributes:
        keyword: name of the keyword.
        group: heading in docs/options.md.
        meaning: description for the docs, one or two sentences.
        takes: accepted values, for the docs. Empty: the range of `number`.
        default: default value, for the docs. Empty: the neutral value of `number`.
        type: type of the value, for the docs.
        per_row: True if a list gives one value per prompt.
        in_transformers: True for a field of transformers' GenerationConfig, False for an option of fastspec alone.
        number: properties of an option that is one number per row. None for others.
        sets: fields of `Options` and `RowOptions` that the keyword sets.
        flag: flag of the command line. A str: there is no flag; the text says why, or names the flag to use instead.
        field: field of a request to the server. A text with "-" in front: there is no field; the text says why, or
            names the field to use instead.
    """

    keyword: str
    group: str
    type: str
    meaning: str
    takes: str = ""
    default: str = ""
    per_row: bool = False
    in_transformers: bool = True
    number: Number | None = None
    sets: tuple[str, ...] = ()
    flag: Flag | str
    field: str


_LENGTH, _SAMPLING, _LOGITS = "Length and end", "Sampling", "Changes to logits"
_TEXT, _DRAFTS, _OUTPUT = "Structured text", "Drafts", "Output"

OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        keyword="max_new_tokens",
        group=_LENGTH,
        type="int",
        meaning="Largest number of new tokens of a row.",
        takes="1 and more",
        default="20, as in transformers, limited by the context",
        sets=("max_new_tokens",),
        flag=Flag("New tokens at most.", int, default=128),
        field="max_tokens",
    ),
    Option(
        keyword="max_length",
        group=_LENGTH,
        type="int",
        meaning="Largest number of tokens of padded prompt and output together. `max_new_tokens` takes precedence.",
        takes="more than the tokens of the prompt",
        default="none",
        flag="the flag of this name sets the generator's max_length",
        field="-max_tokens counts new tokens",
    ),
    Option(
        keyword="min_new_tokens",
        group=_LENGTH,
        type="int",
        meaning="No stop id is allowed before this number of new tokens.",
        takes="0 to max_new_tokens",
        default="0",
        per_row=True,
        sets=("min_new_tokens",),
        flag=Flag("No stop token before this number of new tokens.", int),
        field="min_tokens",
    ),
    Option(
        keyword="min_length",
        group=_LENGTH,
        type="int",
        meaning="The same limit, but the tokens of the padded prompt count, too. `min_new_tokens` takes precedence.",
        takes="0 to the largest length of the row",
        default="0",
        flag="--min-new-tokens",
        field="-min_tokens",
    ),
    Option(
        keyword="eos_token_id",
        group=_LENGTH,
        type="int or list",
        meaning="Ids that end a row; the id is part of the row. An empty list: none.",
        takes="up to 64 ids of the vocabulary",
        default="the checkpoint's",
        sets=("stop_ids",),
        flag="the checkpoint's",
        field="stop_token_ids",
    ),
    Option(
        keyword="stop_strings",
        group=_LENGTH,
        type="str or list",
        meaning="Texts that end a row. `GenerateOutput.texts` ends with the text; tokens end with the one that "
        "completed it. Needs a tokenizer.",
        takes="non-empty texts",
        default="none",
        sets=("stop_strings",),
        flag=Flag("Stop after this text. Repeatable.", form=Form.TEXTS, name="--stop-string", metavar="TEXT"),
        field="stop",
    ),
    Option(
        keyword="stop_across_prompt",
        group=_LENGTH,
        type="bool",
        meaning="A stop string may begin in the prompt, as in transformers.",
        takes="True, False",
        default="True",
        in_transformers=False,
        sets=("across_prompt",),
        flag="as in transformers: a stop string may begin in the prompt",
        field="-False in the server: an answer is read alone",
    ),
    Option(
        keyword="pad_token_id",
        group=_LENGTH,
        type="int",
        meaning="Fills rows that ended early. On the left of an array without a mask it is padding.",
        takes="an id of the vocabulary",
        default="the checkpoint's, else the first stop id, else 0",
        sets=("pad_token_id", "padding"),
        flag="nothing is padded",
        field="-nothing is padded",
    ),
    Option(
        keyword="do_sample",
        group=_SAMPLING,
        type="bool",
        meaning="Samples tokens. False takes the token with the largest logit, for any temperature.",
        takes="True, False",
        default="False",
        flag="--temperature",
        field="-temperature",
    ),
    Option(
        keyword="temperature",
        group=_SAMPLING,
        type="float",
        meaning="Divides the logits. 0 is greedy. No effect without do_sample=True.",
        takes=f"0 to {MAX_TEMPERATURE:g}; below {MIN_TEMPERATURE:g} it is 0",
        per_row=True,
        number=Number("temperature", 1.0, 0.0, MAX_TEMPERATURE),
        sets=("temperature",),
        flag=Flag("0 is greedy; above 0 tokens are sampled.", float, default=0.0),
        field="temperature",
    ),
    Option(
        keyword="top_k",
        group=_SAMPLING,
        type="int",
        meaning="Samples from the k most probable tokens; 0 keeps all.",
        takes="0 and more",
        per_row=True,
        number=Number("top_k", 0, 0, 2**31 - 1),
        sets=("top_k",),
        default="50, as in transformers",
        flag=Flag("Sample from the k most probable tokens; 0 keeps all.", int),
        field="top_k",
    ),
    Option(
        keyword="top_p",
        group=_SAMPLING,
        type="float",
        meaning="Samples from the most probable tokens, as few as have a total probability of p.",
        per_row=True,
        number=Number("top_p", 1.0, 0.0, 1.0),
        sets=("top_p",),
        flag=Flag("Sample from the most probable tokens, up to a sum of p.", float),
        field="top_p",
    ),
    Option(
        keyword="min_p",
        group=_SAMPLING,
        type="float",
        meaning="Samples from tokens with at least min_p times the largest probability.",
        per_row=True,
        number=Number("min_p", 0.0, 0.0, 1.0),
        sets=("min_p",),
        flag=Flag("Sample from tokens with at least min-p times the largest probability.", float),
        field="min_p",
    ),
    Option(
        keyword="seed",
        group=_SAMPLING,
        type="int",
        meaning="Makes sampling repeatable. A list has one seed per row; with a single number rows differ, too.",
        takes="-2^63 to 2^63 - 1",
        default="drawn from torch's CPU generator",
        per_row=True,
        in_transformers=False,
        sets=("seed", "seeded"),
        flag=Flag("Makes a draw repeatable.", int),
        field="seed",
    ),
    Option(
        keyword="num_return_sequences",
        group=_SAMPLING,
        type="int",
        meaning="Number of texts for each prompt. They differ in their seeds. Needs do_sample=True.",
        takes=f"1 to {MAX_RETURN_SEQUENCES}",
        default="1",
        sets=("copies",),
        flag=Flag("Number of samples; each is printed when complete.", int),
        field="n",
    ),
    Option(
        keyword="repetition_penalty",
        group=_LOGITS,
        type="float",
        meaning="Divides positive logits of tokens in prompt or output, and multiplies negative ones.",
        takes=f"{1 / MAX_REPETITION:g} to {MAX_REPETITION:g}",
        per_row=True,
        number=Number("repetition", 1.0, 1 / MAX_REPETITION, MAX_REPETITION, changes_greedy=True),
        sets=("repetition_penalty",),
        flag=Flag("Above 1: tokens of the prompt and the output become less probable.", float),
        field="repetition_penalty",
    ),
    Option(
        keyword="presence_penalty",
        group=_LOGITS,
        type="float",
        meaning="Is subtracted from the logit of every token that is in the output.",
        per_row=True,
        in_transformers=False,
        number=Number("presence", 0.0, -MAX_PENALTY, MAX_PENALTY, changes_greedy=True),
        sets=("presence_penalty",),
        flag=Flag("Subtracted from the logit of every token in the output.", float),
        field="presence_penalty",
    ),
    Option(
        keyword="frequency_penalty",
        group=_LOGITS,
        type="float",
        meaning="Is subtracted from a token's logit once per occurrence in the output.",
        per_row=True,
        in_transformers=False,
        number=Number("frequency", 0.0, -MAX_PENALTY, MAX_PENALTY, changes_greedy=True),
        sets=("frequency_penalty",),
        flag=Flag("Subtracted from a token's logit per occurrence in the output.", float),
        field="frequency_penalty",
    ),
    Option(
        keyword="logit_bias",
        group=_LOGITS,
        type="dict[int, float]",
        meaning="Is added to the logits of these ids; -inf bans an id.",
        takes="ids of the vocabulary to numbers, or -inf",
        default="none",
        per_row=True,
        in_transformers=False,
        sets=("bias",),
        flag=Flag("Added to a token's logit; -inf bans it. Repeatable.", form=Form.BIASES, metavar="ID=BIAS"),
        field="logit_bias",
    ),
    Option(
        keyword="sequence_bias",
        group=_LOGITS,
        type="list or dict",
        meaning="Biases in transformers' form: [[[id], bias], ...] or {(id,): bias}. They are added to logit_bias.",
        takes="sequences of one id",
        default="none",
        sets=("bias",),
        flag="--logit-bias",
        field="-logit_bias",
    ),
    Option(
        keyword="bad_words_ids",
        group=_LOGITS,
        type="list of lists",
        meaning="Ids that are not allowed, as [[id], [id], ...]. Stop ids among them are ignored, as in transformers.",
        takes="lists of one id",
        default="none",
        per_row=True,
        sets=("bias",),
        flag="--suppress-tokens",
        field="-logit_bias",
    ),
    Option(
        keyword="suppress_tokens",
        group=_LOGITS,
        type="list",
        meaning="Ids that are not allowed.",
        takes="ids of the vocabulary",
        default="none",
        per_row=True,
        sets=("bias",),
        flag=Flag("Tokens that are not allowed.", form=Form.IDS, metavar="ID,ID,.."),
        field="-logit_bias",
    ),
    Option(
        keyword="allowed_token_ids",
        group=_LOGITS,
        type="list",
        meaning="The only allowed ids.",
        takes="ids of the vocabulary",
        default="all",
        per_row=True,
        in_transformers=False,
        sets=("allowed",),
        flag=Flag("The only allowed tokens.", form=Form.IDS, metavar="ID,ID,.."),
        field="allowed_token_ids",
    ),
    Option(
        keyword="json_schema",
        group=_TEXT,
        type="dict or str",
        meaning="The text is a JSON value of this schema. Needs the package llguidance, like the next two options.",
        takes="a schema",
        default="none",
        per_row=True,
        in_transformers=False,
        sets=("grammar",),
        flag=Flag("JSON schema that the text follows.", form=Form.FILE, metavar="FILE"),
        field="response_format",
    ),
    Option(
        keyword="regex",
        group=_TEXT,
        type="str",
        meaning="The whole text matches this regular expression.",
        takes="an expression",
        default="none",
        per_row=True,
        in_transformers=False,
        sets=("grammar",),
        flag=Flag("Regular expression that the whole text matches."),
        field="structured_outputs",
    ),
    Option(
        keyword="grammar",
        group=_TEXT,
        type="str",
        meaning="The text follows this Lark grammar.",
        takes="a grammar",
        default="none",
        per_row=True,
        in_transformers=False,
        sets=("grammar",),
        flag=Flag("Lark grammar that the text follows.", form=Form.FILE, metavar="FILE"),
        field="structured_outputs",
    ),
    Option(
        keyword="tokenizer",
        group=_TEXT,
        type="tokenizer",
        meaning="Tokenizer for stop_strings and grammars. Default: that of the checkpoint.",
        takes="one of transformers' tokenizers",
        default="the checkpoint's",
        in_transformers=False,
        flag="the checkpoint's",
        field="-the checkpoint's",
    ),
    Option(
        keyword="num_speculative_tokens",
        group=_DRAFTS,
        type=f'int or "{AUTO}"',
        meaning=f"Largest number of drafts per step. 0 is plain decoding, {AUTO!r} chooses while decoding. "
        "It does not change the distribution of the text.",
        takes=f"0 to the generator's own, {AUTO!r}",
        default="the generator's",
        per_row=True,
        in_transformers=False,
        sets=("num_speculative_tokens", "auto", "draft_limit"),
        flag=Flag("Drafts per step; 0 is plain decoding, auto chooses while decoding.", default=4),
        field="speculative_tokens",
    ),
    Option(
        keyword="predictions",
        group=_DRAFTS,
        type="text or list",
        meaning="A text that the row is likely to repeat, such as the old version of a file. Drafts come from it; it "
        "does not change the distribution of the text. Needs proposer=Suffix().",
        takes="a text or token ids, or one per prompt",
        default="none",
        per_row=True,
        in_transformers=False,
        sets=("prediction",),
        flag=Flag("Text that the new one is likely to repeat.", form=Form.FILE, name="--prediction", metavar="FILE"),
        field="prediction",
    ),
    Option(
        keyword="session",
        group=_DRAFTS,
        type="str",
        meaning='Name of requests whose answers may draft for one another. Needs proposer=Suffix(remember="session").',
        takes="a text",
        default="none",
        per_row=True,
        in_transformers=False,
        sets=("session",),
        flag="the command answers one request",
        field="-the API key of the request",
    ),
    Option(
        keyword="return_dict_in_generate",
        group=_OUTPUT,
        type="bool",
        meaning="Returns a GenerateOutput instead of a tensor.",
        takes="True, False",
        default="False",
        sets=("return_dict",),
        flag="text is printed",
        field="-an answer is JSON",
    ),
    Option(
        keyword="logprobs",
        group=_OUTPUT,
        type="bool or int",
        meaning="Records log-probabilities of the new tokens; n adds the n most probable tokens at each position.",
        takes="False, True, 0 to 20",
        default="False",
        in_transformers=False,
        sets=("top_logprobs",),
        flag="text is printed",
        field="logprobs",
    ),
    Option(
        keyword="logprobs_mode",
        group=_OUTPUT,
        type="str",
        meaning=f"Distribution of `logprobs`: {RAW!r}, the target's own, or {PROCESSED!r}, from which the row samples "
        "after all options. Filtered tokens have -inf. A greedy row counts as temperature 1 without filters.",
        takes=" or ".join(map(repr, LOGPROBS_MODES)),
        default=RAW,
        in_transformers=False,
        sets=("processed_logprobs",),
        flag="text is printed",
        field=f"-{RAW!r}",
    ),
    Option(
        keyword="prompt_logprobs",
        group=_OUTPUT,
        type="bool or int",
        meaning="Records log-probabilities of the prompt's tokens; n adds the n most probable tokens at each place. "
        "Such a prompt is read whole, without the prefix cache.",
        takes="False, True, 0 to 20",
        default="False",
        in_transformers=False,
        sets=("prompt_top_logprobs",),
        flag="text is printed",
        field="prompt_logprobs",
    ),
)

ROWS: Final[Mapping[str, Option]] = {option.keyword: option for option in OPTIONS}
NUMBERS: Final[Mapping[str, Number]] = {
    option.keyword: option.number for option in OPTIONS if option.number is not None
}

# config entries that do not change the text of plain decoding
IGNORED: Final = frozenset(
    [
        "_commit_hash",
        "_from_model_config",
        "transformers_version",
        "bos_token_id",
        "decoder_start_token_id",
        "early_stopping",
        "length_penalty",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_matching_ngram_size",
        "use_cache",  # transformers computes the same text without a cache, only slower; many checkpoints set False
        "compile_config",
        "disable_compile",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "continuous_batching_config",
        "low_memory",
        "renormalize_logits",  # adding one number to all logits does not change the distribution
    ]
)
# config entries that are refused unless they have one of these values
OFF: Final[Mapping[str, tuple[Any, ...]]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "cache_implementation": (None, "dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window"),
    "typical_p": (None, 1.0),
    "top_h": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "diversity_penalty": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
}
# config entries that are refused, with what to do instead
ADVICE: Final[Mapping[str, str]] = {
    "max_time": "end the iteration over stream() after that time",
    "prompt_lookup_num_tokens": "make the generator with proposer=NGram()",
    "assistant_early_exit": "the draft is the generator's: FastSpecGenerator(target, draft)",
}
# arguments of transformers' `generate` that are not config entries, with what to do instead
ARGUMENTS: Final[Mapping[str, str]] = {
    "logits_processor": "use logit_bias, allowed_token_ids, penalties, or a regex or grammar",
    "stopping_criteria": "use stop_strings or eos_token_id, or leave the iteration over stream()",
    "prefix_allowed_tokens_fn": "use allowed_token_ids, or a regex or grammar",
    "assistant_model": "the draft is the generator's: FastSpecGenerator(target, draft)",
    "synced_gpus": "leave it out",
    "negative_prompt_ids": "leave it out",
    "negative_prompt_attention_mask": "leave it out",
    "custom_generate": "leave it out",
    "use_model_defaults": "give the options that you want",
    "position_ids": "positions follow from attention_mask",
    "inputs_embeds": "give token ids",
    "past_key_values": "a common beginning of prompts is computed once, see prefix_cache",
}


def keywords_of(field: str) -> str:
    """Lists the keywords that set a field of `Options` or `RowOptions`, as a text for messages.

    If no keyword sets it, the text is the name of the field.
    """
    found = [option.keyword for option in OPTIONS if field in option.sets] or [field]
    return " or ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else found[0]
