"""Who may import whom, what each package exports, and what importing it loads."""

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"isobatch": "common", "isobatch_keras": "keras_backend", "isobatch_torch": "torch_backend"}

# What a package may import beside the standard library: anywhere, ...
ANYWHERE = {
    "isobatch": {"isobatch"},
    "isobatch_keras": {"isobatch", "isobatch_keras", "keras", "numpy", "optree"},
    "isobatch_torch": {"isobatch", "isobatch_torch", "torch", "numpy", "optree"},
}
# ... only inside functions and for type checkers, so that importing the package does not load it, ...
LAZILY = {"isobatch": {"numpy", "optree", "safetensors", "sklearn"}}
# ... only by name, as a string, which is how a backend is reached on first use, ...
BY_NAME = {"isobatch": {"isobatch_keras", "isobatch_torch"}}
# ... and only in these modules.
IN_MODULES = {
    "isobatch/cli.py": {"rich", "typer"},
    "isobatch/bench_report.py": {"rich"},
    "isobatch/report.py": {"rich", "typer"},
    "isobatch_keras/_tensorflow*.py": {"tensorflow"},
}


def imports(node: ast.AST, how: str = "anywhere") -> Iterator[tuple[int, str, str]]:
    """Yield line, module and how it is imported ("anywhere", "lazily", "by name") for every import below a node."""
    match node:
        case ast.Import():
            yield from ((node.lineno, alias.name, how) for alias in node.names)
        case ast.ImportFrom():
            yield node.lineno, "." * node.level + (node.module or ""), how
        case ast.Call(
            func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(str(name)), *_],
        ):
            yield node.lineno, name, "by name" if how == "lazily" else how
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            how = "lazily"
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            for child in node.body:
                yield from imports(child, "lazily")
            for child in node.orelse:
                yield from imports(child, how)
            return
    for child in ast.iter_child_nodes(node):
        yield from imports(child, how)


def violations(path: str, source: str) -> list[str]:
    """Return the imports that the module at `package/.../module.py` may not have."""
    package = path.partition("/")[0]
    extra = [names for pattern, names in IN_MODULES.items() if PurePosixPath(path).match(pattern)]
    allowed = {"anywhere": sys.stdlib_module_names.union(ANYWHERE[package], *extra)}
    allowed["lazily"] = allowed["anywhere"] | LAZILY.get(package, set())
    allowed["by name"] = allowed["lazily"] | BY_NAME.get(package, set())
    return [
        f"{path}:{line}: {name}"
        for line, name, how in imports(ast.parse(source))
        if name.partition(".")[0] not in allowed[how]
    ]


def loaded_by(module: str, **env: str) -> set[str]:
    """Return the top-level names of what a fresh interpreter loads when it imports a module."""
    code = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in SOURCES.values()),
        **env,
    }
    run = subprocess.run([sys.executable, "-c", code], env=env, check=True, stdout=subprocess.PIPE, text=True)
    return {name.partition(".")[0] for name in run.stdout.split()}


