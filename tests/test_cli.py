"""The command: what it prints, what it writes, and how it refuses."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from isobatch import cli
from isobatch.digits import load_digits, load_images
from isobatch.errors import DataError


def run(*arguments, **options):
    command = [sys.executable, "-m", "isobatch", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def archive(tmp_path, **arrays):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return path


GOOD = {"x": np.random.default_rng(0).random((60, 6, 6)), "y": np.arange(60) % 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "--replicas to be whole numbers of 1 or more, separated by commas, got '0'"),
        (["--replicas", "2,x"], "--replicas"),
        (["--replicas", ""], "--replicas"),
        (["--batch-sizes", "0"], "--batch-sizes to be whole numbers of 1 or more"),
        (["--batch-sizes", "5000"], "--batch-sizes of at most 359"),
        (["--seed", "-1"], "--seed from 0 to"),
        (["--seed", "x"], "--seed"),
        (["--data", "absent.npz"], "absent.npz"),
        (["--json", "absent/report.json"], "--json to be a file in a folder that exists"),
        (["--json", "."], "--json to be a file"),
        (["--unknown"], "--unknown"),
        (["extra"], "extra"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, message, capfd):
    assert cli.main(["parity", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": GOOD["x"]}, r"arrays x and y .* got only \['x'\]"),
        ({**GOOD, "x": GOOD["x"][:, 0]}, r"x of shape .* got \(60, 6\)"),
        ({**GOOD, "x": GOOD["x"][:, :3]}, "at least 4x4 pixels"),
        ({**GOOD, "x": GOOD["x"].astype(str)}, "numbers in x"),
        ({**GOOD, "x": GOOD["x"] * 1j}, "numbers in x, got complex128"),
        (
            {**GOOD, "x": np.where(GOOD["x"] > 0.99, np.nan, GOOD["x"])},
            r"finite numbers in x .* got nan at \[\d+, \d+, \d+\]",
        ),
        ({**GOOD, "y": GOOD["y"][:-1]}, r"one integer class for each image in y, got int64 \(59,\)"),
        ({**GOOD, "y": GOOD["y"] * 1.0}, "got float64"),
        ({**GOOD, "y": GOOD["y"] - 1}, "classes from 0, fewer than images, .* got -1 to 1"),
        ({**GOOD, "y": GOOD["y"] * 10**9}, "got 0 to 2000000000"),
        ({"x": GOOD["x"][:5], "y": GOOD["y"][:5]}, "at least 10 images, got 5"),
        ({"x": np.float64(1), "y": GOOD["y"]}, r"got \(\)"),
    ],
)
def test_wrong_data_says_what_was_found(arrays, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load_images(archive(tmp_path, **arrays))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"])
def test_a_file_that_is_no_archive(content, tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="Expected a NumPy archive"):
        load_images(path)


def test_a_pickle_in_an_archive_is_not_opened(tmp_path):
    with pytest.raises(DataError, match="Expected a NumPy archive"):
        load_images(archive(tmp_path, x=np.array([{}], dtype=object), y=GOOD["y"]))


def test_data_is_split_by_the_seed_alone(tmp_path):
    path = archive(tmp_path, **GOOD)
    one, two, other = load_images(path, 1), load_images(path, 1), load_images(path, 2)
    assert np.array_equal(one.test, two.test)
    assert not np.array_equal(one.test, other.test)
    assert (one.train.shape, one.test.shape, one.classes) == ((48, 6, 6, 1), (12, 6, 6, 1), 3)
    assert one.train.dtype == np.float32


def test_digits_are_the_real_ones():
    digits = load_digits()
    assert len(digits.train) + len(digits.test) == 1797
    assert digits.shape == (8, 8, 1)
    assert digits.train.max() == 1.0
    assert np.bincount(digits.train_labels).min() > 100


def test_help_and_no_arguments():
    for arguments in ([], ["--help"]):
        done = run(*arguments)
        assert done.returncode == 0
        assert "parity" in done.stdout
        assert "devices" in done.stdout


@pytest.mark.slow
def test_devices_shows_each_framework_and_nothing_else():
    done = run("devices")
    assert done.returncode == 0
    assert done.stderr == ""
    for name in ("keras", "torch", "cpu:0"):
        assert name in done.stdout


@pytest.mark.slow
def test_the_main_job_as_it_is_in_the_readme():
    done = run("parity")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS 20 of 20 cases agree." in done.stdout
    accuracies = re.findall(r"(?:keras|torch)(?: parallel)? (0\.\d+)", done.stdout)
    assert len(accuracies) == 4
    assert min(map(float, accuracies)) > 0.95


@pytest.mark.slow
def test_the_main_job_on_own_data_proves_and_records(tmp_path):
    report = tmp_path / "report.json"
    done = run(
        "parity",
        "--data",
        archive(tmp_path, **GOOD),
        "--replicas",
        "1,3",
        "--batch-sizes",
        "5,1",
        "--json",
        report,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS 4 of 4 cases agree." in done.stdout
    assert not re.search(r"oneDNN|cuda|absl|WARNING|Traceback", done.stdout + done.stderr)
    found = json.loads(report.read_text())
    assert found["passed"] is True
    assert [(case["batch"], case["sizes"]) for case in found["cases"]] == [
        (5, [5]),
        (5, [2, 2, 1]),
        (1, [1]),
        (1, [1, 0, 0]),
    ]
    for case in found["cases"]:
        for precision, checks in case["checks"].items():
            for check in checks.values():
                assert check["scaled"] <= found["allowed"][precision]
    assert set(found["versions"]) >= {"python", "keras", "tensorflow", "torch", "numpy", "isobatch"}


@pytest.mark.slow
def test_a_wrong_network_fails_with_exit_code_1_and_says_where(tmp_path):
    # One wrong constant, of the size that passes every float32 tolerance in common use.
    code = (
        "import sys, torch, isobatch_torch.reference as reference\n"
        "load = reference.DigitsNetwork.load_keras\n"
        "def wrong(self, weights):\n"
        "    load(self, weights)\n"
        "    self.norm2.eps = 1.001e-3\n"
        "reference.DigitsNetwork.load_keras = wrong\n"
        "from isobatch.cli import main\n"
        f"sys.exit(main(['parity', '--data', {str(archive(tmp_path, **GOOD))!r}, '--replicas', '2', '--batch-sizes', '5']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL 5 rows, 2 replicas, float64, keras-torch" in done.stdout
    assert "FAIL 0 of 1 cases agree." in done.stdout


@pytest.mark.slow
def test_training_that_diverges_is_one_line(tmp_path):
    data = archive(tmp_path, x=GOOD["x"] * 1e37, y=GOOD["y"])
    done = run("parity", "--data", data, "--replicas", "1", "--batch-sizes", "5")
    assert done.returncode == 2
    assert "training on" in done.stderr
    assert "diverged. Scale them" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_is_json_even_where_a_gap_has_no_number():
    from isobatch.compare import compare
    from isobatch.parity import Case, Report

    fault = compare(np.zeros(2), np.zeros(3), allowed=1e-6)
    case = Case(2, 3, (2, 1), {"float64": {"keras": fault}}, {"keras": 0.0}, {"keras": 1.0})
    report = Report("data", [case], {"float64": 1e-6}, 10, {"keras": 1.0}, 1.0, 0, {})
    assert not report.passed
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert found["cases"][0]["checks"]["float64"]["keras"]["scaled"] is None


@pytest.mark.slow
def test_a_missing_framework_is_one_line():
    code = (
        "import sys, importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "from isobatch.cli import main\n"
        "sys.exit(main(['parity']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        "isobatch: Expected torch to be installed, it is not. Cure: pip install 'isobatch[torch]'."
    )
    assert "Traceback" not in done.stderr
