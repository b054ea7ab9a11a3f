"""Published speeds of batch 1, measured again with fastspec on models of the same shape: `python -m perf anchors`.

Weights are drawn, so a head's drafts would never be accepted. Rows with a drafter use `SyntheticAcceptance` and say so:
a step accepts as many drafts as the published head did in the mean, so its time and its tokens are those of that head.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastspec import FastSpecGenerator, SyntheticAcceptance
from perf import shaped
from perf.experiment import Arm, generate, say, summary
from perf.records import Row
from perf.workloads import WORKLOADS

PROMPT, NEW, CALLS = 128, 256, 2
PATTERN = 50  # steps after which a pattern of accepted drafts begins again: lengths are told to two places
COLUMNS = ("anchor", "gpu", "k", "ms_step", "tokens_per_pass", "tok_s", "published_tok_s", "published_on", "ratio",
           "synthetic", "source")  # fmt: skip
SPECFORGE = "SpecForge, docs/spec_bundle/public/raw_data/data.json: SGLang, EAGLE-3 head of SpecForge, a chain"
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published speed, and the setting that is measured beside it.

    Attributes:
        name: of the setting.
        shape: key of SHAPES, the target.
        tok_s: published tokens a second of one row.
        on: GPU and engine of the published figure.
        source: where it is published, and what of it is derived.
        k: drafts of a step; 0 is plain.
        length: tokens of a pass that the published drafter reached, or what is derived from it; None if plain.
    """

    name: str
    shape: str
    tok_s: float
    on: str
    source: str
    k: int = 0
    length: float | None = None

    @property
    def rule(self) -> SyntheticAcceptance | None:
        """Drafts that each step accepts; None if plain."""
        return None if self.length is None else SyntheticAcceptance(pattern=pattern_of(self.length))