@pytest.mark.parametrize("package", SOURCES)
def test_packages_import_only_what_they_may(package):
    root = ROOT / SOURCES[package]
    files = sorted((root / package).rglob("*.py"))
    assert files
    sources = {file.relative_to(root).as_posix(): file.read_text("utf-8") for file in files}
    assert [found for path, source in sources.items() for found in violations(path, source)] == []


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("isobatch/rows.py", "import torch", "torch"),
        ("isobatch/rows.py", "def f():\n    from keras.ops import add", "keras.ops"),
        ("isobatch/rows.py", "import typing\nif typing.TYPE_CHECKING:\n    import tensorflow", "tensorflow"),
        ("isobatch/rows.py", "if TYPE_CHECKING:\n    import numpy\nelse:\n    import optree", "optree"),
        ("isobatch/rows.py", "import numpy", "numpy"),
        ("isobatch/rows.py", "class A:\n    import optree", "optree"),
        ("isobatch/rows.py", "import sklearn.datasets", "sklearn.datasets"),
        ("isobatch/rows.py", "def f():\n    import rich", "rich"),
        ("isobatch/rows.py", "from importlib import import_module\nimport_module('torch')", "torch"),
        ("isobatch/rows.py", "import importlib\ndef f(): return importlib.import_module('keras')", "keras"),
        ("isobatch/rows.py", "from .trees import Rows", ".trees"),
        ("isobatch/rows.py", "def f():\n    import isobatch_torch", "isobatch_torch"),
        ("isobatch/rows.py", "__import__('isobatch_torch')", "isobatch_torch"),
        ("isobatch/rows.py", "import common.isobatch", "common.isobatch"),
        ("isobatch/cli.py", "def f():\n    import torch", "torch"),
        ("isobatch_keras/model.py", "import tensorflow as tf", "tensorflow"),
        ("isobatch_keras/model.py", "def f():\n    import tensorflow as tf", "tensorflow"),
        ("isobatch_keras/_tensorflow.py", "from isobatch_torch import DataParallel", "isobatch_torch"),
        ("isobatch_keras/model.py", "async def f():\n    import torch", "torch"),
        ("isobatch_torch/model.py", "import keras", "keras"),
        ("isobatch_torch/model.py", "def f():\n    import isobatch_keras", "isobatch_keras"),
        ("isobatch_torch/model.py", "def f(): __import__('isobatch_keras')", "isobatch_keras"),
        ("isobatch_torch/model.py", "import tests.helpers", "tests.helpers"),
        ("isobatch_torch/model.py", "import bench", "bench"),
    ],
)
def test_planted_violation_is_found(path, source, found):
    assert [violation.split(": ")[1] for violation in violations(path, source)] == [found]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("isobatch/rows.py", "import os.path\nfrom isobatch.trees import Rows"),
        ("isobatch/rows.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy as np"),
        ("isobatch/rows.py", "class A:\n    def f(self):\n        import numpy, optree, sklearn.datasets"),
        ("isobatch/rows.py", "import importlib\nimportlib.import_module(name)"),
        ("isobatch/rows.py", "import importlib\ndef f():\n    importlib.import_module('isobatch_keras')"),
        ("isobatch/cli.py", "import rich.table, typer"),
        ("isobatch/report.py", "def f():\n    import rich"),
        ("isobatch_keras/_tensorflow.py", "import tensorflow as tf\nimport keras, numpy, optree, isobatch"),
        ("isobatch_torch/model.py", "import torch.nn, numpy, optree, isobatch.rows"),
    ],
)
def test_allowed_import_is_not_a_violation(path, source):
    assert violations(path, source) == []


@pytest.mark.parametrize("folder", [*SOURCES.values(), "tests", "bench"])
def test_root_folder_is_no_package(folder):
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", SOURCES)
def test_all_names_what_is_public(package):
    module = importlib.import_module(package)
    public = {
        name
        for name in {*vars(module), *dir(module)} - {"annotations", "TYPE_CHECKING"}
        if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
    }
    assert set(module.__all__) == public
    assert module.__all__ == sorted(public, key=lambda name: (not name.isupper(), name))


def test_importing_isobatch_loads_only_the_standard_library():
    assert loaded_by("isobatch") - sys.stdlib_module_names == {"isobatch"}


@pytest.mark.parametrize(
    ("module", "keras_backend", "absent"),
    [
        ("isobatch.cli", "", {"keras", "tensorflow", "torch", "jax", "numpy"}),
        ("isobatch_torch", "", {"keras", "tensorflow", "jax", "isobatch_keras"}),
        ("isobatch_keras", "tensorflow", {"torch", "jax", "isobatch_torch"}),
        ("isobatch_keras", "torch", {"tensorflow", "jax", "isobatch_torch"}),
    ],
)
def test_importing_loads_no_other_framework(module, keras_backend, absent):
    assert loaded_by(module, KERAS_BACKEND=keras_backend).isdisjoint(absent)
