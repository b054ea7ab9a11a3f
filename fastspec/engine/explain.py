"""Text of `FastSpecGenerator.explain`, and the warning that drafting does not pay."""

from __future__ import annotations

from fastspec.adaptive.controller import AUTO
from fastspec.engine.engine import Engine
from fastspec.engine.memory import Layout
from fastspec.engine.settings import Settings
from fastspec.kernels.attention.plan import described
from fastspec.kernels.common.kv_scales import FP8
from fastspec.kernels.gpu import generation_of
from fastspec.models.checkpoints.pair import AS_STORED
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.hosted.model import HostedModel
from fastspec.models.interface import ModelInfo, ModelSource
from fastspec.models.pairs import suggestion
from fastspec.models.parallel import ParallelDecoder
from fastspec.models.vocab import SharedVocab
from fastspec.output import Stats
from fastspec.proposers.draft_model import DraftModel
from fastspec.sampling.rules import BLOCK, COUPLED, SyntheticAcceptance
from fastspec.scheduling.draft_length import DraftPlan
from fastspec.shapes import ConvRule, DeltaRule, MambaRule, SelectiveRule

WEIGHT_ONLY = (
    "read as they are dequantised, with activations in the dtype above: an engine that rounds activations to 8 bits "
    "gives other text"
)
_GRAMMARS = (
    "a row with a grammar steps when the host has read its last token, others meanwhile; its drafts are what the "
    "grammar forces and what the row repeats, not the draft's"
)
_STEPS_TO_JUDGE = 64  # steps needed before acceptance is judged


def explain(
    settings: Settings,
    engine: Engine,
    target: ModelSource,
    draft: ModelSource | None,
    shared_vocab: SharedVocab,
    drafting: DraftPlan,
) -> str:
    """Describes a generator in lines: device, models, drafting, KV cache, kernels, CUDA graphs and memory.

    Args:
        settings: settings of the generator.
        engine: the running models and buffers.
        target: checkpoint of the target.
        draft: checkpoint of the draft model or head. None: there is neither.
        shared_vocab: token ids that draft and target share.
        drafting: numbers of draft tokens per step, and the choices that "auto" has made.
    """
    layout, proposer = settings.layout, engine.modules.proposer
    drafter = proposer.model if isinstance(proposer, DraftModel) else None
    lines = [
        f"device     {settings.device}",
        f"target     {_model(target, str(layout.target_dtype), engine.modules.target)}",
        f"draft      {_model(draft, str(layout.draft_dtype), drafter) if draft else _no_draft(target)}",
        f"drafting   {_drafting(settings, engine, target, draft, shared_vocab)}",
        f"drafts     {_drafts(drafting)}",
        f"verifying  {_verifying(settings)}",
        f"grammars   {_GRAMMARS}",
        f"rows       {layout.batch} at once, {settings.max_length} tokens each ({settings.length_reason})",
        f"cache      {engine.pages.num_pages} pages of {layout.page_size} positions, one table for both models"
        f"{_kv(layout)}",
        f"prompts    in chunks of {_chunks(engine)} tokens{_batched(engine)}{_waited_for(engine)}",
        f"prefixes   {_prefixes(engine)}",
        f"attention  {_attention(settings, engine)}",
        f"products   {_products(settings)}",
        *([f"plans      {launch_plans(settings)}"] if settings.layout.ops.name == "triton" else []),
        *([f"threads    {engine.threads}"] if engine.threads else []),
        *([f"states     {text}"] if (text := states_of_layers(engine)) else []),
        *([f"experts    {text}"] if (text := shared_expert(settings, engine)) else []),
        *_ranks(settings, engine),
        f"graphs     {engine.runner.describe()}",
        f"memory     {settings.memory}",
    ]
    return "\n".join(lines)


