"""Runs of real processes, computed again on one: ``pliant replay``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from running import Launcher, Running, records, shared_out
from safetensors.torch import load_file, save_file

from pliant.core.journal import records as journal
from pliant.core.journal.records import EraRecord, RewindRecord, RoundRecord
from pliant.core.tickets import Flag

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "replayed.py"

SCENES: dict[str, dict[str, Any]] = {
    "delay 1, scaler": {"scaler": True, "evaluates": True, "nonfinite": True, "breaks": True},
    "delay 0, AdamW, loaders": {
        "delay": 0,
        "optimizer": "adamw",
        "loaders": True,
        "evaluates": True,
        "nonfinite": True,
        "breaks": True,
    },
    "auto, open batch, AdamW": {
        "delay": "auto",
        "floating": True,
        "optimizer": "adamw",
        "evaluates": True,
    },
    "last displacement, killed and back": {
        "optimizer": "rmsprop",
        "faults": [["w1", 5, "kill"]],
        "until": ["drew-w1.2"],
        "evaluates": True,
        "loaders": True,
        "sleep_s": 0.02,
    },
    "killed, open batch, AdamW": {
        "faults": [["w2", 4, "kill"], ["w0", 12, "kill"]],
        "until": ["fault-0", "fault-1"],
        "floating": True,
        "optimizer": "adamw",
    },
    "leaves": {"faults": [["w0", 5, "leave"]], "until": ["fault-0"], "evaluates": True, "epochs": 5},
    "all killed, on from a checkpoint": {
        "faults": [["w0", 12, "kill"], ["w1", 12, "kill"], ["w2", 12, "kill"]],
        "until": ["fault-0", "fault-1", "fault-2"],
        "checkpoint": "checkpoints",
        "evaluates": True,
        "sleep_s": 0.03,
    },
    "scaler, killed and back": {
        "scaler": True,
        "faults": [["w1", 5, "kill"], ["w0", 20, "kill"]],
        "until": ["drew-w1.2", "drew-w0.2"],
        "evaluates": True,
        "nonfinite": True,
        "sleep_s": 0.02,
    },
    "scaler, synchronous, all killed, on from a checkpoint": {
        "delay": 0,
        "scaler": True,
        "faults": [["w0", 12, "kill"], ["w1", 12, "kill"], ["w2", 12, "kill"]],
        "until": ["fault-0", "fault-1", "fault-2"],
        "checkpoint": "checkpoints",
        "nonfinite": True,
        "sleep_s": 0.03,
    },
}


def ran(launch: Launcher, scene: dict[str, Any], workers: int = 3) -> Running:
    (launch.directory / "scene.json").write_text(json.dumps(scene))
    run = launch.command("run", "-n", str(workers), "--dir", "job", str(SCRIPT), "scene.json")
    assert run.wait() == 0, run.output
    return run


def replayed(
    launch: Launcher, *options: str, script: Path = SCRIPT, args: tuple[str, ...] = ("scene.json",)
) -> Running:
    environment = {"OMP_NUM_THREADS": "1"}
    words = ("replay", *options, "job", str(script), *args)
    again = launch.python("-W", "error", "-c", "from pliant.ui.cli import main; main()", *words, **environment)
    again.wait()
    return again


def found(again: Running) -> dict[str, Any]:
    return json.loads(again.lines[-1])


def rounds(run: Running) -> list[RoundRecord]:
    return [record for record in records(run) if isinstance(record, RoundRecord)]


SOUGHT = ("scaler, synchronous, all killed, on from a checkpoint", "delay 1, scaler")


@pytest.mark.parametrize("name", shared_out(SCENES, *SOUGHT))
def test_computed_again(launch: Launcher, name: str) -> None:
    scene = SCENES[name]
    run = ran(launch, scene)
    made = [record for record in journal.effective(records(run)) if isinstance(record, RoundRecord)]
    again = replayed(launch, "--json")
    assert again.process.returncode == 0, again.output
    findings = found(again)
    assert findings["agrees"] and findings["complete"] and findings["exact"]
    assert findings["rounds"] == len(made)
    assert findings["weights"]["relative"] <= 1e-9 and findings["largest"]["relative"] <= 1e-9
    if scene.get("delay", 1) == 1:
        points = [ticket.point for record in made for ticket in record.tickets]
        assert any(point is not None and point[3] & 1 for point in points), "nobody looked ahead"
    if scene.get("nonfinite"):
        assert any(record.skipped for record in made)
    if scene.get("scaler"):
        said = {line.partition("] ")[2] for line in [*run.lines, f"[again] {again.lines[-2]}"] if "scale " in line}
        assert len(said) == 1, "all ended with one scale, and so did the replay"
        assert len({ticket.scale for record in made for ticket in record.tickets}) > 1, "it moved"
    if scene.get("breaks"):
        assert any(ticket.flags & Flag.BREAK for record in made for ticket in record.tickets)
    if scene.get("checkpoint"):
        assert any(isinstance(record, RewindRecord) for record in records(run)), "nobody went back"
    unplanned = sum(record.entries is not None for record in records(run) if isinstance(record, EraRecord))
    kills = [who for who, _, what in scene.get("faults", []) if what == "kill"]
    # Where nobody survives, no era begins with survivors.
    assert unplanned >= (0 if scene.get("checkpoint") else len(kills))


EARLIER = Path(__file__).parent / "earlier"


@pytest.mark.parametrize("kind", ["own", "given"])
def test_a_journal_of_the_time_before_orders_had_names(launch: Launcher, kind: str) -> None:
    """Written when an epoch was a permutation drawn as a whole: by the script's own order, and by Pliant's."""
    shutil.copytree(EARLIER / kind, launch.directory / "job")
    audited = launch.command("audit", "job")
    # In order; but nothing says how much there was of it.
    assert audited.wait() == 3, audited.output
    again = replayed(launch, "--json", script=EARLIER / "train.py", args=("given",) if kind == "given" else ())
    assert again.process.returncode == 0, again.output
    findings = found(again)
    assert findings["agrees"] and findings["complete"] and findings["weights"]["relative"] <= 1e-9


def test_from_a_checkpoint(launch: Launcher) -> None:
    """Beginning in mid-run: past epochs are not computed, the user's state is that of the checkpoint."""
    scene = {"delay": 0, "checkpoint": "checkpoints", "evaluates": True, "epochs": 5, "sleep_s": 0.02}
    run = ran(launch, scene)
    last = rounds(run)[-1].round
    findings = found(replayed(launch, "--json", "--from", str(last)))
    assert findings["agrees"] and findings["complete"]
    assert findings["first_round"] > 1 and findings["rounds"] == last - findings["first_round"] + 1
    assert findings["weights"]["relative"] <= 1e-9 and findings["largest"]["relative"] <= 1e-9

    early = replayed(launch, "--from", "1")
    assert early.process.returncode == 1 and "there is no checkpoint up to round 1 to start from" in early.output
    (launch.directory / "scene.json").write_text(json.dumps({**scene, "checkpoint": None}))
    without = replayed(launch, "--from", str(last))
    assert without.process.returncode == 1 and "calls join without checkpoint" in without.output


