"""The emulator among threads, forks and signals. Each test runs a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = """
extern "C" __global__ void forever(volatile int* flag) { while (*flag == 0) {} }
extern "C" __global__ void fill(float* out, int first, float value) {
  out[first + blockIdx.x * blockDim.x + threadIdx.x] = value;
}
extern "C" __global__ void wide(int* out) {
  __syncthreads();
  if (threadIdx.x == 0) *out = ID;
}
"""
HEAD = """
import os, signal, sys, threading, time
import numpy as np
from cupaged.emulator import EmulatedModule, EmulatorError
path = sys.argv[1]
flag = np.zeros(1, np.int32)
def load(**options):
    return EmulatedModule(path, {"ID": 0}, **options)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("process") / "process.cu"
    file.write_text(SOURCE)
    return file


def start(path: Path, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + code, str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=120)[0]


def interrupted(process: subprocess.Popen[str]) -> str:
    """The rest of the output of a process that gets SIGINT, alone, after its first line."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    return output(process)


@pytest.mark.parametrize("mode", ["checked", "plain"])
def test_an_interrupt_never_looks_like_an_end(path: Path, mode: str) -> None:
    code = f"""
kernel = load(mode={mode!r}).get_function("forever")
signal.signal(signal.SIGINT, lambda *_: print("handler"))  # does not raise, as a server's does not
print("ready", flush=True)
try:
    kernel((1,), (1,), (flag,))
    print("returned")
except KeyboardInterrupt:
    print("interrupted")
"""
    assert sorted(interrupted(start(path, code)).split()) == ["handler", "interrupted"]


def test_an_interrupt_ends_the_launch_of_another_thread(path: Path) -> None:
    code = """
def work():
    try:
        load().get_function("forever")((1,), (1,), (flag,))
        print("returned")
    except EmulatorError as error:
        print(error)
thread = threading.Thread(target=work)
load()
thread.start()
print("ready", flush=True)
try:
    while thread.is_alive():
        time.sleep(0.01)
except KeyboardInterrupt:
    pass
thread.join()
"""
    assert interrupted(start(path, code)) == (
        "the launch was interrupted; its outputs are not complete\n"
    )


def test_an_ignored_interrupt_is_ignored(path: Path) -> None:
    code = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
module = load(max_steps=1_000_000)
out = np.zeros(64, np.float32)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
end = time.monotonic() + 0.6
while time.monotonic() < end:
    out[:] = 0
    module.get_function("fill")((2,), (32,), (out, np.int32(0), np.float32(1)))
    assert out.all()
print("all done")
"""
    assert output(start(path, code)) == "all done\n"


def test_launches_of_threads_lose_nothing(path: Path) -> None:
    code = """
module, out = load(), np.zeros(4 * 64, np.float32)
def fill(quarter):
    for _ in range(50):
        kernel = module.get_function("fill")
        kernel((2,), (32,), (out, np.int32(64 * quarter), np.float32(quarter + 1)))
threads = [threading.Thread(target=fill, args=(i,)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(np.unique(out.reshape(4, 64), axis=1).tolist())
"""
    assert output(start(path, code)) == "[[1.0], [2.0], [3.0], [4.0]]\n"


def test_a_child_launches_while_a_thread_of_its_parent_does(path: Path) -> None:
    code = """
slow = load(max_steps=400_000_000).get_function("forever")
def run():
    try:
        slow((1,), (1,), (flag,))
    except EmulatorError:
        pass
thread = threading.Thread(target=run)
module = load()
thread.start()
time.sleep(0.2)
child = os.fork()
if child == 0:
    signal.alarm(60)
    out = np.zeros(64, np.float32)
    module.get_function("fill")((2,), (32,), (out, np.int32(0), np.float32(5)))
    os._exit(0 if out.all() else 1)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""
    assert output(start(path, code)) == "child 0\n"


def test_a_child_ends_with_its_parent(path: Path) -> None:
    code = """
print("ready", flush=True)
load(mode="plain").get_function("forever")((1,), (1,), (flag,))
"""
    process = start(path, code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("the kernel does not list children")
    end = time.monotonic() + 60
    while not children.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    child = int(children.read_text().split()[0])
    time.sleep(0.3)
    child = int(children.read_text().split()[0]) if children.read_text().split() else child
    process.kill()
    process.communicate()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # ended; whoever adopted it has not asked yet
        time.sleep(0.05)
    else:
        pytest.fail("the child goes on")


def test_modules_share_the_stacks_of_their_threads(path: Path) -> None:
    code = """
def mappings():
    return sum(1 for _ in open("/proc/self/maps"))
def run(number):
    out = np.zeros(1, np.int32)
    EmulatedModule(path, {"ID": number}, mode="plain", isolated=False).get_function("wide")(
        (1,), (1024,), (out,))
    assert out[0] == number
run(1)
before = mappings()
run(2)
run(3)
print(mappings() - before < 100)
"""
    assert output(start(path, code)) == "True\n"
