"""The command line: `isobatch parity` and `isobatch devices`.

Exit codes: 0 all agree, 1 a mismatch, 2 wrong use, with one line on standard error that says what was wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from isobatch.errors import IsobatchError
from isobatch.registry import available_backends, get_backend

__all__ = ["main"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

# Typer uses the package click or a copy of its own, by its version; this is the class in either.
_TyperUsageError: type[Exception] = typer.BadParameter.__bases__[0]

_INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C


class _WrongUseError(Exception):
    """An option's value makes no sense."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Instead of the process's own.

    Returns:
        The exit code.
    """
    # Before a framework starts: TensorFlow writes its start-up notes from C++, past any logging of Python's.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except _TyperUsageError as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except (_WrongUseError, IsobatchError, OSError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Run one model over several devices, in Keras and in torch, and prove that both give the same numbers."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def parity(
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, separated by commas.")] = "1,2,3,4",
    batch_sizes: Annotated[str, typer.Option(help="Numbers of rows, separated by commas.")] = "64,63,5,3,1",
    data: Annotated[
        Path | None, typer.Option(help="A .npz file with images x and classes y, instead of the digits.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="For the split of the data, the first weights and the order of rows.")
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> int:
    """Train a network in Keras over replicas, carry it to torch, and compare both, alone and parallel, on the same rows."""
    from isobatch.digits import load_digits, load_images
    from isobatch.parity import run
    from isobatch.report import print_report, progress_bar

    counts, batches = _numbers(replicas, "--replicas"), _numbers(batch_sizes, "--batch-sizes")
    if not 0 <= seed < 2**32:
        msg = f"Expected --seed from 0 to 4294967295, got {seed}."
        raise _WrongUseError(msg)
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        msg = f"Expected --json to be a file in a folder that exists, got {str(json_file)!r}."
        raise _WrongUseError(msg)
    images = load_digits(seed) if data is None else load_images(data, seed)
    if max(batches) > len(images.test):
        msg = f"Expected --batch-sizes of at most {len(images.test)}, the number of test images, got {max(batches)}."
        raise _WrongUseError(msg)
    with progress_bar() as progress:
        with _quiet_start():
            for name in ("torch", "keras"):  # torch must be loaded before TensorFlow
                get_backend(name).devices()
        report = run(images, counts, batches, seed=seed, progress=progress)
    print_report(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if report.passed else 1


@app.command()
def devices() -> int:
    """Show what each installed framework sees here."""
    from isobatch.report import console, devices_table

    names = available_backends()
    if not names:
        sys.stdout.write(
            "No framework is installed. Cure: pip install 'isobatch[keras]', 'isobatch[torch]' or 'isobatch[all]'.\n"
        )
        return 0
    with _quiet_start():
        rows = [
            _describe(name) for name in reversed(names)
        ]  # torch first: it must be loaded before TensorFlow
    table = devices_table(rows)
    console(table).print(table)
    return 0


@contextmanager
def _quiet_start() -> Generator[None, None, None]:
    """Hold back what is written to the process's standard error while a framework starts; show it if the start fails.

    TensorFlow 2.21 logs from C++ before it has read TF_CPP_MIN_LOG_LEVEL.
    """
    logging.getLogger("tensorflow").setLevel(
        logging.ERROR
    )  # else it remarks on tracing anew for each batch size
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except Exception:
            held.seek(0)
            os.write(screen, held.read())
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)


def _describe(name: str) -> tuple[str, str, str, str]:
    found = ", ".join(map(str, get_backend(name).devices()))
    engine = sys.modules[name].config.backend() if name == "keras" else name
    version = metadata.version(name) + (f" on {engine} {metadata.version(engine)}" if engine != name else "")
    return name, version, found, str(_threads(engine))


def _threads(engine: str) -> int:
    """Threads that one operation may use on the CPU."""
    module = sys.modules[engine]
    if engine == "torch":
        return int(module.get_num_threads())
    chosen = module.config.threading.get_intra_op_parallelism_threads() if engine == "tensorflow" else 0
    return int(chosen or os.cpu_count() or 1)  # 0: as many as there are cores


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        msg = f"Expected {option} to be whole numbers of 1 or more, separated by commas, got {text!r}."
        raise _WrongUseError(msg)
    return numbers


def _fail(message: str) -> int:
    sys.stderr.write(f"isobatch: {' '.join(message.split())}\n")
    return 2
