"""What the commands show on a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import groupby

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from isobatch.model_parity import ModelReport
from isobatch.parity import Case, Report
from isobatch.verdict import LayerCheck

__all__ = ["console", "devices_table", "print_model_report", "print_report", "progress_bar"]

_SHOWN = 10  # layers of a network in which none differs


def console(table: Table) -> Console:
    """Return where to print a table: never narrower than it is, for a terminal can wrap lines but not bring lost columns back."""
    natural = Console(width=1000).measure(table).maximum
    return Console(width=max(Console().width, natural))


@contextmanager
def progress_bar() -> Generator[Callable[[str, float], None], None, None]:
    """Show a progress bar while the block runs; give a function that moves it."""
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    # A handle of its own: the process's standard error is held back while TensorFlow starts.
    with (
        os.fdopen(os.dup(2), "w") as screen,
        Progress(*columns, console=Console(file=screen), transient=True, disable=not screen.isatty()) as bar,
    ):
        task = bar.add_task("starting the frameworks", total=1.0)
        yield lambda text, done: bar.update(task, description=text, completed=done)


def print_report(report: Report) -> None:
    """Print a parity report: one table, what was allowed and why, the accuracies, the verdict.

    Args:
        report: From `isobatch.parity.run`.
    """
    table = _cases_table(report.cases)
    out = console(table)
    out.print(f"Data: {report.data}; seed {report.seed}.")
    out.print(table)
    allowed = " and ".join(f"{gap:.0e} in {precision}" for precision, gap in report.allowed.items())
    out.print(
        "Greatest differences of logits, divided by the greatest logit. K-T: Keras and torch; P-S: parallel and single, in either; "
        f"own error: float32 against float64; ms: best of five, KP and TP in parallel. "
        f"Allowed: {allowed}, which is 2 x {report.terms} x eps: the rounding of the "
        f"{report.terms} terms added up on the way through the network, on both sides."
    )
    accuracy = ", ".join(f"{name} {share:.4f}" for name, share in report.accuracy.items())
    out.print(f"Test accuracy: {accuracy}.")
    out.print(
        f"{' '.join(f'{name} {version}' for name, version in report.versions.items())}; {report.seconds:.0f} s."
    )
    for case in report.cases:
        for precision, checks in case.checks.items():
            for name, check in checks.items():
                if not check.passed:
                    out.print(
                        f"[red]FAIL[/] {case.batch} rows, {case.replicas} replicas, {precision}, {name}: {check}",
                        highlight=False,
                    )
    passed = sum(case.passed for case in report.cases)
    style, word = ("bold green", "PASS") if report.passed else ("bold red", "FAIL")
    out.print(f"[{style}]{word}[/] {passed} of {len(report.cases)} cases agree.", highlight=False)


def print_model_report(report: ModelReport) -> None:
    """Print what a parity run on one model found: the layers that differ, or else those that are nearest to their floor.

    Args:
        report: From `isobatch.model_parity.run_model`.
    """
    verdict = report.verdict
    nearest = sorted(verdict.layers, key=lambda one: one.check.scaled / one.check.allowed, reverse=True)
    table = _layers_table(
        verdict.wrong or nearest[:_SHOWN], "that differ" if verdict.wrong else "nearest to their floor"
    )
    out = console(table)
    out.print(f"{report.model} against {report.module}, on {report.data}.", highlight=False)
    if verdict.layers:
        out.print(table)
    first, *rest = str(verdict).splitlines()
    for line in rest[len(verdict.wrong) :]:
        out.print(line.strip(), highlight=False, markup=False)
    out.print(
        f"{' '.join(f'{name} {version}' for name, version in report.versions.items())}; {sum(report.seconds.values()):.0f} s."
    )
    style = {"PASS": "bold green", "FAIL": "bold red"}.get(verdict.word, "bold yellow")
    out.print(Text(first, style))


def _layers_table(layers: Sequence[LayerCheck], which: str) -> Table:
    table = Table(
        "layer",
        "operations",
        "gap",
        "floor",
        "",
        box=box.SIMPLE_HEAD,
        title=f"Layers {which}, in float64, each fed what Keras's was",
        title_justify="left",
    )
    for one in layers:
        word = Text("PASS", "green") if one.check.passed else Text("FAIL", "bold red")
        name = f"{one.layer}, training" if one.training else one.layer
        table.add_row(
            Text(name), ", ".join(one.operations), _gap(one.check.scaled), _gap(one.check.allowed), word
        )
    return table


def devices_table(rows: Iterable[Sequence[str]]) -> Table:
    """Return the table of `isobatch devices`.

    Args:
        rows: Framework, version, devices and threads of each.
    """
    table = Table(
        "framework",
        "version",
        "devices",
        "threads",
        title="What each framework sees here",
        title_justify="left",
    )
    for row in rows:
        table.add_row(*row)
    return table


def _cases_table(cases: Sequence[Case]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        title="Keras and torch, alone and data-parallel, on the same rows",
        title_justify="left",
    )
    headings = (
        *("\nrows", "repli-\ncas", "rows\neach"),
        *("float64\nK-T", "\nP-S", "float32\nK-T", "\nP-S", "own\nK", "error\nT"),
        *("ms\nK", "\nKP", "\nT", "\nTP", ""),
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for _, group in groupby(cases, key=lambda case: case.batch):
        for case in group:
            table.add_row(*_cells(case))
        table.add_section()
    return table


def _cells(case: Case) -> list[str | Text]:
    gaps: list[str] = []
    for precision in ("float64", "float32"):
        checks = case.checks[precision]
        gaps += [
            _gap(checks["keras-torch"].scaled),
            _gap(max(checks["keras"].scaled, checks["torch"].scaled)),
        ]
    return [
        *(str(case.batch), str(case.replicas), " ".join(map(str, case.sizes))),
        *gaps,
        *(_gap(case.rounding[name]) for name in ("keras", "torch")),
        *(
            f"{case.milliseconds[name]:.1f}"
            for name in ("keras", "keras parallel", "torch", "torch parallel")
        ),
        Text("PASS", "green") if case.passed else Text("FAIL", "bold red"),
    ]


def _gap(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"
