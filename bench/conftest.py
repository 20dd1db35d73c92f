"""A bench is one comparison: its contestants take turns, and ratios of medians are what counts.

Each leaves its medians, ratios, goals and spread in the bench's extra information, which `--benchmark-json` writes down, and
which is shown as one table at the end.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from isobatch.timing import Timing, ratio, take_turns

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture
def contest(benchmark):
    """Let calls take turns; the first is what the others are held against.

    Args (of what it returns):
        group: What is compared.
        calls: By name.
        goals: The greatest ratio to the first call that is aimed at, by name, with another call's name to be held against it.
        seconds: How long to time each call.
        info: What else to write down: sizes.
    """

    def run(group, calls, goals=(), seconds=4.0, **info):
        timings = {}

        def measure():
            for found in take_turns(calls, seconds=seconds):
                timings.update(found)

        benchmark.group = group
        benchmark.pedantic(measure, rounds=1)
        first = next(iter(calls))
        benchmark.extra_info.update(
            info, first=first, calls={name: _told(one) for name, one in timings.items()}
        )
        pairs = {(name, first): None for name in calls if name != first} | dict(goals)
        benchmark.extra_info["ratios"] = [
            [name, base, *_numbers(ratio(timings[name], timings[base])), goal]
            for (name, base), goal in pairs.items()
        ]
        return timings

    return run


@pytest.fixture
def measured(benchmark):
    """Write down numbers that were measured otherwise, each with its goal: `{name: (value, unit, goal)}`."""

    def run(group, call, numbers):
        benchmark.group = group
        result = benchmark.pedantic(call, rounds=1)
        benchmark.extra_info["numbers"] = [[name, *rest] for name, rest in numbers(result).items()]
        return result

    return run


class Peer:
    """A program that does one round of its work whenever it is told to: what can run only once, or only elsewhere, takes turns too."""

    def __init__(self, program, *arguments, **environment):
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / program), *arguments],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._ask("hello") == "ready"

    def _ask(self, word):
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"{self._process.args[1:]} has ended"
        return json.loads(answer)

    def call(self, word):
        return lambda: self._ask(word)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


@pytest.fixture
def peer():
    """Start programs and end them."""
    started = []

    def start(*arguments, **environment):
        started.append(Peer(*arguments, **environment))
        return started[-1]

    yield start
    for one in started:
        one.close()


def _told(timing: Timing):
    return {
        "median": timing.median,
        "spread": round(timing.spread, 3),
        "turns": len(timing.seconds),
        "noisy": timing.noisy,
    }


def _numbers(found):
    return [round(one, 4) for one in (found.value, found.low, found.high)]


def pytest_terminal_summary(terminalreporter, config):
    """Show every ratio with its goal."""
    session = getattr(config, "_benchmarksession", None)
    benches = [one for one in getattr(session, "benchmarks", []) if one.extra_info]
    if not benches:
        return
    shown = Table("comparison", "what", "", "95 %", "goal", "", box=box.SIMPLE_HEAD, title="Goals")
    for bench in benches:
        for name, base, value, low, high, goal in bench.extra_info.get("ratios", ()):
            noisy = any(bench.extra_info["calls"][one]["noisy"] for one in (name, base))
            shown.add_row(
                bench.group,
                f"{name} / {base}",
                f"{value:.2f}{'*' if noisy else ''}",
                f"{low:.2f}..{high:.2f}",
                *_goal(value, low, goal),
            )
        for name, value, unit, goal in bench.extra_info.get("numbers", ()):
            shown.add_row(bench.group, name, f"{value:.3g} {unit}", "", *_goal(value, value, goal))
    console = Console(width=max(Console().width, Console(width=1000).measure(shown).maximum))
    with console.capture() as text:
        console.print(shown)
        console.print("Ratios of medians; * the machine was busy with something else while it was timed.")
    terminalreporter.write_line(text.get())


def _goal(value, low, goal):
    if goal is None:
        return "", ""
    return f"<= {goal:g}", "met" if value <= goal else "within noise" if low <= goal else "missed"
