"""Pictures of rows: roofline, a step's timeline, tokens per second over k and beside peers, speed-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # writes files; there may be no screen
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from perf.anatomy import SHOWN
from perf.cases import tokens_per_step
from perf.records import Row
from perf.workloads import WORKLOADS, Bytes

SIZE, DPI = (4.8, 3.8), 330  # inches, small against the font: a phone shows the whole width
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
COLOURS = ("#1f5f99", "#d9822b", "#3d8c40", "#a23b72", "#6b5b95", "#8c6d31", "#444444", "#17a2a8")
KIND_COLOURS = ("#1f5f99", "#d9822b", "#3d8c40", "#6b5b95", "#8c6d31", "#a23b72", "#17a2a8", "#888888")
OF_KIND = dict(zip(SHOWN, KIND_COLOURS, strict=True))
TENSOR_PEAK = 989e12  # operations a second that NVIDIA states for an H200: bf16, dense
ENLARGED = 11  # kernels of the scoring pass that are shown larger: about two layers


def save(name: str, folder: Path, draw: Callable[[Axes], bool], size: tuple[float, float] = SIZE) -> Path | None:
    """A picture, or None where there are no rows for it."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        try:
            if not draw(axes):
                return None
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=DPI, metadata={"Software": None})  # no version: the same rows, the same file
            return path
        finally:
            plt.close(figure)


def operations_and_bytes(row: Row) -> tuple[float, float] | None:
    """What a step of an end-to-end row computes and reads; None for pairs whose shapes are not at hand."""
    workload = WORKLOADS.get(str(row.get("workload")))
    if workload is None or not workload.target or not row.get("floor_ms") or not row.get("read_gb_s"):
        return None
    target, draft = (Bytes.of(workload.config(role), workload.dtype).weights for role in ("target", "draft"))
    k, batch = row.get("k") or 0, row["batch"]
    parameters = (k + 1) * target + k * draft
    return 2 * batch * parameters / workload.dtype.itemsize, row["floor_ms"] * row["read_gb_s"] * 1e6


def roofline(kernels: Sequence[Row], steps: Sequence[Row]) -> Callable[[Axes], bool]:
    """Operations per second over operations per byte, of single kernels and of whole steps, under what can be."""

    def draw(axes: Axes) -> bool:
        points: dict[str, list[tuple[float, float]]] = {}
        for row in kernels:
            if row.get("operations") and row.get("bytes"):
                points.setdefault(f"kernels: {row['bench']}", []).append(
                    (row["operations"] / row["bytes"], row["operations"] / row["us"] / 1e6)
                )
        for row in steps:
            counted = operations_and_bytes(row)
            if counted and row.get("ms_step"):
                points.setdefault(f"step: {row['workload']}", []).append(
                    (counted[0] / counted[1], counted[0] / row["ms_step"] / 1e9)
                )
        ceilings = [row["read_gb_s"] for row in steps if row.get("read_gb_s")]
        if not points or not ceilings:
            return False
        _roof(axes, max(ceilings) * 1e9)
        for index, (name, places) in enumerate(sorted(points.items())):
            marker = "o" if name.startswith("step") else "^"
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(
                *zip(*sorted(places), strict=True), marker, color=colour, label=name, ms=6, alpha=0.85, mec="white"
            )
        axes.set(xlabel="operations per byte read", ylabel="TFLOP/s")
        axes.legend(loc="lower right", ncols=2 if len(points) > 6 else 1, fontsize=8)
        axes.set_title("Steps and kernels under the roofline", loc="left")
        return True

    return draw


