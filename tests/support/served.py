"""Runs programs in forks of a process that has torch, transformers and DeepSpeed loaded: a start costs milliseconds
instead of ten seconds of imports.

What starts a program starts a small client in its place. The client hands its words, folder, environment and open files
to the server, passes signals on, and ends as the program ends. So a test sees a process as any other: with its own
streams and exit code, and dead when the client is killed.
"""

import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from support import forked, networks
from support.tiers import FULL, TIER
from ulysses_cli.prove.ranks import start_process

CLIENT = """\
import json, os, signal, socket, sys
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if os.path.exists(f"/proc/self/fd/{file}")]  # not the listing's own
mask = os.umask(0)
request = {"words": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ), "files": files, "umask": mask}
text = json.dumps(request).encode()
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
socket.send_fds(server, [len(text).to_bytes(8, "big")], files)
server.sendall(text)
answers = server.makefile()
program = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(program, number))
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
START_SECONDS = 120.0
MAX_FILES, MANY = 64, 256  # files of a client; a number above all of them
_spawn = util.spawnv_passfds  # type: ignore[attr-defined]
_folder: tempfile.TemporaryDirectory[str] | None = None


def write_python() -> Path:
    """Returns a program that stands for this interpreter, for `-m MODULE`, `-c CODE` or `FILE` and their words. Its
    server is started when it is first asked for, and ends with this process. `make test-full` takes the interpreter."""
    global _folder
    if TIER == FULL:
        return Path(sys.executable)
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="served-")  # Linux allows a socket's path 107 characters
        folder = Path(_folder.name)
        (folder / "client.py").write_text(CLIENT)
        write_script(folder / "python", f'exec "{sys.executable}" -IS {folder}/client.py {folder}/socket "$@"')
        start_process(_serve, (str(folder / "socket"),))
        end = time.monotonic() + START_SECONDS
        while not (folder / "socket").exists():
            assert time.monotonic() < end, "the server of programs does not start"
            time.sleep(0.05)
    return Path(_folder.name) / "python"


def write_program(folder: Path) -> Path:
    """Writes `ulysses`."""
    folder.mkdir()
    return write_script(folder / "ulysses", f'exec {write_python()} -m ulysses_cli "$@"')


def write_script(file: Path, line: str) -> Path:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return file


class ServedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Has `[sys.executable, "-m", MODULE, ...]` run by the server, and any other command as usual."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        if not isinstance(args, str) and list(args[:2]) == [sys.executable, "-m"]:
            args = [str(write_python()), *args[1:]]
        super().__init__(args, *rest, **options)


def _serve(path: str) -> None:
    forked.preload()
    util.spawnv_passfds = _start_helper  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(16)
    os.rename(f"{path}.new", path)
    keepers = set[int]()
    while True:
        client, _ = listener.accept()
        keepers -= {keeper for keeper in keepers if os.waitpid(keeper, os.WNOHANG)[0]}
        keeper = os.fork()
        if keeper == 0:
            listener.close()
            _look_after(client)
        keepers.add(keeper)
        client.close()


def _look_after(client: socket.socket) -> NoReturn:
    """Runs the client's program, and ends it when the client is gone."""
    with suppress(BaseException):
        size, files, *_ = socket.recv_fds(client, 8, MAX_FILES)
        with client.makefile("rb") as stream:
            request = json.loads(stream.read(int.from_bytes(size, "big")))
        pid, *_ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        program = os.fork()
        if program == 0:
            client.close()
            _be(request, pid, files)
        for file in files:
            os.close(file)
        client.sendall(f"{program}\n".encode())
        handle = os.pidfd_open(program)
        ready, _, _ = select.select([handle, client], [], [])
        if handle not in ready:
            os.kill(program, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        client.sendall(f"{code}\n".encode())
    os._exit(0)


def _be(request: dict[str, Any], client: int, files: Sequence[int]) -> NoReturn:
    try:
        os.setsid()
        process.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it may start ranks
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined] # a file may get its number
        networks.join(client)
        _take_files(files, request["files"])
        os.umask(request["umask"])
        forked.be_new(request["cwd"], request["env"])
        paths = request["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path += [path for path in paths if path not in sys.path]
        words = request["words"]
        forked.run(words[1:] if words[0] == "-u" else words)
    except BaseException:  # noqa: BLE001 - nothing of the server goes on here
        traceback.print_exc()
    os._exit(1)


def _take_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives this process's files the numbers that they have in the client."""
    for copy, number in zip([fcntl.fcntl(file, fcntl.F_DUPFD, MANY) for file in files], numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )


def _start_helper(path: Any, args: Sequence[Any], kept: Sequence[int]) -> int:
    """Starts a helper of multiprocessing. A server of ranks is forked: what it imports first is here already."""
    if "forkserver" not in args[-1]:
        return int(_spawn(path, args, kept))
    server = os.fork()
    if server == 0:
        try:
            forked.take_files((-1, -1, -1), set(kept))
            forked.be_new(None, None)
            forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined] # held by who starts it
            exec(args[-1])
        finally:
            os._exit(1)
    return server
