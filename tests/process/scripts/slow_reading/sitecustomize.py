"""Like the one beside it; and in a run's processes patience is short, while a new coordinator's reading is long.

It goes on reading when the file ``read-on`` exists, and makes ``reading``, and ``patience-over`` once those who wait
were told to for longer than any of them is patient.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quick  # noqa: F401

ANSWER_S, AWAY_S = 4.0, 12.0
"""How long an answer may take, and how long the coordinator may be away; usually 10 to 30 s, and 30 to 60 s"""
HOLD_EVERY_S = 0.1


def read_slowly() -> None:
    from pliant.coordinator import service
    from pliant.coordinator.journal import JournalFile
    from pliant.coordinator.waiting_room import WaitingRoom

    reopened, hold, told = JournalFile.reopened, WaitingRoom.hold, []

    def slowly(*given, **named):
        Path("reading").touch()
        while not Path("read-on").exists():
            time.sleep(0.05)
        return reopened(*given, **named)

    def counted(self):
        hold(self)
        told.append(time.monotonic())
        if told[-1] - told[0] > AWAY_S + 2 * ANSWER_S:
            Path("patience-over").touch()

    service.HOLD_EVERY_S, JournalFile.reopened, WaitingRoom.hold = HOLD_EVERY_S, slowly, counted


def be_impatient() -> None:
    from pliant.control import connect, link
    from pliant.launch import launcher

    link.GIVE_UP_S, connect.CONNECT_S = AWAY_S, ANSWER_S
    launcher.RECONNECT_S, launcher.ANSWER_S = AWAY_S, ANSWER_S


if "pliant.launch.coordinator_process" in sys.orig_argv:
    read_slowly()
else:
    be_impatient()
