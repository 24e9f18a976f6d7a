"""How long a user waits for ``import archon`` and ``archon-run --help``, each in a new process.

    python benchmarks/import_time.py --json benchmarks/results/import_time.json

Exits with 1 when a median exceeds its limit.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from report import argument_parser, write_report

COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
    "import archon": [sys.executable, "-c", "import archon"],
    "archon-run --help": [str(Path(sys.executable).with_name("archon-run")), "--help"],
}
LIMITS_S = {"import archon": 3.0, "archon-run --help": 1.0}


def wall_time(command: list[str]) -> float:
    """Seconds that ``command`` takes from start to exit."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return time.perf_counter() - start


def main() -> None:
    parser = argument_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7, help="processes per command (default 7)")
    args = parser.parse_args()

    for command in COMMANDS.values():
        wall_time(command)  # compiles bytecode and fills the disk cache
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(args.runs):  # interleaved, so that a busy moment hits all of them alike
        for name, command in COMMANDS.items():
            samples[name].append(wall_time(command))

    report = write_report(args.json, unit="s", samples=samples, limit=LIMITS_S)
    for name, seconds in report["median"].items():
        limit = f"  (limit {LIMITS_S[name]:g} s)" if name in LIMITS_S else ""
        print(f"{name:20s} {seconds:6.2f} s{limit}")
    if slow := [name for name, limit in LIMITS_S.items() if report["median"][name] > limit]:
        sys.exit(f"too slow: {', '.join(slow)}")


if __name__ == "__main__":
    main()
