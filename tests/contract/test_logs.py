"""The log of a process, where somebody removes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from pliant.launch.logs import Log


def test_a_removed_log_is_made_again_with_what_was_in_it(tmp_path: Path) -> None:
    path = tmp_path / "job" / "logs" / "w0.log"
    path.parent.mkdir(parents=True)
    log = Log(path)
    log.write(b"before\n")
    log.mend()
    shutil.rmtree(tmp_path / "job")
    log.write(b"while it was away\n")
    log.mend()
    log.write(b"after\n")
    log.mend()
    log.close()
    assert path.read_bytes() == b"before\nwhile it was away\nafter\n"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    path.unlink()
    log.mend()
    assert not path.exists()


def test_a_log_that_cannot_be_made_yet_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "job" / "w0.log"
    path.parent.mkdir()
    log = Log(path)
    log.write(b"before\n")
    shutil.rmtree(tmp_path / "job")
    (tmp_path / "job").write_text("in the way")
    log.mend()
    log.write(b"meanwhile\n")
    (tmp_path / "job").unlink()
    log.mend()
    log.close()
    assert path.read_bytes() == b"before\nmeanwhile\n"


def test_a_process_started_without_a_directory_has_a_log_once_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "job" / "logs" / "w0.log"
    log = Log(path)
    log.write(b"lost\n")
    log.mend()
    log.write(b"kept\n")
    log.close()
    assert path.read_bytes() == b"kept\n"
