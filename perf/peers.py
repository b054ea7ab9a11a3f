"""Other engines on the same weights, prompts and k, in the same run.

An engine that cannot take part says why in its row's `status`; none is left out silently.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from perf.experiment import FAILURES, Call, Say, summary, wait
from perf.models import SEED, Prompts
from perf.records import Row

EXTERNAL = ("vllm", "sglang")
NOT_HERE = "not importable here"
VLLM_SHARE = 0.6  # of the GPU's memory, which other engines' weights share


@dataclass(frozen=True, slots=True)
class Setting:
    """The task of every engine.

    Attributes:
        batches: prompts of each call, all of one length.
        new: tokens per prompt. k: drafts per step.
        sampled: True to draw at temperature 1 from the whole vocabulary, else greedy.
    """

    batches: Prompts
    new: int
    k: int
    sampled: bool = False


class _Passes(StoppingCriteria):
    """Counts passes of the target and stamps the first. Never stops anything.

    transformers asks its criteria once after each pass of plain decoding, also when the pass is compiled. Assisted
    generation asks them at other times too; there a hook of the target, which is not compiled, counts.
    """

    def __init__(self, target: PreTrainedModel, *, assisted: bool) -> None:
        self._device = target.device
        self._hook = target.register_forward_hook(lambda *_: self._count()) if assisted else None
        self.passes = 0
        self.first = 0.0

    def _count(self) -> None:
        self.passes += 1
        if self.passes == 1:
            wait(self._device)
            self.first = time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self._hook is None:
            self._count()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def close(self) -> None:
        """Takes the hook off."""
        if self._hook is not None:
            self._hook.remove()


def transformers_call(target: PreTrainedModel, prompts: list[list[int]], setting: Setting, **options: Any) -> Call:
    """One timed `generate` of transformers with the options given on top of the setting."""
    device = target.device
    ids = torch.tensor(prompts, device=device)
    stamps = _Passes(target, assisted="assistant_model" in options)
    config = GenerationConfig(
        cache_implementation=options.pop("cache_implementation", None),
        max_new_tokens=setting.new,
        do_sample=setting.sampled,
        eos_token_id=None,
        pad_token_id=0,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if setting.sampled else {}),
    )
    torch.manual_seed(SEED)
    wait(device)
    start = time.perf_counter()
    try:
        with torch.inference_mode():
            found = cast("Any", target).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([stamps]),
                **options,
            )
        wait(device)
    finally:
        stamps.close()
    seconds = time.perf_counter() - start
    text = found[:, ids.shape[1] :].tolist()
    row_steps = stamps.passes * len(prompts)
    return Call(sum(map(len, text)), stamps.passes, row_steps, seconds, stamps.first - start, text)


def transformers_peers(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    setting: Setting,
    *,
    engines: Sequence[str] = ("plain", "static", "assisted"),
    say: Say = lambda _: None,
) -> tuple[list[Row], dict[str, list[Call]]]:
    """Measures plain `generate`, the same with a static cache and compiled, and assisted generation.

    Returns:
        One row per engine, and the calls of those that ran, by the row's engine name.
    """
    options: dict[str, Any] = {"plain": {}, "static": {"cache_implementation": "static"}}
    rows, taken = [], {}
    if draft is not None:
        draft.generation_config.num_assistant_tokens = setting.k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        options["assisted"] = {"assistant_model": draft}
    for engine in engines:
        name = f"transformers {engine}"
        if engine == "static":
            name += " compiled" if target.device.type == "cuda" else " (not compiled on a CPU)"
        k = setting.k if engine == "assisted" else 0
        if (reason := _refusal(engine, draft, setting)) is not None:
            rows.append({"engine": name, "k": k, "status": reason})
            continue
        try:
            start = time.perf_counter()
            for _ in range(2 if engine == "static" else 1):  # compiled code is recorded as a graph on its second run
                transformers_call(target, setting.batches[0], setting, **options[engine])
            warm_up = time.perf_counter() - start
            calls = [transformers_call(target, batch, setting, **options[engine]) for batch in setting.batches]
        except FAILURES as error:
            rows.append(failed(name, k, error, say))
            continue
        rows.append({**summary(name, k, calls), "warm_up_s": round(warm_up, 2)})
        taken[name] = calls
        say(f"{name}: {rows[-1]['tok_s']} tok/s")
    return rows, taken


def failed(name: str, k: int, error: Exception, say: Say) -> Row:
    """The row of an engine that broke: one peer must not take the others' figures with it."""
    say(f"{name} failed: {error}")
    return {"engine": name, "k": k, "status": f"failed: {type(error).__name__}"}


