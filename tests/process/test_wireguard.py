"""The recipe of docs/guide/security.md: two machines (network namespaces) that train through a WireGuard tunnel.

Needs root, ``ip``, ``wg`` and either the kernel's WireGuard or ``wireguard-go``; elsewhere it is passed over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import LIMIT_S, QUICK, Launcher, Running, records
from test_trust import TRAINING

pytestmark = pytest.mark.slow

HERE, THERE = f"pliant-a{os.getpid()}", f"pliant-b{os.getpid()}"
OUTSIDE = {HERE: "10.76.0.1", THERE: "10.76.0.2"}
INSIDE = {HERE: "10.77.0.1", THERE: "10.77.0.2"}
PORT = 51820


def run(*words: str, text: str | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, input=text, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


def has_kernel_wireguard() -> bool:
    name = f"wgx{os.getpid()}"[:15]
    if subprocess.run(["ip", "link", "add", name, "type", "wireguard"], capture_output=True, check=False).returncode:
        return False
    run("ip", "link", "delete", name)
    return True


@contextlib.contextmanager
def tunnel(directory: Path) -> Iterator[None]:
    """Two namespaces, a cable between them, and WireGuard over it."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("wg"):
        pytest.skip("needs root, ip and wg")
    kernel = has_kernel_wireguard()
    if not kernel and not (shutil.which("wireguard-go") and Path("/dev/net/tun").exists()):
        pytest.skip("neither the kernel nor wireguard-go speaks WireGuard here")
    keys = {name: run("wg", "genkey") for name in (HERE, THERE)}
    public = {name: run("wg", "pubkey", text=key) for name, key in keys.items()}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name in (HERE, THERE):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        cable = {HERE: f"va{os.getpid()}", THERE: f"vb{os.getpid()}"}
        run("ip", "link", "add", cable[HERE], "type", "veth", "peer", "name", cable[THERE])
        for name, other in ((HERE, THERE), (THERE, HERE)):
            run("ip", "link", "set", cable[name], "netns", name)
            run("ip", "-n", name, "address", "add", f"{OUTSIDE[name]}/24", "dev", cable[name])
            run("ip", "-n", name, "link", "set", cable[name], "up")
            device = f"wg{cable[name]}"[:15]
            if kernel:
                run("ip", "-n", name, "link", "add", device, "type", "wireguard")
            else:
                command = ["ip", "netns", "exec", name, "wireguard-go", "--foreground", device]
                started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                until_s = time.monotonic() + LIMIT_S
                while not Path(f"/var/run/wireguard/{device}.sock").exists():
                    assert time.monotonic() < until_s and started[-1].poll() is None, "wireguard-go does not start"
                    time.sleep(0.05)
            secret = directory / f"{name}.key"
            secret.write_text(keys[name])
            secret.chmod(0o600)
            peer = ("peer", public[other], "allowed-ips", f"{INSIDE[other]}/32", "endpoint", f"{OUTSIDE[other]}:{PORT}")
            wg = ("ip", "netns", "exec", name, "wg", "set", device)
            run(*wg, "listen-port", str(PORT), "private-key", str(secret), *peer)
            run("ip", "-n", name, "address", "add", f"{INSIDE[name]}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
        yield
    finally:
        for process in started:
            process.terminate()
            process.wait()
        for name in (HERE, THERE):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def inside(launch: Launcher, name: str, *words: str) -> Running:
    main = "from pliant.ui.cli import main; main()"
    command = ["ip", "netns", "exec", name, sys.executable, "-W", "error", "-c", main, *words]
    started = Running(command, launch.directory, {})
    launch.runs.append(started)
    return started


SPY = f"""
import socket, sys, time
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
counts = dict(tunnel=0, other=0, words=0)
wire.settimeout(0.2)
print("listening", flush=True)
import os
while os.getppid() > 1 and not os.path.exists("enough"):
    try:
        packet, (device, *_) = wire.recvfrom(65536)
    except TimeoutError:
        continue
    # What goes over the cable; the tunnel's own device shows what is inside it.
    if not device.startswith("v"):
        continue
    is_ip, is_udp = packet[12:14] == b"\\x08\\x00", packet[23:24] == b"\\x11"
    if is_ip and is_udp and {PORT} in (int.from_bytes(packet[34:36], "big"), int.from_bytes(packet[36:38], "big")):
        counts["tunnel"] += 1
    elif is_ip:
        counts["other"] += 1
    counts["words"] += b"pliant" in packet.lower()
print(*counts.values(), flush=True)
"""


def test_two_machines_train_through_a_tunnel(launch: Launcher) -> None:
    with tunnel(launch.directory):
        (launch.directory / "train.py").write_text(QUICK + textwrap.dedent(TRAINING).replace("== 3", "== 2"))
        spy = Running(["ip", "netns", "exec", HERE, sys.executable, "-c", SPY], launch.directory, {})
        launch.runs.append(spy)
        spy.until("listening")
        owner = inside(launch, HERE, "run", "--host", INSIDE[HERE], "--insecure", "--dir", "job", "train.py")
        owner.until("trains")
        address = (launch.directory / "job" / "address").read_text().strip()
        assert address.startswith(INSIDE[HERE])
        join = ("run", "--join", address, "--token-file", "job/token", "--dir", "guest", "train.py")
        guest = inside(launch, THERE, *join)
        assert owner.wait() == 0, owner.output
        assert guest.wait() == 0, guest.output
        (launch.directory / "enough").touch()
        assert spy.wait() == 0, spy.output
        through, other, words = map(int, spy.lines[-1].split())
        assert through > 50 and other == 0 and words == 0, spy.lines[-1]
    assert any("w1" in getattr(record, "roster", []) for record in records(owner))
