"""`isobatch bench`: calls timed in turns, the choices of a model, what is shown, and what an interruption leaves."""

import json
import re

import numpy as np
import pytest

from isobatch.cli import main
from isobatch.timing import Ratio, Timing, peak_memory, ratio, take_turns


def test_calls_are_made_in_turns_and_each_turn_starts_with_another():
    made = []
    calls = {name: lambda name=name: (made.append(name), sum(range(100_000))) for name in "abc"}
    *_, timings = take_turns(calls, seconds=0.0, turns=(3, 3))
    order = "".join(made)
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3, 3]
    assert re.search("a+b+c+b+c+a+c+a+b+$", order), order


def test_a_ratio_knows_how_sure_it_is():
    rng = np.random.default_rng(0)
    one, other = (Timing(tuple(mean * (1 + 0.1 * rng.standard_normal(50)))) for mean in (2.0, 1.0))
    found = ratio(one, other)
    assert found.low < 2 < found.high
    assert found.high - found.low < 0.3
    again = ratio(other, other)
    assert (again.value, again.low, again.high) == (1, 1, 1), "turns taken together are drawn together"
    assert Timing((1.0, 1.0, 3.0, 3.0)).noisy
    assert not Timing((1.0, 1.01, 1.0)).noisy


def test_whoever_stops_early_keeps_what_was_measured():
    def fail():
        if len(kept.get("a", Timing(())).seconds) == 4:
            raise KeyboardInterrupt

    kept = {}
    with pytest.raises(KeyboardInterrupt):
        for kept in take_turns({"a": fail}, turns=(5, 10)):  # noqa: B007
            pass
    assert len(kept["a"].seconds) == 4


def test_peak_memory_sees_what_a_call_takes():
    found = peak_memory(lambda: np.ones(4_000_000))
    if found is None:
        pytest.skip("only Linux tells the peak")
    assert 30e6 < found < 40e6


pytest.importorskip("torch")
keras = pytest.importorskip("keras")

from isobatch.bench import BenchReport, Choice, run_bench  # noqa: E402
from isobatch.errors import DataError, ModelError  # noqa: E402


def small_model():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3, name="out")]
    )


HERE = f"{__name__}:small_model"


@pytest.fixture(autouse=True)
def _here(monkeypatch, request):
    monkeypatch.syspath_prepend(request.path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_every_choice_is_timed_on_the_same_rows(training):
    report = run_bench(HERE, replicas=[2], batches=[4, 5], training=training, seconds=0.02)
    assert report.complete
    assert [(choice.framework, choice.replicas, choice.rows) for choice in report.choices] == [
        (framework, count, rows) for rows in (4, 5) for count in (0, 2) for framework in ("keras", "torch")
    ]
    assert all(choice.gap < 1e-5 for choice in report.choices)
    assert all(len(choice.timing.seconds) >= 5 for choice in report.choices)


def test_the_command_shows_a_table_and_one_sentence(tmp_path, capsys):
    files = [tmp_path / "bench.json", tmp_path / "bench.html"]
    options = ["--batch-sizes", "4", "--replicas", "1,2", "--seconds", "0.1"]
    assert main(["bench", HERE, *options, "--json", str(files[0]), "--html", str(files[1])]) == 0
    shown = capsys.readouterr().out
    for title in ("Keras alone", "torch alone", "Keras over 1 replica", "torch over 2 replicas"):
        assert shown.count(title) >= 1
    written = json.loads(files[0].read_text())
    assert written["advice"] in " ".join(shown.split())
    assert len(written["choices"]) == 6
    page = files[1].read_text()
    assert page.count("<circle") == 6
    assert "script" not in page
    assert "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_an_interruption_keeps_the_rows_that_were_measured(monkeypatch, capsys):
    import isobatch.bench

    def measure(ways, inputs, rows, seconds, *, training):
        if rows == 5:
            raise KeyboardInterrupt
        return real(ways, inputs, rows, seconds, training=training)

    real = isobatch.bench._measure
    monkeypatch.setattr(isobatch.bench, "_measure", measure)
    assert main(["bench", HERE, "--batch-sizes", "4,5", "--replicas", "2", "--seconds", "0.1"]) == 130
    shown = capsys.readouterr().out
    assert "Interrupted" in shown
    assert shown.count("torch alone") >= 1


def choice(framework, replicas, seconds):
    return Choice(framework, replicas, 8, Timing(seconds), None, 0.0)


def test_the_advice_says_when_noise_decides():
    slow, fast = choice("keras", 0, (2.0, 2.1, 2.0, 2.05)), choice("torch", 2, (1.0, 1.02, 1.0, 1.01))
    clear = BenchReport("m", training=False, choices=(slow, fast), complete=True, versions={})
    assert clear.advice().startswith(
        "Fastest here: torch over 2 replicas at 8 rows a call, 8 rows a second, 2.0"
    )
    near = choice("keras", 2, (1.02, 0.99, 1.03, 1.0))
    unsure = BenchReport("m", training=False, choices=(near, fast), complete=True, versions={})
    assert "as fast within the noise" in unsure.advice()
    assert str(Ratio(1.0, 0.9, 1.1)) == "1.00 (0.90 to 1.10)"


def test_choices_that_differ_are_not_timed(monkeypatch):
    import isobatch.bench

    def other_twin(model):
        found = twin(model)
        found.out.bias.data += 1
        return found

    twin = isobatch.bench.twin
    monkeypatch.setattr(isobatch.bench, "twin", other_twin)
    with pytest.raises(ModelError, match=r"to compute the same, but .* torch alone"):
        run_bench(HERE, replicas=[2], batches=[4], seconds=0.02)


def test_too_few_rows_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 6), "float32"))
    with pytest.raises(DataError, match="at least 4 rows, got 3"):
        run_bench(HERE, batches=[4], data=tmp_path / "x.npy", seconds=0.02)
