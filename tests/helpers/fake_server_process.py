"""A program in place of vLLM's server: answers /health on a Unix socket or a port, and starts a process of its own.

    python fake_server_process.py SOCKET | HOST:PORT PIDS [stubborn | broken | silent]

Both pids go to the file PIDS. `stubborn` ignores SIGTERM, and makes a file PIDS.PID then; `broken` ends before it is
ready; `silent` never listens.
"""

import http.server
import os
import pathlib
import signal
import socketserver
import subprocess
import sys
import time

path, pids, *how = sys.argv[1:]
if "broken" in how:
    sys.exit("ValueError: there is no such model\n")
if "stubborn" in how:
    signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(f"{pids}.{os.getpid()}").touch())
child = subprocess.Popen(["sleep", "300"])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def address_string(self) -> str:
        return "socket"


def note() -> None:
    with open(pids, "a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")


if "silent" in how:
    note()
    while True:
        time.sleep(300)
socketserver.TCPServer.allow_reuse_address = True
host, _, port = path.rpartition(":")
made = (
    socketserver.TCPServer((host, int(port)), Handler)
    if host
    else socketserver.UnixStreamServer(path, Handler)
)
with made as server:
    note()
    server.serve_forever()
