"""The picture of a run: reward of every training step, its trend, and the held-out evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from areal.metrics.logger import read_metrics

_TRAINING, _HELD_OUT = "#2b6cb0", "#c05621"


def plot_reward(metrics_path: str | Path, png_path: str | Path, title: str | None = None) -> None:
    """Draw ``reward/mean`` and ``eval/reward`` against the training step.

    Args:
        metrics_path: a run's ``metrics.jsonl``.
        png_path: the picture; its folder is made where it is missing.
        title: None takes ``<experiment>/<trial>`` from the folder of the metrics.

    Raises:
        ValueError: the file holds neither metric.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    metrics_path, png_path = Path(metrics_path), Path(png_path)
    rows = list(read_metrics(metrics_path))
    training = _series(rows, "reward/mean")
    held_out = _series(rows, "eval/reward")
    if not training and not held_out:
        raise ValueError(f"{metrics_path} holds no reward/mean and no eval/reward: nothing to draw")

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        steps, rewards = zip(*training, strict=True)
        width = 2 * (len(rewards) // 20) + 1
        axes.plot(steps, rewards, color=_TRAINING, alpha=0.3, linewidth=1, label="training, each step")
        axes.plot(steps, smooth(rewards, width), color=_TRAINING, linewidth=2, label=f"training, mean of {width} steps")
    if held_out:
        steps, rewards = zip(*held_out, strict=True)
        axes.plot(steps, rewards, "o--", color=_HELD_OUT, linewidth=1.2, markersize=6, label="held-out prompts")
        for step, reward in {held_out[0], held_out[-1]}:
            above = reward >= held_out[0][1] and step != held_out[0][0]
            axes.annotate(
                f"{reward:.3f}",
                (step, reward),
                (0, 10 if above else -18),
                textcoords="offset points",
                ha="center",
                color=_HELD_OUT,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )
    axes.set_title(title or "/".join(metrics_path.absolute().parts[-3:-1]))
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=150)


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Centred moving average over ``width`` values (odd); over those that exist near the ends."""
    reach = width // 2
    return [mean(values[max(0, index - reach) : index + reach + 1]) for index in range(len(values))]


def _series(rows: list[dict], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]