def test_what_differs_is_named(launch: Launcher) -> None:
    run = ran(launch, {"epochs": 2}, workers=2)
    job = launch.directory / "job"

    until = replayed(launch, "--until", "3")
    assert until.process.returncode == 0 and "up to round 3" in until.output, until.output

    # The file of weights.
    tensors = load_file(job / "weights.safetensors")
    tensors["4.weight"][1, 2] += 1e-6
    save_file(tensors, job / "other.safetensors")
    other = replayed(launch, "--weights", str(job / "other.safetensors"))
    assert other.process.returncode == 1 and "4.weight[18] is" in other.output, other.output

    # The script, its arguments, what it reads.
    changed = launch.directory / "changed.py"
    changed.write_text(SCRIPT.read_text().replace("nn.Dropout(0.2)", "nn.Dropout(0.3)"))
    assert "changed.py is not the script that wrote this journal" in replayed(launch, script=changed).output
    assert "other arguments" in replayed(launch, args=("scene.json", "more")).output
    (launch.directory / "scene.json").write_text(json.dumps({"epochs": 2, "delay": 0}))
    settings = replayed(launch)
    assert settings.process.returncode == 1 and "joins with delay=0, the run had delay=1" in settings.output
    (launch.directory / "scene.json").write_text(json.dumps({"epochs": 2, "nonfinite": True}))
    nonfinite = replayed(launch)
    skipped = next(record for record in rounds(run) if record.round > 7)
    assert nonfinite.process.returncode == 1 and "first difference above" in nonfinite.output, nonfinite.output
    assert skipped is not None

    # A journal that says something else, with checksums that fit.
    (launch.directory / "scene.json").write_text(json.dumps({"epochs": 2}))
    target = rounds(run)[4]
    tampered = target.tickets[1]
    altered = [
        *target.tickets[:1],
        journal.TicketLine(**{**{f: getattr(tampered, f) for f in tampered.__struct_fields__}, "loss_sum": 1.25}),
        *target.tickets[2:],
    ]
    write(job / "journal.jsonl", run, target, altered)
    forged = replayed(launch)
    assert forged.process.returncode == 1, forged.output
    assert f"round {target.round}, w1: the loss is" in forged.output


def write(path: Path, run: Running, target: RoundRecord, tickets: list[journal.TicketLine]) -> None:
    """The journal with other tickets in one round, and without its end, which says what was before it."""
    chain, lines = 0, []
    for record in records(run):
        if isinstance(record, journal.EndRecord):
            continue
        if isinstance(record, RoundRecord) and record.round == target.round:
            fields = {name: getattr(record, name) for name in record.__struct_fields__}
            record = RoundRecord(**{**fields, "tickets": tickets})
        line, chain = journal.line(journal.encode(record), chain)
        lines.append(line)
    path.write_bytes(b"".join(lines))


def test_float32_is_reported(launch: Launcher) -> None:
    ran(launch, {"epochs": 2, "dtype": "float32"}, workers=2)
    again = replayed(launch, "--json")
    assert again.process.returncode == 0, again.output
    findings = found(again)
    # A sum of two is the same in any order: there may be no difference at all.
    assert not findings["exact"] and findings["weights"]["relative"] < 1e-3
