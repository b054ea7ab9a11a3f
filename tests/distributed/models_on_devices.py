"""One rank of `test_devices` with models of many kinds, on a GPU of its own, in bfloat16; started by torchrun.

Of every kind the text with drafts is the text without, and all ranks have it. A line of JSON says of each, from rank 0,
a hash of the texts and on how many GPUs they are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, PreTrainedModel

from fastspec import FastSpecGenerator, NGram, demo_pair
from fastspec.models.hosted.info import hosted_info
from tests.helpers import dflash, heads, hybrid, mtp, mxfp4
from tests.helpers.checkpoints import make_model
from tests.helpers.families import make_family

VOCAB, HIDDEN = 2048, 512
DENSE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": 4},
    **{
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "std": 0.06,
    },
}
# a layer as wide as those of models with 7 B parameters
WIDE = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "head_dim": 128}
REQUESTS = "requests"
CALLS: list[dict[str, Any]] = [{}, {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": 7}]
Made = tuple[str, str | None, dict[str, Any]]  # target, draft, options


def saved(model: PreTrainedModel, path: Path) -> str:
    model.to(torch.bfloat16).save_pretrained(path)
    return str(path)


def dense(path: Path) -> str:
    return saved(make_model("llama3", tie_word_embeddings=False, **DENSE), path / "dense")


def eagle3(path: Path) -> Made:
    sizes = {
        "hidden": HIDDEN,
        "target_hidden": HIDDEN,
        "inner": 1024,
        "heads": 8,
        "kv_heads": 4,
        "dim": 64,
        "vocab": VOCAB,
    }
    shared = {"own_head": False, "own_embed": False, "drafted": VOCAB, "std": 0.06}
    head = heads.write_eagle3(path / "head", heads.eagle3_tensors(**sizes, **shared), vocab=VOCAB, head_dim=64)
    return dense(path), str(head), {"feature_layers": (1, 2, 3)}


def of_dflash(path: Path) -> Made:
    sizes = {"target_layers": 4, "heads": 8, "kv_heads": 4, "dim": 64, "inner": 1024, "std": 0.06}
    return dense(path), str(dflash.write_z_lab(path / "head", dflash.Head(HIDDEN, VOCAB, **sizes), torch.bfloat16)), {}


def mtp_layer(path: Path) -> Made:
    sizes = {key: value for key, value in DENSE.items() if key != "num_hidden_layers"}
    mtp.write_target(path / "mtp", "nextn", tie_word_embeddings=False, **sizes)
    return str(path / "mtp"), "mtp", {"dtype": "bfloat16", "draft_quantization": "int8"}


def experts(path: Path) -> Made:
    sizes = {key: value for key, value in DENSE.items() if key != "std"}
    more = {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "mlp_only_layers": [1]}
    return saved(make_family("qwen3_moe", std=0.06, **{**sizes, **more}), path / "moe"), str(path / "moe"), {}


def gpt_oss(path: Path) -> Made:
    """In mxfp4; of three times 64 columns of an expert one rank has two."""
    sizes = {key: value for key, value in DENSE.items() if key != "std"} | {"intermediate_size": 192}
    model = make_family("gpt_oss", std=0.06, **sizes, num_local_experts=16, num_experts_per_tok=4)
    saved(model, path / "oss")
    stored, _ = mxfp4.in_mxfp4(load_file(path / "oss" / mxfp4.FILE))
    mxfp4.rewritten(path / "oss", stored, **mxfp4.MXFP4)
    return str(path / "oss"), None, {"proposer": NGram()}


def recurrent(path: Path) -> Made:
    sizes = {key: value for key, value in DENSE.items() if key != "std"}
    more = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64}
    more |= {"linear_value_head_dim": 64, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}
    return saved(hybrid.make_hybrid("next", std=0.06, **{**sizes, **more}), path / "next"), str(path / "next"), {}


def over_all_heads(path: Path) -> Made:
    sizes = {key: value for key, value in DENSE.items() if key != "std"}
    model = make_family("olmo2", std=0.06, **{**sizes, "num_key_value_heads": 8})
    return saved(model, path / "olmo2"), None, {"proposer": NGram()}


def hosted(name: str, dtype: str = "bfloat16", **more: Any) -> Callable[[Path], Made]:
    """A model of a family that transformers runs, cut by its plan; it is its own draft, and cut there as well."""

    def make(path: Path) -> Made:
        sizes = {key: value for key, value in DENSE.items() if key != "std"} | {"intermediate_size": 1024} | more
        config = CONFIG_MAPPING[name](**sizes)
        torch.manual_seed(1)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = hosted_info(config).kind(config)
        for label, parameter in model.named_parameters():
            parameter.data.normal_(1.0 if "norm" in label and label.endswith("weight") else 0.0, 0.06)
        model.cpu().to(getattr(torch, dtype)).save_pretrained(path / name)
        target = str(path / name)
        return target, target, {"draft_tensor_parallel": "split", "dtype": dtype, "draft_quantization": None}

    return make


def quantised(form: str) -> Callable[[Path], Made]:
    return lambda path: (dense(path), str(path / "dense"), {"target_quantization": form})


KINDS: dict[str, Callable[[Path], Made]] = {
    "EAGLE-3": eagle3,
    "experts": experts,
    "experts in mxfp4": gpt_oss,
    "recurrent layers and experts": recurrent,
    "DFlash": of_dflash,
    "MTP layer in 8 bits": mtp_layer,
    "norms over all heads": over_all_heads,
    "hosted": hosted("gpt_neox"),
    "hosted in fp32": hosted("gpt_neox", "float32"),
    "hosted experts": hosted("ernie4_5_moe", moe_intermediate_size=256, moe_num_experts=16, moe_k=4),
    "hosted, of real width": hosted("gpt_neox", vocab_size=50432, **WIDE),
    **{f"target in {form}": quantised(form) for form in ("fp8", "int4")},
}


def check(path: Path, kind: str) -> dict[str, Any]:
    """Texts of one kind; raises where drafts change something, or ranks differ."""
    target, draft, options = by_first(lambda: KINDS[kind](path))
    lengths = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB, (length,), generator=lengths).tolist() for length in (7, 300, 20, 64)]
    prompts[2] = prompts[2][:5] * 4
    common: dict[str, Any] = {"max_batch_size": 4, "max_length": 600, "progress": False, "verification": "coupled"}
    found = []
    with FastSpecGenerator(target, draft, tensor_parallel="auto", **common, **options) as made:
        for call in CALLS:
            texts = [
                made.generate(
                    prompts, max_new_tokens=40, eos_token_id=None, num_speculative_tokens=k,
                    return_dict_in_generate=True, **call,
                )
                for k in (0, 4)
            ]  # fmt: skip
            assert texts[0].new_tokens == texts[1].new_tokens, f"drafts change the text: {call}"
            found.append(texts[0].new_tokens)
            rate = texts[1].stats.acceptance_rate
        ranks = [line for line in made.explain().splitlines() if line.startswith(("ranks", "exchange"))]
        same = texts[0].stats.same_text_on
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert all(each == found for each in everyone), "ranks differ"
    text = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
    return {"text": text, "same_text_on": same, "accepted": round(rate, 3), "said": ranks}


def requests() -> dict[str, Any]:
    """Requests of rank 0, which the others follow, have the text of a call of all ranks; and how long both take."""
    common: dict[str, Any] = {"max_batch_size": 4, "max_length": 700, "progress": False, "tensor_parallel": "auto"}
    with FastSpecGenerator(*map(str, demo_pair()), **common) as made:
        lengths = torch.Generator().manual_seed(2)
        prompts = [torch.randint(0, 4000, (length,), generator=lengths).tolist() for length in (7, 300, 20, 64, 5)]
        options = [{"seed": index, "do_sample": index % 2 == 1, "temperature": 0.9} for index in range(len(prompts))]

        def alone(index: int) -> list[int]:
            output = made.generate(
                prompts[index : index + 1], max_new_tokens=200, return_dict_in_generate=True, **options[index]
            )
            return list(output.new_tokens[0])

        want = [alone(index) for index in range(len(prompts))]
        started = time.perf_counter()
        assert alone(0) == want[0]
        called = time.perf_counter() - started
        if dist.get_rank() > 0:
            made.follow()
            return {}
        handles = [
            made.submit(prompt, max_new_tokens=200, **more) for prompt, more in zip(prompts, options, strict=True)
        ]
        gone = made.submit(prompts[1], max_new_tokens=300)
        next(iter(gone))
        assert [handle.result().new_tokens[0] for handle in handles] == want, "another text"
        started = time.perf_counter()
        assert made.submit(prompts[0], max_new_tokens=200, **options[0]).result().new_tokens[0] == want[0]
        submitted = time.perf_counter() - started
        count = len(want[0])
    return {"tokens": count, "called_ms": round(1e3 * called, 1), "submitted_ms": round(1e3 * submitted, 1)}


def by_first(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank; an error of its own is one on every rank."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except Exception as error:  # noqa: BLE001  (raised below)
            traceback.print_exc()
            told[1] = repr(error)
    dist.broadcast_object_list(told)
    if told[1] is not None:
        raise RuntimeError(f"rank 0 could not make it: {told[1]}")
    return told[0]


def main(kinds: list[str]) -> int:
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    where: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    failed = 0
    for index, kind in enumerate(kinds or [*KINDS, REQUESTS]):
        started, told = time.perf_counter(), dict[str, Any]()
        try:
            place = Path(where[0]) / str(index)
            told = requests() if kind == REQUESTS else check(place, kind)
        except Exception as error:  # noqa: BLE001  (the other kinds are checked all the same)
            failed, told = 1, {"failed": f"{type(error).__name__}: {error}"[:600]}
            traceback.print_exc()
        if dist.get_rank() == 0 or "failed" in told:
            row = {"kind": kind, "ranks": dist.get_world_size(), "rank": dist.get_rank(), **told}
            print(json.dumps({**row, "seconds": round(time.perf_counter() - started, 1)}), flush=True)
    dist.barrier()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
