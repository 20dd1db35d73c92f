"""Every block of code in the document on migration runs, in order."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

DOCUMENT = Path(__file__).parent.parent / "docs" / "migrating-from-DataParallel.md"


def test_every_block_runs():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
    names = {"__name__": "document"}
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), names)  # noqa: S102 - our own document
