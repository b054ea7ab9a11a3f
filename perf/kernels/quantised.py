"""Times chains of products with quantised weights over the time to read them: `python -m perf.kernels.quantised`.

A chain is all layers of a model, each with weights of its own, and its head, without attention, in whose place stands
what it could have left. `over_floor` is its time over its bytes at the read ceiling of the same run, `over_16_bits`
over the chain of 16-bit weights. Also prompts of 2048 tokens through three layers, and products against
`torch._weight_int4pack_mm` and cuBLAS. Kernels are compiled by processes before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.compilers import Compilers
from fastspec.kernels.common.launch import compiling
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.product.dispatch import packed_linear
from fastspec.kernels.product.launch import reads_raised
from fastspec.kernels.product.prefill import prefill_linear
from fastspec.kernels.product.quantised.plan import WIDE_FROM
from fastspec.kernels.product.quantised.prompts import prefill_quantised
from fastspec.kernels.select import KERNELS
from fastspec.kernels.triton_ops import TRITON_OPS
from fastspec.shapes import UNTILED
from perf import records, timing
from perf.kernels.linear import HEADS, MODELS, Product, layers_of, packed_weights
from perf.records import Row

FORMS = ("bf16", "fp8", "int8", "int4")
CUDA, BF16, EPS = torch.device("cuda"), torch.bfloat16, 1e-5
PROMPT, PROMPT_LAYERS = 2048, 3
GROUP = 128  # of int4
COPIES = 24  # of a weight, at most, that take turns
LIFT = {"fp8": 56, "int8": 69, "int4": 69}  # so that sums are of the size of activations
PROCESSES = 12  # that compile
GPU_ONLY = True  # for perf.bench
Call = Callable[[], object]


def random_weight(form: str, product: Product) -> Weight:
    """A weight with random codes that are finite numbers, or with random 16-bit values."""
    if form == "bf16":
        return packed_weights(product, 1)[0]
    kind = CodesKind(form, (1, GROUP if form == "int4" else product.k))  # type: ignore[arg-type]
    weight = Weight.empty_codes((product.n, product.k), kind, "gated" in product.fused, BF16, CUDA)
    codes = weight.codes
    assert codes is not None
    codes.words.random_(-(2**31), 2**31 - 1)
    if form == "fp8":
        codes.words.bitwise_and_(-0x01010102)  # no NaN
    codes.factors.fill_(2.0 ** LIFT[form] * product.k**-0.5 / (4 if form == "int4" else 100))
    if codes.scales is not None:
        codes.scales.view(torch.float16).uniform_(0.5, 1.0)
    return weight


@dataclass(slots=True, eq=False)
class Chain:
    """A model's products in one format.

    Attributes:
        model: "8b" or "1b". layers: weights in the order of `MODELS`.
    """

    model: str
    form: str
    layers: list[list[Weight]]
    head: Weight

    @classmethod
    def made(cls, model: str, form: str, layers: int | None = None) -> Chain:
        """With random weights, and so many layers, or all."""
        count, products = MODELS[model]
        head = Product("head", *HEADS[model], ("norm", "fp32"))
        weights = [[random_weight(form, product) for product in products] for _ in range(layers or count)]
        return cls(model, form, weights, random_weight(form, head))

    @property
    def nbytes(self) -> int:
        """That a pass reads."""
        return sum(weight.nbytes for layer in self.layers for weight in layer) + self.head.nbytes

    def call(self, rows: int) -> Call:
        """A pass with `rows` rows: as a step's, with the kernels that it has for so many."""
        products = MODELS[self.model][1]
        hidden = products[0].k
        start, attended = torch.randn(2, rows, 1, hidden, device=CUDA).to(BF16)
        if rows >= WIDE_FROM.get(self.form, 9) and not reads_raised(self.layers[0][1]):  # type: ignore[call-overload]
            attended = regrouped(attended)
        layers = layers_of(products, [list(each) for each in zip(*self.layers, strict=True)])

        def run() -> None:
            x = start
            TRITON_OPS.linear(x, layers[0].qkv, None, UNTILED, norm=(layers[0].input_norm, EPS))
            for layer, following in zip(layers, [*layers[1:], None], strict=True):
                x, _ = TRITON_OPS.layer_tail(TRITON_OPS.linear, attended, x, layer, following, EPS, UNTILED)
            norm = (layers[0].input_norm, EPS)
            packed_linear(x.view(rows, hidden), self.head, norm=norm, out_dtype=torch.float32, pdl=True)

        return run

    def prompt(self, layers: int) -> Call:
        """The products of a prompt's pass, one after the other."""
        products = MODELS[self.model][1]
        x = {product.k: torch.randn(PROMPT, product.k, device=CUDA).to(BF16) for product in products}
        gamma = torch.ones(products[0].k, device=CUDA, dtype=BF16)
        multiply = prefill_linear if self.form == "bf16" else prefill_quantised

        def run() -> None:
            for layer in self.layers[:layers]:
                for product, weight in zip(products, layer, strict=True):
                    given: dict[str, Any] = {"norm": (gamma, EPS)} if "norm" in product.fused else {}
                    if "residual" in product.fused:
                        given["residual"] = x[products[0].k]
                    multiply(x[product.k], weight, gated="gated" in product.fused, **given)

        return run


