"""One rank of `test_devices`, with a GPU of its own: started by torchrun, whose exit code tells of failed checks."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastspec import FastSpecGenerator, demo_pair
from fastspec.distributed.devices import OverDevices, _all_gather, _room_of
from fastspec.distributed.exchange import add_rounded, tree_sum
from fastspec.distributed.world import World
from fastspec.kernels import exchange, room
from fastspec.kernels.reference import keys_of
from fastspec.kernels.room import elements_of

LARGEST = 40 * 8192  # elements that the kernel exchanges; what is larger goes by NCCL
PROMPTS = ["def main(argv=None):", "import os\nclass A:", "for i in range(10):", "x = ["]


def sums() -> None:
    """Sums and gathers are those of all ranks' tensors, launched and replayed, with hosts at different places."""
    world = World.meet()
    device = torch.device("cuda", torch.cuda.current_device())
    over = OverDevices(world, device, LARGEST)
    own = torch.Generator(device).manual_seed(7 + world.rank)
    common = torch.Generator(device).manual_seed(3)

    def everyone(x: Tensor) -> list[Tensor]:
        out = torch.empty(world.size, *x.shape, dtype=x.dtype, device=device)
        _all_gather(out.view(-1), x.contiguous().view(-1), over._group())
        return list(out)

    def added(x: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        assert torch.equal(over.added(x, bias, residual), add_rounded(tree_sum(everyone(x)), bias, residual)), x.shape

    for rows, width in ((1, 4096), (5, 4096), (8, 1000), (3, 77), (40, 8192), (200, 4096), (131, 4096)):
        x = torch.randn(rows, width, device=device, generator=own)
        residual = torch.randn(rows, width, device=device, generator=common).bfloat16()
        added(x, None, residual)
        added(x, torch.randn(width, device=device, generator=common).bfloat16(), residual)
        assert torch.equal(over.sum(x), tree_sum(everyone(x))), (rows, width)
        assert torch.equal(over.gather(x), torch.cat(everyone(x), -1)), (rows, width)

    thresholds = exchange.TWO_SHOT
    for least in (1, room.ALL):  # all sums two-shot, and none
        exchange.TWO_SHOT = dict.fromkeys(thresholds, least)
        for rows, ways in ((1, 1), (5, 2), (40, 4), (77, 2)):  # many blocks, each in its own place
            x = torch.randn(ways, rows, 4096, device=device, generator=own)
            residual = torch.randn(rows, 4096, device=device, generator=common).bfloat16()
            want = add_rounded(tree_sum(everyone(tree_sum(x.unbind()))), None, residual)
            for _ in range(4):
                assert torch.equal(over.added(x, None, residual), want), (least, rows, ways)
    exchange.TWO_SHOT = dict.fromkeys(thresholds, 64 * 4096)  # below: some sums one-shot, some two-shot

    for rows, limit in ((1, 400), (5, 250), (600, 400), (LARGEST, 400)):  # the last goes by NCCL
        logits = torch.randint(-9, 9, (rows, 100 * world.size), device=device, generator=common).float()
        keys = keys_of(logits[:, 100 * world.rank :][:, :100], limit - 100 * world.rank).view(torch.uint64)
        ids = torch.full((rows, 3), -1, device=device)
        over.largest(keys, 100, ids[:, 1])
        assert torch.equal(ids[:, 1], logits[:, :limit].argmax(-1)), (rows, limit)
        assert (ids[:, ::2] == -1).all(), "nothing else is written"

    nan = torch.full((3, 4096), room.EMPTY, device=device, dtype=torch.int32).view(torch.float32)
    assert over.gather(nan).isnan().all(), "a NaN of the bits of an empty place"

    inputs = [
        torch.zeros(shape, device=device)
        for shape in ((1, 4096), (5, 4096), (8, 1000), (50, 4096), (70, 4096), (200, 4096))
    ]
    residuals = [torch.randn(x.shape, device=device, generator=common).bfloat16() for x in inputs]
    outputs: list[Tensor] = []

    def body() -> None:
        outputs[:] = [over.added(x, None, residual) for x, residual in zip(inputs, residuals, strict=True)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
        torch.cuda.synchronize()
        world.wait_for_all()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        body()
        graph.capture_end()
        for turn in range(40):
            if turn % 7 == world.rank:
                torch.cuda._sleep(10_000_000)  # this rank is late
            for x in inputs:
                x.normal_(generator=own)
            for _ in range(1 + turn % 2):  # also with nothing in between
                graph.replay()
            for x, residual, found in zip(inputs, residuals, outputs, strict=True):
                assert torch.equal(found, add_rounded(tree_sum(everyone(x)), None, residual)), turn
    world.close()


def sums_with_norms() -> None:
    """A sum with the norm behind it is the two one after the other: launched, and replayed with a rank that is late."""
    from triton.experimental.gluon import language as gl

    from fastspec.kernels.product.rank_sums import sum_ranks_permuted
    from fastspec.kernels.product.split_k import Parts, permuted_rows

    world = World.meet()
    device = torch.device("cuda", torch.cuda.current_device())
    over = OverDevices(world, device, 200 * 4096)
    assert over.room is not None, over.describe()
    own = torch.Generator(device).manual_seed(7 + world.rank)
    common = torch.Generator(device).manual_seed(3)

    def both(x: Tensor, bias: Tensor | None, residual: Tensor, cut: tuple[int, int]) -> list[Any]:
        norm = torch.linspace(0.5, 1.5, residual.shape[1], device=device).bfloat16(), 1e-5
        wanted = permuted_rows(over.added(x, bias, residual), norm, cut, gl.bfloat16, True)
        found = sum_ranks_permuted(Parts(x, 0), bias, residual, norm, cut, gl.bfloat16, True, over.room)
        return [*wanted, *found]

    def same(six: list[Any]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(six[:3], six[3:], strict=True))

    cases: list[tuple[Tensor, Tensor | None, Tensor, tuple[int, int]]] = []
    for ways, rows, k, splits in (
        (2, 32, 4096, 4),
        (1, 9, 2048, 4),
        (4, 160, 4096, 4),
        (2, 40, 2880, 4),
        (2, 70, 8192, 8),
    ):
        x = torch.randn(ways, rows, k, device=device, generator=own)
        residual = torch.randn(rows, k, device=device, generator=common).bfloat16()
        bias = torch.randn(k, device=device, generator=common).bfloat16() if ways == 2 else None
        cases.append((x, bias, residual, (splits, 64)))
    for case in cases:
        for _ in range(3):
            assert same(both(*case)), (case[0].shape, case[3])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
        world.wait_for_all()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        made = [both(*case) for case in cases]
        graph.capture_end()
        for turn in range(40):
            if turn % 7 == world.rank:
                torch.cuda._sleep(10_000_000)  # this rank is late
            for case in cases:
                case[0].normal_(generator=own)
            for _ in range(1 + turn % 2):  # also with nothing in between
                graph.replay()
            assert all(map(same, made)), turn
            same_on_all([each[3].double().sum().item() for each in made])
    world.close()


def few_sums() -> None:
    """Each way of an exchange once: one-shot, two-shot, of few rows and many."""
    world = World.meet()
    device = torch.device("cuda", torch.cuda.current_device())
    shared, why = _room_of(world, device, elements_of(LARGEST, 0))
    assert shared is not None, why
    mine = float(1 + world.rank)
    for rows, least in ((3, room.ALL), (79, room.ALL), (79, 1)):
        x = torch.full((2, rows, 4096), mine, device=device)
        residual = torch.ones(rows, 4096, device=device, dtype=torch.bfloat16)
        total = 1 + world.size * (world.size + 1)
        assert (exchange.exchange_added(x, None, residual, shared, least) == total).all(), (rows, least)
    gathered = exchange.exchange_gather(torch.full((70, 1003), mine, device=device), shared)
    assert (gathered[:, -1] == world.size).all()
    keys = keys_of(torch.full((5, 100), mine, device=device), 100).view(torch.uint64)
    ids = torch.full((5,), -1, device=device)
    exchange.exchange_largest(keys, 100, shared, ids)
    assert (ids == 100 * (world.size - 1)).all()
    print("few sums are right", flush=True)
    world.close()


def same_on_all(value: Any) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(each == found[0] for each in found), "ranks differ"


def texts(**more: Any) -> None:
    """Texts with drafts are those without, on every rank the same; memory does not grow."""
    target, draft = map(str, demo_pair())
    common = {"progress": False, "max_length": 400, "max_batch_size": 4, "tensor_parallel": "auto", **more}
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": 11}
    with FastSpecGenerator(target, draft, verification="coupled", **common) as made:
        ids = [made.tokenizer(text)["input_ids"] for text in PROMPTS]
        ids.append(ids[0] * 30)  # a prompt of several passes
        found = {}
        for name, options in (("greedy", {}), ("sampled", sampled)):
            for k in (0, 4):
                output = made.generate(
                    ids, max_new_tokens=48, num_speculative_tokens=k, return_dict_in_generate=True, **options
                )
                found[name, k] = output.new_tokens
            assert found[name, 0] == found[name, 4], name
        same_on_all(list(found.items()))
        gc.collect()
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated()
        for _ in range(30):
            made.generate(ids[:2], max_new_tokens=8)
        gc.collect()
        assert torch.cuda.memory_allocated() == used


def without_peers() -> None:
    """Where GPUs do not reach each other's memory all goes by NCCL, in the graph, and explain() says so."""
    torch.cuda.can_device_access_peer = lambda *devices: False
    target, draft = map(str, demo_pair())
    with FastSpecGenerator(target, draft, progress=False, max_length=200, tensor_parallel="auto") as made:
        assert "NCCL in the graph, because the GPUs do not reach each other's memory" in made.explain()
        ids = [made.tokenizer(PROMPTS[0])["input_ids"]]
        found = [
            made.generate(ids, max_new_tokens=48, num_speculative_tokens=k, return_dict_in_generate=True).new_tokens
            for k in (0, 4)
        ]
    assert found[0] == found[1], "drafts change nothing"
    same_on_all(found)


def one_text() -> None:
    """Says the texts of this many GPUs: of prompts of one pass and of several, few rows and many."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    with torch.device("cuda", torch.cuda.current_device()):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    lengths = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 4096, (length,), generator=lengths).tolist() for length in (7, 700, 200, *[30] * 9)]
    sampled = {"do_sample": True, "temperature": 0.9, "seed": 3}
    found = []
    common: dict[str, Any] = {"max_batch_size": 12, "max_length": 900, "progress": False, "tensor_parallel": "auto"}
    with FastSpecGenerator(model, model, **common) as made:
        for options in ({}, sampled, {"num_speculative_tokens": 0}):
            for count in (2, 12):
                output = made.generate(
                    prompts[:count], max_new_tokens=64, eos_token_id=None, return_dict_in_generate=True, **options
                )
                found.append(output.new_tokens)
                assert output.stats.same_text_on == (1, 2, 4), output.stats
    assert found[:2] == found[4:], "drafts change nothing"
    same_on_all(found)
    if dist.get_rank() == 0:
        print("text", hashlib.sha256(repr(found).encode()).hexdigest())


CHECKS: dict[str, Callable[[], None]] = {
    "sums": sums,
    "sums with norms": sums_with_norms,
    "few sums": few_sums,
    "texts": texts,
    "texts with a cut draft": lambda: texts(draft_tensor_parallel="split"),
    "texts by NCCL alone": without_peers,
    "texts of a quantised target": lambda: texts(target_quantization="int8"),
}
TEXT = "one text"  # which tests compare between numbers of ranks

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    one_text() if sys.argv[1] == TEXT else CHECKS[sys.argv[1]]()
    dist.barrier()
