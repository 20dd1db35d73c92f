"""Every block of code in the migration guide runs, in order, in one process with stand-ins for eight GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")

GUIDE = Path(__file__).parent.parent / "docs" / "migrating-from-multi_gpu_model.md"


@pytest.mark.slow
def test_every_block_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) >= 8
    path = os.pathsep.join(root for root in sys.path if root)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", "\n".join(blocks)],
        env={**os.environ, "ISOBATCH_VIRTUAL_GPUS": "8", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "cpu:0 cpu:1 cpu:2 cpu:3",
        "Expected gpus to be 2 or more, or a list of 2 or more, got 1. Use the model as it is.",
    ]
