"""Runs Python programs in processes that have torch already, since to import it takes most of the
time of a short command.

A server that has done nothing but import torch forks for each program. What stands on the reader's
path in place of a program is a script that sends its arguments, folder, environment and standard
streams to the server, and ends with the status that comes back.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_SERVER = '''
import os, pickle, runpy, socket, sys, traceback

import torch


def run(prelude, module, arguments, environ, folder):
    """A program, in a process of its own; its exit status."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.path[:0] = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *arguments]
    try:
        exec(prelude, {})
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
while True:
    client, _ = listener.accept()
    message, streams, _, _ = socket.recv_fds(client, 1 << 16, 3)
    while more := client.recv(1 << 16):
        message += more
    child = os.fork()
    if not child:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        status = run(*pickle.loads(message))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    for stream in streams:
        os.close(stream)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    client.sendall(bytes([status % 256]))
    client.close()
'''
_CLIENT = """
import os, pickle, socket, sys

place, prelude, module, *arguments = sys.argv[1:]
with open(prelude) as file:
    prelude = file.read()
message = pickle.dumps((prelude, module, arguments, dict(os.environ), os.getcwd()))
server = socket.socket(socket.AF_UNIX)
server.connect(place)
socket.send_fds(server, [message[:1]], [0, 1, 2])
server.sendall(message[1:])
server.shutdown(socket.SHUT_WR)
sys.exit(server.recv(1)[0])
"""


@contextmanager
def warm_programs(
    folder: Path, programs: Mapping[str, Sequence[str]], prelude: str = ""
) -> Iterator[None]:
    """Puts programs into a folder, and serves them until the context ends.

    Args:
        folder: where the programs are put.
        programs: name to module and first arguments.
        prelude: Python that is executed before each of them.
    """
    place = str(folder / "server")
    (folder / "client.py").write_text(_CLIENT)
    (folder / "prelude.py").write_text(prelude)
    files = [str(folder / "client.py"), place, str(folder / "prelude.py")]
    for name, program in programs.items():
        command = shlex.join([sys.executable, "-S", *files, *program])
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, place],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        yield
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
