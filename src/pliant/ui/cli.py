"""The ``pliant`` command.

Question  How does a user start, watch and check runs?
Holds     A user's mistake gives one line on standard error and a non-zero exit status, never a traceback.
          Torch is not imported: starting a run must not take longer than the script's own imports.
Source    DESIGN, the user's interface.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pliant.coordinator.status import Status
from pliant.core.journal.records import JOURNAL
from pliant.errors import PliantError, RunEnded, UsageError
from pliant.launch import certificate_check, local, requests
from pliant.launch.job import GRACE_S, NOTICE_EVERY_S
from pliant.ui import progress

Number = TypeVar("Number", int, float)

FOLLOW_S = 0.5
"""Interval at which ``pliant events --follow`` asks again."""

Directory = Annotated[Path | None, typer.Option("--dir", help="The run directory (default: the newest in runs/).")]
Address = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="The coordinator, instead of --dir.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="The file with the token, for --address.")]
Authority = Annotated[
    Path | None, typer.Option("--tls-ca", help="The run's certificate authority (ca.pem), if it speaks TLS.")
]
Certificate = Annotated[Path | None, typer.Option("--tls-cert", help="The coordinator's certificate.")]
Key = Annotated[Path | None, typer.Option("--tls-key", help="The certificate's key.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Let other machines reach the coordinator without TLS.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the coordinator answers.")]

app = typer.Typer(
    name="pliant",
    help="Train one PyTorch model on whatever workers there are right now.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point."""
    try:
        app()
    except PliantError as error:
        print(f"pliant: {error}", file=sys.stderr)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"pliant {version('pliant')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="The training script; everything after it is passed to it.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="Workers to start here.")] = 1,
    pace: Annotated[str, typer.Option(help="Emulate slower devices, e.g. 1,1,0.5,0.25.")] = "",
    size: Annotated[str, typer.Option(help="Micro-batch sizes per worker, e.g. 32,32,16,8.")] = "",
    directory: Annotated[Path | None, typer.Option("--dir", help="The run directory (default: runs/<job>).")] = None,
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="Add workers to the run at this address.")] = "",
    token_file: Annotated[Path | None, typer.Option(help="The file with the token, for --join.")] = None,
    host: Annotated[str, typer.Option(help="The coordinator's address, for workers on other machines.")] = local.HOST,
    port: Annotated[
        int, typer.Option(min=0, max=65535, show_default=False, help="The coordinator's port (default: a free one).")
    ] = 0,
    min_workers: Annotated[int, typer.Option(help="Below this many workers the run waits for more.")] = 1,
    max_workers: Annotated[int | None, typer.Option(help="Newcomers beyond this many workers have to wait.")] = None,
    grace: Annotated[float, typer.Option(help="Seconds a worker may take to leave before it is killed.")] = GRACE_S,
    notice_command: Annotated[str, typer.Option(help="A command that exits 0 on a preemption notice.")] = "",
    notice_every: Annotated[float, typer.Option(help="Seconds between two runs of that command.")] = NOTICE_EVERY_S,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --dir from its checkpoint.")] = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    insecure: Insecure = False,
) -> None:
    """Run a script on several workers of this machine, or add workers to a run (--join)."""
    if not module and not Path(script).is_file():
        print(f"pliant: no script at {script}; give the path of the training script", file=sys.stderr)
        raise typer.Exit(2)
    spec = local.JobSpec(
        script=script,
        args=tuple(args or ()),
        workers=workers,
        paces=_numbers(pace, float, "--pace"),
        sizes=_numbers(size, int, "--size"),
        directory=directory,
        # An IPv6 address may come in brackets, as in `--join`.
        host=host.removeprefix("[").removesuffix("]"),
        port=port,
        module=module,
        min_workers=min_workers,
        max_workers=max_workers,
        grace_s=grace,
        notice_command=notice_command,
        notice_every_s=notice_every,
        resume=resume,
        trust=local.NO_TLS if join else certificate_check.given(tls_cert, tls_key, tls_ca, insecure=insecure),
    )
    if join:
        if tls_cert is not None or tls_key is not None:
            raise UsageError("--tls-cert and --tls-key are the coordinator's; a joiner needs --tls-ca alone")
        access = requests.at(join, directory, token_file, tls_ca)
        outcome = local.join(spec, access, ui=progress.Terminal())
    else:
        outcome = local.run(spec, ui=progress.Terminal())
    raise typer.Exit(outcome.exit_status)


@app.command()
def coordinator(
    directory: Annotated[Path, typer.Option("--dir", help="The run directory.")],
    resume: Annotated[bool, typer.Option("--resume", help="Replace the run's lost coordinator.")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Another port; only newcomers will find it.", show_default=False)
    ] = 0,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    insecure: Insecure = False,
) -> None:
    """Start a run's coordinator by hand after its launcher was lost."""
    if not resume:
        raise UsageError("`pliant run` starts a run with its coordinator; give --resume to take a lost one's place")
    from pliant.launch.coordinator_takeover import take_over

    own = certificate_check.given(tls_cert, tls_key, tls_ca, insecure=insecure)
    take_over(directory, port, lambda text: print(f"pliant: {text}", file=sys.stderr, flush=True), own)


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(metavar="JOURNAL", help=f"A run's {JOURNAL}, or its directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check samples and sums, but not the decisions. Ten times as fast."),
    ] = False,
) -> None:
    """Prove that each sample was used once per epoch, or list those that were not.

    Exit status: 0 proved to the end, 1 problems found, 3 no problem found but the journal was not closed.
    """
    from pliant.ui import audit_command

    path = _journal_at(path)
    report = audit_command.audited(path, quick=quick)
    if as_json:
        print(json.dumps({"problems": report.problems, **report.summary}))
    else:
        print("\n".join(audit_command.text(report)))
    raise typer.Exit(audit_command.status(report))


