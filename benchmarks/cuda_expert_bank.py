"""Measure a bank of experts on a CUDA device, beside exllamav3 where it is installed.

    python benchmarks/cuda_expert_bank.py [--write]

The shape of Qwen3.6-35B-A3B: hidden 2048, intermediate 512, 256 experts, 8 for each token; gate, up, down, activation,
rotations and the weighted sum included. Three banks: widths mixed (a quarter of the experts e2m1@1, half e2m1@2, a
quarter int5@3: 2.0 bits in the mean), e2m1@2 and exl3-mul1@2 throughout. exllamav3 runs the tensors of the last; of its
ways (exl3_moe_coop, and exl3_moe with its gather, without the sorting that it needs before) the faster counts. Each
figure is the median time in microseconds of one call in a CUDA graph of 40 with different routing, drawn at random, so
that few experts are found in the L2 cache. With --write the table goes to benchmarks/results/cuda-expert-bank.md too.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cuda_setup import setup

from espalier_format.kernels import torch_decoder
from espalier_format.kernels.cuda.compiler import compile_cubin, cuda_core
from espalier_format.kernels.cuda.expert_bank import plan
from espalier_format.kernels.cuda.loading import architecture
from espalier_format.kernels.expert_bank import ExpertBankOperand, expert_bank
from espalier_format.kernels.expert_bank_layout import PROJECTIONS, BankGeometry, ExpertBankLayout

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 512, 256, 8
TOKENS = (1, 2, 4, 8, 16, 32, 64)
CALLS = 40
RESULT = Path(__file__).parent / "results" / "cuda-expert-bank.md"

BOUNDS = """
## What bounds it

Counted in the machine code, profiled with ncu and traced with clocks on one H200 (not repeated by the script):

- The inner loop takes 5.0 instructions a weight and lane at 2 and 3 bits: 2 byte permutations, 1 multiplication, 1
  look-up in shared memory, 0.2 to 0.3 funnel shifts, 0.25 mma, 0.5 for addresses and inputs. Permutations and shifts
  (64 lanes a cycle and multiprocessor), look-ups (32) and issue (128) would all be full at 25 to 29 weights a cycle; a
  loop of nothing but the four instructions that a weight needs reaches 29.0. Measured: 15 to 17, while about three of
  the four warps of a scheduler are in it.
- With 16 tokens, issue slots were busy in 53 % of the cycles, the arithmetic pipe in 49 %, the data path of shared
  memory in 58 % (a quarter of that for tiles, whose lanes read 16 bytes of different lines). In the inner loop a warp
  issues every 6.0 cycles: 1.0 for the instruction itself, 1.2 while another one issues, 1.1 for fixed latencies, 0.9
  for the arithmetic pipe, 0.6 for look-ups, 0.4 for instructions to arrive. No gain: whole tiles in a lane (registers
  spill: 25 % slower), quarters of tiles, 20 to 32 warps, windows taken by multiplication instead of permutation (4 %
  slower), looking numbers up one step ahead, smaller tasks towards the end.
- With one token it is a chain of waits: 2.1 µs until the routing is known and the first tiles are asked for; 6.7 µs
  for gate and up, of which 4.6 µs in the product; 1.8 µs until all others have done theirs; 4.8 µs for down, of
  which 2.4 µs in the product and 1.9 µs to gather, rotate and activate its inputs; 1.2 µs for the sum; the rest are
  handovers through the L2 cache (a fence takes 0.4 µs, a poll 0.4 µs), the slowest multiprocessor, and 1 µs between
  launches.
- Measured and dropped for few tokens: a cluster of thread blocks for each expert, whose sums of gate and up went to the
  shared memory of the others (28.7 µs at best for one token where tasks took 20.9, 45.9 for two where they took 28.7).
  This device holds 7 clusters of 16 such blocks at once, 15 of 8, 30 of 4 or 66 of 2, so that 8, 15.8 and 30.4 experts
  just miss one wave, and products were no faster. One warp of a team that prefetches for it: 1 to 2 % faster for 1 to 4
  tokens, 1 to 2 % slower for 8 and more. The next task worked out behind the product, the first tickets of a block by
  one atomic, sums of 8 slices loaded at once: up to 8 % slower.
