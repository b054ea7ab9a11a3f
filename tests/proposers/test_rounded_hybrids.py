"""Drafters of quantised targets with recurrent states: text as that of the values that the codes mean, without drafts.

Drafts of heads are those of the hidden states of these values.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from fastspec import FastSpecGenerator, GenerateOutput, NGram, SyntheticAcceptance, UnsupportedOption
from fastspec.kernels.common.rounding import FORMATS, kind_for, rounded
from fastspec.models.checkpoints.quantised.write import write_quantised
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers import dflash_definition, quantised
from tests.helpers.dflash import Head, write_z_lab
from tests.helpers.heads import eagle3_tensors, engine_with
from tests.helpers.hybrid import KINDS, STATES, make_hybrid, make_states
from tests.helpers.mtp import NemotronMtp, add_to, mtp_of_transformers, random_mtp, stored_names, write_ling
from tests.models.checkpoints.quantised.test_checkpoints import FP8
from tests.proposers.test_dflash import TOLERANCE, VOCAB, distance, watch
from tests.proposers.test_eagle3 import Seen, watched, wrong_drafts
from tests.proposers.test_hybrid_heads import READ, HybridTruth, eagle
from tests.proposers.test_mtp import TheirTruth
from tests.scheduling.test_scheduler import run, sampled_row

KS = (1, 3, 5)
FILE = "model.safetensors"
COMMON: dict[str, Any] = {
    **{"device": "cpu", "dtype": "float32", "max_length": 160, "page_size": 16, "progress": False},
    **{"max_batch_size": 2, "verification": "coupled"},
}
LAWS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "temperature": 0.9, "seed": 4})
SHARED = torch.randint(VOCAB, (66,), generator=torch.Generator().manual_seed(3)).tolist()
# more than rows, so that some are admitted while others run; the last begins like the second, behind whose first 64
# tokens states are kept
GIVEN = [[3], SHARED, [5, 2], [7, 1, 4, 4, 9], [*SHARED[:64], 2, 8]]
HEAD = Head(64, VOCAB, block_size=6, mask_id=10, ids=tuple(layer - 1 for layer in READ))
DAILY = {
    ("qwen3_5", "blocks"),  # the delta rule, with an MTP layer, which is quantised, too
    ("granite4", "int8"),  # Mamba-2
    ("lfm2", "int4"),  # short convolutions
    ("nemotron_h", "saved int4"),  # layers of one part each, of which some are experts; an MTP layer in 16 bits
}
MIXTURES = (
    *("next", "qwen3_5_moe", "lfm2_moe", "granite4_moe", "nemotron_h", "nemotron_super", "jamba", "kimi_linear"),
    "ling",
)  # whose experts are not rounded while they are loaded
ROUNDED = [(kind, form) for kind in (*KINDS, *STATES) if kind not in MIXTURES for form in FORMATS]
SAVED = [(kind, "saved int4") for kind in (*KINDS, *STATES)]
DRAFTERS = ("eagle3", "dflash", "mtp", "lookup", "itself")


@dataclass(frozen=True)
class Target:
    """A quantised target.

    Attributes:
        directory, form: what is loaded, and the format to which it is rounded meanwhile.
        plain: the checkpoint from which it was made.
        meant: a checkpoint of the values that its codes mean.
    """

    directory: Path
    form: str | None
    plain: Path
    meant: Path

    @property
    def has_mtp(self) -> bool:
        return resolve(self.plain, role="target").mtp


def made(kind: str, form: str, root: Path) -> Target:
    plain, saved, meant = root / "plain", root / "saved", root / "meant"
    layers = write_plain(kind, plain)
    shutil.copytree(plain, meant)
    if form == "blocks":
        save_file(quantised.write(plain, saved, FP8, quantised.fp8_blocks), meant / FILE, {"format": "pt"})
        return Target(saved, None, plain, meant)
    name = form.removeprefix("saved ")
    left = ("embed", "lm_head", "mtp.", f"layers.{layers}.")  # of which no matrix is rounded: MTP layers, too
    save_file(_rounded(load_file(plain / FILE), name, left), meant / FILE, {"format": "pt"})
    if name == form:
        return Target(plain, form, plain, meant)
    write_quantised(str(plain), saved, name)
    return Target(saved, None, plain, meant)


def write_plain(kind: str, path: Path) -> int:
    """Writes a model of so few ids that a head without a clue is right now and then. Returns how many layers it has."""
    ids: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
    if kind == "ling":
        write_ling(path, **ids)
        return int(resolve(path, role="target").native.num_layers)
    short = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    live = (
        make_hybrid(kind, **ids, **(short if kind == "qwen3_5" else {})) if kind in KINDS else make_states(kind, **ids)
    )
    if kind == "qwen3_5":
        live.config.num_mtp_layers, live.config.mtp_layer_types = 1, ["full_attention"]
    live.save_pretrained(path)
    if kind == "qwen3_5":
        add_to(path, stored_names("mtp", random_mtp(live, neutral=0.0), 0))
    if kind == "nemotron_h":
        kinds = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
        add_to(path, NemotronMtp(live).stored(), **kinds)
    return int(live.config.num_hidden_layers)


def _rounded(stored: dict[str, Tensor], form: Any, left: tuple[str, ...]) -> dict[str, Tensor]:
    """Tensors whose matrices are rounded, but for those with one of the parts `left` in their name."""
    found = dict(stored)
    for name, values in stored.items():
        if values.dim() != 2 or any(part in name for part in left) or not name.endswith(".weight"):
            continue
        kind = kind_for(form, (values.shape[0], values.shape[1]))
        found[name] = values if kind is None else rounded(values, kind).dequantise(torch.float32)
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=() if each in DAILY else pytest.mark.slow, id=" ".join(each))
        for each in (*ROUNDED, ("qwen3_5", "blocks"), *SAVED)
    ],
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return made(*request.param, tmp_path_factory.mktemp("target"))


def texts(directory: Path, *drafter: Any, ks: tuple[int, ...], **options: Any) -> tuple[list[Tensor], int, int]:
    """Greedy and sampled texts for each k; how many drafts were accepted, and how many tokens were not read again."""
    found, accepted, cached = [], 0, 0
    with FastSpecGenerator(directory, *drafter, num_speculative_tokens=max(ks), **COMMON, **options) as gen:
        for law in LAWS:
            for k in ks:
                out = gen.generate(
                    GIVEN,
                    max_new_tokens=8,
                    eos_token_id=[],
                    return_dict_in_generate=True,
                    **({"num_speculative_tokens": k} if k else {}),
                    **law,
                )
                assert isinstance(out, GenerateOutput)
                found.append(out.sequences)
                accepted, cached = accepted + out.stats.accepted, cached + out.stats.cached_tokens
    return found, accepted, cached


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Tensor]:
    """Texts of the values that are meant, every prompt read anew."""
    return texts(target.meant, ks=(0,), prefix_cache=False)[0]


def drafter(name: str, target: Target, path: Path) -> tuple[tuple[Path | str, ...], dict[str, Any]]:
    if name == "eagle3":
        return (eagle(path, eagle3_tensors(vocab=VOCAB, drafted=VOCAB, read=len(READ))),), {}
    if name == "dflash":
        return (write_z_lab(path, HEAD),), {}
    if name == "lookup":
        return (), {"proposer": NGram()}
    return ("mtp" if name == "mtp" else target.plain,), {}


@pytest.mark.filterwarnings("ignore::UserWarning")  # no tokenizers, drafts that do not pay, an MTP layer
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_that_of_the_meant_values(name: str, target: Target, plain: list[Tensor], tmp_path: Path) -> None:
    if name == "mtp" and not target.has_mtp:
        pytest.skip("the checkpoint has no MTP layer")
    draft, options = drafter(name, target, tmp_path)
    found, accepted, cached = texts(target.directory, *draft, ks=KS, target_quantization=target.form, **options)
    for index, text in enumerate(found):
        assert torch.equal(text, plain[index // len(KS)])
    assert accepted > 0
    assert cached >= 64, "states are kept, and read again"


PATTERN = SyntheticAcceptance(pattern=[4, 0, 2, 3, 1])  # states go back by every number of drafts


def drafted(target: Target, head: Path | str) -> list[Seen]:
    """What was drafted behind texts of which any number of drafts was accepted."""
    seen: list[Seen] = []
    engine = engine_with(target.directory, head, k=4, batch=2, quantization=target.form, verification=PATTERN)
    run(watched(engine, seen), GIVEN, [12, 20, 16, 9, 14], k=lambda steps: (4, 4, 0, 3)[steps % 4])
    assert len(seen) > 20
    return seen


def test_eagle3_reads_the_meant_hidden_states(target: Target, tmp_path: Path) -> None:
    tensors = eagle3_tensors(vocab=VOCAB, drafted=VOCAB, read=len(READ))
    seen = drafted(target, eagle(tmp_path, tensors))
    assert wrong_drafts(HybridTruth(target.meant, tensors), seen) == 0
    # 8 bits change few drafts; laws, which DFlash's test compares, tell these apart
    others = wrong_drafts(HybridTruth(target.plain, tensors), seen)
    assert target.form == "int8" or others > 0, "those of the values before would be seen"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dflash_reads_the_meant_hidden_states(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen, rules = write_z_lab(tmp_path, HEAD), watch(monkeypatch), dflash_definition.full(HEAD)
    engine = engine_with(target.directory, path, k=5, batch=2, quantization=target.form, verification="rejection")
    run(engine, GIVEN, 8, k=5, options=[sampled_row(seed) for seed in range(len(GIVEN))])
    assert distance(target.meant, path, HEAD, rules, seen) < TOLERANCE
    assert distance(target.plain, path, HEAD, rules, seen) > 10 * TOLERANCE, "those of the values before would be seen"


@pytest.mark.parametrize("form", ["int8", "blocks"])
def test_mtp_reads_the_meant_hidden_states(form: str, tmp_path: Path) -> None:
    """Of a layer in 16 bits beside a rounded target, and of one that is quantised with it."""
    target, kind = made("qwen3_5", form, tmp_path), mtp_of_transformers()
    seen, wrong = drafted(target, "mtp"), []
    for directory in (target.meant, target.plain):
        main = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        wrong.append(wrong_drafts(TheirTruth(main, kind.from_pretrained(main)), seen))  # type: ignore[arg-type]
    assert wrong[0] == 0
    assert wrong[1] > 0, "those of the values before would be seen"


@pytest.mark.parametrize("draft", ["mtp", "eagle3"])
def test_rounding_a_target_with_experts_is_refused_for_every_drafter(draft: str, tmp_path: Path) -> None:
    write_plain("nemotron_h", tmp_path / "target")
    head = eagle(tmp_path / "head", eagle3_tensors(vocab=VOCAB, drafted=VOCAB, read=len(READ)))
    with pytest.raises(UnsupportedOption, match="experts are not rounded while loading"):
        FastSpecGenerator(tmp_path / "target", "mtp" if draft == "mtp" else head, target_quantization="int4", **COMMON)
