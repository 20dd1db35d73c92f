"""The wheel and the sdist hold what they should, and the wheel works where no framework is installed."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"isobatch": "common", "isobatch_keras": "keras_backend", "isobatch_torch": "torch_backend"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build the sdist, and from it the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def empty(wheel, tmp_path_factory):
    """Install the wheel, with what it depends on, into an empty environment; return where its programs are."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [programs / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", ROOT / "requirements.lock", wheel], check=True)
    return programs


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_the_packages_the_tests_and_the_environment(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"{folder}/{package}/py.typed" for package, folder in PACKAGES.items()} <= names
    assert {"LICENSE", "Makefile", "pyproject.toml", "requirements.lock", "tests/test_layout.py"} <= names


@pytest.mark.parametrize("command", [["isobatch"], ["python", "-m", "isobatch"]])
def test_cli_runs_without_any_framework(empty, tmp_path, command):
    # From a folder of its own, so that nothing but the installed wheel is found.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [empty / command[0], *command[1:], "devices"]
    run = subprocess.run(command, cwd=tmp_path, env=env, check=False, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert "no framework is installed" in run.stdout.lower()