@app.command(context_settings={"allow_interspersed_args": False})
def replay(
    path: Annotated[Path, typer.Argument(metavar="JOURNAL", help=f"A run's {JOURNAL}, or its directory.")],
    script: Annotated[Path, typer.Argument(help="The script of that run; all that follows are its arguments.")],
    args: Annotated[list[str] | None, typer.Argument(help="The arguments it was run with.")] = None,
    since: Annotated[
        int | None,
        typer.Option("--from", min=1, metavar="ROUND", help="Start from the last checkpoint up to this round."),
    ] = None,
    until: Annotated[int | None, typer.Option(min=1, metavar="ROUND", help="Stop after this round.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Compare with this file of run.save (default: the run's own, if any).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Compute a run again in one process and compare the results. Options come before JOURNAL."""
    from pliant.ui import replay_command

    path = _journal_at(path)
    if not script.is_file():
        raise UsageError(f"no script at {script}; give the path of the training script")
    if weights is not None and not weights.is_file():
        raise UsageError(f"no weights at {weights}; give a file that run.save wrote")
    findings = replay_command.replay(path, script, args or (), since=since, until=until, weights=weights)
    if as_json:
        print(json.dumps(replay_command.as_json(findings)))
    else:
        print("\n".join(replay_command.text(findings)))
    raise typer.Exit(0 if findings.agrees else 1)


@app.command()
def status(
    directory: Directory = None,
    address: Address = "",
    token_file: TokenFile = None,
    tls_ca: Authority = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of a run."""
    answer = _asked("/status", directory, address, token_file, tls_ca)
    if as_json:
        print(answer.decode())
        return
    current = msgspec.json.decode(answer, type=Status)
    print(f"{current.job}: {progress.line(current)}")
    if current.ended is not None:
        print(f"over: {current.ended}")
    table = Table("worker", "state", "samples", "samples/s", "busy s", "idle s", box=None)
    for worker in current.workers:
        figures = (f"{worker.samples:,}", f"{worker.pace:,.0f}", f"{worker.busy_s:.1f}", f"{worker.idle_s:.1f}")
        table.add_row(worker.name, worker.state, *figures)
    Console().print(table)


@app.command()
def scale(
    workers: Annotated[int, typer.Argument(metavar="N", help="The wanted number of workers.")],
    directory: Directory = None,
    address: Address = "",
    token_file: TokenFile = None,
    tls_ca: Authority = None,
) -> None:
    """Change the number of workers of a run."""
    if workers < 1:
        raise UsageError(f"a run cannot go on with {workers} workers; give at least 1, or end it with Ctrl-C")
    said = requests.post(requests.found(directory, address, token_file, tls_ca), "/scale", {"workers": workers})
    print(said.decode().strip())


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name, as in `pliant status`.")],
    directory: Directory = None,
    address: Address = "",
    token_file: TokenFile = None,
    tls_ca: Authority = None,
) -> None:
    """Ask a worker to finish its round and leave."""
    said = requests.post(requests.found(directory, address, token_file, tls_ca), "/drain", {"worker": worker})
    print(said.decode().strip())


@app.command()
def events(
    directory: Directory = None,
    address: Address = "",
    token_file: TokenFile = None,
    tls_ca: Authority = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new events until the run is over.")] = False,
) -> None:
    """Show the events of a run: workers that joined, left or were lost, and why."""
    shown = _show_events(json.loads(_asked("/events", directory, address, token_file, tls_ca)), [])
    while follow:
        time.sleep(FOLLOW_S)
        access = requests.found(directory, address, token_file, tls_ca)
        try:
            shown = _show_events(json.loads(requests.get(access, "/events")), shown)
        except RunEnded:
            return


certs = typer.Typer(help="Certificates for runs over shared networks.", no_args_is_help=True)
app.add_typer(certs, name="certs")


@certs.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory for the files.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address of the coordinator's machine; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How many days the certificate is valid.")] = 365,
) -> None:
    """Create a certificate authority for one job, and the coordinator's certificate."""
    from pliant.launch import certificates

    for line in certificates.made(directory, host or [], days):
        print(line)


@app.command()
def demo() -> None:
    """Train one model on built-in data with unequal workers, and the same with plain DDP."""
    from pliant.ui.demo import main as show

    raise typer.Exit(show())


def _journal_at(path: Path) -> Path:
    """The journal that is named, or that of the run directory that is named."""
    path = path / JOURNAL if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"no journal at {path}; it is {JOURNAL} in the run's directory")
    return path


def _asked(path: str, directory: Path | None, address: str, token_file: Path | None, authority: Path | None) -> bytes:
    """The coordinator's answer; for a run that is over, the answer from its journal."""
    from pliant.ui import offline_status

    try:
        return requests.get(requests.found(directory, address, token_file, authority), path)
    except RunEnded:
        told = None if address else offline_status.told(path, directory or local.newest())
        if told is None:
            raise
        return told


def _show_events(found: list[dict[str, Any]], shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the events not shown yet. They are compared, not counted: the coordinator keeps only the last ones."""
    for event in found:
        if event not in shown:
            # The journal of a run that is over has no time for most events.
            clock = time.strftime("%H:%M:%S", time.localtime(event["unix_s"])) if event["unix_s"] else "        "
            print(f"{clock}  {event['kind']:<10} {event['worker']:<6} {event['text']}", flush=True)
    return found


def _numbers(text: str, kind: Callable[[str], Number], option: str) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"{option} is {text!r}; give numbers with commas between them") from None
