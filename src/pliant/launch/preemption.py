"""Preemption notices: this machine is about to be taken away.

Question  How does a launcher learn that its machine will be taken away, without code for any cloud?
Holds     The user's command is run again and again, in a session of its own; exit status 0 is the notice. A command
          that does not end in time is killed with its children and counts as "not yet".
Source    ours; docs/guide/notices.md has the commands for AWS, GCP and Slurm.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable

from pliant.environment import plain_environment
from pliant.launch.process import OwnedProcess

COMMAND_S = 10.0
"""Metadata services answer in milliseconds; a command that hangs must not hide a later notice."""

_CANNOT_RUN = {126: "it is not executable", 127: "it is not found"}
"""exit statuses with which a shell reports a command that it cannot run"""


async def noticed(command: str, every_s: float, warn: Callable[[str], None]) -> None:
    """Return when the command exits with 0; ``warn`` is told once if it cannot be run."""
    loop = asyncio.get_running_loop()
    warned = False
    while True:
        began_s = loop.time()
        status = await _status(command)
        if status == 0:
            return
        if status in _CANNOT_RUN and not warned:
            warned = True
            warn(f"the notice command does not work ({_CANNOT_RUN[status]}): {command}")
        await asyncio.sleep(max(0.0, began_s + every_s - loop.time()))


async def _status(command: str) -> int | None:
    """The command's exit status; None if it took too long."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    asking = OwnedProcess(["/bin/sh", "-c", command], plain_environment(), end, output=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(COMMAND_S):
            return await ended
    except TimeoutError:
        return None
    finally:
        asking.dispose()