def regrouped(attended: Tensor) -> Tensor:
    """[R, 1, hidden] as the kernels for many rows leave attention's result: by 64 values."""
    return attended.reshape(*attended.shape[:2], -1, 64)


def milliseconds(call: Call) -> float:
    return timing.graph_time(call, repeats=9, calls=1).us / 1e3


def compile_all(models: Sequence[str], forms: Sequence[str], counts: Sequence[int], processes: int) -> None:
    """Everything that will be launched, by layers of each kind."""
    chains = [Chain.made(model, form, 2) for model in models for form in forms]
    with compiling(Compilers(processes, kernels=KERNELS, now=True)):
        for chain in chains:
            for count in counts:
                chain.call(count)()
            if chain.model == "8b":
                chain.prompt(1)()


def chain_rows(models: Sequence[str], forms: Sequence[str], counts: Sequence[int], ceiling: float) -> Iterator[Row]:
    """A row for each model, format and number of rows; and prompts of the 8B's."""
    whole: dict[tuple[str, int], float] = {}  # of 16 bits
    for model in models:
        for form in forms:
            chain = Chain.made(model, form)
            times = {count: milliseconds(chain.call(count)) for count in counts}
            if model == "8b":
                times[PROMPT] = milliseconds(chain.prompt(PROMPT_LAYERS))
            if form == "bf16":
                whole |= {(model, count): time for count, time in times.items()}
            for count, time in times.items():
                known = whole.get((model, count))
                row: Row = {"bench": "quantised chain", "workload": model, "case": form, "rows": count}
                if count == PROMPT:
                    row |= {"bench": "quantised prompts", "workload": f"8b, {PROMPT_LAYERS} layers"}
                else:
                    row |= {"gigabytes": round(chain.nbytes / 1e9, 3), "ceiling_gbs": round(ceiling)}
                    row["over_floor"] = round(time / (chain.nbytes / ceiling / 1e6), 3)
                over = None if known is None else round(time / known, 3)
                yield {**row, "ms": round(time, 4), "over_16_bits": over, "status": "ok"}
            del chain
            torch.cuda.empty_cache()


def peer_rows(counts: Sequence[int], ceiling: float) -> Iterator[Row]:
    """Products in int4 against torch's, and against cuBLAS in 16 bits, over weights that take turns."""
    for product in MODELS["8b"][1]:
        plain = Product(product.name, product.n, product.k, ())
        copies = range(min(COPIES, timing.copies_for(product.nbytes // 4)))
        ours = [random_weight("int4", plain) for _ in copies]
        packed = [torch.ops.aten._convert_weight_to_int4pack(_bytes(plain), 8) for _ in copies]
        scales = torch.rand(product.k // GROUP, product.n, 2, device=CUDA).to(BF16)
        dense = [torch.randn(product.n, product.k, device=CUDA).to(BF16) for _ in range(4)]
        for number in counts:
            x = torch.randn(number, product.k, device=CUDA).to(BF16)
            calls: dict[str, list[Call]] = {
                "int4_us": [partial(packed_linear, x, weight, pdl=True) for weight in ours],
                "int4pack_mm_us": [partial(torch._weight_int4pack_mm, x, each, GROUP, scales) for each in packed],
                "cublas_bf16_us": [partial(F.linear, x, weight) for weight in dense],
            }
            times = {name: round(timing.graph_time(each, repeats=7).us, 2) for name, each in calls.items()}
            floor = round(ours[0].nbytes / ceiling / 1e3, 2)
            told = {"workload": f"8b {product.name}", "rows": number, **times, "floor_us": floor}
            yield {"bench": "quantised peers", **told, "status": "ok"}


def rows(*, device: torch.device, quick: bool) -> Iterator[Row]:
    """For `python -m perf kernels`."""
    models, forms, counts = ["1b"] if quick else list(MODELS), FORMS, [1, 8] if quick else [1, 8, 32, 64]
    compile_all(models, forms, counts, PROCESSES)
    yield from chain_rows(models, forms, counts, timing.read_ceiling(device=device))


def _bytes(product: Product) -> Tensor:
    return torch.randint(0, 256, (product.n, product.k // 2), device=CUDA, dtype=torch.uint8)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measures and prints each row as a line of JSON; --out appends rows to perf/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="bf16 first, to compare with it")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--peers", action="store_true", help="also other kernels")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="that compile")
    parser.add_argument("--commit", help="where there is no checkout")
    parser.add_argument("--out", help="a file of JSON lines; a bare name lies in perf/results")
    given = parser.parse_args(arguments)
    compile_all(given.models, given.forms, given.rows, given.processes)
    ceiling = timing.read_ceiling()
    environment = records.environment("cuda", given.commit)
    found = itertools.chain(
        chain_rows(given.models, given.forms, given.rows, ceiling), peer_rows((1, 8), ceiling) if given.peers else ()
    )
    return records.follow(found, environment, given.out)


if __name__ == "__main__":
    main()
