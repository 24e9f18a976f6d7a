"""Tokens per second and peak memory of one train step against transformers: same model, same tokens, one run.

    python benchmarks/train_step_cpu.py --json benchmarks/results/train_step_cpu.json

Two batches: RL-shaped (lengths spread four times, half of each sequence is prompt that trains nothing) and equal
lengths without a mask. transformers pads its batch, as it must; Archon packs. Both run AdamW over fp32 weights, in
fp32 and in bf16 compute (transformers: autocast). Each contender runs in a process of its own, alternating;
transformers with every implementation of its experts that fits (``batched_mm`` copies the weights of its experts for
each token), of which the faster counts.

``peak_share`` divides the operations that the model needs by the time and by the FLOP/s of one large product, measured
in the same process. ``head_seconds`` times linear_logprob, forward and backward, by the part of its rows that train.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import archon
from archon.bench import model_flops
from archon.device import peak_memory_bytes
from archon.models.config import ModelConfig
from archon_kernels.linear_logprob import linear_logprob
from report import argument_parser, write_report

VOCAB = 32_000
SHAPES = {"rl": (64, 256, 0.5), "equal": (160, 160, 0.0)}
"""Shortest and longest sequence, and which part of each is prompt."""
LOSS = archon.LossSpec("archon.losses.SupervisedLoss")
CONTENDERS = ("archon", "transformers grouped_mm", "transformers eager")
TRAINED = (1.0, 0.75, 0.5, 0.25)
"""Parts of the rows that the head is timed with."""


def make_model(folder: Path) -> None:
    """6 layers, width 512, 8 experts of which 2 are active."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def make_batch(shape: str, tokens: int) -> archon.PackedBatch:
    shortest, longest, prompt = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    rows, total = [], 0
    while total < tokens:
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        mask = torch.arange(length) >= max(1, round(prompt * length))
        rows.append({"input_ids": torch.randint(VOCAB, (length,), generator=generator), "loss_mask": mask})
        total += length
    return archon.PackedBatch.from_sequences(rows)


def ours(folder: Path, dtype: str, batch: archon.PackedBatch) -> Callable[[], float]:
    engine = archon.Engine.from_pretrained(
        folder, dtype=dtype, optimizer=archon.OptimizerConfig(lr=1e-5), max_tokens_per_mb=batch.num_tokens
    )
    return lambda: engine.train_step(batch, LOSS)["loss"]


def theirs(folder: Path, dtype: str, batch: archon.PackedBatch, experts: str) -> Callable[[], float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation=experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    sequences = batch.input_ids.split(batch.lengths.tolist())
    masks = batch.loss_mask.split(batch.lengths.tolist())
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(
        [row.where(mask, -100) for row, mask in zip(sequences, masks, strict=True)],
        batch_first=True,
        padding_value=-100,
    )
    attention = torch.arange(ids.shape[1]) < batch.lengths[:, None]

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(input_ids=ids, attention_mask=attention).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def product_flops(dtype: str) -> float:
    """FLOP/s of a matrix product as large as the head's, the best of several: what a step could reach."""
    a, b = (torch.randn(2048, size).to(getattr(torch, dtype)) for size in (1024, 4096))
    a = a.t().contiguous()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2.0 * a.shape[0] * a.shape[1] * b.shape[1] / min(seconds)


def measure(contender: str, folder: Path, shape: str, dtype: str, tokens: int, steps: int) -> dict[str, object]:
    """Runs in a process of its own: seconds of each step after one warm-up, losses, and peak memory."""
    batch = make_batch(shape, tokens)
    name, _, experts = contender.partition(" ")
    step = ours(folder, dtype, batch) if name == "archon" else theirs(folder, dtype, batch, experts)
    losses, seconds = [step()], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds,
        "losses": losses,
        "peak_memory_bytes": peak_memory_bytes(torch.device("cpu")),
        "tokens": batch.num_tokens,
        "model_flops": model_flops(ModelConfig.from_folder(folder), batch.lengths.tolist()),
        "product_flops": product_flops(dtype),
    }


def measure_head(tokens: int, rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of the LM head's forward and backward in bf16, by the part of its rows that train; interleaved."""
    hidden = torch.randn(tokens, 512).bfloat16().requires_grad_()
    weight = (torch.randn(VOCAB, 512) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(VOCAB, (tokens,))
    seconds: dict[str, list[float]] = {f"{part}": [] for part in TRAINED}
    for measured in [False] + [True] * rounds:
        for part in TRAINED:
            mask = torch.arange(tokens) < part * tokens
            start = time.perf_counter()
            linear_logprob(hidden, weight, targets, mask_M=mask).logprobs.sum().backward()
            if measured:
                seconds[f"{part}"].append(time.perf_counter() - start)
            hidden.grad = weight.grad = None
    return seconds


def main() -> None:
    parser = argument_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per step, prompts included (default 2048)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per process (default 3)")
    parser.add_argument("--rounds", type=int, default=2, help="processes per contender, alternating (default 2)")
    parser.add_argument("--measure", nargs=4, metavar=("CONTENDER", "FOLDER", "SHAPE", "DTYPE"), help="one process")
    args = parser.parse_args()
    if args.measure:
        contender, folder, shape, dtype = args.measure
        print(json.dumps(measure(contender, Path(folder), shape, dtype, args.tokens, args.steps)))
        return

    samples: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    losses: dict[str, list[float]] = {}
    cases = [(shape, dtype) for shape in SHAPES for dtype in ("bfloat16", "float32")]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for _ in range(args.rounds):
            for shape, dtype in cases:
                for contender in CONTENDERS:
                    command = [sys.executable, __file__, "--tokens", str(args.tokens), "--steps", str(args.steps)]
                    command += ["--measure", contender, folder, shape, dtype]
                    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
                    found = json.loads(done.stdout.splitlines()[-1])
                    name = f"{shape} {dtype} {contender}"
                    reached = found["model_flops"] / found["product_flops"]
                    samples.setdefault(name, []).extend(found["tokens"] / s for s in found["seconds"])
                    shares.setdefault(name, []).extend(reached / s for s in found["seconds"])
                    memory[name] = max(memory.get(name, 0), found["peak_memory_bytes"])
                    losses[name] = found["losses"]
    head = measure_head(args.tokens)
    speed = {name: median(values) for name, values in samples.items()}
    rival = {  # the fastest of the others, by case
        case: max((f"{case} {other}" for other in CONTENDERS[1:]), key=speed.__getitem__)
        for case in (f"{shape} {dtype}" for shape, dtype in cases)
    }
    ratios = {case: speed[f"{case} archon"] / speed[name] for case, name in rival.items()}
    head_ratio = {part: median(seconds) / median(head["1.0"]) for part, seconds in head.items()}
    write_report(
        args.json,
        unit="tokens/s",
        samples=samples,
        ratio=ratios["rl bfloat16"],
        ratios=ratios,
        peak_share={name: median(values) for name, values in shares.items()},
        peak_memory_bytes=memory,
        losses=losses,
        head_seconds=head,
        head_ratio=head_ratio,
    )
    for case, theirs_name in rival.items():
        for name in (f"{case} archon", theirs_name):
            print(
                f"{name:40s} {speed[name]:7.0f} tokens/s  {median(shares[name]):4.0%} of a product's FLOP/s  "
                f"{memory[name] / 2**30:5.2f} GiB  loss {losses[name][-1]:.5f}"
            )
        print(f"{case:40s} ratio {ratios[case]:.2f}")
    print("head's time by the part that trains: " + ", ".join(f"{part}: {x:.2f}" for part, x in head_ratio.items()))


if __name__ == "__main__":
    main()