def _roof(axes: Axes, read: float) -> None:
    ridge = TENSOR_PEAK / read
    axes.plot([0.5, ridge, 2000], [0.5 * read / 1e12, TENSOR_PEAK / 1e12, TENSOR_PEAK / 1e12], color="#444444", lw=1.2)
    axes.set(xscale="log", yscale="log", xlim=(0.5, 2000), ylim=(0.5, 2 * TENSOR_PEAK / 1e12))
    axes.annotate(f"reading at {read / 1e9:.0f} GB/s,\nmeasured", (9, 9 * read / 1e12 * 1.3), fontsize=8, ha="right")
    axes.annotate(
        f"{TENSOR_PEAK / 1e12:.0f} TFLOP/s, stated", (1900, TENSOR_PEAK / 1e12 * 1.15), fontsize=8, ha="right"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def step_timeline(row: Row) -> Callable[[Axes], bool]:
    """One step, kernel by kernel: a line for each pass, a colour for each kind; the scoring pass's start larger."""

    def draw(axes: Axes) -> bool:
        bars = [[bar[0] or "kernels", *bar[1:]] for bar in row.get("timeline") or []]
        if not bars:
            return False
        lanes = list(dict.fromkeys(bar[0] for bar in bars))
        for place, lane in enumerate(lanes):
            _bars(axes, [bar for bar in bars if bar[0] == lane], place, 1e3)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("ms since the step's first kernel")
        axes.set_xlim(0, max(bar[2] + bar[3] for bar in bars) / 1e3 * 1.01)
        shown = [kind for kind in OF_KIND if any(bar[1] == kind for bar in bars)]
        handles = [Line2D([], [], color=OF_KIND[kind], lw=6, label=kind) for kind in shown]
        axes.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.42, -0.16),
            ncols=len(shown),
            handlelength=1,
            columnspacing=1,
        )
        axes.set_title(f"One traced step of {len(bars)} kernels,\n{row['case']}, k = {row['k']}", loc="left")
        scoring = [bar for bar in bars if bar[0] == "score"][:ENLARGED]
        if len(lanes) > 3 and scoring:  # else there is no room
            _enlarged(axes, scoring)
        return True

    return draw


def _bars(axes: Axes, bars: list[list[Any]], place: float, unit: float) -> None:
    for kind, colour in OF_KIND.items():
        spans = [(bar[2] / unit, bar[3] / unit) for bar in bars if bar[1] == kind]
        axes.broken_barh(spans, (place - 0.36, 0.72), facecolors=colour)


def _enlarged(axes: Axes, bars: list[list[Any]]) -> None:
    """Some kernels in microseconds, in the corner that the passes leave free."""
    inset = axes.inset_axes((0.56, 0.72, 0.42, 0.16))
    start = bars[0][2]
    _bars(inset, [[*bar[:2], bar[2] - start, bar[3]] for bar in bars], 0, 1)
    inset.set_xlim(0, bars[-1][2] + bars[-1][3] - start)
    inset.set_yticks([])
    inset.tick_params(labelsize=7)
    inset.spines["left"].set_visible(False)
    inset.set_title("start of the scoring pass, µs", loc="left", fontsize=8)


def rate_over_k(rows: Sequence[Row]) -> Callable[[Axes], bool]:
    """Tokens per second over drafts per step, a line for each pair and batch that has several k."""

    def draw(axes: Axes) -> bool:
        lines: dict[tuple[str, int], dict[int, Row]] = {}
        for row in rows:
            lines.setdefault((row["workload"], row["batch"]), {})[row["k"]] = row
        drawn = {key: line for key, line in lines.items() if len(line) > 1}
        names = list(dict.fromkeys(name for name, _ in drawn))
        for (name, batch), line in sorted(drawn.items()):
            ks, found = sorted(line), [line[k]["tok_s"] for k in sorted(line)]
            colour = COLOURS[names.index(name) % len(COLOURS)]
            errors = [
                [abs(rate - bound) for rate, bound in zip(found, bounds, strict=True)]
                for bounds in zip(*(line[k]["tok_s_95"] for k in ks), strict=True)
            ]
            axes.errorbar(ks, found, yerr=errors, color=colour, marker="o", ms=4, capsize=2, lw=1.3)
            if batch > 1:
                end = ks[-1], found[-1]
                axes.annotate(f"batch {batch}", end, (6, -3), textcoords="offset points", fontsize=8, color=colour)
        if not drawn:
            return False
        axes.set(xlabel="drafts per step, k (0 decodes plainly)", ylabel="tokens per second, all rows")
        rates = [row["tok_s"] for line in drawn.values() for row in line.values()]
        if max(rates) > 5 * min(rates):
            _log_rates(axes)
        else:
            axes.set_ylim(0, 1.1 * max(row["tok_s_95"][1] for line in drawn.values() for row in line.values()))
        axes.set_xticks(range(max(max(line) for line in drawn.values()) + 1))
        axes.margins(x=0.1)
        axes.legend(
            loc="upper right",
            bbox_to_anchor=(1.02, 0.62),
            fontsize=8,
            handles=[Line2D([], [], color=COLOURS[i % len(COLOURS)], label=name) for i, name in enumerate(names)],
        )
        axes.set_title("Tokens per second over k (batch 1 if none is named)", loc="left")
        return True

    return draw


