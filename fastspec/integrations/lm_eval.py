"""A model class for lm-evaluation-harness: `python -m fastspec.integrations.lm_eval run --model fastspec ...`.

Needs the package lm-eval, which finds the model by its name after this module is imported. Continuations that a task
gives are scored in decode steps. Contexts with the same beginning are prefilled once. Texts for perplexity are scored
in the prefill. No result depends on how requests are batched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from fastspec.config import PlanOptions
from fastspec.generator import FastSpecGenerator
from fastspec.output import GenerateOutput

_AUTO: Final = "auto"
_MOST_ROWS: Final = 256  # largest batch size that batch_size=auto tries
Scored = tuple[tuple[str, str], list[int], list[int]]  # both texts, tokens of the context, tokens of the continuation


@register_model("fastspec")
class FastSpecLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Model for lm-evaluation-harness that generates and scores with a `FastSpecGenerator`.

    Args:
        pretrained: the target; see `FastSpecGenerator`.
        draft: the draft; see `FastSpecGenerator`. None: no draft.
        batch_size: largest number of requests in a batch. "auto" takes as many as fit in memory, up to 256.
        max_batch_size: upper limit for "auto". None: 256.
        device: device of the models. None: `FastSpecGenerator` chooses.
        max_gen_toks: largest number of new tokens, for tasks without a limit of their own.
        add_bos_token: True to add a BOS token to texts, False to add none. None: the tokenizer's own setting.
        **options: further arguments of `FastSpecGenerator`, for example dtype and max_length.

    Attributes:
        generator: generator that runs all requests.
        tokenizer: the target's tokenizer.
    """

    def __init__(
        self,
        pretrained: str,
        draft: str | None = None,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        given = {"device": device, "progress": False, **options}
        rows = str(batch_size)
        if rows.startswith(_AUTO):
            found = _largest(pretrained, draft, min(max_batch_size or _MOST_ROWS, _MOST_ROWS), given)
        else:
            found = int(rows)
        self.generator = FastSpecGenerator(pretrained, draft, max_batch_size=found, **given)
        self.tokenizer: PreTrainedTokenizerBase = self.generator.tokenizer
        self.batch_size, self._name = found, pretrained
        self._max_gen_toks, self._add_bos = max_gen_toks, add_bos_token

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that is put before a text to score the text's first token: BOS, or EOS if there is no BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Largest number of tokens before the last token of a request."""
        return self.generator.max_length - 1

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches tokenised requests."""
        return self._name.replace("/", "__")

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        special = self._add_bos if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(str(self.tokenizer.decode([self.prefix_token_id]))):
            special = False
        more = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer.encode(string, **more))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Formats a conversation as a prompt, by the tokenizer's chat template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    @override
    def _loglikelihood_tokens(self, requests: Sequence[Scored], **kwargs: Any) -> list[tuple[float, bool]]:
        rows = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        sizes = [len(continuation) for _, _, continuation in requests]
        lengths = [len(row) - size for row, size in zip(rows, sizes, strict=True)]
        found = self.generator.score(rows, lengths=lengths, top_logprobs=1, prompt_logprobs=False)
        results = []
        for request, row, length, values, tops in zip(
            requests, rows, lengths, found.logprobs, found.top_logprobs, strict=True
        ):
            results.append((sum(values), row[length:] == [pairs[0][0] for pairs in tops]))
            self.cache_hook.add_partial("loglikelihood", request[0], results[-1])
        return results

    @override
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each whole text. Texts longer than the context are cut into windows."""
        windows = [list(self._windows(text)) for (text,) in (request.args for request in requests)]
        pieces = [piece for text in windows for piece in text]
        if not pieces:
            return [0.0] * len(requests)
        found = self.generator.score([context + scored for context, scored in pieces])
        assert found.prompt_logprobs is not None, "they are asked for"
        values = iter(
            sum(row[len(row) - len(scored) :]) for (_, scored), row in zip(pieces, found.prompt_logprobs, strict=True)
        )
        totals = [sum(next(values) for _ in text) for text in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Yields (context tokens, scored tokens) of each window of a text."""
        for window in get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        ):
            context, scored = make_disjoint_window(window)
            yield list(context), list(scored)

    @override
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates a text for each request, up to a stop string. Requests with equal options run in one call."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        texts = [""] * len(requests)
        for indices in groups.values():
            contexts = [requests[index].args[0] for index in indices]
            for index, text in zip(indices, self._texts(contexts, requests[indices[0]].args[1]), strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _texts(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        """Generates a continuation of each context. `options` are generation options of lm-eval."""
        given = dict(normalize_gen_kwargs(options, self._max_gen_toks))
        stops = handle_stop_sequences(given.pop("until", None), eos=str(self.tokenizer.decode([self.eot_token_id])))
        new = given.pop("max_gen_toks")
        if not given.get("do_sample"):
            for name in ("temperature", "top_p", "top_k", "min_p"):
                given.pop(name, None)
        room = self.generator.max_length - new
        if room < 1:
            raise ValueError(
                f"max_gen_toks={new} leaves no room for a context in max_length={self.generator.max_length}; lower it, "
                "or raise max_length"
            )
        output = self.generator.generate(
            [self.tok_encode(context)[-room:] for context in contexts],
            return_dict_in_generate=True,
            max_new_tokens=new,
            stop_strings=[stop for stop in stops if stop] or None,
            stop_across_prompt=False,
            **given,
        )
        assert isinstance(output, GenerateOutput)
        return [
            postprocess_generated_text(str(self.tokenizer.decode(tokens, skip_special_tokens=True)), stops, None)
            for tokens in output.new_tokens
        ]


def _largest(target: str, draft: str | None, limit: int, options: dict[str, Any]) -> int:
    """Finds the largest batch size that fits in memory: `limit`, or a smaller power of two.

    Args:
        target, draft: see `FastSpecGenerator`.
        limit: largest batch size to try.
        options: further arguments of `FastSpecGenerator`.
    """
    rows, options = limit, {name: value for name, value in options.items() if name in PlanOptions.__annotations__}
    while rows > 1:
        try:
            FastSpecGenerator.plan(target, draft, max_batch_size=rows, **options)
            return rows
        except MemoryError:
            rows = 1 << ((rows - 1).bit_length() - 1)
    return 1


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
