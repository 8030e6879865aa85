"""The ``pliant`` command.

Question  How do people start, watch and check runs?
Holds     A mistake of the user costs one line on standard error and a non-zero exit status, never a traceback.
          Torch is not imported: starting a run must not take longer than the script's own imports.
Source    DESIGN, the user's interface.
"""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pliant.core import journal
from pliant.errors import PliantError, UsageError
from pliant.launch.local import JobSpec
from pliant.launch.local import run as run_locally
from pliant.runtime.status import Status
from pliant.ui import progress

ANSWER_S = 5.0
"""A coordinator that lives answers in milliseconds."""

Number = TypeVar("Number", int, float)

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
    script: Annotated[str, typer.Argument(help="The training script; all that follows are its arguments.")],
    args: Annotated[list[str] | None, typer.Argument(help="Given to the script untouched.")] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="Workers to start here.")] = 1,
    pace: Annotated[str, typer.Option(help="Emulate slower devices, e.g. 1,1,0.5,0.25.")] = "",
    size: Annotated[str, typer.Option(help="Micro-batch sizes per worker, e.g. 32,32,16,8.")] = "",
    directory: Annotated[Path | None, typer.Option("--dir", help="The run directory (default: runs/<job>).")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, show_default=False, help="The coordinator's port (default: a free one).")
    ] = 0,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
) -> None:
    """Run a script on several workers of this machine."""
    if not module and not Path(script).is_file():
        print(f"pliant: no script at {script}; give the path of the training script", file=sys.stderr)
        raise typer.Exit(2)
    spec = JobSpec(
        script=script,
        args=tuple(args or ()),
        workers=workers,
        paces=_numbers(pace, float, "--pace"),
        sizes=_numbers(size, int, "--size"),
        directory=directory,
        port=port,
        module=module,
    )
    outcome = run_locally(spec, ui=progress.Terminal())
    raise typer.Exit(outcome.exit_status)


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A run's journal.jsonl, or its directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Prove that each sample was used once per epoch, or say which were not."""
    from pliant.core.audit import audit as audited

    path = path / "journal.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"no journal at {path}; it is journal.jsonl in the run's directory")
    with path.open("rb") as lines:
        report = audited(journal.read(lines))
    if as_json:
        print(json.dumps({"problems": report.problems, **report.summary}))
    else:
        for name, value in report.summary.items():
            print(f"{name.replace('_', ' ')}: {value}")
        for problem in report.problems:
            print(f"problem: {problem}")
        print("every sample is accounted for" if not report.problems else f"{len(report.problems)} problems")
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def status(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run directory (default: the newest in runs/).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the coordinator answers.")] = False,
) -> None:
    """Show how a run is getting on."""
    answer = _asked(directory or _newest())
    if as_json:
        print(answer.decode())
        return
    current = msgspec.json.decode(answer, type=Status)
    print(f"{current.job}: {progress.line(current)}")
    table = Table("worker", "state", "samples", "samples/s", "busy s", "idle s", box=None)
    for worker in current.workers:
        figures = (f"{worker.samples:,}", f"{worker.pace:,.0f}", f"{worker.busy_s:.1f}", f"{worker.idle_s:.1f}")
        table.add_row(worker.name, worker.state, *figures)
    Console().print(table)


@app.command()
def demo() -> None:
    """Unequal workers train one model on built-in data, next to plain DDP."""
    from pliant.ui.demo import main as show

    raise typer.Exit(show())


def _numbers(text: str, kind: Callable[[str], Number], option: str) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"{option} is {text!r}; give numbers with commas between them") from None


def _newest() -> Path:
    addresses = sorted(Path("runs").glob("*/address"), key=lambda path: path.stat().st_mtime)
    if not addresses:
        raise UsageError("no run in ./runs; give its directory with --dir")
    return addresses[-1].parent


def _asked(directory: Path) -> bytes:
    try:
        address = (directory / "address").read_text().strip()
        token = (directory / "token").read_text().strip()
    except OSError:
        raise UsageError(f"no run in {directory}; give a run's directory with --dir") from None
    connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
    try:
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException):
        raise UsageError(f"the run in {directory} is over: nobody listens at {address}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise UsageError(f"the coordinator at {address} refused the token in {directory}; is it another run's?")
    return answer