def break_even_advice(stats: Stats, layout: Layout) -> str | None:
    """Returns a warning if draft passes take more time than accepted draft tokens save.

    The time of a pass is estimated by the bytes of its weights. None: drafting may save time, there is no draft model
    or head, or there are too few steps to judge.

    Args:
        stats: numbers of steps, drafted and accepted tokens of a call.
        layout: sizes of the models.
    """
    judged = stats.drafted and stats.steps >= _STEPS_TO_JUDGE and not stats.synthetic
    if layout.draft is None or not judged or stats.auto == AUTO:  # "auto" itself compares with plain decoding
        return None
    target_bytes, draft_bytes = layout.weight_bytes
    draft_pass = draft_bytes / target_bytes
    needed = 1 + stats.drafted / stats.steps * draft_pass
    gained = stats.emitted / stats.steps
    if gained >= needed:
        return None
    return (
        f"drafting does not pay here: {gained:.2f} tokens per step at an acceptance of {stats.acceptance_rate:.1%}, "
        f"but the {stats.k} draft passes of a step alone cost as much as {needed - 1:.2f} tokens of plain decoding; "
        "use a smaller or better draft, or fewer num_speculative_tokens (0 decodes plainly)"
    )


def may_lose(stats: Stats, layout: Layout) -> bool:
    """True if steps without draft tokens may have been faster, because few draft tokens were accepted.

    Always False with a draft model or head, or with too few steps to judge.
    """
    judged = stats.drafted and stats.steps >= _STEPS_TO_JUDGE and not stats.synthetic and stats.auto != AUTO
    return layout.draft is None and bool(judged) and stats.emitted / stats.steps < 1 + stats.k / 2


def lookup_advice(stats: Stats, plain: float, drafting: float) -> str | None:
    """Returns a warning if steps with draft tokens take more time than the accepted tokens save. None: they do not.

    Args:
        stats: numbers of steps, drafted and accepted tokens of a call.
        plain: seconds of a step without draft tokens.
        drafting: seconds of a step with `stats.k` draft tokens per sequence.
    """
    gained, needed = stats.emitted / stats.steps, drafting / plain
    if gained >= needed:
        return None
    return (
        f"drafting does not pay here: {gained:.2f} tokens per step at an acceptance of {stats.acceptance_rate:.1%}, "
        f"and a step with {stats.k} drafts takes {needed:.2f} plain steps; use fewer num_speculative_tokens (0 decodes "
        "plainly), or 'auto', which drafts only where it pays"
    )


def launch_plans(settings: Settings) -> str:
    """Returns a text that says if the kernels' launch parameters were measured on GPUs of this compute capability."""
    gpu = generation_of(settings.device)
    name = "sm_" + "".join(map(str, gpu.capability))
    if gpu.measured:
        return f"measured on {name}"
    return f"UNTESTED on {name}: the kernels compile for it, but they have never run on such a GPU"


def _kv(layout: Layout) -> str:
    """Describes an 8-bit KV cache. Returns an empty text if neither model has one."""
    if layout.kv_dtypes is None or FP8 not in layout.kv_dtypes:
        return ""
    of_target, of_draft = layout.kv_dtypes[0] == FP8, layout.draft is not None and layout.kv_dtypes[1] == FP8
    whose = "of both models" if of_target and of_draft else "of the target" if of_target else "of the draft"
    effect = (
        "the text differs from that of 16 bits, and does not depend on drafts"
        if of_target
        else "the text does not change"
    )
    return (
        f";\n           K and V {whose} in 8 bits (e4m3; scales of the checkpoint where it has them, else 1): {effect}"
    )


def _chunks(engine: Engine) -> str:
    sizes = engine.sizes.chunks
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}, by its length,"


def _batched(engine: Engine) -> str:
    """Describes how many prompts share a prefill pass."""
    sizes = engine.sizes
    if not sizes.shared:
        return ", one prompt at a time"
    return f"; the last ones of several prompts together, up to {sizes.most_blocks * sizes.block} in one pass"


def _waited_for(engine: Engine) -> str:
    if engine.sizes.budget is None:
        return ""
    return f"; rows of other calls wait for {engine.sizes.budget} of them a step, or for one chunk"


def _no_draft(target: ModelSource) -> str:
    offer = "; the checkpoint has an MTP layer; draft='mtp' uses it" if target.mtp else ""
    return f"none: plain decoding{offer}{suggestion(target.name)}"


