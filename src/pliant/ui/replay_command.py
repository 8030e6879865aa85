"""``pliant replay``: run the script again, with the journal instead of workers.

Question  How is a recorded run replayed from the command line, and what is printed?
Holds     The script runs as ``__main__`` with its arguments, in this process. A script, arguments or settings that are
          not those of the run are refused by name before anything is computed.
Source    docs/design/0012-replay.md, docs/guide/replay.md.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pliant.core.journal import records as journal
from pliant.core.journal.records import RunRecord
from pliant.core.journal.trace import score
from pliant.errors import Diverged, UsageError
from pliant.replay import replayer
from pliant.replay.findings import Difference, Findings
from pliant.tensors.weights import FINAL
from pliant.worker import session


def replay(
    path: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    since: int | None = None,
    until: int | None = None,
    weights: Path | None = None,
) -> Findings:
    """Compute the run in the journal at ``path`` again, up to round ``until``.

    ``since``: start from the last checkpoint up to that round. ``weights``: the file to compare the final weights with.
    """
    with path.open("rb") as lines:
        # A line torn by a crash ends the journal of a run that was cut off.
        written = score(journal.read(line for line in lines if line.endswith(b"\n")))
    _compare_script(written.run, script, arguments)
    if weights is None and (path.parent / FINAL).is_file():
        weights = path.parent / FINAL
    findings = Findings()
    _execute(
        script,
        arguments,
        lambda offer: replayer.enrolled(offer, written, findings, since=since, until=until, weights=weights),
    )
    return findings


def _compare_script(run: RunRecord, script: Path, arguments: Sequence[str]) -> None:
    if run.script and run.script != journal.digest_of(script.read_bytes()):
        raise Diverged(
            f"{script} is not the script that wrote this journal, or was changed since: "
            "give the one of the run (a digest of its text is in the journal's first line)"
        )
    if run.arguments and run.arguments != journal.digest_of(*(argument.encode() for argument in arguments)):
        raise Diverged("the run was started with other arguments for the script: give the same ones, after the script")


def _execute(script: Path, arguments: Sequence[str], enroll: Any) -> None:
    """Run the script as python would; its ``join`` connects to the journal instead of a job."""
    before, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    joined: list[Any] = []

    def enrolled(offer: Any) -> Any:
        if joined:
            raise UsageError("the script calls join twice: replay knows one run per script")
        joined.append(enroll(offer))
        return joined[0]

    try:
        with session.appointed(enrolled):
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as ended:
                if ended.code:
                    raise UsageError(
                        f"the script ended itself with status {ended.code} while it was replayed"
                    ) from None
            if not joined:
                raise UsageError(f"{script} never calls pliant.join: there is nothing to replay")
            # For a script that calls ``join`` without a ``with`` block.
            joined[0].finish()
    finally:
        sys.argv, sys.path[:] = before, path


def text(findings: Findings) -> list[str]:
    """The findings in lines, the verdict last."""
    kind = "float64" if findings.exact else "shorter than float64"
    lines = [
        f"rounds: {findings.rounds}, {_from(findings)}up to round {findings.last_round}",
        f"contributions: {findings.contributions}, {findings.dropped} of them lost in the run",
        f"evaluations: {findings.evaluations}",
    ]
    if findings.largest is not None:
        lines.append(
            f"largest relative difference of tickets: {findings.largest.relative:.1e} ({_where(findings.largest)})"
        )
    if findings.weights is not None:
        lines.append(f"largest relative difference of weights: {findings.weights.relative:.1e} ({findings.compared})")
    else:
        lines.append(f"weights: not compared, {findings.not_compared}")
    if findings.first is not None:
        lines.append(f"first difference above {findings.tolerance:.0e}: {findings.first}")
        if findings.first.round <= 1 and findings.first_round == 1:
            lines.append("hint: from the first round on; does the script seed its model (torch.manual_seed)?")
    if findings.weights is not None and not findings.weights.relative <= findings.tolerance:
        lines.append(f"weights: {findings.weights}")
    if findings.agrees:
        bound = f" to {findings.tolerance:.0e}" if findings.exact else f"; trained in types {kind}, so this is no proof"
        lines.append(f"the run can be computed again{bound}")
    else:
        lines.append("the run cannot be computed again")
    return lines


def _from(findings: Findings) -> str:
    return "" if findings.first_round == 1 else f"from round {findings.first_round} "


def _where(difference: Difference) -> str:
    return f"round {difference.round}, {difference.worker}, {difference.what}"


def as_json(findings: Findings) -> dict[str, Any]:
    """The findings for programs."""
    return {**asdict(findings), "agrees": findings.agrees}
