"""What `isobatch bench` shows: a table on the terminal, or a page with a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from rich import box
from rich.table import Table

from isobatch.bench import BenchReport, Choice
from isobatch.page import page, section, table
from isobatch.report import console
from isobatch.timing import ratio

__all__ = ["print_bench", "render_bench"]

HEADS = ("rows", "choice", "ms", "spread", "rows/s", "of Keras alone", "memory", "gap")

_NOTE = (
    "ms: median of one call, numpy in and numpy out, the choices of one number of rows in turns; spread: the middle half of the turns, "
    "* where the machine was busy with something else; of Keras alone: ratio of the medians with its 95 % interval; memory: what a call "
    "takes at its peak; gap: scaled difference from Keras alone, of the {what}."
)
_COLOURS = ("#0969da", "#1a7f37", "#bc4c00", "#8250df", "#bf3989", "#6e7781", "#9a6700", "#116329")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 960, 300, 72, 40


def print_bench(report: BenchReport) -> None:
    """Print one table and one sentence.

    Args:
        report: From `isobatch.bench.run_bench`.
    """
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for head in HEADS:
        shown.add_column(head, justify="left" if head == "choice" else "right", no_wrap=True)
    for _, group in groupby(report.choices, key=lambda choice: choice.rows):
        for choice in group:
            shown.add_row(*_cells(report, choice))
        shown.add_section()
    out = console(shown)
    out.print(_headline(report), highlight=False)
    out.print(shown)
    out.print(_note(report), highlight=False)
    out.print(" ".join(f"{name} {version}" for name, version in report.versions.items()))
    out.print(report.advice(), style="bold", highlight=False)


def render_bench(report: BenchReport) -> str:
    """Return a page with a plot of speed over rows, and the table.

    Args:
        report: From `isobatch.bench.run_bench`.
    """
    rows = [_cells(report, choice) for choice in report.choices]
    return page(
        f"Speed of {report.model}",
        f"{_headline(report)} {report.advice()}",
        [
            section("Rows a second over rows of a call", _plot(report.choices)),
            section("All choices", table(HEADS, rows) + f"<p>{escape(_note(report))}</p>"),
            section("Versions", table(("what", "version"), report.versions.items())),
        ],
    )


def _headline(report: BenchReport) -> str:
    what = "One step of training" if report.training else "One prediction"
    end = "" if report.complete else " Interrupted: only what had been measured is shown."
    return f"{what} of {report.model}, in Keras and in torch.{end}"


def _note(report: BenchReport) -> str:
    return _NOTE.format(what="loss" if report.training else "outputs")


def _cells(report: BenchReport, choice: Choice) -> tuple[str, ...]:
    timing = choice.timing
    return (
        str(choice.rows),
        str(choice),
        f"{1e3 * timing.median:.3g}",
        f"{timing.spread:.0%}{'*' if timing.noisy else ''}",
        f"{choice.speed:,.0f}",
        str(ratio(timing, report.alone(choice).timing)),
        "?" if choice.memory is None else f"{choice.memory / 2**20:.1f} MiB",
        "0" if choice.gap == 0 else f"{choice.gap:.0e}",
    )


def _plot(choices: Sequence[Choice]) -> str:
    """One line for each way to run the model; both axes logarithmic."""
    rows, speeds = [choice.rows for choice in choices], [choice.speed for choice in choices]
    lines = []
    for number, title in enumerate(dict.fromkeys(map(str, choices))):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [
            (_place(one.rows, rows, _LEFT, _WIDTH - 220), _place(one.speed, speeds, _HEIGHT, 16), one)
            for one in choices
            if str(one) == title
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{title}, {one.rows} rows: {one.speed:,.0f} rows/s</title></circle>'
            for x, y, one in points
        ]
        height = 24 + 18 * number
        lines.append(
            f'<rect x="{_WIDTH - 190}" y="{height - 9}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{_WIDTH - 174}" y="{height}">{title}</text>'
        )
    marks = [
        f'<text x="{_place(one, rows, _LEFT, _WIDTH - 220):.1f}" y="{_HEIGHT + 22}">{one}</text>'
        for one in sorted(set(rows))
    ]
    marks += [
        f'<text x="2" y="{_place(one, speeds, _HEIGHT, 16) + 4:.1f}">{one:,.0f}</text>'
        for one in (min(speeds), max(speeds))
    ]
    body = "".join(marks + lines)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _BOTTOM}" role="img">{body}</svg>'


def _place(value: float, values: Sequence[float], start: float, end: float) -> float:
    """Where a value is between two ends of a logarithmic axis that spans all values."""
    low, high = math.log(min(values)), math.log(max(values))
    share = (math.log(value) - low) / (high - low) if high > low else 0.5
    return start + share * (end - start)
