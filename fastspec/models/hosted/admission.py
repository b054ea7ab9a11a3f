"""Checks a hosted model before its first use: compares short passes, and refuses a model whose results differ.

A hosted model is a module of transformers that runs with attention and KV cache of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastspec.errors import UnsupportedModel
from fastspec.models.hosted.layerwise import Layers, errors
from fastspec.models.hosted.model import TRIAL_PROMPT, HostedModel, trial_ids
from fastspec.models.hosted.probe import base_name
from fastspec.models.hosted.swaps import ATTENTION
from fastspec.shapes import ForwardBatch, Tiling

# largest allowed difference of hidden states, relative to their norm. Rounding explains this much: sums have another
# order, and in 16 bits a router may choose another expert of nearly the same weight
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
_ROUNDED: Final = 0.5  # the same for a model whose matrices were rounded to fewer bits while they were loaded


def admit(model: HostedModel, name: str, tiling: Tiling, max_queries: int) -> None:
    """Runs short passes of a hosted model. Compares them with each other, and with transformers' own attention.

    Args:
        model: the model with weights and KV cache. The first pages of the cache are overwritten.
        name: name of the model, for messages.
        tiling: tile sizes of decode steps. If `tiling.rows` is set, a token must have the same bits whether it is fed
            alone or with others.
        max_queries: largest number of tokens of a row in a step.

    Raises:
        UnsupportedModel: results differ. The message names the check and the first layer that differs.
    """
    try:
        with torch.inference_mode():
            _Trial(model, tiling, max_queries).run()
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: cannot be hosted: {error}") from error
    # errors that a foreign module may raise when its parts are replaced
    except (TypeError, AttributeError, NotImplementedError, AssertionError, LookupError) as error:
        raise UnsupportedModel(
            f"{name}: cannot be hosted: a pass with swapped parts failed ({type(error).__name__}: {error})"
        ) from error


def admit_streams(model: HostedModel, name: str, tiling: Tiling, *, shares_embedding: bool) -> None:
    """Checks that a proposer can read the hidden states between the layers of a hosted model.

    Args:
        model: the model with weights.
        name: name of the model, for messages.
        tiling: tile sizes of decode steps.
        shares_embedding: True if the proposer uses the model's embedding. Then the input of the first layer must be
            unchanged rows of the embedding, without a factor and without position embeddings.

    Raises:
        UnsupportedModel: the inputs of the layers are not the hidden states that the module itself reports, or the
            input of the first layer is not rows of the embedding.
    """
    count, device = TRIAL_PROMPT, model.keys[0].device
    ids, positions = trial_ids(count, model.info, device), torch.arange(count, device=device)[None]
    layers, base = len(model.info.layer_names), model.base
    base.set_attn_implementation("eager")
    try:
        running = model.running(Tiling(count, count) if tiling.rows else tiling, count)
        with torch.inference_mode(), running, model.streams.recorded(range(-1, layers - 1)) as found:
            whole = {**model.info.probed.whole, "output_hidden_states": True}
            out = base(input_ids=ids, position_ids=positions, use_cache=False, **whole)
    finally:
        base.set_attn_implementation(ATTENTION)
    said = getattr(out, "hidden_states", None) or ()
    advice = "use a draft model, or a target of a native family"
    if len(said) != layers + 1:
        raise UnsupportedModel(
            f"{name}: {type(base).__name__} returns {len(said)} hidden states, and learned drafters need {layers + 1} "
            f"for its {layers} layers; {advice}"
        )
    other = next((layer for layer in range(-1, layers - 1) if not torch.equal(found[layer], said[layer + 1])), None)
    if other is not None:
        raise UnsupportedModel(
            f"{name}: the input of layer {other + 1} is not the hidden state that {type(base).__name__} reports there, "
            f"so a learned drafter would read other values; {advice}"
        )
    if shares_embedding and not torch.equal(found[-1], model.ops.embed(model.weights.embed, ids)):
        raise UnsupportedModel(
            f"{name} changes its embeddings before the first layer, for example by a scale or by positions, and the "
            "learned drafter needs them unchanged; use a learned drafter with its own embedding"
        )


class _Trial:
    def __init__(self, model: HostedModel, tiling: Tiling, max_queries: int) -> None:
        self._model, self._tiling = model, tiling
        pages, self._page_size = model.keys[0].shape[:2]
        count = min(TRIAL_PROMPT + max_queries, (pages - 1) * self._page_size, model.info.max_length)
        self._device = model.keys[0].device
        self._ids = trial_ids(count, model.info, self._device)
        self._pages = -(-count // self._page_size)

    def run(self) -> None:
        """Compares passes of the hosted model with a pass that uses transformers' own attention.

        If `tiling.rows` is set, also checks that a token's bits do not depend on the tokens fed with it.

        Raises:
            UnsupportedModel: results differ.
        """
        count = self._ids.shape[1]
        own = self._own()
        self._check_cut(own)
        tiling = Tiling(count, count) if self._tiling.rows else self._tiling
        self._compare("a whole pass", own, tiling, (count,))
        single = self._compare("passes of one token each", own, self._tiling, (1,) * count)
        first = min(TRIAL_PROMPT, count - 1)
        logits = self._model.logits(single[:, first:], self._tiling)
        if logits.shape[-1] != self._model.vocab_size or not bool(logits.isfinite().all()):
            raise UnsupportedModel("its head does not give finite logits of its vocabulary")
        if self._tiling.rows is None:
            return
        joint = self._feed(first, count - first, self._tiling)
        alone = [self._model.logits(single[:, place : place + 1], self._tiling) for place in range(first, count)]
        same = torch.equal(joint, single[:, first:]) and torch.equal(logits, torch.cat(alone, dim=1))
        if not same:
            layer = self._first_difference(first, count)
            raise UnsupportedModel(
                f"layer {layer!r}: a token's bits depend on how many are fed beside it, so exact=True cannot be "
                "promised; exact=False runs it"
            )

    def _feed(self, start: int, count: int, tiling: Tiling) -> Tensor:
        ids = self._ids[:, start : start + count].contiguous()
        positions = torch.arange(start, start + count, device=self._device)[None]
        table = torch.arange(1, 1 + self._pages, device=self._device)[None]
        return self._model.hidden(
            ForwardBatch(ids, positions, torch.ones_like(ids, dtype=torch.bool), table, 1, tiling)
        )

    def _own(self) -> Tensor:
        """Runs one pass over all test tokens with transformers' own attention and masks, without a KV cache.

        Returns the last hidden states, [1, tokens, hidden].
        """
        model, base = self._model, self._model.base
        base.set_attn_implementation("eager")
        try:
            count = self._ids.shape[1]
            positions = torch.arange(count, device=self._device)[None]
            with model.running(Tiling(count, count) if self._tiling.rows else self._tiling, count):
                whole = model.info.probed.whole
                out = base(input_ids=self._ids, position_ids=positions, use_cache=False, **whole)
                hidden: Tensor = out.last_hidden_state
        finally:
            base.set_attn_implementation(ATTENTION)
        return hidden

    def _check_cut(self, own: Tensor) -> None:
        """Compares hidden states from all ranks together with hidden states from the module before its split.

        Does nothing if one process runs the whole module.

        Args:
            own: hidden states [1, tokens, hidden] from all ranks, the result of `_own`.
        """
        cut, wanted = self._model.info.cut, self._model.wanted
        if cut is None or wanted is None:
            return
        count = min(wanted.shape[1], own.shape[1])
        error = float(errors([own[:, :count].to(wanted.device)], wanted[:, :count]).median())
        limit = max(_TOLERANCE[own.dtype], _TOLERANCE[wanted.dtype])
        if not error <= (_ROUNDED if self._model.rounded else limit):
            raise UnsupportedModel(
                f"split by transformers' plan, {cut.share.size} ranks together compute something else than the whole "
                f"module: hidden states differ by {error:.2g} of their norm; leave tensor_parallel out"
            )

    def _compare(self, what: str, own: Tensor, tiling: Tiling, counts: Sequence[int]) -> Tensor:
        """Feeds the test tokens in several passes, and compares the hidden states with `own`.

        If they differ by more than rounding, the layers are compared one by one. Each layer then gets the input that
        it had in the pass of `own`.

        Args:
            what: description of the passes, for messages.
            own: hidden states [1, tokens, hidden], the result of `_own`.
            tiling: tile sizes of the passes.
            counts: number of tokens of each pass.

        Returns:
            The last hidden states of all passes, [1, tokens, hidden].

        Raises:
            UnsupportedModel: a layer differs.
        """
        passes = [partial(self._feed, sum(counts[:index]), count, tiling) for index, count in enumerate(counts)]
        ours = torch.cat([feed() for feed in passes], dim=1)
        error = (ours.float() - own.float()).norm() / own.float().norm()
        limit = _TOLERANCE[own.dtype]
        if bool(error <= limit):
            return ours
        prefix = len(base_name(self._model.module)) + 1
        layers = Layers(self._model.base, [call.layer[prefix:] for call in self._model.info.probed.calls])
        try:
            wanted = layers.record(self._own)
            firsts = [sum(counts[:index]) for index in range(len(counts))]
            layers.compare(
                wanted, [layers.record_fed_like(wanted, *each) for each in zip(firsts, passes, strict=True)], what
            )
        except UnsupportedModel as reason:
            raise UnsupportedModel(
                f"{what} over K/V in pages differs from transformers' own attention by {float(error):.2g} of the "
                f"hidden states' norm, more than the {limit} that rounding explains: {reason}"
            ) from reason
        return torch.cat(
            [feed() for feed in passes], dim=1
        )  # repeated, because the comparison has overwritten the K/V in the pages

    def _first_difference(self, first: int, count: int) -> str:
        """Finds the first submodule whose output for a token depends on the tokens that are fed after it.

        Args:
            first: position of the token.
            count: number of all test tokens.

        Returns:
            The name of the submodule. "lm_head" if no submodule of the base model has such an output.
        """
        alone = self._outputs(lambda: self._feed(first, 1, self._tiling))
        among = self._outputs(lambda: self._feed(first, count - first, self._tiling))
        for (name, one), (_, many) in zip(alone, among, strict=True):
            if one.dim() > 1 and not torch.equal(one.flatten(0, -2)[0], many.flatten(0, -2)[0]):
                return name
        return "lm_head"

    def _outputs(self, run: Callable[[], object]) -> list[tuple[str, Tensor]]:
        seen: list[tuple[str, Tensor]] = []

        def note(name: str) -> Any:
            def hook(part: nn.Module, given: Any, out: Any) -> None:
                out = out[0] if isinstance(out, tuple) else out
                if isinstance(out, Tensor):
                    seen.append((name, out))

            return hook

        handles = [part.register_forward_hook(note(name)) for name, part in self._model.base.named_modules()]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return seen
