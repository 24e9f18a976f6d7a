"""Registers, shared memory and spills of every Triton kernel, compiled ahead of time for devices that are not here.

    python benchmarks/kernels_compile.py --json benchmarks/results/kernels_compile.json --page docs/kernels.md

Exits with 1 when a kernel does not compile, needs more shared memory than a device has, or spills where it must not.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from report import argument_parser, write_report

PAGE_BORDERS = ("<!-- written by benchmarks/kernels_compile.py -->", "<!-- end -->")


@dataclass(frozen=True)
class Target:
    """A device to compile for: Triton's backend, architecture and warp size, and its shared memory per block."""

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    may_spill: bool


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024, may_spill=True),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, may_spill=False),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, may_spill=True),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, may_spill=True),
}


def launches() -> list[tuple[str, int]]:
    """Every way that a kernel of archon_kernels is launched: its module, and its index in ``COMPILED``."""
    import archon_kernels.triton_ops as package

    found = []
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        entries = importlib.import_module(f"{package.__name__}.{module}").COMPILED
        found.extend((module, index) for index in range(len(entries)))
    return found


def compile_one(launch: tuple[str, int], name: str) -> dict[str, Any]:
    """Compile one launch for the target ``name``; the row says what it needs, or why that failed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, index = launch
    entry = importlib.import_module(f"archon_kernels.triton_ops.{module}").COMPILED[index]
    target = TARGETS[name]
    row = {
        "module": module,
        "kernel": entry.kernel.__name__,
        "variant": entry.variant,
        "target": name,
        "num_warps": entry.num_warps,
        "num_stages": entry.num_stages,
    }
    # As launched on a model: storage is aligned, and sizes are multiples of 16 where a launch looks at them.
    kinds = [(entry.signature[parameter.name], parameter) for parameter in entry.kernel.params]
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (kind, parameter) in enumerate(kinds)
        if kind[0] == "*" or (kind[0] in "iu" and not parameter.do_not_specialize)
    }
    source = ASTSource(entry.kernel, dict(entry.signature), constexprs=dict(entry.constants), attrs=aligned)
    start = time.perf_counter()
    try:
        compiled = triton.compile(
            source,
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={"num_warps": entry.num_warps, "num_stages": entry.num_stages},
        )
        usage = _cuda_usage(compiled.asm["cubin"]) if target.backend == "cuda" else _amd_usage(compiled.asm["amdgcn"])
    except Exception as error:  # whatever the compiler says belongs into the table, beside the other kernels
        return {**row, "error": f"{type(error).__name__}: {error}"[:2000]}
    return {**row, **usage, "shared_bytes": compiled.metadata.shared, "seconds": time.perf_counter() - start}


def _cuda_usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes per thread on the stack, where the assembler puts what it spills."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": usage["REG"], "spilled": usage["STACK"] + usage["LOCAL"]}


def _amd_usage(assembly: str) -> dict[str, int]:
    """Vector registers per thread, and how many vector and scalar registers are spilled."""
    usage = {key: int(value) for key, value in re.findall(r"^\s*\.(\w+_count):\s+(\d+)", assembly, re.MULTILINE)}
    return {"registers": usage["vgpr_count"], "spilled": usage["vgpr_spill_count"] + usage["sgpr_spill_count"]}


def faults(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong, one sentence each; none when every kernel fits every target."""
    found = []
    for row in rows:
        target = TARGETS[row["target"]]
        who = f"{label(row)} for {row['target']}"
        if "error" in row:
            found.append(f"{who} does not compile: {row['error']}")
            continue
        if row["shared_bytes"] > target.shared_bytes:
            found.append(f"{who} needs {row['shared_bytes']} bytes of shared memory of {target.shared_bytes}")
        if row["spilled"] and not target.may_spill:
            found.append(f"{who} spills {row['spilled']} bytes of registers per thread")
    return found


def label(row: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (f"{row['module']}.{row['kernel'].lstrip('_')}", row["variant"])))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one line per launch, one column per target."""
    lines = [f"| kernel | {' | '.join(TARGETS)} |", f"|---|{'---|' * len(TARGETS)}"]
    for name in dict.fromkeys(map(label, rows)):
        cells = {row["target"]: row for row in rows if label(row) == name}
        shown = (
            f"{cells[t]['registers']} / {cells[t]['shared_bytes'] / 1024:.3g} / {cells[t]['spilled']}"
            if "error" not in cells[t]
            else "does not compile"
            for t in TARGETS
        )
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def write_page(page: Path, markdown: str) -> None:
    """Put the table between its borders in a page.

    Raises:
        ValueError: the page lacks the borders.
    """
    before, first, rest = page.read_text(encoding="utf-8").partition(PAGE_BORDERS[0])
    _, last, after = rest.partition(PAGE_BORDERS[1])
    if not first or not last:
        raise ValueError(
            f"{page} has no place for the table: add a line {PAGE_BORDERS[0]} and a line {PAGE_BORDERS[1]}"
        )
    page.write_text(f"{before}{first}\n{markdown}\n{last}{after}", encoding="utf-8")


def main() -> None:
    parser = argument_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="compile at a time")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its borders")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: kernels of the interpreter cannot be compiled; unset it")

    todo = launches()
    rows: list[dict[str, Any]] = []
    samples: dict[str, list[float]] = {}
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for name in TARGETS:
            found = list(pool.map(partial(compile_one, name=name), todo, chunksize=4))
            samples[name] = [row.pop("seconds") for row in found if "seconds" in row]
            rows += found
    write_report(args.json, unit="s", samples=samples, packages=("torch", "triton"), kernels=rows)
    print("registers / KiB of shared memory / spilled (bytes on sm, registers on gfx)\n")
    print(table(rows))
    if args.page is not None:
        write_page(args.page, table(rows))
    if wrong := faults(rows):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