def _prefixes(engine: Engine) -> str:
    if engine.prefix is None:
        return "not kept"
    states = "; also the recurrent states after a prompt's last piece" if engine.prefix_states is not None else ""
    return f"stored in pages that no row needs, in pieces of {engine.prefix.unit} tokens{states}"


def _model(checkpoint: ModelSource, dtype: str, model: object = None) -> str:
    spec = checkpoint.spec
    millions = spec.weight_bytes(spec.dtype) / spec.dtype.itemsize / 1e6
    windows = sum(window is not None for window in spec.windows)
    recurrent = spec.num_layers - len(spec.attending) if isinstance(spec, ModelSpec) else 0
    kinds = f", {recurrent} of them recurrent" if recurrent else ""
    sliding = f"{kinds}, {windows} of them with a sliding window" if windows else kinds
    quantised = ""
    if checkpoint.stored:
        quantised = f"\n           quantised  {checkpoint.stored}; {WEIGHT_ONLY}{_in_memory(model)}"
    if checkpoint.stored.startswith(AS_STORED):
        quantised = f"\n           format     {checkpoint.stored}"
    hosted = f"\n           {spec.hosting}" if spec.hosting else ""
    return (
        f"{checkpoint.name}: {spec.family}, {millions:.1f} M parameters in {spec.num_layers} layers{sliding}, "
        f"{dtype.removeprefix('torch.')}, context {spec.max_length}{quantised}{hosted}"
    )


def _in_memory(model: object) -> str:
    """Describes how many matrices of a quantised model stay quantised in memory. Empty for a hosted model."""
    if not isinstance(model, Decoder):
        return ""
    matrices = model.weights.matrices()
    kept = sum(each.format == "codes" for each in matrices)
    what = {0: "all dequantised", len(matrices): "all in their codes"}.get(kept, f"{kept} in codes, others dequantised")
    size = model.weights.nbytes() / 2**20
    return f"\n           in memory  {len(matrices)} matrices, {what}: {size:.1f} MiB"


def _drafting(
    settings: Settings, engine: Engine, target: ModelSource, draft: ModelSource | None, shared_vocab: SharedVocab
) -> str:
    if not settings.layout.max_drafts:
        return "off"
    text = f"up to {settings.layout.max_drafts} tokens a step, by {engine.modules.proposer}"
    if draft is None:
        return text
    if shared_vocab.count < target.spec.vocab_size:
        text += f"; only the {shared_vocab.count} ids that both models know are drafted, of {target.spec.vocab_size}"
    if draft.spec.max_length < settings.max_length:
        text += f"; rows longer than the draft's context of {draft.spec.max_length} tokens continue without drafts"
    return text


def _drafts(drafting: DraftPlan) -> str:
    """Describes the number of draft tokens per step, and the choices of "auto"."""
    lines = drafting.describe()
    if not drafting.auto and not lines:
        return f"k = {drafting.max_drafts}, unless a call sets it"
    named = ", ".join(map(str, drafting.ks))
    head = f"k = {drafting.default}; auto chooses among {named} by measured tokens per second"
    return "\n           ".join([head, *lines])


def _verifying(settings: Settings) -> str:
    rule = settings.verification
    if isinstance(rule, SyntheticAcceptance):
        return f"{rule}: for benchmarks, THE TEXT IS NOT THE MODEL'S"
    sampled = {
        COUPLED: "the target samples with the draft's random numbers: one seed gives one text for any drafts",
        BLOCK: "all drafts of a step together (block verification)",
    }.get(str(rule), "one draft after the other (rejection sampling)")
    return f"lossless; greedy rows by match, sampled ones by {rule}: {sampled}"


def _attention(settings: Settings, engine: Engine) -> str:
    if engine.modules.ops.name == "torch":
        return "torch, over gathered pages"
    if engine.modules.ops.name == "cpu":
        return "torch, row by row over the keys that it sees"
    found = attention_kernels(settings)
    if len(set(found.values())) == 1:
        return f"Triton kernels over pages; {' and '.join(found)}: {next(iter(found.values()))}"
    return "Triton kernels over pages; " + "; ".join(f"{name}: {text}" for name, text in found.items())