""".splitlines()

Routing = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[torch.Tensor, Routing], torch.Tensor]


def layout_of(books: Sequence[str]) -> ExpertBankLayout:
    """Return the layout of a bank whose experts have these codebooks in all projections."""
    named = {name: list(books) for name in PROJECTIONS}
    return ExpertBankLayout.of(HIDDEN, INTERMEDIATE, named, dict.fromkeys(PROJECTIONS, (128, 128)))


def layouts() -> dict[str, ExpertBankLayout]:
    """Return the banks' layouts by name."""
    mixed = ["e2m1@1"] * (EXPERTS // 4) + ["e2m1@2"] * (EXPERTS // 2) + ["int5@3"] * (EXPERTS // 4)
    random.Random(0).shuffle(mixed)
    uniform = {name: layout_of([name] * EXPERTS) for name in ("e2m1@2", "exl3-mul1@2")}
    return {"mixed": layout_of(mixed)} | uniform


def random_bank(layout: ExpertBankLayout) -> ExpertBankOperand:
    """Return a bank of random bits whose products neither grow nor shrink much."""
    buffers = layout.empty_buffers("cuda")
    buffers["trellis"].random_(-32768, 32768)
    for name, projection in layout.projections.items():
        for expert in range(layout.num_experts):
            _, suh, svh = layout.views(buffers, name, expert)
            suh.normal_(std=projection.in_features**-0.5 / 2)
            svh.normal_()
    return ExpertBankOperand(layout, **buffers)


def compile_all(banks: Sequence[ExpertBankLayout]) -> None:
    """Compile the kernels side by side: they are found in the cache later."""
    limit: int = torch.cuda.get_device_properties(0).shared_memory_per_block_optin  # type: ignore[attr-defined]
    cuda_core()
    compile_cubin("expert_bank", plan(BankGeometry.read(banks[0].spelling), False, limit).macros, architecture(0))
    with ThreadPoolExecutor() as pool:
        for bank in banks[1:]:
            macros = plan(BankGeometry.read(bank.spelling), False, limit).macros
            pool.submit(compile_cubin, "expert_bank", macros, architecture(0))


def routings(tokens: int) -> list[Routing]:
    """Draw experts, different ones for a token, and weights."""
    drawn = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices for _ in range(CALLS)]
    return [(ids, torch.rand(tokens, TOP_K, device="cuda").half()) for ids in drawn]


