"""Small decoders with random weights, built without a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastspec.engine.engine import Engine
from fastspec.engine.pass_sizes import PassSizes
from fastspec.engine.step_shapes import StepShapes
from fastspec.graphs.results import ResultRing
from fastspec.graphs.runner import EagerRunner, GraphRunner, Runner
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import TORCH_OPS
from fastspec.kernels.select import ops_for
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.kv_cache.pages import PageTable
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.families.plan import LayerPlan
from fastspec.models.layer_table import DecoderWeights, LayerWeights
from fastspec.models.rope import RopeSpec
from fastspec.proposers.draft_model import DraftModel
from fastspec.shapes import LONG_PROMPT, Tiling
from fastspec.state import DecodeState
from fastspec.step import PromptEnd, StepModules

VOCAB = 101
STEP_TILING = Tiling(rows=8, queries=8)


def tiny_spec(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    window: int | None = None,
) -> ModelSpec:
    inv_freq = tuple(10000.0 ** (-i / dim) for i in range(0, dim, 2))
    return ModelSpec(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=96,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_eps=1e-5,
        max_length=4096,
        ropes=(RopeSpec("default", inv_freq, 1.0),),
        plans=(LayerPlan(window=window),) * layers,
        tied=False,
        dtype=torch.float32,
    )


def random_weights(spec: ModelSpec, seed: int, device: torch.device, std: float = 0.3) -> DecoderWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device)

    def matrix(*shape: int) -> Weight:
        return Weight(normal(*shape))

    def layer() -> LayerWeights:
        heads = spec.num_heads * spec.head_dim
        return LayerWeights(
            input_norm=1 + normal(spec.hidden_size),
            post_norm=1 + normal(spec.hidden_size),
            qkv=matrix(heads + 2 * spec.num_kv_heads * spec.head_dim, spec.hidden_size),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=matrix(spec.hidden_size, heads),
            o_bias=None,
            gate_up=matrix(2 * spec.intermediate_size, spec.hidden_size),
            gate_up_bias=None,
            down=matrix(spec.hidden_size, spec.intermediate_size),
            down_bias=None,
        )

    return DecoderWeights(
        embed=matrix(spec.vocab_size, spec.hidden_size),
        layers=tuple(layer() for _ in range(spec.num_layers)),
        norm=1 + normal(spec.hidden_size),
        head=matrix(spec.vocab_size, spec.hidden_size),
    )


def tiny_engine(
    *,
    k: int = 4,
    batch: int = 4,
    max_length: int = 200,
    page_size: int = 16,
    device: str = "cpu",
    order: list[int] | None = None,
    window: int | None = None,
    same: bool = False,
    tiling: Tiling = STEP_TILING,
    chunks: tuple[int, ...] = (32,),
    depth: int = 1,
    num_pages: int | None = None,
    draft_context: int = 4096,
    graphs: bool = False,
    prefill_batch_tokens: int = 0,
    long_prompt: int = LONG_PROMPT,
    prediction_tokens: int = 0,
) -> Engine:
    """An engine over two random decoders (or one as its own draft)."""
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    ops = TORCH_OPS if on.type == "cpu" else ops_for(on)  # what graphs capture, which reads nothing
    pages_per_row = -(-(max_length + k + 1) // page_size)
    pages = num_pages or 1 + batch * pages_per_row

    def decoder(spec: ModelSpec, seed: int) -> Decoder:
        cache = PagedKVCache.allocate(
            spec.num_layers,
            pages,
            page_size,
            spec.num_kv_heads,
            spec.head_dim,
            dtype=torch.float32,
            device=on,
        )
        return Decoder(
            spec,
            random_weights(spec, seed, on),
            cache,
            ops,
            max_positions=pages_per_row * page_size,
            batch=batch,
            max_queries=max(2, k + 1),
        )

    runner = GraphRunner(on, depth=depth) if graphs else EagerRunner(on, depth)
    with runner.on_stream():
        target = decoder(tiny_spec(window=window), seed=1)
        draft = decoder(tiny_spec(window=window), seed=1) if same else decoder(tiny_spec(layers=1, hidden=32), seed=2)
        state = DecodeState.allocate(
            batch=batch,
            max_drafts=k,
            max_length=max_length,
            pages_per_row=pages_per_row,
            vocab_size=VOCAB,
            device=on,
            prediction_tokens=prediction_tokens,
        )
        work = ops.sampled_work(batch, k, VOCAB, on)
        proposer = DraftModel(draft, ops, VOCAB, draft_context, work=work)
        ring = ResultRing(batch, k, state.top_ids.shape[2], on, pinned=ops.name == "triton")
        scratch = ops.commit_scratch(batch, k, on)
        record_work = ops.record_work(batch, k, VOCAB, on)
        prompt_ends = replace(
            PromptEnd.zeros(batch, target.spec.hidden_size, 0, torch.float32, on), threshold=long_prompt
        )
    if on.type == "cuda":
        torch.cuda.synchronize(on)  # tests also look at it from the default stream
    return Engine(
        modules=StepModules(
            target, proposer, ops, ring.outbox, scratch, work=work, record_work=record_work, prompt_ends=prompt_ends
        ),
        state=state,
        pages=PageTable(pages, page_size, order),
        runner=runner,
        ring=ring,
        shapes=StepShapes(batch, state.tokens.shape[1], k, tiling, runner.static),
        sizes=PassSizes(batch, tiling.rows is not None, chunks, batch_tokens=prefill_batch_tokens),
    )


def with_runner(engine: Engine, runner: Runner) -> Engine:
    """The same engine with another runner."""
    return replace(engine, runner=runner, shapes=replace(engine.shapes, static=runner.static))


def capture_all(engine: Engine, ks: set[int], sampler: str, top_logprobs: int | None = None) -> None:
    """Makes every step of these kinds ready to run, over short rows and over the longest."""
    with engine.on_device():
        for longest in (0, engine.state.tokens.shape[1] - 1):
            for rows, shape in engine.missing(engine.state.batch, ks, sampler, top_logprobs, longest):
                engine.capture(rows, shape)
