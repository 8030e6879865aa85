"""Tables of what concerns reliability: fuzzing, the journal, checkpoints."""

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
    columns = ("pair", "rounds", "CPU of a round (ms)", "added CPU", "added main-thread time", "copies of the state")
    rows = tuple(
        (
            str(trial.repeat),
            f"{trial.figures['rounds']:.0f}",
            f"{trial.figures['round_ms']:.1f}",
            f"{100 * trial.figures['cpu']:+.2f} %",
            f"{100 * trial.figures['main']:+.2f} %",
            f"{trial.figures['copies']:.2f}",
        )
        for trial in results.trials
    )
    state = results.trials[0].figures["state_mb"]
    return [Sheet(f"A checkpoint of {state:.0f} MB every 5 s", columns, rows)]


SHEETS = {"fuzz": _fuzz, "journal": _journal, "checkpoints": _checkpoints}
