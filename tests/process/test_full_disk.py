"""A worker's log is on a full disk."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from pliant.launch.output import SeenTracebacks
from pliant.launch.process import WorkerProcess


def test_a_worker_whose_log_is_on_a_full_disk_is_reported_all_the_same() -> None:
    async def started() -> tuple[list[str], int]:
        shown: list[str] = []
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        worker = WorkerProcess(
            "w0",
            Path("/dev/full"),
            SeenTracebacks(),
            lambda _, line, stream: shown.append(line),
            lambda _, status: ended.set_result(status),
        )
        worker.start([sys.executable, "-c", "print('a word'); raise SystemExit(3)"], dict(os.environ))
        return shown, await asyncio.wait_for(ended, 60)

    assert asyncio.run(started()) == (["a word"], 3)
