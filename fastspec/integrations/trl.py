"""Generates the rollouts of TRL's GRPOTrainer with fastspec: `GRPOTrainer(..., rollout_func=rollout(draft))`.

The first rollout makes a `FastSpecGenerator` from the trainer's model, which copies the weights. Before each later
rollout, weights that an optimizer step has changed are copied again, in place. The default of `verification` is
"coupled" here: a text depends on its seed, but not on the drafts. So training is the same with and without a draft.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch

from fastspec.errors import UnsupportedOption
from fastspec.generator import FastSpecGenerator
from fastspec.inputs.row_options import derive_seed
from fastspec.output import GenerateOutput
from fastspec.sampling.rules import COUPLED

_ROWS: Final = 64  # largest default of `max_batch_size`
Rollouts = dict[str, list[Any]]


def rollout(draft: Any = None, **options: Any) -> Callable[[list[Any], Any], Rollouts]:
    """Makes a `rollout_func` for TRL's GRPOTrainer.

    Args:
        draft: the draft; see `FastSpecGenerator`. It is not trained. None: no draft.
        **options: further arguments of `FastSpecGenerator`. By default max_batch_size is the number of prompts, up to
            64, dtype is the model's, and verification is "coupled". max_length is enough for the prompts and
            max_completion_length.
    """
    return _Rollouts(draft, options)


class _Rollouts:
    """A `rollout_func` for TRL, with the generator that it uses in all calls.

    Args:
        draft, options: see `rollout`.
    """

    def __init__(self, draft: Any, options: dict[str, Any]) -> None:
        self._draft, self._options = draft, {"verification": COUPLED, **options}
        self._generator: FastSpecGenerator | None = None
        self._step = -1  # optimizer step of the weights that the generator has

    def __call__(self, prompts: list[Any], trainer: Any) -> Rollouts:
        """Generates one completion of each prompt, with the sampling options of the trainer.

        Args:
            prompts: texts or conversations. TRL repeats each prompt as often as it wants completions.
            trainer: a GRPOTrainer. Seeds are derived from its step and the seed in its arguments.

        Returns:
            Lists with an entry for each prompt: `prompt_ids`, `completion_ids`, `logprobs` under the distribution from
            which tokens were sampled, and `weight_version`, the optimizer step of the weights.

        Raises:
            UnsupportedOption: the trainer samples with an option that `generate` does not have.
        """
        args, tokenizer = trainer.args, trainer.processing_class
        ids = [_ids(tokenizer, prompt) for prompt in prompts]
        new = int(args.max_completion_length)
        generator = self._current(trainer, len(ids), max(map(len, ids)) + new)
        process, step = trainer.accelerator.process_index, int(trainer.state.global_step)
        base = derive_seed(int(args.seed), step, process)
        output = generator.generate(
            ids,
            return_dict_in_generate=True,
            max_new_tokens=new,
            logprobs=True,
            logprobs_mode="processed",
            seed=[derive_seed(base, index, 0) for index in range(len(ids))],
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **_sampling(args),
        )
        assert isinstance(output, GenerateOutput)
        version = [output.stats.weight_version] * len(ids)
        return {
            "prompt_ids": ids,
            "completion_ids": output.new_tokens,
            "logprobs": output.logprobs or [],
            "weight_version": version,
        }

    def _current(self, trainer: Any, rows: int, tokens: int) -> FastSpecGenerator:
        """Returns a generator with the trainer's current weights. Makes a new one if `tokens` exceeds its length.

        Args:
            trainer: the trainer.
            rows: number of prompts.
            tokens: tokens of the longest prompt with its completion.
        """
        model, step = trainer.accelerator.unwrap_model(trainer.model), int(trainer.state.global_step)
        made = self._generator
        if made is not None and tokens > made.max_length and "max_length" not in self._options:
            made.close()
            made = None
        if made is None:
            context = int(getattr(model.config, "max_position_embeddings", None) or tokens)
            sizes = {
                "max_batch_size": min(rows, _ROWS),
                "max_length": max(tokens, min(1 << (tokens - 1).bit_length(), context)),
                "dtype": model.dtype,
                "progress": False,
            }
            made = FastSpecGenerator(_plain(model), self._draft, **{**sizes, **self._options})
        elif step != self._step:
            made.update_weights(model.state_dict(), version=step)
        self._generator, self._step = made, step
        return made


def _plain(model: Any) -> Any:
    """Makes a new module of the model's class with the same weight tensors, without hooks of the trainer."""
    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    made.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        setattr(made.get_submodule(owner), attribute, buffer)
    made.generation_config = model.generation_config
    return made.eval()


def _ids(tokenizer: Any, prompt: Any) -> list[int]:
    """Returns the token ids of a prompt: a text, or a conversation, which the chat template formats."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    found = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(found["input_ids"])


def _sampling(args: Any) -> dict[str, Any]:
    """Returns the sampling options in a trainer's arguments, as `FastSpecGenerator.generate` names them."""
    if args.generation_kwargs:
        raise UnsupportedOption(
            f"generation_kwargs={args.generation_kwargs!r} are options of the trainer's own loop; leave them out"
        )
    return {
        "do_sample": True,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
