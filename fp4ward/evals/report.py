"""What an evaluation looks like: tables and a progress bar on a terminal, and a bar chart in a file."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fp4ward.errors import UserError
from fp4ward.evals.run import Run
from fp4ward.evals.stats import Paired
from fp4ward.evals.tasks import Question


def show(run: Run, other: Run | None, paired: Mapping[str, Paired] | None) -> None:
    """The accuracies on stdout; and the differences where there is another run."""
    from rich.console import Console
    from rich.table import Table

    # A pipe or a file has no width that a table would have to fit.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)

    def table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
        made = Table()
        for column in columns:
            made.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
        for row in rows[:-1]:
            made.add_row(*row, end_section=row == rows[-2])
        if len(rows) > 2:  # one family is its own total
            made.add_row(*rows[-1])
        console.print(made)

    def span(interval: tuple[float, float], sign: str = "") -> str:
        return " to ".join(f"{100 * x:{sign}.1f}" for x in interval)

    table(
        ("held-out questions", "right", "accuracy %", "95 % interval", "chance %", "seconds"),
        [
            (name, f"{t.right}/{t.asked}", f"{100 * t.accuracy:.1f}", span(t.interval), f"{100 * t.chance:.1f}",
             f"{t.seconds:.1f}")
            for name, t in run.tallies().items()
        ],
    )  # fmt: skip
    if other is not None and paired is not None:
        table(
            ("difference", "points", "95 % interval", "gained", "lost", "p (McNemar)"),
            [
                (name, f"{100 * d.difference:+.1f}", span(d.interval, "+"), str(d.gained), str(d.lost),
                 f"{d.p_value:.3f}" if d.p_value >= 0.001 else "< 0.001")
                for name, d in paired.items()
            ],
        )  # fmt: skip
        console.print(f"The difference is {run.model} now minus {other.model} as saved.", markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress_bars(questions: Iterable[Question], quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """A `progress` for `ask` that draws a bar a family on stderr; nothing when quiet, or when stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda family, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {family: bar.add_task(family, total=n) for family, n in Counter(q.family for q in questions).items()}
        yield lambda family, done: bar.update(tasks[family], completed=done)


def check_plot(path: str) -> None:
    """UserError when no chart could be drawn to `path`: to know it before the questions are asked."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib, which is not installed; pip install 'fp4ward[plot]'") from None
    known = sorted(Figure().canvas.get_supported_filetypes())
    if Path(path).suffix.lower().lstrip(".") not in known:
        raise UserError(f"--plot {path}: a name that ends in one of {', '.join(known)} is expected")


def plot(path: str, run: Run, other: Run | None = None) -> None:
    """A bar a family with its 95 % interval and a mark at chance level; beside it the other run's, if there is one."""
    from matplotlib.figure import Figure

    runs = [run] if other is None else [run, other]
    names = [name for name in run.tallies() if name != "total" or len(run.tallies()) > 2]
    width = 0.8 / len(runs)
    figure = Figure(figsize=(3.0 + 0.9 * len(names), 4.5), layout="constrained")
    axes = figure.subplots()
    for i, one in enumerate(runs):
        tallies = [one.tallies()[name] for name in names]
        at = [k + (i - (len(runs) - 1) / 2) * width for k in range(len(names))]
        height = [100 * t.accuracy for t in tallies]
        error = [[100 * abs(t.accuracy - t.interval[side]) for t in tallies] for side in (0, 1)]
        label = one.model.rstrip("/").rpartition("/")[2] + (" (compared)" if i else "")
        axes.bar(at, height, 0.92 * width, color=("#3b6ea5", "#b8c4d0")[i], label=label)
        axes.errorbar(at, height, yerr=error, fmt="none", ecolor="black", elinewidth=1, capsize=3)
    for k, name in enumerate(names):
        chance = [100 * run.tallies()[name].chance] * 2
        axes.plot([k - 0.45, k + 0.45], chance, color="#c0392b", ls="--", label=None if k else "chance")
    axes.set_xticks(range(len(names)), [f"{name}\nn = {run.tallies()[name].asked}" for name in names])
    axes.set(ylim=(0, 105), ylabel="accuracy on held-out questions (%)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", frameon=False)  # in one column: names of models are long
    try:
        figure.savefig(path, dpi=150)
    except OSError as e:
        raise UserError(f"--plot {path}: {e.strerror or e}") from None
