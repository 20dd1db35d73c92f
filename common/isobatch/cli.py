"""The command line: `isobatch parity`, `isobatch bench`, `isobatch twin` and `isobatch devices`.

Exit codes: 0 all agree, 1 a mismatch, 2 wrong use, with one line on standard error that says what was wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobatch.errors import IsobatchError
from isobatch.registry import available_backends, get_backend

__all__ = ["main"]

if TYPE_CHECKING:
    from isobatch.model_parity import ModelReport

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

# Typer uses the package click or a copy of its own, by its version; this is the class in either.
_TyperUsageError: type[Exception] = typer.BadParameter.__bases__[0]

_Model = Annotated[
    str, typer.Argument(help="A .keras or .h5 file, module:function, or an application's name.")
]
_Size = Annotated[int | None, typer.Option(help="Height and width of an application's images.", min=1)]
_JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")]

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
def parity(  # noqa: PLR0917 - typer calls it by name
    model: Annotated[
        str | None,
        typer.Argument(
            help="A .keras or .h5 file, module:function, or an application's name; without it: the digits network."
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="Numbers of replicas, separated by commas, or none; by default 1,2,3,4 for the digits and 1,2,4 for a MODEL."
        ),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Numbers of rows, separated by commas.")] = "64,63,5,3,1",
    data: Annotated[
        Path | None,
        typer.Option(
            help="A .npz file with images x and classes y, instead of the digits; for a MODEL a .npz or .npy file or a folder of images."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="For the split of the data, the first weights and the order of rows.")
    ] = 0,
    json_file: _JsonFile = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", help="Write a report of the MODEL to this file, which needs nothing else."),
    ] = None,
    torch_module: Annotated[
        str | None,
        typer.Option(
            "--torch", help="module:function that returns the torch module; the MODEL's twin without it."
        ),
    ] = None,
    torch_weights: Annotated[
        Path | None, typer.Option(help="A file with the state_dict of the torch module, or of the twin.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="channels_first if the torch module takes images so.")
    ] = "channels_last",
    placement: Annotated[
        Path | None,
        typer.Option(
            help="A JSON file of parts and their devices, with which a MODEL is run too, beside the replicas."
        ),
    ] = None,
    train: Annotated[  # noqa: FBT002 - a flag of the command line
        bool,
        typer.Option(
            "--train", help="Without a MODEL: train the digits in both frameworks side by side, step by step."
        ),
    ] = False,
    epochs: Annotated[int, typer.Option(help="How often --train sees the data.", min=1)] = 8,
    rows: Annotated[int, typer.Option(help="Rows that a MODEL is run on.", min=1)] = 7,
    size: _Size = None,
) -> int:
    """Hold a Keras MODEL against its twin in torch, layer by layer in float64.

    Without a MODEL: train a network in Keras over replicas, carry it to torch, and compare both, alone and parallel, on the same rows.
    """
    _check_outputs(json_file, html_file)
    if train:
        _refuse_with_train(torch_module, torch_weights, placement, size)
        return _train_parity(model, replicas or "1,4", data, epochs, seed, (json_file, html_file))
    if model is not None:
        from isobatch.model_parity import run_model

        counts = (
            [] if replicas == "none" else _numbers("1,2,4" if replicas is None else replicas, "--replicas")
        )
        if layout not in {"channels_last", "channels_first"}:
            msg = f"Expected --layout channels_last or channels_first, got {layout!r}."
            raise _WrongUseError(msg)
        return _model_parity(
            run_model,
            (json_file, html_file),
            name=model,
            data=data,
            module=torch_module,
            weights=torch_weights,
            layout=layout,
            replicas=counts,
            placement=placement,
            rows=rows,
            size=size,
            seed=seed,
        )
    if any(option is not None for option in (html_file, torch_module, torch_weights, placement, size)):
        msg = "Expected a MODEL with --html, --torch, --torch-weights, --placement and --size."
        raise _WrongUseError(msg)
    return _digits_parity("1,2,3,4" if replicas is None else replicas, batch_sizes, data, seed, json_file)


def _refuse_with_train(*options: Any) -> None:
    names = ("--torch", "--torch-weights", "--placement", "--size")
    given = [name for name, option in zip(names, options, strict=True) if option is not None]
    if given:
        msg = f"Expected --train without {', '.join(given)}, which are for a MODEL."
        raise _WrongUseError(msg)


def _train_parity(  # noqa: PLR0917 - one call
    model: str | None,
    replicas: str,
    data: Path | None,
    epochs: int,
    seed: int,
    files: tuple[Path | None, Path | None],
) -> int:
    from isobatch.digits import load_digits, load_images
    from isobatch.report import progress_bar
    from isobatch.train_parity import render_training, run_training

    if model is not None:
        msg = f"Expected --train without a MODEL, got {model!r}; for a model of your own: isobatch.testing.assert_training_parity."
        raise _WrongUseError(msg)
    counts = _numbers(replicas, "--replicas")
    images = load_digits(seed) if data is None else load_images(data, seed)
    with progress_bar() as progress:
        _start("torch", "keras")
        report = run_training(images, counts, epochs=epochs, seed=seed, progress=progress)
    sys.stdout.write(f"{report}\n")
    _write(report, *files, render_training)
    return 0 if report.passed else 1


def _model_parity(
    run_model: Callable[..., ModelReport], files: tuple[Path | None, Path | None], **options: Any
) -> int:
    from isobatch.html import render_html
    from isobatch.report import print_model_report, progress_bar

    with progress_bar() as progress:
        _start("torch", "keras")
        report = run_model(progress=progress, **options)
    print_model_report(report)
    _write(report, *files, render_html)
    return 0 if report.passed else 1


@app.command()
def bench(  # noqa: PLR0917 - typer calls it by name
    model: _Model,
    replicas: Annotated[
        str, typer.Option(help="Numbers of replicas, separated by commas, beside the model by itself.")
    ] = "2,4",
    batch_sizes: Annotated[str, typer.Option(help="Rows of a call, separated by commas.")] = "32,256",
    train: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--train", help="Time steps of training rather than predictions.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="A .npz or .npy file or a folder of images, instead of random rows.")
    ] = None,
    size: _Size = None,
    seconds: Annotated[float, typer.Option(help="How long to time each choice.", min=0.1)] = 2.0,
    seed: Annotated[int, typer.Option(help="Of random rows and weights.", min=0)] = 0,
    json_file: _JsonFile = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write a page with a plot to this file.")
    ] = None,
) -> int:
    """Time a Keras MODEL and its twin in torch, alone and over replicas, and say which choice is fastest here.

    Ctrl-C ends it early and shows what has been measured.
    """
    from isobatch.bench import run_bench
    from isobatch.bench_report import print_bench, render_bench
    from isobatch.report import progress_bar

    _check_outputs(json_file, html_file)
    counts, batches = _numbers(replicas, "--replicas"), _numbers(batch_sizes, "--batch-sizes")
    with progress_bar() as progress:
        _start("torch", "keras")
        report = run_bench(
            model,
            replicas=counts,
            batches=batches,
            training=train,
            data=data,
            size=size,
            seconds=seconds,
            seed=seed,
            progress=progress,
        )
    print_bench(report)
    _write(report, json_file, html_file, render_bench)
    return 0 if report.complete else _INTERRUPTED


@app.command()
def twin(
    model: _Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write to.")],
    size: _Size = None,
) -> int:
    """Write a Keras MODEL so that isobatch_torch.from_spec builds it in torch on a machine without Keras."""
    from isobatch.model_parity import write_twin

    _start("keras")
    spec = write_twin(model, output, size)
    count = sum(tensor.size for tensor in spec.tensors.values())
    sys.stdout.write(f"{spec.name}: {len(spec.nodes)} operations and {count:,} weights in {output}\n")
    return 0


def _write(
    report: Any,
    json_file: Path | None,
    html_file: Path | None = None,
    render: Callable[[Any], str] = str,
) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if html_file is not None:
        html_file.write_text(render(report), encoding="utf-8")


def _check_outputs(*files: Path | None) -> None:
    for option, file in zip(("--json", "--html"), files, strict=True):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            msg = f"Expected {option} to be a file in a folder that exists, got {str(file)!r}."
            raise _WrongUseError(msg)


def _digits_parity(
    replicas: str, batch_sizes: str, data: Path | None, seed: int, json_file: Path | None
) -> int:
    from isobatch.digits import load_digits, load_images
    from isobatch.parity import run
    from isobatch.report import print_report, progress_bar

    counts, batches = _numbers(replicas, "--replicas"), _numbers(batch_sizes, "--batch-sizes")
    if not 0 <= seed < 2**32:
        msg = f"Expected --seed from 0 to 4294967295, got {seed}."
        raise _WrongUseError(msg)
    images = load_digits(seed) if data is None else load_images(data, seed)
    if max(batches) > len(images.test):
        msg = f"Expected --batch-sizes of at most {len(images.test)}, the number of test images, got {max(batches)}."
        raise _WrongUseError(msg)
    with progress_bar() as progress:
        _start("torch", "keras")  # in this order: torch must be loaded before TensorFlow
        report = run(images, counts, batches, seed=seed, progress=progress)
    print_report(report)
    _write(report, json_file)
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
    _start(*reversed(names))  # torch first: it must be loaded before TensorFlow
    rows = [_describe(name) for name in reversed(names)]
    table = devices_table(rows)
    console(table).print(table)
    return 0


def _start(*names: str) -> None:
    """Load frameworks, and hold back what they write to the process's standard error meanwhile; show it if that fails.

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
            for name in names:
                get_backend(name).devices()
        except Exception as error:
            held.seek(0)
            os.write(screen, b"" if isinstance(error, IsobatchError) else held.read())
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
