"""The example over Flower's own engines: its simulation, and SuperLink and SuperNodes as processes that speak TLS.

Takes minutes, as every client of every round is a process that imports torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import sparsedp
from sparsedp.runs.run import Run

pytest.importorskip("flwr", reason="flwr is not installed; `make integrations` installs it")

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower_digits"
PROGRAMS = Path(sys.executable).parent
CLIENTS = 3

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


def environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(APP), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": path, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours, "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"}


def certificates(folder: Path) -> list[str]:
    """A certificate that signs itself, for this machine alone."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", folder / "server.key", "-out", folder / "server.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    pem, key = str(folder / "server.pem"), str(folder / "server.key")
    return ["--ssl-certfile", pem, "--ssl-keyfile", key, "--ssl-ca-certfile", pem]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(port: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise TimeoutError(f"nobody listens at port {port}")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Path]:
    """A SuperLink and three SuperNodes; gives Flower's home, where its address is known as `here`."""
    home, tls, port = tmp_path / "home", certificates(tmp_path), free_port()
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{tmp_path / "server.pem"}"\n'
    )
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        log = (tmp_path / f"{len(started)}-{name}.log").open("wb")
        command = [str(PROGRAMS / name), *arguments]
        started.append(
            subprocess.Popen(command, env=environment(home), stdout=log, stderr=log, start_new_session=True)
        )

    try:
        start("flower-superlink", *tls, "--port", str(port), "--disable-runtime-dependency-installation")
        wait_for(port)
        for number in range(CLIENTS):
            start(
                "flower-supernode", *tls, "--root-certificates", str(tmp_path / "server.pem"),
                "--superlink", f"127.0.0.1:{port}", "--port", str(free_port()),
                "--node-config", f"partition-id={number} num-partitions={CLIENTS}",
            )  # fmt: skip
        yield home
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, if it is still at work


def check_run(out: Path) -> None:
    verified = sparsedp.verify(out, independent=False)
    assert verified.passed, verified.reasons
    record = Run.open(out).record
    assert record["status"] == "finished"
    assert (record["unit"], record["units"]) == ("client", CLIENTS)


def test_processes_over_tls(federation, tmp_path):
    out = tmp_path / "run"
    config = f'clients={CLIENTS} clients-a-round=2 rounds=4 out="{out}"'
    command = [str(PROGRAMS / "flwr"), "run", str(APP), "here", "--run-config", config]
    subprocess.run(command, env=environment(federation), check=True, capture_output=True, timeout=120)
    deadline = time.monotonic() + 450
    while not (out / "record.json").exists() or Run.open(out).record["status"] != "finished":
        assert time.monotonic() < deadline, "the run did not finish"
        time.sleep(2)
    check_run(out)


def test_the_simulation_engine(tmp_path):
    pytest.importorskip("ray", reason="flwr[simulation] is not installed")
    out = tmp_path / "run"
    code = (
        "import flower_digits as app; from flwr.simulation import run_simulation; "
        f"app.DEFAULTS.update({{'clients': {CLIENTS}, 'clients-a-round': 2, 'rounds': 4, 'out': {str(out)!r}}}); "
        f"run_simulation(app.server, app.client, num_supernodes={CLIENTS})"
    )
    subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), check=True, capture_output=True, timeout=500
    )
    check_run(out)