def attention_kernels(settings: Settings) -> dict[str, str]:
    """Names the decode attention kernels of target and draft on a GPU, with the reason for each."""
    layout, gpu = settings.layout, generation_of(settings.device)
    capacity = layout.pages_per_row(settings.max_length) * layout.page_size
    of_target, of_draft = layout.cache_dtypes
    models = {"target": (layout.target, layout.target_dtype, of_target)}
    if layout.draft is not None:
        models["draft"] = (layout.draft, layout.draft_dtype, of_draft)
    return {
        name: described(gpu, dtype.itemsize, _head_dim(spec), layout.page_size, capacity, cached.itemsize)
        for name, (spec, dtype, cached) in models.items()
    }


def _head_dim(spec: ModelInfo) -> int:
    """Returns head_dim of the first layer with attention."""
    return spec.attention_shapes[0][2] if spec.attention_shapes else spec.head_dim


def _products(settings: Settings) -> str:
    if settings.config.compile:
        return (
            "compile=True: passes of steps by torch.compile, one graph a shape; prompts as they are; a row's bits may "
            "depend on k and on its neighbours"
        )
    if not settings.exact:
        return (
            "exact=False: the library's in any shape, so a row's bits may depend on k and on its neighbours; packed "
            "weights as with exact=True, but on sm_90 steps of more than 160 rows as prompts"
        )
    return "exact=True: the same arithmetic for any number of rows, so a row's bits depend on that row alone"


_STATE_KINDS = {
    DeltaRule: "the gated delta rule",
    MambaRule: "Mamba-2",
    ConvRule: "short convolutions",
    SelectiveRule: "Mamba-1",
}


def states_of_layers(engine: Engine) -> str:
    """Describes the target's recurrent layers and their kernels. Empty if the target has no recurrent layers."""
    target = engine.modules.target
    rules = target.spec.state_rules if isinstance(target, Decoder) else ()
    if not rules:
        return ""
    kind = _STATE_KINDS[type(rules[0])]
    if isinstance(rules[0], DeltaRule) and rules[0].by_channel:
        kind = "Kimi delta attention"
    text = f"{len(rules)} layers with {kind}: "
    in_chunks = engine.modules.ops.name == "cpu" and isinstance(rules[0], MambaRule)
    by_torch = "torch, token by token" + (", prompts in chunks" if in_chunks else "")
    return text + ("Triton kernels" if engine.modules.ops.name == "triton" else by_torch)


def shared_expert(settings: Settings, engine: Engine) -> str:
    """Describes how the target's shared expert is launched. Empty if the target has no shared expert.

    A shared expert runs in the launches of the routed experts, or as a separate MLP. For a separate MLP the text gives
    the reason.
    """
    target = engine.modules.target
    if not isinstance(target, Decoder):
        return ""
    pairs = zip(target.spec.plans, target.weights.layers, strict=True)
    plan, weights = next(((plan.experts, each.experts) for plan, each in pairs if plan.experts), (None, None))
    if plan is None or weights is None or not plan.shared:
        return ""
    if weights.joined:
        return "the shared expert runs in the same launches as the routed experts"
    if engine.modules.ops.name != "triton":
        why = "computed by torch"
    elif settings.ranks:
        why = "ranks split its columns"
    elif not plan.shared_parts:
        why = f"{plan.shared} wide, the others {plan.width}"
    else:
        why = (
            "in fp32"
            if settings.layout.target_dtype.itemsize > 2
            else "it is quantised, or the router's kernel does not support its width"
        )
    return f"the shared expert is a separate MLP with its own launches: {why}"


def _ranks(settings: Settings, engine: Engine) -> list[str]:
    """Returns lines about the ranks that share the target, and how these exchange tensors. Empty without ranks."""
    if not settings.ranks:
        return []
    target = engine.modules.target
    between = target.exchange.describe() if isinstance(target, ParallelDecoder | HostedModel) else "none"
    return [f"ranks      {settings.ranks}", f"exchange   {between}"]