def exact(bank: ExpertBankOperand, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the result in float64, from decoded weights."""
    result = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    tensors = bank.tensors()
    for token, (experts, weights) in enumerate(zip(*(each.tolist() for each in routing), strict=True)):
        for expert, factor in zip(experts, weights, strict=True):
            gate, up, down = (
                torch_decoder.decode_weight(
                    *bank.layout.views(tensors, name, expert), projection.codebook(expert), projection.rotation_in,
                    projection.rotation_out, projection.in_features, projection.out_features, torch.float32,
                ).double()
                for name, projection in bank.layout.projections.items()
            )  # fmt: skip
            row = x[token].double()
            result[token] += factor * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    return result


def graph_time(call: Call, x: torch.Tensor, drawn: Sequence[Routing], replays: int = 9) -> float:
    """Return the median microseconds of one call, from replays of a graph of calls with different routing."""
    for routing in drawn[:2]:
        call(x, routing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for routing in drawn:
            call(x, routing)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(drawn))
    return statistics.median(times)


def exllamav3_ways(bank: ExpertBankOperand) -> dict[str, Call]:
    """Return what exllamav3 has for the experts of a bank of exl3-mul1@2."""
    import exllamav3.ext

    ext = exllamav3.ext.exllamav3_ext
    tensors, bits = bank.tensors(), 2.0

    def table(name: str, place: int) -> torch.Tensor:
        return torch.tensor([bank.layout.views(tensors, name, e)[place].data_ptr() for e in range(EXPERTS)]).cuda()

    tables = [[table(name, place) for place in range(3)] for name in PROJECTIONS]
    flat = [each for projection in tables for each in projection]

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16, device="cuda")

    slots, rows = 256, 32
    scratch = [half(slots, HIDDEN), half(slots, HIDDEN), *(half(slots, INTERMEDIATE) for _ in range(3))]
    down = torch.empty(slots, HIDDEN, device="cuda")
    counters = torch.zeros(1 << 14, dtype=torch.int32, device="cuda")
    summed = torch.zeros(rows, HIDDEN, device="cuda")

    def coop(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        ext.exl3_moe_coop(
            x, *routing, -1, -1, HIDDEN, *flat, None, None, None, bits, bits, bits, False, True, 0, 0.0, True,
            *scratch, down, counters, summed, None, None,
        )  # fmt: skip
        return summed[: x.shape[0]]

    at_once = ext.exl3_moe_max_concurrency(0)
    buffers = [half(at_once, 256, size) for size in (HIDDEN, HIDDEN, INTERMEDIATE, INTERMEDIATE)]
    prepared: dict[int, tuple[Any, ...]] = {}

    def prepare(routing: Routing) -> tuple[Any, ...]:
        experts, weights = (each.flatten() for each in routing)
        order = experts.argsort()
        counts = torch.bincount(experts, minlength=EXPERTS + 1)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device="cuda"))
        start = counts.cumsum(0) - counts
        parts = torch.empty(order.numel(), HIDDEN, device="cuda")
        return experts, order // TOP_K, weights[order], counts, inverse, start, (counts > 0).long(), parts, routing

    def moe(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        if id(routing) not in prepared:
            prepared[id(routing)] = prepare(routing)
        experts, tokens, weights, counts, inverse, start, kind, parts, _ = prepared[id(routing)]
        out = summed[: x.shape[0]]
        ext.exl3_moe(
            x, out, counts, tokens, weights, *buffers, 0, bits, bits, bits, *flat, *(False, True) * 3, 0.0, -1, parts,
            start, 1, 256, 16,
        )  # fmt: skip
        ext.exl3_moe_gather(out, parts, experts, inverse, start[:EXPERTS], start[:EXPERTS], kind[:EXPERTS], weights)
        return out

    return {"exl3_moe_coop": coop, "exl3_moe": moe}


def call_of(bank: ExpertBankOperand) -> Call:
    """Return our call."""
    return lambda x, routing: expert_bank(x, *routing, bank)


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative root mean square error."""
    return float((result.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def measure(report: Callable[[str], object]) -> str:
    """Measure everything, hand over the report, in Markdown, after each row, and return it."""
    found = layouts()
    compile_all(list(found.values()))
    banks = {name: random_bank(layout) for name, layout in found.items()}
    has_peer = importlib.util.find_spec("exllamav3") is not None
    peers = exllamav3_ways(banks["exl3-mul1@2"]) if has_peer else {}
    lines = [
        "| tokens | experts | mixed ratio | e2m1@2 | mul1@2 | mixed µs | e2m1@2 | mul1@2 | exllamav3 | by | GB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for tokens in TOKENS:
        drawn = routings(tokens)
        used = statistics.mean(len(set(ids.flatten().tolist())) for ids, _ in drawn)
        x = torch.randn(tokens, HIDDEN, device="cuda").half()
        times = {name: graph_time(call_of(bank), x, drawn) for name, bank in banks.items()}
        theirs = {}
        for name, call in peers.items():
            if tokens <= 32:  # more do not fit what exllamav3 keeps for a batch
                for routing in drawn:
                    call(x, routing)  # what exl3_moe needs sorted is sorted here, outside of the graph
                theirs[name] = graph_time(call, x, drawn)
        if tokens <= 2:
            for name, bank in banks.items():
                expected = exact(bank, x, drawn[0])
                errors = [error_of(call_of(bank)(x, drawn[0]), expected)]
                errors += [error_of(call(x, drawn[0]), expected) for call in peers.values() if name == "exl3-mul1@2"]
                print(
                    tokens, name, "relative errors, ours first:", *(f"{error:.1e}" for error in errors), file=sys.stderr
                )
                if errors[0] > 2e-3:
                    raise SystemExit(f"{name} is wrong")
        best = min(theirs, key=lambda name: theirs[name]) if theirs else ""
        ratios = [f"{theirs[best] / times[name]:.2f}" if best else "–" for name in banks]
        rate = 3 * HIDDEN * INTERMEDIATE * used * 2 / 8 / times["mixed"] / 1000
        shown = [f"{times[name]:.1f}" for name in banks] + [f"{theirs[best]:.1f}" if best else "–", best or "–"]
        lines.append(f"| {tokens} | {used:.1f} | {' | '.join(ratios + shown)} | {rate:.0f} |")
        print(lines[-1], file=sys.stderr, flush=True)
        report(text := "\n".join([*head(), *lines, *BOUNDS]) + "\n")
    return text


def head() -> list[str]:
    """Say what was measured on."""
    return [
        "# A bank of experts on a CUDA device",
        "",
        setup(),
        "",
        "Made by `python benchmarks/cuda_expert_bank.py --write`; its text says how. Ratio: time of exllamav3 over",
        "ours, so above 1 is faster. GB/s: compressed bytes of the experts used, at 2.0 bits, over the time of the",
        "mixed bank.",
        "",
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"also write {RESULT.name}")
    arguments = parser.parse_args()

    def report(text: str) -> None:
        if arguments.write:
            RESULT.write_text(text, encoding="utf-8")

    print(measure(report))


if __name__ == "__main__":
    main()
