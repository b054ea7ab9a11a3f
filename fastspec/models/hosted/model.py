"""Runs a module of transformers over a paged KV cache, as a `CausalModel`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastspec.distributed.exchange import Alone, Exchange
from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.attention import AttendCall
from fastspec.models.hosted.info import HostedInfo
from fastspec.models.hosted.probe import base_name, base_of
from fastspec.models.hosted.streams import LayerStreams
from fastspec.models.hosted.swaps import FixedShapes, NoCache, attach, our_op
from fastspec.models.layer_table import DecoderWeights
from fastspec.shapes import UNTILED, ForwardBatch, Tiling

TRIAL_PROMPT = 4  # `admit` feeds this number of test tokens before those of a step


def trial_ids(count: int, info: HostedInfo, device: torch.device) -> Tensor:
    """Returns the first `count` of the token ids with which `admit` tests a model, int64 [1, count]."""
    return ((torch.arange(count, device=device) * 7 + 1) % info.vocab_size)[None]


class HostedModel:
    """Module of transformers that runs with attention, KV cache and matrix products of this package.

    `host` sets the module. Passes can run after that.

    Args:
        info: sizes and attention calls of the model.
        ops: implementations of the replaced operations.
        num_pages, page_size: number of pages of the KV cache, and tokens of a page.
        max_positions: positions of the longest row.
        batch, max_queries: largest number of rows, and of tokens per row, of a decode pass.
        dtype, device: dtype and device of the KV cache.
        exchange: communication between ranks, if each has a part of the model. None: this process has the whole model.

    Attributes:
        wanted: hidden states [1, n, hidden] of the whole model for test tokens, if this is one rank's part. They are
            computed while the weights are loaded. None: this process has the whole model.
        rounded: True if weights were quantised after `wanted` was computed.
        weights: the module's embedding and output matrix, for learned drafters that share them. It has no layers.
        streams: recorder of the residual stream between the layers.
    """

    def __init__(
        self,
        info: HostedInfo,
        ops: Ops,
        *,
        num_pages: int,
        page_size: int,
        max_positions: int,
        batch: int,
        max_queries: int,
        dtype: torch.dtype,
        device: torch.device,
        exchange: Exchange | None = None,
    ) -> None:
        self.info, self.ops, self.exchange = info, ops, exchange or Alone()
        self.tiling, self.queries, self.inside = UNTILED, 1, False
        self.constants: dict[Any, Tensor] = {}
        shapes = [(num_pages, page_size, kv_heads, dim) for _, kv_heads, dim in info.slots]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        calls = info.probed.calls
        queries = TRIAL_PROMPT + max_queries  # tokens of the largest pass that admission makes
        self._work = {
            shape: ops.workspace(device, batch, queries, max_positions, shape)
            for shape in dict.fromkeys(call.shape for call in calls)
        }
        self.wanted: Tensor | None = None
        self.rounded = False
        self._rows: ForwardBatch | None = None
        self._at = 0

    def host(self, module: nn.Module) -> None:
        """Sets the module that passes run. `load_hosted` has replaced its submodules and filled its weights."""
        self.module: Any = module
        self.base: Any = base_of(module)
        attach(module, self)
        self.streams = LayerStreams(self.base, self.info.layer_names)
        its: Any = module
        embed, head = _weight_of(its.get_input_embeddings()), _weight_of(its.get_output_embeddings())
        self.weights = DecoderWeights(embed=embed, layers=(), norm=embed.data.new_empty(0), head=head)
        # for logits the module is called with hidden states in place of embeddings; its base model is replaced by one
        # that returns them, so that only the LM head computes
        setattr(module, base_name(module), _PassOn(self.info.probed.output, hasattr(self.base, "decoder")))

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.info.vocab_size

    def hidden(self, rows: ForwardBatch) -> Tensor:
        """Runs a forward pass over the tokens of `rows`, and writes their K/V to the cache.

        Returns the last hidden states [B, Q, hidden].
        """
        self._rows, self._at = rows, 0
        # padding and idle rows may have positions after the end of the module's own position tables
        positions = rows.positions.clamp(max=self.info.max_length - 1)
        with self.running(rows.tiling, rows.ids.shape[1]):
            given = {**self.info.probed.whole, self.info.probed.cache_name: NoCache()}
            out = self.base(input_ids=rows.ids, position_ids=positions, use_cache=True, **given)
        assert self._at == len(self.info.probed.calls), "a pass calls attention as the probe did"
        hidden: Tensor = out.last_hidden_state
        return hidden

    def hidden_with_features(self, rows: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Returns the result of `hidden`, and the residual stream after each of `layers`.

        For shapes and indices see `Decoder.hidden_with_features`. `admit_streams` has checked before that the
        residual stream can be read between the module's layers.
        """
        count = len(self.info.layer_names)
        with self.streams.recorded([layer for layer in layers if layer < count]) as found:
            last = self.hidden(rows)
        return last, torch.stack([found.get(layer, last) for layer in layers], dim=2)

    def head_logits(self, x: Tensor, tiling: Tiling, *, norm: tuple[Tensor, float] | None = None) -> Tensor:
        """Computes fp32 logits [..., V] for hidden states of a learned drafter that uses this module's LM head.

        Scale and softcap of the module's logits are applied, too.

        Args:
            x: [..., hidden], hidden states of the drafter.
            tiling: tile sizes of the product.
            norm: (weight, epsilon) of an RMSNorm that is applied to x first. None: no norm.
        """
        return self.logits(x if norm is None else self.ops.norm(x.contiguous(), *norm), tiling)

    def head_argmax(
        self,
        x: Tensor,
        limit: int,
        tiling: Tiling,
        out: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        work: object = None,
        ids: Tensor | None = None,
    ) -> None:
        """Writes to `out` [R] the token id with the largest logit, for each row of x [R, hidden]; see `head_logits`.

        Only ids below `limit` count. For `ids` see `CausalModel.argmax`. `work` is not used.
        """
        reference.pick(self.head_logits(x, tiling, norm=norm), limit, out, ids)

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns fp32 logits [..., V] for hidden states [..., hidden], computed by the module's own LM head."""
        given = hidden.reshape(1, -1, hidden.shape[-1])
        with self.running(tiling, 1):
            logits: Tensor = self.module(inputs_embeds=given, use_cache=False).logits
        return logits.float().view(*hidden.shape[:-1], -1)

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None = None) -> None:
        """Writes to `out` [R] the token id with the largest logit, for each row of `hidden` [R, hidden].

        Only ids below `limit` count. Of equal logits the lowest id is taken. For `ids` see `CausalModel.argmax`.
        """
        reference.pick(self.logits(hidden, tiling), limit, out, ids)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Computes the next attention call of the running pass. Implements `HostedPass.attend`.

        Writes K and V to the pages of the call's slot in the KV cache, and attends to all keys there.

        Args:
            module: attention module that makes the call. Not used.
            query: [B, H, Q, D].
            key, value: [B, Hkv, Q, D] each. In latent attention (MLA), values have another D than keys.
            mask: not used, because `info` has the attention rule of each call.
            options: other arguments of the call, of which sinks are read.

        Returns:
            [B, Q, H, D of values].
        """
        call, rows = self.info.probed.calls[self._at], self._rows
        assert rows is not None
        self._at += 1
        # a layer that shares the keys of another writes the same bits to the same pages again. In latent attention
        # values are narrower than keys: they are padded with zeros, which change no result
        wide = [_padded(part, call.head_dim).transpose(1, 2).flatten(2) for part in (query, key, value)]
        qkv = torch.cat(wide, dim=-1)
        sinks = options.get("s_aux")
        with our_op(self):
            attending = AttendCall(
                qkv.to(self.keys[call.slot].dtype),
                None,
                None,
                self.keys[call.slot],
                self.values[call.slot],
                rows.block_table,
                rows.positions,
                rows.write_mask,
                num_heads=call.heads,
                num_blocks=rows.num_blocks,
                first_block=rows.first_block,
                rule=call.rule,
                sinks=None if sinks is None else sinks.detach().reshape(-1).contiguous(),
                tiling=rows.tiling,
            )
            out = self.ops.attend(attending, self._work[call.shape])
        heads: Tensor = out.unflatten(-1, (call.heads, -1))[..., : call.value_dim].to(query.dtype)
        return heads

    @contextmanager
    def running(self, tiling: Tiling, queries: int) -> Iterator[None]:
        """Context manager for a pass with `queries` tokens per row, in which products have the tile sizes `tiling`."""
        self.tiling, self.queries = tiling, queries
        with FixedShapes(self):
            yield


def _weight_of(part: Any) -> Weight:
    """Returns the weight of an embedding or of a linear layer `part`."""
    found = part.weight
    return found if isinstance(found, Weight) else Weight(found.detach())


def _padded(x: Tensor, width: int) -> Tensor:
    """Pads x [..., D] with zeros to [..., width]. Returns x itself if D is `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


class _PassOn(nn.Module):
    """Replaces the base model of a module while logits are computed. Its forward returns the input embeddings.

    Args:
        output: class of the base model's result.
        decoder: True if the module calls the `decoder` of its base model, as OPT does.
    """

    def __init__(self, output: Any, decoder: bool) -> None:
        super().__init__()
        self._output = output
        if decoder:
            self.decoder = _PassOn(output, False)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Returns the input embeddings as last hidden state."""
        return self._output(last_hidden_state=inputs_embeds)
