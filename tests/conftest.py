"""One `backend` fixture for every test of the contract, and a process that has what all tests need."""

import importlib.util
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

collect_ignore = ["keras_placement.py"]  # a program that tests start in processes of their own

NAMES = ("keras", "torch")
CPU_DEVICES = 8  # logical ones in TensorFlow; torch needs none


def pytest_addoption(parser):
    parser.addoption(
        "--backends",
        default="",
        help="Backends that must be tested, separated by commas; one that is missing fails. Without it: those installed.",
    )


def _installed(name):
    return importlib.util.find_spec(name) is not None


def pytest_configure(config):
    asked = [name for name in config.getoption("--backends").split(",") if name]
    missing = [name for name in asked if name not in NAMES or not _installed(name)]
    if missing:
        msg = f"--backends asks for {', '.join(missing)}, which cannot be tested here: not installed, or none of {NAMES}."
        raise pytest.UsageError(msg)
    config.isobatch_backends = asked or [name for name in NAMES if _installed(name)]
    if "torch" in config.isobatch_backends:
        import torch  # noqa: F401 - with both in one process it must be loaded before TensorFlow
    if "keras" in config.isobatch_backends:
        import isobatch

        isobatch.virtual_devices(CPU_DEVICES)


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.isobatch_backends, indirect=True)


@pytest.fixture
def backend(request):
    """The kit of one framework; see `kits.py`."""
    from kits import kit

    return kit(request.param)


@pytest.fixture
def both(request):
    """The kits of both frameworks, for tests that hold one against the other."""
    from kits import kit

    missing = [name for name in NAMES if name not in request.config.isobatch_backends]
    if missing:
        pytest.skip(f"needs both frameworks; not tested here: {', '.join(missing)}")
    return [kit(name) for name in NAMES]


@pytest.fixture
def keras_float64():
    """Make float64 what Keras computes in by default; a policy once read no longer follows floatx, so both are set."""
    import keras

    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)
