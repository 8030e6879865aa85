"""``python -m benchmarks.digest [--parameters N]``: what the digest of the weights costs.

Question  How much CPU time does the drift guard add to a round of a large model?
Holds     Digest and round are measured in turn in one process with one thread, as CPU time. The round is the least that
          a worker does: one micro-batch of 32 samples and one update, no exchange. Ratio: mean digest over mean round.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from pliant.core import drift
from pliant.tensors.digest import WeightsDigest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digest")
    parser.add_argument("--parameters", type=int, default=30_000_000, metavar="N")
    parser.add_argument("--rounds", type=int, default=64, metavar="N")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = round((arguments.parameters / 6) ** 0.5)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    weights = list(model.parameters())
    fingerprint = WeightsDigest(weights, parts=drift.PARTS, reduces=False)
    x = torch.randn(32, width)
    for turn in range(fingerprint.parts):
        fingerprint.of(turn)
    rounds_s = digests_s = 0.0
    for number in range(-2, arguments.rounds):
        start = time.process_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        middle = time.process_time()
        if drift.is_due(number, drift.EVERY):
            fingerprint.of(drift.turn(number, drift.EVERY))
        if number >= 0:
            rounds_s += middle - start
            digests_s += time.process_time() - middle
    size = sum(p.numel() for p in weights)
    each_ms, digest_ms = 1e3 * rounds_s / arguments.rounds, 1e3 * digests_s / arguments.rounds
    print(
        f"{size / 1e6:.1f} million parameters: {digest_ms:.3f} ms of digest in a round of {each_ms:.1f} ms: "
        f"{digest_ms / each_ms:.3%}"
    )


if __name__ == "__main__":
    main()
