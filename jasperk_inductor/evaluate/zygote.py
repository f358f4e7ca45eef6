"""The process that workers are forked from.

Importing torch takes seconds, forking a process that has done so takes milliseconds. The zygote imports, never computes, never
touches a GPU, and forks a clean worker whenever the judge asks; each worker leads a session of its own, in a folder of its own,
with a scrubbed environment. It ends, and its workers with it, when the judge's socket closes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_KEEP = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
    "PYTHONPATH",
    "CXX",
    "CC",
)


def main(fd: int) -> None:
    import torch  # noqa: F401  (so that a fork finds it imported)

    from ..contract import Candidate, Spec, from_json, to_json
    from . import guards, worker  # noqa: F401

    guards.reset()  # its first call imports for a second; touches no GPU and starts no threads
    for noun in (Spec("", (), ()), Candidate("", "")):  # builds their parsers once, for all forks
        from_json(type(noun), to_json(noun))
    control = socket.socket(fileno=fd)
    print("ready", file=sys.stderr, flush=True)
    while True:
        data, fds, *_ = socket.recv_fds(control, 1 << 16, 2)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if request["do"] == "spawn":
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_worker(request, *fds)
            for given in fds:
                os.close(given)
            control.sendall(json.dumps({"pid": pid}).encode())
        elif request["do"] == "reap":
            control.sendall(json.dumps(_reap(request["pid"])).encode())


def _reap(pid: int) -> dict[str, Any]:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return {"signal": None, "exit": None}
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status), "exit": None}
    return {"signal": None, "exit": os.WEXITSTATUS(status)}


def _become_worker(request: dict[str, Any], sock: int, log: int) -> None:
    code = 2
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.chdir(request["folder"])
        kept = {k: os.environ[k] for k in _KEEP if k in os.environ}
        os.environ.clear()
        os.environ.update(kept | request["environment"])
        for name, value in request["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        from . import worker

        worker.serve(socket.socket(fileno=sock), request["device"], request["threads"], request["cold_bytes"])
        code = 0
    except BaseException:  # the worker's boundary: nothing may return into the zygote's loop
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
