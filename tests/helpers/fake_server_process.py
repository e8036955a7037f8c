"""A program in place of vLLM's server: answers /health on a Unix socket, and starts a process of its own.

    python fake_server_process.py SOCKET PIDS [stubborn | broken]

Both pids go to the file PIDS. `stubborn` ignores SIGTERM; `broken` ends before it is ready.
"""

import http.server
import os
import signal
import socketserver
import subprocess
import sys

path, pids, *how = sys.argv[1:]
if "broken" in how:
    sys.exit("ValueError: there is no such model\n")
if "stubborn" in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def address_string(self) -> str:
        return "socket"


with socketserver.UnixStreamServer(path, Handler) as server:
    with open(pids, "a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    server.serve_forever()