def pattern_of(length: float) -> tuple[int, ...]:
    """Accepted drafts of PATTERN steps that give `length` tokens a step in the mean, as evenly as can be."""
    total = round((length - 1) * PATTERN)
    return tuple((index + 1) * total // PATTERN - index * total // PATTERN for index in range(PATTERN))


def shorter(length: float, k: int, fewer: int) -> float:
    """Tokens of a pass with `fewer` drafts, from those with k: every draft is accepted at one rate a.

    A pass of k drafts then has 1 + a + .. + a^k tokens (Leviathan et al., arXiv 2211.17192, section 3.3).
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(k + 1)) < length else (low, middle)
    return sum(low**j for j in range(fewer + 1))


def _specforge(task: str, length: float, base: float, ratios: Mapping[int, float]) -> list[Anchor]:
    """The rows of one task.

    Args:
        length: tokens of a pass at k = 7.
        base: tokens a second without drafts; ratios: speed-up over that by k.
    """
    found = []
    for k, ratio in ratios.items():
        derived = "" if k == 7 else "; tokens a pass derived from k = 7 with one rate of acceptance"
        at = round(shorter(length, 7, k), 2) if k != 7 else length
        name, speed = f"8B, EAGLE-3 k = {k}, {task}", round(base * ratio, 1)
        found.append(Anchor(name, "8b", speed, "H200, SGLang", SPECFORGE + derived, k, at))
    return found


ANCHORS = (
    *_specforge("MT-bench", 3.86, 450 / 2.37, {3: 2.13, 5: 2.35, 7: 2.37}),
    *_specforge("HumanEval", 4.91, 571.5 / 2.99, {3: 2.44, 5: 2.88, 7: 2.99}),
    *_specforge("MATH500", 5.40, 638 / 3.34, {3: 2.58, 5: 3.11, 7: 3.34}),
    Anchor("1B, plain", "1b", 1050, "H100, Hazy megakernel", "Hazy Research, Look Ma, No Bubbles (78% of bandwidth)"),
    Anchor("Qwen3-30B-A3B, plain", "qwen3-30b-a3b", 204, "H100, MPK", "mirage, issue 563 (4.9 ms)"),
    Anchor("gpt-oss-20b, plain", "gpt-oss-20b", 248, "H100, vLLM 0.19.1", "vLLM blog, 2026-04-22 (4.03 ms)"),
)

_MIXTURE: Fields = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
}
_OSS: Fields = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
_MXFP4: Fields = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
_8B_1B = WORKLOADS["8b+1b-tied"]
SHAPES: Mapping[str, Fields] = {
    "8b": {"architectures": ["LlamaForCausalLM"], **_8B_1B.target},
    "1b": {"architectures": ["LlamaForCausalLM"], **_8B_1B.draft},
    "qwen3-30b-a3b": _MIXTURE,
    "gpt-oss-20b": _OSS,
}
# sizes of SpecForge's head for Llama-3.1-8B: one layer, three hidden states, 32,000 ids
HEAD: Fields = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def small(fields: Fields) -> Fields:
    """The same family at a size for a CPU."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 32}
    counts = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    counts |= {"num_experts": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "draft_vocab_size": 256}
    found = {**fields, **{name: value for name, value in (sizes | counts).items() if name in fields}}
    if "layer_types" in fields:
        found["layer_types"] = fields["layer_types"][: counts["num_hidden_layers"]]
    if "architectures" in fields and "Eagle3" in fields["architectures"][0]:
        found["num_hidden_layers"] = 1
    return found


def write_model(directory: Path, fields: Fields) -> Path:
    """A checkpoint of a model, without weights; experts of gpt-oss are stored in mxfp4."""
    from transformers import CONFIG_MAPPING

    mxfp4 = fields["model_type"] == "gpt_oss"
    known = {name: value for name, value in fields.items() if name not in ("model_type", "architectures")}
    config = CONFIG_MAPPING[fields["model_type"]](**known)
    shapes = shaped.shapes_of(config, torch.bfloat16, mxfp4=mxfp4)
    told = {**config.to_dict(), **fields, "dtype": "bfloat16", **(_MXFP4 if mxfp4 else {})}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return shaped.write(directory, {**told, **ends}, shapes, {})


def write_head(directory: Path, fields: Fields) -> Path:
    """An EAGLE-3 head in the layout of SpecForge, without weights."""
    hidden, inner, ids = fields["hidden_size"], fields["intermediate_size"], fields["draft_vocab_size"]
    heads, kept = (fields[f"num_{name}_heads"] * fields["head_dim"] for name in ("attention", "key_value"))
    layer, attention = "midlayer.", "midlayer.self_attn."
    sizes = {
        "fc.weight": (hidden, 3 * hidden),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{attention}q_proj.weight": (heads, 2 * hidden),
        f"{attention}k_proj.weight": (kept, 2 * hidden),
        f"{attention}v_proj.weight": (kept, 2 * hidden),
        f"{attention}o_proj.weight": (hidden, heads),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (ids, hidden),
    }
    chosen = torch.arange(ids) * (fields["vocab_size"] // ids)
    known = torch.zeros(fields["vocab_size"], dtype=torch.bool).index_fill_(0, chosen, True)
    values = {"d2t": chosen - torch.arange(ids), "t2d": known}
    return shaped.write(directory, fields, {name: (size, torch.bfloat16) for name, size in sizes.items()}, values)


def measured(anchor: Anchor, generator: FastSpecGenerator, vocab: int) -> Row:
    """The row of an anchor."""
    ids = torch.randint(vocab, (1, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    arm = Arm(generator, anchor.k)
    generate(arm, ids, 8)
    found = []
    for _ in range(CALLS):
        first = generate(arm, ids, 1).seconds
        found.append(generate(arm, ids, NEW, first=first))
    row = summary("fastspec", anchor.k, found)
    # of steps alone, as the published figures: those of prompts differ
    length = row["tokens_per_pass"] if anchor.length is None else anchor.length
    speed = round(length / row["ms_step"] * 1e3, 1)
    return {
        "bench": "anchors",
        "anchor": anchor.name,
        "workload": f"shape of {anchor.shape}, drawn weights, batch 1, prompt {PROMPT}, {NEW} new, greedy",
        **{name: row[name] for name in ("k", "status", "ms_step", "ms_step_iqr", "tokens_per_pass")},
        "tok_s": speed,
        "published_tok_s": anchor.tok_s,
        "published_on": anchor.on,
        "published_length": anchor.length,
        "ratio": round(speed / anchor.tok_s, 3),
        "synthetic": None if anchor.rule is None else f"acceptance of {anchor.length:g} tokens a pass",
        "source": anchor.source,
    }


def rows_of(anchors: list[Anchor], device: str, *, tiny: bool = False) -> Iterator[list[Row]]:
    """Measures anchors; those of one target and k share a generator's files."""
    fit = small if tiny else dict
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as scratch, shaped.drawn(device):
        places: dict[str, Path] = {}
        for anchor in anchors:
            fields = fit(SHAPES[anchor.shape])
            if anchor.shape not in places:
                places[anchor.shape] = write_model(Path(scratch, anchor.shape), fields)
            head = Path(scratch, "head")
            if anchor.k and not head.exists():
                write_head(head, fit(HEAD))
            options: dict[str, Any] = {"num_speculative_tokens": anchor.k, "draft_quantization": None}
            if anchor.rule is not None:
                options |= {"draft": head, "verification": anchor.rule, "feature_layers": default_layers(fields)}
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of synthetic acceptance, which the row tells
                with FastSpecGenerator(
                    places[anchor.shape],
                    **options,
                    max_batch_size=1,
                    max_length=PROMPT + NEW + 16,
                    dtype=dtype,
                    device=device,
                    prefix_cache=False,
                    progress=False,
                ) as generator:
                    row = measured(anchor, generator, fields["vocab_size"])
            yield [{**row, "seconds": round(time.perf_counter() - start, 1)}]


def default_layers(fields: Fields) -> tuple[int, int, int]:
    """The layer boundaries that SpecForge's heads read: 2, L / 2, L - 3."""
    layers = fields["num_hidden_layers"]
    return 2, layers // 2, max(layers - 3, layers // 2 + 1)


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf anchors`."""
    made.set_defaults(columns=COLUMNS)
    made.add_argument("--only", default="", help="anchors whose name holds this")
    made.add_argument("--small", action="store_true", help="tiny models: shows that the measuring works")


def command_anchors(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Published speeds of batch 1, and ours on models of the same shape."""
    chosen = [anchor for anchor in ANCHORS if given.only in anchor.name]
    for rows in rows_of(chosen, given.device, tiny=given.small):
        say(f"{rows[0]['anchor']}: {rows[0]['tok_s']} tok/s, published {rows[0]['published_tok_s']}")
        yield rows
