"""Tables of what concerns reliability: fuzzing, the journal, checkpoints, the coordinator, limits."""

from collections.abc import Mapping

from benchmarks.results import Results, Trial
from benchmarks.sheet import Sheet


def _fuzz(results: Results) -> list[Sheet]:
    columns = ("surface", "seed", "inputs", "refused", "taken", "failures", "growth, MB", "inputs/s")
    rows = tuple(_fuzzed(trial) for trial in results.trials)
    return [Sheet("Hostile inputs", columns, rows)]


def _fuzzed(trial: Trial) -> tuple[str, ...]:
    found = trial.figures
    if trial.failure is not None:
        return trial.model, str(trial.repeat), f"failed: {trial.failure}", "", "", "", "", ""
    counts = (f"{found[name]:,.0f}" for name in ("inputs", "rejected", "accepted", "failures"))
    return trial.model, str(trial.repeat), *counts, f"{found['grown_mb']:.1f}", f"{found['inputs_per_s']:.0f}"


def _journal(results: Results) -> list[Sheet]:
    by_act = {(trial.model, trial.act): trial.figures for trial in results.trials}
    written = by_act["4 workers", "write"]
    rows = [
        ("bytes per round and worker", f"{written['bytes']:.0f}"),
        ("CPU of each worker for a round's record", f"{written['made_us']:.0f} µs"),
        ("CPU of the coordinator for it", f"{written['written_us']:.0f} µs"),
    ]
    for model in ("small", "large"):
        if found := by_act.get((model, "write")):
            text = f"{100 * found['added']:.2f} % of {found['round_ms']:.0f} ms"
            rows.append((f"both, of the CPU of a round of the {model} model", text))
    for act, name in (("proof", "`pliant audit --quick` (samples and sums)"), ("audit", "`pliant audit`")):
        if found := by_act.get(("4 workers", act)):
            rows.append((f"{name}, CPU of {found['rounds']:,.0f} rounds", f"{found['cpu_s']:.1f} s"))
    return [Sheet(f"Journal of {written['rounds']:,.0f} rounds of 4 workers", ("", "measured"), tuple(rows))]


def _checkpoints(results: Results) -> list[Sheet]:
    columns: list[list[tuple[str, str]]] = []
    for trial in results.trials:
        found = trial.figures
        shown = [
            ("rounds, checkpoints", f"{found['rounds']:.0f}, {found['checkpoints']:.0f}"),
            ("CPU of a round", f"{found['round_ms']:.1f} ms"),
            ("copy by the main thread, median", f"{found['copy_ms']:.0f} ms"),
            *_pauses(found),
            ("added CPU, copy and writing", f"{100 * found['cpu']:.2f} %"),
            ("added time of the main thread", f"{100 * found['main']:.2f} %"),
            ("memory while one is written, in copies of the state", f"{found['copies']:.2f}"),
        ]
        columns.append(shown)
    # A column for each repeat.
    rows = [(cells[0][0], *(text for _, text in cells)) for cells in zip(*columns, strict=True)]
    names = [f"repeat {trial.repeat}" for trial in results.trials] if len(columns) > 1 else ["measured"]
    state = results.trials[0].figures["state_mb"]
    return [Sheet(f"A checkpoint of {state:.0f} MB every 5 s", ("", *names), tuple(rows))]


def _pauses(found: Mapping[str, float]) -> list[tuple[str, str]]:
    """How long training stood still for a checkpoint, where that was measured."""
    if "pause_ms" not in found:
        return []
    pauses = f"{found['pause_ms']:.1f} ms, {found['longest_pause_ms']:.1f} ms"
    return [
        ("pause of training for a checkpoint, median and longest", pauses),
        ("a micro-batch, median", f"{found['micro_batch_ms']:.1f} ms"),
        ("longest pause ÷ a micro-batch", f"{found['longest_pause_ms'] / found['micro_batch_ms']:.2f}"),
    ]


def _coordinator(results: Results) -> list[Sheet]:
    rows = [
        (
            trial.model,
            f"{trial.figures['cpu_share']:.3f}",
            f"{trial.figures['beat_us']:.0f}",
            f"{trial.figures['formed_s']:.2f}",
        )
        for trial in results.trials
        if trial.act == "heartbeats"
    ]
    columns = ("", "CPU s per s", "µs per heartbeat", "CPU s until the first era")
    sheets = [Sheet("The coordinator at 2 heartbeats per second and worker", columns, tuple(rows))]
    for trial in results.trials:
        if trial.act == "succession" and trial.failure is None:
            found = trial.figures
            facts = (
                ("journal", f"{found['journal_mb']:,.0f} MB"),
                ("memory grown over the last nine tenths", f"{found['grown_mb']:.0f} MB"),
                ("a new coordinator has read", f"{found['read_mb']:.2f} MB"),
                ("and can serve after", f"{found['serves_s']:.2f} s"),
                ("without the state file", f"{found['whole_s']:.0f} s"),
                ("memory at most", f"{found['resident_mb']:.0f} MB"),
            )
            sheets.append(Sheet(f"After {found['rounds']:,.0f} rounds of {trial.model}", ("", "measured"), facts))
    return sheets


def _limits(results: Results) -> list[Sheet]:
    begun = tuple(
        (
            str(trial.repeat),
            f"{trial.figures['begins_ms']:.1f} ms",
            f"{trial.figures['short_ms']:.1f} ms",
            f"{trial.figures['grown_mb']:.1f} MB",
        )
        for trial in results.trials
        if trial.act == "epoch"
    )
    joined = tuple(
        (
            f"{trial.figures['state_rounds']:.0f}",
            f"{trial.figures['copies']:.2f}",
            f"{trial.figures['rounds']:.0f}",
            f"{trial.figures['waits']:.0f}",
            f"{trial.figures['asked']:.0f}",
        )
        for trial in results.trials
        if trial.act == "newcomer"
    )
    columns = ("rounds the state takes", "copies of the gradients", "rounds followed", "moments waited", "requests")
    sheets = [
        Sheet("An epoch of 1e9 samples begins", ("epoch", "first micro-batch", "of 1,000", "memory"), begun),
        Sheet("Memory of a newcomer beyond its state, large model", columns, joined),
    ]
    return [sheet for sheet in sheets if sheet.rows]


SHEETS = {
    "fuzz": _fuzz,
    "journal": _journal,
    "checkpoints": _checkpoints,
    "coordinator": _coordinator,
    "limits": _limits,
}
