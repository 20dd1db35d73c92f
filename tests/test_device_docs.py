"""The code in docs/device-parallelism.md runs and prints what it says, and so does the example of two sequences."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs" / "device-parallelism.md").read_text(encoding="utf-8")


def test_the_code_in_the_document_runs_and_prints_what_it_says(capsys):
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, "docs/device-parallelism.md", "exec"), names)  # noqa: S102 - our own document
    said = re.findall(r"print\(.*\)  # (.+)", DOCUMENT)
    assert len(said) == 4
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.slow
def test_the_example_of_two_sequences_learns(backend):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "two_sequences.py", backend.name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.fullmatch(r"loss before ([\d.]+), after ([\d.]+)\n", done.stdout).groups())
    assert after < 0.9 * before
