"""`isobatch parity --train` on real digits, for one epoch and few rows."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("torch")
keras = pytest.importorskip("keras")

from isobatch.cli import main  # noqa: E402
from isobatch.digits import load_digits  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.skipif(
        keras.config.backend() != "tensorflow", reason="Keras's optimizers are held to TensorFlow's forms"
    ),
]


@pytest.mark.slow
def test_digits_are_trained_side_by_side(tmp_path, capfd):
    images = load_digits(0)
    np.savez(tmp_path / "few.npz", x=images.train[:240], y=images.train_labels[:240])
    arguments = ["--data", str(tmp_path / "few.npz"), "--replicas", "1,2", "--epochs", "4"]
    files = ["--html", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]
    floatx = keras.config.floatx()
    assert main(["parity", "--train", *arguments, *files]) == 0
    assert keras.config.floatx() == floatx
    said = capfd.readouterr().out
    assert re.search(r"2 replicas: PASS: torch and keras agree over 12 steps", said)
    report = json.loads((tmp_path / "r.json").read_text())
    assert [one["what"] for one in report["rounding"]] == ["loss", "test logits"]
    assert all(0 < one["gap"] < 0.01 for one in report["rounding"])
    assert said.count("float32, ") == 2
    runs = report["runs"]
    assert [run["replicas"] for run in runs] == [1, 2]
    for run in runs:
        assert run["accuracy"]["keras"] == run["accuracy"]["torch"]
        assert np.mean(run["trajectory"]["losses"][0][-3:]) < 0.5 * run["trajectory"]["losses"][0][0]
    page = (tmp_path / "r.html").read_text()
    assert page.count("<polyline") == 4  # both sides of both runs
    assert not re.search(r"<script|https?://|<link|<img", page)


def test_wrong_uses(capfd):
    assert main(["parity", "xception", "--train"]) == 2
    assert "assert_training_parity" in capfd.readouterr().err
    assert main(["parity", "--train", "--size", "8"]) == 2
    assert "without --size" in capfd.readouterr().err
