"""Comparison of what a replay computes with what the journal says.

Question  Is this the script of the run, and are its numbers those of the workers?
Holds     A script that does something else is refused with what it does differently (``Diverged``). A different number
          is noted as a finding. Tickets are compared in the order of the run, so the first difference has a round and
          a worker.
Source    docs/design/0012-replay.md.
"""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from pliant.core.journal.records import PhaseRecord, PolicyRecord, RoundRecord
from pliant.core.journal.trace import TracedContribution
from pliant.core.tickets import Flag, Kind
from pliant.errors import Diverged, UsageError
from pliant.replay.findings import Difference, Findings, of_weights
from pliant.tensors.weights import open_weights
from pliant.worker.elastic.signature import signature, summary
from pliant.worker.script.calls import ScriptCall
from pliant.worker.session import JoinRequest
from pliant.worker.training import Training

# A loss per sample, or a norm, that is smaller counts as this number in a relative difference: it is mere rounding.
_LEAST = 1e-6
# The first three say nothing about what is computed. A loss scale is divided out again, and a script written for a GPU
# has no scaler when it is replayed on a CPU.
_OF_NO_EFFECT = ("dead_after", "hung_after", "checkpoint", "scaler")

NAMES = {Kind.TRAIN: "batches", Kind.EVALUATE: "evaluate"}
"""What the script calls to open a phase."""


def refuse_other_settings(offer: JoinRequest, agreed: PolicyRecord | None) -> None:
    """Raise ``Diverged`` if the script joins with other settings, or another model, than the run's script."""
    if agreed is None:
        raise UsageError("the journal has no phase: the run ended before it trained, and there is nothing to replay")
    for name, recorded in agreed.settings.items():
        here = offer.agreed.get(name)
        if here != recorded and name not in _OF_NO_EFFECT:
            raise Diverged(f"the script joins with {name}={here}, the run had {name}={recorded}")
    here = summary(signature(offer.model, offer.optimizer, offer.agreed))
    if agreed.parameters and agreed.parameters != here:
        raise Diverged(f"the script trains another model: {here}; the run trained {agreed.parameters}")


def refuse_other_call(
    call: ScriptCall, limits: tuple[int | None, int | None], record: PhaseRecord, agreed: PolicyRecord | None
) -> None:
    """Raise ``Diverged`` if the script opens another phase than the run did.

    limits   of samples and of updates, as the script has set them in ``epochs``
    record   the phase that the run opened
    agreed   the policy in force in the run
    """
    where = f"phase {record.phase} (epoch {record.epoch + 1})"
    if record.task != call.kind.name.lower():
        there = NAMES[Kind[record.task.upper()]]
        raise Diverged(f"{where}: the script calls {NAMES[call.kind]}, the run called {there}")
    for what, here, there in (
        ("is in epoch", call.epoch + 1, record.epoch + 1),
        ("has samples:", call.samples.length, record.length),
        ("takes the samples in an order with the checksum", call.samples.checksum, record.order),
    ):
        if here != there:
            raise Diverged(f"{where}: the script {what} {here}, the run {there}")
    recorded = (agreed.samples_limit, agreed.updates_limit) if agreed is not None else (None, None)
    for name, here, there in zip(("samples", "steps"), limits, recorded, strict=True):
        if here != there:
            raise Diverged(f"{where}: the script trains on {name}={here}, the run on {name}={there}")


class Comparison:
    """Notes every number that differs. ``weights`` is a file written by ``run.save``."""

    def __init__(self, findings: Findings, weights: Path | None) -> None:
        self._findings = findings
        self._weights = weights
        self._measured: dict[int, float] = {}

    def ticket(
        self, part: TracedContribution, weight: float, loss: float, norm: float | None, reference: float
    ) -> None:
        """Compare a contribution, all of which is computed, with its ticket.

        weight      sum of the weights of its micro-batches
        loss        sum of its weighted losses
        norm        squared norm of its gradient; None if that or the loss is not finite
        reference   the batch in units of which gradients are summed
        """
        self._findings.contributions += 1
        self._findings.dropped += part.line is None
        if part.line is None:
            return
        line, number, worker = part.line, part.round, part.worker
        self._compare("the weight", weight, line.weight, _LEAST, number, worker)
        finite = not line.flags & Flag.NONFINITE
        if (norm is not None) != finite:
            here, there = (1.0, math.inf) if norm is not None else (math.inf, 1.0)
            self._findings.note(Difference(math.inf, "loss or gradient (1: finite)", number, worker, here, there))
        elif norm is not None:
            self._compare("the loss", loss, line.loss_sum, _LEAST * max(1.0, line.weight), number, worker)
            mean = reference / weight if weight > 0 else 0.0
            square = norm * mean * mean
            self._compare("the gradient's squared norm", square, line.squared_norm, _LEAST**2, number, worker)

    def rate(self, here: float, record: RoundRecord) -> None:
        """Compare the learning rate of an update."""
        self._compare("the learning rate", here, record.rate, 0.0, record.round, "the group")

    def measure(self, taken: tuple[int, float], record: RoundRecord) -> None:
        """Compare the norm of a mean gradient, which the run measured in one round and reported in a later one.

        ``taken``: the last round in which it was measured here, and the squared norm.
        """
        number, square = taken
        if number:
            self._measured[number] = square
        if record.measured is not None:
            told, recorded = record.measured
            here = self._measured.pop(told, None)
            if here is not None:
                what = "the squared norm of the mean gradient"
                self._compare(what, here, recorded, _LEAST**2, told, "the group")

    def evaluated(self, part: TracedContribution, total: float, count: float, number: int) -> None:
        """Compare one worker's part of an exchange of an ``evaluate``, after round ``number``."""
        line = part.line
        assert line is not None
        self._compare("evaluate's count", count, line.weight, _LEAST, number, part.worker)
        if math.isfinite(total):
            floor = _LEAST * max(1.0, abs(line.weight))
            self._compare("evaluate's sum", total, line.loss_sum, floor, number, part.worker)

    def result(self, here: float, recorded: float, number: int, name: str = "") -> None:
        """Compare a mean that ``evaluate`` returned after round ``number``; ``name``: its key in a dict of means."""
        self._compare(
            f"the result of evaluate{f' ({name})' if name else ''}", here, recorded, _LEAST, number, "the group"
        )

    def weights(self, model: nn.Module, training: Training, number: int) -> None:
        """Compare the model's plain weights after round ``number`` with the file, if that is of this round."""
        path, findings = self._weights, self._findings
        if path is None:
            findings.not_compared = "there is no file; give one that run.save wrote with --weights"
        if path is None or findings.compared or findings.not_compared:
            return
        training.back()
        try:
            with training.plain(), open_weights(path) as file:
                there = (file.metadata() or {}).get("round")
                if there is not None and int(there) != number:
                    findings.not_compared = f"those in {path.name} are of round {there}"
                    return
                findings.weights = of_weights(model.state_dict(), file, findings.last_round)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"cannot read weights from {path}: {error}; give a file that run.save wrote") from None
        findings.compared = f"the weights in {path.name}"

    def _compare(self, what: str, here: float, there: float, floor: float, number: int, worker: str) -> None:
        apart = abs(here - there)
        scale = max(abs(here), abs(there), floor)
        relative = apart / scale if apart else 0.0
        if math.isnan(relative):
            relative = math.inf
        self._findings.note(Difference(relative, what, number, worker, here, there))
