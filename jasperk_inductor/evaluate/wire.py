"""What judge and workers say to each other: JSON messages over a socket, tensors through files in the job's folder.

Nothing here unpickles. A message has a bounded length and a deadline; tensors travel as safetensors, which is parsed, never
executed.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LONGEST = 4 << 20  # bytes of one message


class Closed(Exception):
    """The other side is gone."""


class Late(Exception):
    """No whole message within the time allowed."""


class Garbled(Exception):
    """Bytes that are no message."""


def send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    try:
        sock.sendall(struct.pack("!I", len(data)) + data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(sock: socket.socket, timeout: float | None = None, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The next message. `tick` is called a few times a second while waiting and may raise.

    Raises:
        Closed, Late, Garbled
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    (length,) = struct.unpack("!I", _exactly(sock, 4, deadline, tick))
    if length > LONGEST:
        raise Garbled(f"a message of {length} bytes")
    try:
        message = json.loads(_exactly(sock, length, deadline, tick))
    except ValueError as error:
        raise Garbled(str(error)) from error
    if not isinstance(message, dict):
        raise Garbled("a message must be an object")
    return message


def _exactly(sock: socket.socket, count: int, deadline: float | None, tick: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < count:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise Late
        sock.settimeout(0.1 if left is None else min(0.1, left))
        try:
            part = sock.recv(count - len(data))
        except TimeoutError:
            tick()
            continue
        except (ConnectionResetError, BrokenPipeError) as error:
            raise Closed from error
        if not part:
            raise Closed
        data += part
    return data


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes dense copies; strides are not kept."""
    save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, path)


def read_tensors(path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    return load_file(path, device=device)
