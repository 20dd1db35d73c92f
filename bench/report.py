"""Write docs/performance.md and its plot from what `make bench` or `make bench-full` measured.

Usage: python bench/report.py bench.json
"""

import json
import platform
import sys
from importlib import metadata
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "isobatch"
import matplotlib.pyplot as plt  # noqa: E402

DOCS = Path(__file__).parents[1] / "docs"
INTRODUCTION = """# Performance

Measured by `make bench-full` and written by `bench/report.py`. Calls that are compared take turns in one process, or tell a peer in a process of its
own to take its turn; ratios are of medians, with the 95 % interval of a bootstrap over turns. `*` marks a timing whose middle half of turns
spreads by more than a fifth: the machine was busy with something else then. Numbers are of one machine; run it on yours.

"""


def main(path):
    """Write the page."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    cpu = found["machine_info"]["cpu"]
    names = ("isobatch", "tensorflow", "keras", "torch", "numpy")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    machine = f"{cpu.get('brand_raw', platform.machine())}, {cpu['count']} cores; Python {platform.python_version()}, {versions}; {found['datetime'][:10]}.\n\n"
    ratios = [
        (bench["group"], bench["extra_info"], *one)
        for bench in found["benchmarks"]
        for one in bench["extra_info"].get("ratios", ())
    ]
    numbers = [
        (bench["group"], *one)
        for bench in found["benchmarks"]
        for one in bench["extra_info"].get("numbers", ())
    ]
    lines = [INTRODUCTION, machine, "![Ratios to the plain model](performance.svg)\n\n"]
    lines += ["| comparison | what | ratio | 95 % | goal | |\n|---|---|---|---|---|---|\n"]
    for group, info, name, base, value, low, high, goal in ratios:
        star = "*" if any(info["calls"][one]["noisy"] for one in (name, base)) else ""
        lines.append(
            f"| {group} | {name} / {base} | {value:.2f}{star} | {low:.2f} to {high:.2f} | {_goal(value, low, goal)} |\n"
        )
    lines.append("\n| measured | what | value | goal | |\n|---|---|---|---|---|\n")
    lines += [
        f"| {group} | {name} | {value:.3g} {unit} | {_goal(value, value, goal)} |\n"
        for group, name, value, unit, goal in numbers
    ]
    reasons = DOCS / "performance-reasons.md"
    lines.append("\n" + reasons.read_text(encoding="utf-8"))
    (DOCS / "performance.md").write_text("".join(lines), encoding="utf-8")
    _plot([one for one in ratios if one[3] == "plain"])


def _goal(value, low, goal):
    if goal is None:
        return " | "
    return f"<= {goal:g} | {'met' if value <= goal else 'within noise' if low <= goal else '**missed**'}"


def _plot(ratios):
    """Each ratio to the plain model with its interval."""
    titles = [f"{group}: {name}" for group, _, name, *_ in ratios]
    figure, axes = plt.subplots(figsize=(9, 0.28 * len(ratios) + 1))
    for place, (_, _, name, _, value, low, high, goal) in enumerate(ratios):
        colour = "#0969da" if "replica" in name else "#8c959f"
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(value, place, "o", color=colour, markersize=4)
        if goal is not None:
            axes.plot(goal, place, "|", color="#b42318", markersize=10)
    axes.axvline(1, color="#d0d7de", zorder=0)
    axes.set_yticks(range(len(titles)), titles, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("time, as a multiple of the plain model's (red: the goal)")
    figure.tight_layout()
    figure.savefig(DOCS / "performance.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
