"""A report as one HTML page that needs nothing else: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from string import Template

__all__ = ["COLOURS", "page", "section", "table"]

COLOURS = {"PASS": "#1a7f37", "FAIL": "#b42318", "INCONCLUSIVE": "#9a6700"}
"""Colours of verdicts."""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>$title</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328 }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem } .word { color: $colour }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums } th, td { text-align: left; padding: .15rem .6rem;
border-bottom: 1px solid #d8dee4 } tr.wrong td { background: #ffebe9 } svg { width: 100%; height: auto }
text { font: 11px system-ui, sans-serif; fill: #57606a } .wide { overflow-x: auto }
</style></head><body>
<h1>$title$word</h1>
<p>$summary</p>
$sections
</body></html>
""")


def page(title: str, summary: str, sections: Iterable[str], word: str = "") -> str:
    """Return a whole page.

    Args:
        title: Its heading.
        summary: One paragraph under it.
        sections: From `section`; empty ones are left out.
        word: A verdict to show beside the title, a key of `COLOURS`.

    >>> page("A <title>", "What it says.", []).count("A &lt;title&gt;")
    2
    """
    return _PAGE.substitute(
        title=escape(title),
        word=f': <span class="word">{word}</span>' if word else "",
        colour=COLOURS.get(word, "inherit"),
        summary=escape(summary),
        sections="\n".join(part for part in sections if part),
    )


def section(title: str, body: str) -> str:
    """Return a heading with HTML under it; nothing at all where there is no body."""
    return f'<h2>{escape(title)}</h2>\n<div class="wide">{body}</div>' if body else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], marked: Iterable[bool] = ()) -> str:
    """Return a table.

    Args:
        heads: Titles of the columns.
        rows: Plain text, a cell for each column.
        marked: Which rows are shown as wrong.
    """
    marks = iter(marked)
    lines = [
        f"<tr{' class=wrong' if next(marks, False) else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    ]
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{''.join(lines)}</table>"
