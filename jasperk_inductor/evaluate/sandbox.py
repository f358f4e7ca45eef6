"""Starting, watching and ending worker processes, from the judge's side.

A worker may crash, hang, exit, flood its log or eat memory: each ends as a `Lost` with its cause, the whole process group is
gone afterwards, and the next worker is a fresh fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ..contract import Status
from ..errors import WorkerLost
from . import wire

_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TOP_PAD_": str(64 << 20)}
_LOG_BYTES = 8 << 20  # of a worker's stdout and stderr together


class Lost(Exception):
    """A worker is gone, or was ended; `status` says why."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Failed(Exception):
    """A worker is well, but what it ran raised."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def scratch(prefix: str) -> Path:
    """A new private folder, in memory where the machine has a memory file system with room."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 8 << 30 else None
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


class Zygote:
    """Forks workers on demand; started when first needed, restarted if it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def _start(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parent.parent.parent)
        # Freed memory stays with the process, as in a long-lived one: else each call would pay for page faults.
        environment = os.environ | _MALLOC | {
            "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jasperk_inductor.evaluate.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip() == b"ready":
                break
        else:
            raise WorkerLost("an evaluation process could not be started; run `python -c 'import torch'` to see why.")
        # Keep its stderr drained, so that a chatty import never blocks it.
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        self._control = ours
        return ours

    def ask(self, request: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        with self._lock:
            for attempt in (1, 2):
                control = self._start()
                try:
                    socket.send_fds(control, [json.dumps(request).encode()], list(fds))
                    if reply := control.recv(1 << 16):
                        return json.loads(reply)
                except OSError:
                    pass
                self.close()
                if request["do"] == "reap":
                    return {"signal": None, "exit": None}
                if attempt == 2:
                    break
            raise WorkerLost("evaluation processes die as they start; is the machine out of memory or of processes?")

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stderr is not None:
                with contextlib.suppress(ValueError):
                    self._process.stderr.close()
            self._process = None


class Handle:
    """One worker process, as the judge sees it."""

    def __init__(
        self, zygote: Zygote, device: str, threads: int, cold_bytes: int, memory_bytes: int,
        environment: Mapping[str, str] | None = None, file_bytes: int = 16 << 30,
    ) -> None:  # fmt: skip
        self._zygote, self.memory_bytes = zygote, memory_bytes
        self.folder = scratch("jasperk-worker-")
        self._log = self.folder / "log"
        ours, theirs = socket.socketpair()
        private = self.folder / "private"
        for name in ("home", "tmp", "inductor", "triton"):
            (private / name).mkdir(parents=True)
        with open(self._log, "wb") as log:
            reply = zygote.ask(
                {
                    "do": "spawn", "folder": str(private), "device": device, "threads": threads, "cold_bytes": cold_bytes,
                    "environment": {
                        "HOME": str(private / "home"), "TMPDIR": str(private / "tmp"),
                        "TORCHINDUCTOR_CACHE_DIR": str(private / "inductor"), "TRITON_CACHE_DIR": str(private / "triton"),
                        **(environment or {}),
                    },
                    "limits": {"CORE": 0, "FSIZE": file_bytes},
                },
                (theirs.fileno(), log.fileno()),
            )  # fmt: skip
        theirs.close()
        self._sock, self.pid, self.alive = ours, reply["pid"], True
        self._checked = 0.0

    def call(self, command: str, timeout: float, **fields: Any) -> dict[str, Any]:
        """Sends one command and waits for its reply.

        Raises:
            Failed: the command raised in the worker, which can go on.
            Lost: the worker crashed, hung, left, or broke the protocol; it has been ended.
        """
        if not self.alive:
            raise Lost(Status.PROTOCOL, "the worker has been ended")
        try:
            wire.send(self._sock, {"command": command, **fields})
            reply = wire.receive(self._sock, timeout, self._watch)
        except wire.Late:
            self.end()
            raise Lost(Status.TIMEOUT, f"no answer to {command!r} within {timeout:.0f} s") from None
        except wire.Garbled as error:
            self.end()
            raise Lost(Status.PROTOCOL, f"it wrote something that is no answer: {error}") from None
        except wire.Closed:
            raise self._cause() from None
        if reply.get("fatal"):
            self.end()
            raise Lost(Status.CRASHED, str(reply["error"]))
        if "error" in reply:
            raise Failed(Status.OUT_OF_MEMORY if reply.get("memory") else Status.RAISED, str(reply["error"]))
        return reply

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._checked < 0.25:
            return
        self._checked = now
        try:
            process = psutil.Process(self.pid)
            used = sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
        except psutil.Error:
            return
        if used > self.memory_bytes:
            self.end()
            raise Lost(Status.OUT_OF_MEMORY, f"it took {used >> 20} MiB of memory; the limit is {self.memory_bytes >> 20} MiB")
        if self._log.stat().st_size > _LOG_BYTES:
            self.end()
            raise Lost(Status.PROTOCOL, f"it wrote more than {_LOG_BYTES >> 20} MiB of output")

    def _cause(self) -> Lost:
        ended = self.end()
        said = self.log_tail()
        if ended["running"]:
            return Lost(Status.PROTOCOL, f"it closed its channel before the protocol was over. {said}")
        if ended["signal"] == signal.SIGKILL:
            return Lost(Status.OUT_OF_MEMORY, f"it was killed, most likely for memory. {said}")
        if ended["signal"] is not None:
            return Lost(Status.CRASHED, f"{signal.Signals(ended['signal']).name}. {said}")
        if ended["exit"] == 2:  # the worker itself failed, not what it ran
            return Lost(Status.INFRASTRUCTURE, f"the worker failed: {(said.splitlines() or ['?'])[-1]}")
        return Lost(Status.PROTOCOL, f"it left with exit code {ended['exit']} before the protocol was over. {said}")

    def log_tail(self, most: int = 1500) -> str:
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, self._log.stat().st_size - most))
                return log.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def end(self) -> dict[str, Any]:
        """Ends the worker and everything it started. How it had ended, if it was gone already."""
        if not self.alive:
            return {"signal": None, "exit": None, "running": False}
        self.alive = False
        self._sock.close()
        deadline = time.monotonic() + 0.3
        while (running := _running(self.pid)) and time.monotonic() < deadline:  # it may be on its way out: see how
            time.sleep(0.01)
        ended: dict[str, Any] = {"signal": None, "exit": None}
        children = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(WorkerLost):
            ended = self._zygote.ask({"do": "reap", "pid": self.pid})
        return ended | {"running": running}

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
