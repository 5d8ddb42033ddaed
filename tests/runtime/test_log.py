"""No traceback shows what variables held, by whichever way it is written: prompts and keys are among them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECRET = "S3CRET"
WAYS: dict[str, str] = {
    "a log line": """
try:
    fails(make())
except KeyError:
    logger.exception("bug")
try:
    fails(make())
except KeyError as error:
    logger.critical("bug", exc_info=error)
""",
    "another library's log line": """
try:
    fails(make())
except KeyError:
    logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
""",
    "uvicorn": """
import socket, uvicorn
from gateway.http.server import make_server
async def app(scope, receive, send):
    fails(make())
listener = socket.create_server(("127.0.0.1", 0))
server = make_server(app, 5.0, 1)
async def main():
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
    await reader.read()
    server.should_exit = True
    await serving
asyncio.run(main())
""",
    "a task": "async def main(stop):\n    watched(in_a_task(make()))\n    await asyncio.sleep(20)\nrun_process(main)",
    "a task nobody asks": """
async def main(stop):
    asyncio.create_task(in_a_task(make()))
    await asyncio.sleep(0.1)
    gc.collect()
    return 0
run_process(main)
""",
    "a callback": """
async def main(stop):
    asyncio.get_running_loop().call_soon(fails, make())
    await asyncio.sleep(20)
run_process(main)
""",
    "a partial callback": """
async def main(stop):
    asyncio.get_running_loop().call_soon(functools.partial(fails, make(), more=make()))
    await asyncio.sleep(20)
run_process(main)
""",
    "a thread": "t = threading.Thread(target=fails, args=(make(),))\nt.start()\nt.join()",
    "a destructor": "class Odd:\n    def __del__(self):\n        fails(make())\nOdd()",
    "a warning": "def warns(prompt):\n    warnings.warn('odd', stacklevel=1)\nwarns(make())",
    "nobody": "fails(make())",
    "a command": """
import typer
from runtime.settings.command_line import add_command, invoke, new_app
from runtime.settings.roles import GatewaySettings
def run(settings):
    fails(make())
app = new_app()
add_command(app, "gateway", GatewaySettings, run)
invoke(app, ["--model", "m", "--api-keys", make()], "crossdock")
""",
    "a hang": "faulthandler.enable()\ndef hangs(prompt):\n    os.kill(os.getpid(), signal.SIGABRT)\nhangs(make())",
}
BEGIN = """
import asyncio, faulthandler, functools, gc, logging, os, signal, threading, warnings
from runtime.process import log
from runtime.process.driver import run_process, watched
logger = log.configure(level="debug", fmt={fmt!r}, process="p")
def make():
    return "".join(reversed({secret!r}))
def fails(prompt, more=None):
    tokens, api_key = [prompt], prompt
    raise KeyError("bug")
async def in_a_task(prompt):
    fails(prompt)
"""


@pytest.mark.parametrize("fmt", ["console", "json"])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_tracebacks_hide_variable_values(way: str, fmt: str) -> None:
    """Tracebacks in the log say where an error happened, but show no values of variables."""
    code = BEGIN.format(fmt=fmt, secret=SECRET[::-1]) + WAYS[way]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    said = done.stdout + done.stderr
    assert SECRET not in said, said
    where = {"a warning": "odd", "a hang": "in hangs"}.get(way, "in fails")
    assert where in said and "ImportError" not in said, said
