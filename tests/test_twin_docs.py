"""Every block of code in docs/parity.md runs, in order, and prints what it says."""

import re
from pathlib import Path

DOCUMENT = (Path(__file__).parent.parent / "docs" / "parity.md").read_text(encoding="utf-8")


def test_the_code_in_the_document_runs_and_prints_what_it_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(blocks) == 6
    names = {}
    for block in blocks:
        exec(compile(block, "docs/parity.md", "exec"), names)  # noqa: S102 - our own document
    said = re.findall(r"print\(.*\)  # (.+)", DOCUMENT)
    assert len(said) == 7
    assert capsys.readouterr().out.splitlines() == said
