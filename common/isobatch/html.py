"""The report of a model's parity as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from isobatch.model_parity import ModelReport
from isobatch.page import COLOURS, page, section, table
from isobatch.verdict import DECADES, Closeness, LayerCheck, ParallelCheck

__all__ = ["render_html"]

_LOWEST, _HIGHEST = -17, 1  # powers of ten that the plot of layers shows
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 960, 260, 44, 24


def render_html(report: ModelReport) -> str:
    """Return the page.

    Args:
        report: From `isobatch.model_parity.run_model`.

    Returns:
        HTML without scripts, and without anything that is loaded from elsewhere.
    """
    verdict = report.verdict
    sections = [
        section(
            "Layers: gap in float64 against the floor of each",
            _layer_plot(verdict.layers) if verdict.layers else "",
        ),
        section("Every layer that differs", _layer_table(verdict.wrong) if verdict.wrong else ""),
        section(
            "In the user's precision", "" if verdict.closeness is None else _closeness(verdict.closeness)
        ),
        section(
            "Over several devices, in float64", _parallel_table(verdict.parallel) if verdict.parallel else ""
        ),
        section("All layers", _layer_table(verdict.layers) if verdict.layers else ""),
        section(
            "Times",
            table(("part", "seconds"), ((name, f"{value:.2f}") for name, value in report.seconds.items())),
        ),
        section("Versions", table(("what", "version"), report.versions.items())),
    ]
    whole = "" if verdict.whole is None else f" Whole network: {verdict.whole}."
    summary = f"{str(verdict).splitlines()[0]}. Held against {report.module} on {report.data}.{whole}"
    return page(f"Parity of {report.model}", summary, sections, verdict.word)


def _layer_table(layers: Sequence[LayerCheck]) -> str:
    rows = [
        (
            f"{one.layer}{' (one step of training)' if one.training else ''}",
            ", ".join(one.operations),
            f"{one.check.scaled:.1e}",
            f"{one.check.allowed:.0e}",
            "" if one.check.passed else str(one.check),
        )
        for one in layers
    ]
    return table(("layer", "operations", "gap", "floor", ""), rows, (not one.check.passed for one in layers))


def _layer_plot(layers: Sequence[LayerCheck]) -> str:
    """One mark for each layer over its place in the network, and a line for its floor; powers of ten upwards."""
    step = (_WIDTH - _LEFT) / len(layers)
    parts = [_grid(range(_LOWEST, _HIGHEST + 1, 3))]
    for number, one in enumerate(layers):
        x = _LEFT + (number + 0.5) * step
        floor, gap = _up(one.check.allowed), _up(one.check.scaled)
        colour = COLOURS["PASS" if one.check.passed else "FAIL"]
        hint = escape(f"{one.layer}: {one.check.scaled:.1e} of {one.check.allowed:.0e}")
        parts.append(
            f'<line x1="{x - step / 2:.1f}" x2="{x + step / 2:.1f}" y1="{floor:.1f}" y2="{floor:.1f}" stroke="#8c959f"/>'
            f'<circle cx="{x:.1f}" cy="{gap:.1f}" r="3" fill="{colour}"><title>{hint}</title></circle>'
        )
    note = f'<text x="{_LEFT}" y="{_HEIGHT + _BOTTOM - 4}">layers in order; marks are gaps, lines are floors</text>'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _BOTTOM}" role="img">{"".join(parts)}{note}</svg>'


def _up(value: float) -> float:
    """Where a value is, with a gap of zero at the bottom and one without a number at the top."""
    power = _LOWEST if value <= 0 else _HIGHEST if not math.isfinite(value) else math.log10(value)
    share = (min(max(power, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return 8 + (1 - share) * (_HEIGHT - 16)


def _grid(powers: Iterable[int]) -> str:
    return "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{_up(10.0**power):.1f}" y2="{_up(10.0**power):.1f}" stroke="#eaeef2"/>'
        f'<text x="4" y="{_up(10.0**power) + 4:.1f}">1e{power}</text>'
        for power in powers
    )


def _closeness(close: Closeness) -> str:
    names = {"gap": "between the sides", "keras": "Keras's own rounding", "torch": "torch's own rounding"}
    times = ", ".join(f"{name} {value:.1f} ms" for name, value in close.milliseconds.items())
    charts = "".join(_histogram(names[name], counts) for name, counts in close.histograms.items())
    return f"<p>{escape(str(close))}. One call: {escape(times)}.</p>{charts}"


def _histogram(title: str, counts: Sequence[int]) -> str:
    """Bars over the powers of ten of the scaled differences."""
    height, bar = 90, (_WIDTH - _LEFT) / len(counts)
    most = max(counts) or 1
    bars = "".join(
        f'<rect x="{_LEFT + number * bar + 1:.1f}" width="{bar - 2:.1f}" y="{height - 70 * count / most:.1f}" '
        f'height="{70 * count / most:.1f}" fill="#54aeff"><title>{count}</title></rect>'
        f'<text x="{_LEFT + number * bar + 2:.1f}" y="{height + 12}">1e{DECADES[0] + number}</text>'
        for number, count in enumerate(counts)
    )
    return f'<svg viewBox="0 0 {_WIDTH} {height + 18}" role="img"><text x="{_LEFT}" y="12">{escape(title)}: elements by difference</text>{bars}</svg>'


def _parallel_table(runs: Sequence[ParallelCheck]) -> str:
    def gap(checks: Mapping[str, object], name: str) -> str:
        return str(checks[name])

    rows = [
        (
            run.label,
            *(gap(run.checks, name) for name in ("keras", "torch", "keras-torch")),
        )
        for run in runs
    ]
    heads = (
        "how",
        "Keras, parallel and single",
        "torch, parallel and single",
        "Keras and torch, parallel",
    )
    return table(heads, rows, (not run.passed for run in runs))
