"""What a replay computes, beside what the journal says.

Question  Is this the script of the run, and are its numbers those of the workers?
Holds     Another script is refused by what it does differently (``Diverged``); another number is a finding. What each
          ticket says is compared as it is reached, so the first difference has a round and a worker.
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

# A loss per sample, or a norm, below this is compared as if it were this: nothing is left of it but rounding.
_LEAST = 1e-6
# Say when a worker is lost and where checkpoints go, and nothing about what is computed; a loss scale is taken out
# again, and a script that was made for a GPU has none where it is replayed without one.
_OF_NO_EFFECT = ("dead_after", "hung_after", "checkpoint", "scaler")

NAMES = {Kind.TRAIN: "batches", Kind.EVALUATE: "evaluate"}
"""What the script calls to open a phase."""


def refuse_other_settings(offer: JoinRequest, agreed: PolicyRecord | None) -> None:
    """The script must join as the run's did."""
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
    """The script must open the phase that the run opened; ``limits``: of samples and updates, as the script has it."""
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
    """Notes every number that differs. ``weights`` is a file that ``run.save`` wrote."""

    def __init__(self, findings: Findings, weights: Path | None) -> None:
        self._findings = findings
        self._weights = weights
        self._measured: dict[int, float] = {}

    def ticket(
        self, part: TracedContribution, weight: float, loss: float, norm: float | None, reference: float
    ) -> None:
        """All of a contribution is computed; ``norm`` of its gradient, squared: None if that or the loss is no number.

        ``reference``: the batch in units of which gradients are summed.
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
        """The learning rate that an update is made with."""
        self._compare("the learning rate", here, record.rate, 0.0, record.round, "the group")

    def measure(self, taken: tuple[int, float], record: RoundRecord) -> None:
        """The norm of a mean gradient that the run took, and told in a later round; ``taken``: here, with the last."""
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
        """One worker's part of an exchange of an ``evaluate``, after round ``number``."""
        line = part.line
        assert line is not None
        self._compare("evaluate's count", count, line.weight, _LEAST, number, part.worker)
        if math.isfinite(total):
            floor = _LEAST * max(1.0, abs(line.weight))
            self._compare("evaluate's sum", total, line.loss_sum, floor, number, part.worker)

    def result(self, here: float, recorded: float, number: int, name: str = "") -> None:
        """The mean that ``evaluate`` returned, after round ``number``; ``name``: of several ones."""
        self._compare(
            f"the result of evaluate{f' ({name})' if name else ''}", here, recorded, _LEAST, number, "the group"
        )

    def weights(self, model: nn.Module, training: Training, number: int) -> None:
        """The model's plain weights after round ``number`` beside those of the file, if that is of this round."""
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
