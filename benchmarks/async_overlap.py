"""Wall-clock time per step over how stale training may be, under rollout latency with a long tail.

    python benchmarks/async_overlap.py --json benchmarks/results/async_overlap.json

Each run is the same recipe (a tiny model, 8 prompts x 4 samples a step) with an environment that takes its time: a
Pareto latency for every episode, drawn from the episode alone, so that every run waits for the same environment. The
first steps, which fill the pipeline, are left out. ``ratio`` is seconds per step at eta 0 ÷ at the largest eta, for the
longest tail.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from areal import Trainer
from areal.metrics.logger import read_metrics
from areal.rollout.trajectory import Trajectory
from areal.workflows import RLVRWorkflow
from report import argument_parser, write_report

MODEL = Path(__file__).parents[1] / "configs" / "models" / "tiny_qwen3_moe"
TAILS = {"none": 0.0, "moderate": 3.0, "long": 1.2}
"""Pareto exponents; a smaller one has a longer tail. 0 waits for the scale alone."""
SCALE_S, LONGEST_S = 0.05, 3.0
WARM_UP = 6


class SlowEnvironment(RLVRWorkflow):
    """Sleeps after each episode as long as the environment of that episode takes."""

    def __init__(self, exponent: float) -> None:
        super().__init__("areal.rewards.reasoning_gym.reward")
        self.exponent = exponent

    async def run(self, data: dict[str, Any], **kwargs: Any) -> Trajectory:
        trajectory = await super().run(data, **kwargs)
        uniform = random.Random(f"{kwargs['episode'].order}").random()
        stretch = (1 - uniform) ** (-1 / self.exponent) if self.exponent else 1.0
        await asyncio.sleep(min(LONGEST_S, SCALE_S * stretch))
        return trajectory


def run(eta: int, exponent: float, steps: int, folder: Path) -> list[dict[str, float]]:
    """Metrics of the steps after the pipeline has filled."""
    config = {
        "experiment_name": "async_overlap",
        "cluster": {"fileroot": str(folder)},
        "total_train_steps": WARM_UP + steps,
        "actor": {"path": str(MODEL), "init_from_scratch": True, "dtype": "float32"},
        "gconfig": {"n_samples": 4, "max_new_tokens": 8},
        "rollout": {"max_head_offpolicyness": eta, "num_threads": 1},
        "train_dataset": {
            "path": "reasoning_gym/spell_backward",
            "batch_size": 8,
            "dataset_kwargs": {"size": 8 * (WARM_UP + steps), "min_word_len": 3, "max_word_len": 6},
        },
        "evaluator": {"eval_before_train": False},
    }
    result = Trainer(config, workflow=SlowEnvironment(exponent)).train()
    return [row for row in read_metrics(result.run_dir / "metrics.jsonl") if row["step"] > WARM_UP]


def main() -> None:
    parser = argument_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=15, help="measured steps per run (default 15)")
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 2, 4])
    args = parser.parse_args()

    samples: dict[str, list[float]] = {}
    staleness: dict[str, float] = {}
    for tail, exponent in TAILS.items():
        for eta in args.etas:
            folder = Path(tempfile.mkdtemp())
            try:
                rows = run(eta, exponent, args.steps, folder)
            finally:
                shutil.rmtree(folder)
            name = f"tail {tail}, eta {eta}"
            samples[name] = [row["time/step"] for row in rows]
            staleness[name] = max(row["staleness/max"] for row in rows)
            mean, slowest = sum(samples[name]) / len(samples[name]), max(samples[name])
            print(
                f"{name:24s} {mean:6.3f} s/step  slowest {slowest:6.3f} s  staleness <= {staleness[name]:.0f}",
                flush=True,
            )
    mean_s = {name: sum(values) / len(values) for name, values in samples.items()}
    ratios = {tail: mean_s[f"tail {tail}, eta 0"] / mean_s[f"tail {tail}, eta {max(args.etas)}"] for tail in TAILS}
    write_report(
        args.json,
        unit="s/step",
        samples=samples,
        ratio=ratios["long"],
        mean=mean_s,
        ratios=ratios,
        staleness_max=staleness,
        latency={"scale_s": SCALE_S, "longest_s": LONGEST_S, "pareto_exponents": TAILS},
    )
    print(json.dumps({"eta 0 ÷ eta " + str(max(args.etas)): ratios}))


if __name__ == "__main__":
    main()