def _refusal(engine: str, draft: PreTrainedModel | None, setting: Setting) -> str | None:
    if engine != "assisted":
        return None
    if draft is None or not setting.k:
        return "needs a draft and k > 0"
    return "takes one prompt at a time" if len(setting.batches[0]) > 1 else None


def importable(name: str) -> bool:
    """True if a package of that name is installed; its own imports may fail all the same."""
    return importlib.util.find_spec(name) is not None


def external_peers(
    names: Sequence[str],
    target: Path | None,
    draft: Path | None,
    setting: Setting,
    say: Say = lambda _: None,
) -> list[Row]:
    """Rows of engines that are packages of their own; those not there say so.

    Args:
        names: of EXTERNAL.
        target, draft: checkpoints on disk; these engines load no live modules.
    """
    runners = {"vllm": _vllm, "sglang": _sglang}
    rows: list[Row] = []
    for name in names:
        if not importable(name):
            rows.append({"engine": name, "k": setting.k, "status": NOT_HERE})
        elif target is None:
            rows.append({"engine": name, "k": setting.k, "status": "importable, but it needs checkpoints on disk"})
        else:
            for k in dict.fromkeys((0, setting.k if draft is not None else 0)):
                try:
                    rows.append(_external_row(name, runners[name], target, draft if k else None, setting, k))
                except FAILURES as error:
                    rows.append(failed(name, k, error, say))
    return rows


Opened = tuple[Callable[[list[list[int]], int], list[list[int]]], Callable[[], object]]  # generate, close


def _external_row(
    name: str,
    opener: Callable[[Path, Path | None, Setting, int], Opened],
    target: Path,
    draft: Path | None,
    setting: Setting,
    k: int,
) -> Row:
    start = time.perf_counter()
    generate, close = opener(target, draft, setting, k)
    try:
        generate(setting.batches[0], setting.new)
        warm_up = time.perf_counter() - start
        calls = []
        for batch in setting.batches:
            begun = time.perf_counter()
            generate(batch, 1)
            first = time.perf_counter() - begun
            begun = time.perf_counter()
            text = generate(batch, setting.new)
            calls.append(Call(sum(map(len, text)), None, None, time.perf_counter() - begun, first, text))
    finally:
        close()
        gc.collect()
        torch.cuda.empty_cache()
    version = getattr(sys.modules[name], "__version__", "unknown")
    return {**summary(f"{name} {'draft model' if k else 'plain'}", k, calls), "version": version, "warm_up_s": warm_up}


def _vllm(target: Path, draft: Path | None, setting: Setting, k: int) -> Opened:
    """Opens vLLM's offline engine (docs.vllm.ai/en/latest/features/speculative_decoding/draft_model)."""
    vllm: Any = importlib.import_module("vllm")
    extra: dict[str, Any] = {}
    if draft is not None:
        extra["speculative_config"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k}
    engine = vllm.LLM(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=len(setting.batches[0][0]) + setting.new + k + 1,
        gpu_memory_utilization=VLLM_SHARE,
        enable_prefix_caching=False,
        **extra,
    )

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            max_tokens=new, temperature=1.0 if setting.sampled else 0.0, ignore_eos=True, detokenize=False, seed=SEED
        )
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in found]

    return generate, lambda: None


def _sglang(target: Path, draft: Path | None, setting: Setting, k: int) -> Opened:
    """Opens SGLang's offline engine (docs.sglang.io/docs/advanced_features/speculative_decoding.md)."""
    sglang: Any = importlib.import_module("sglang")
    extra: dict[str, Any] = {}
    if draft is not None:
        extra = {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(draft),
            "speculative_num_steps": k,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": k + 1,
        }
    engine = sglang.Engine(
        model_path=str(target),
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        mem_fraction_static=VLLM_SHARE,
        **extra,
    )

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        params = {"max_new_tokens": new, "temperature": 1.0 if setting.sampled else 0.0, "ignore_eos": True}
        found = engine.generate(input_ids=prompts, sampling_params=params)
        return [list(answer["output_ids"]) for answer in found]

    return generate, engine.shutdown