def _log_rates(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else ""))


def acceptance_of(tokens: float, k: int) -> float:
    """The acceptance of every draft at which steps of k emit so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, k) < tokens else (low, middle)
    return (low + high) / 2


def gain_over_acceptance(rows: Sequence[Row]) -> Callable[[Axes], bool]:
    """Speed-up over acceptance: what the measured steps give at any acceptance, and the rows themselves.

    The lines are E(a, k) * T(0) / T(k) with measured times T of a step; points are whole calls, prompts included.
    """

    def draw(axes: Axes) -> bool:
        timed = [row for row in rows if row.get("ms_step")]
        plain = [row["ms_step"] for row in timed if not row["k"]]
        drafted = sorted({row["k"]: row for row in timed if row["k"]}.items())
        if not plain or not drafted:
            return False
        places = [index / 100 for index in range(30, 101)]
        for index, (k, row) in enumerate(drafted):
            ratio = min(plain) / row["ms_step"]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(places, [tokens_per_step(a, k) * ratio for a in places], color=colour, lw=1.3, label=f"k = {k}")
        for row in timed:
            if row["k"] and row.get("tokens_per_pass") and row.get("speed_up"):
                colour = COLOURS[[k for k, _ in drafted].index(row["k"]) % len(COLOURS)]
                axes.plot(
                    acceptance_of(row["tokens_per_pass"], row["k"]),
                    row["speed_up"],
                    "o",
                    color=colour,
                    mec="white",
                    ms=7,
                )
        axes.axhline(1, color="#444444", lw=0.8)
        axes.set(xlabel="acceptance of a draft", ylabel="speed-up over the faster plain decoding", xlim=(0.3, 1.0))
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", ncols=2)
        axes.set_title(f"Speed-up over acceptance: {rows[0]['workload']}, batch {rows[0]['batch']}", loc="left")
        return True

    return draw


def beside(rows: Sequence[Row]) -> Callable[[Axes], bool]:
    """Tokens per second of engines on the same weights, fastest first, ours in the first colour."""

    def draw(axes: Axes) -> bool:
        if not rows:
            return False
        listed = sorted(rows, key=lambda row: float(row["tok_s"]))
        rates = [row["tok_s"] for row in listed]
        colours = [COLOURS[0] if row["engine"].startswith("fastspec") else "#b0b7bf" for row in listed]
        bars = axes.barh([_engine_name(row) for row in listed], rates, color=colours)
        axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], padding=4)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.2 * max(rates))
        axes.set_xlabel("tokens per second")
        axes.set_title(f"Same weights: {listed[0]['workload']}, greedy, one prompt at a time", loc="left", x=-0.62)
        return True

    return draw


def of_drafters(rows: Sequence[Row]) -> Callable[[Axes], bool]:
    """Tokens per second of a real model by drafter, greedy and sampled, with tokens per step.

    Rows have `drafter`, `k`, `temperature`, `tok_s`, `tok_s_95` and `tokens_per_step`.
    """

    def draw(axes: Axes) -> bool:
        greedy = [row for row in rows if row["temperature"] == 0]
        names = [row["drafter"] for row in sorted(greedy, key=lambda row: float(row["tok_s"]))]
        if not names:
            return False
        heats = sorted({row["temperature"] for row in rows})
        for index, heat in enumerate(heats):
            found = {row["drafter"]: row for row in rows if row["temperature"] == heat}
            listed = [(place, found[name]) for place, name in enumerate(names) if name in found]
            places, rates = [place - 0.4 * index for place, _ in listed], [row["tok_s"] for _, row in listed]
            sides = [[abs(row["tok_s"] - row["tok_s_95"][side]) for _, row in listed] for side in (0, 1)]
            label = f"temperature {heat:g}" if heat else "greedy"
            bars = axes.barh(places, rates, 0.38, xerr=sides, color=COLOURS[index], label=label, ecolor="#57606a")
            axes.bar_label(bars, [f"{row['tokens_per_step']:.2f}" for _, row in listed], padding=4)
        axes.set_yticks([place - 0.2 * (len(heats) - 1) for place in range(len(names))], names)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.15 * max(float(row["tok_s_95"][1]) for row in rows))
        axes.set_xlabel(f"tokens per second ({rows[0].get('gpu')})")
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=2)
        axes.set_title(str(rows[0]["workload"]).partition(", up to")[0], loc="left")
        return True

    return draw


def _engine_name(row: Row) -> str:
    """The engine, with its drafts per step where it makes any."""
    drafts = f", k = {row['k']}" if row["k"] else ""
    return f"{str(row['engine']).partition(' k=')[0]}{drafts}".replace("K/V, ", "K/V,\n").replace(", k", ",\nk")


def by_format(rows: Sequence[Row]) -> Callable[[Axes], bool]:
    """Tokens per second of a pair by the formats of its weights: with the best k, and plainly, as shorter bars inside.

    Rows have `case` (formats of target + draft), `k` and `tok_s`.
    """

    def draw(axes: Axes) -> bool:
        best: dict[str, Row] = {}
        plain = {_target_of(row): row["tok_s"] for row in rows if not row["k"]}
        for row in rows:
            name = str(row["case"]).replace("+", " + ")
            if row["k"] and row["tok_s"] > best.get(name, row | {"tok_s": 0})["tok_s"]:
                best[name] = row
        if not best:
            return False
        listed = sorted(best.items(), key=lambda item: float(item[1]["tok_s"]))
        names, rates = [name for name, _ in listed], [row["tok_s"] for _, row in listed]
        bars = axes.barh(names, rates, color=COLOURS[0], label="with drafts, best k")
        axes.bar_label(bars, [f"{row['tok_s']:.0f}, k = {row['k']}" for _, row in listed], padding=4)
        alone = [plain.get(_target_of(row), 0) for _, row in listed]
        axes.barh(names, alone, height=0.3, color=COLOURS[1], label="the target alone")
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 1.25 * max(rates))
        axes.set_xlabel(f"tokens per second, one prompt ({listed[0][1].get('gpu')})")
        axes.set_ylabel("weights of target + draft")
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=2)
        axes.set_title(f"By format of the weights: {listed[0][1]['workload']}", loc="left")
        return True

    return draw


def rewards(rows: Sequence[Row]) -> Callable[[Axes], bool]:
    """The mean reward of each step of training, of runs that differ in drafts alone: a line, and points on it.

    Rows have `k`, `rewards`, `rollout_s` and `seconds`.
    """

    def draw(axes: Axes) -> bool:
        for row in rows:
            steps = range(1, len(row["rewards"]) + 1)
            name = f"{row['k']} drafts a step" if row["k"] else "without drafts"
            form: Any = {"marker": "o", "ls": "", "ms": 4} if row["k"] else {"lw": 1.6}
            axes.plot(steps, row["rewards"], color=COLOURS[bool(row["k"])], label=name, **form)
        axes.set(xlabel="step", ylabel="mean reward", title="GRPO: rewards with and without drafts")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if rows:
            axes.legend(loc="lower right")
        return bool(rows)

    return draw


def _target_of(row: Row) -> str:
    """The format of the target's weights."""
    return str(row["case"]).partition("+")[0]
