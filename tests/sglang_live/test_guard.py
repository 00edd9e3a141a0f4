"""The guard over an engine's processes, with processes that are no engine."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from pat.sglang.guard import EngineDied, Guard, alive

SLEEPS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "


@pytest.fixture
def process():
    process = subprocess.Popen([sys.executable, "-c", SLEEPS + "time.sleep(60)"])
    time.sleep(0.3)
    yield process
    process.kill()
    process.wait()


def test_a_lost_process_ends_what_waits_and_the_others(process):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    guard = Guard()
    guard.watch([process.pid, other.pid])

    async def scenario():
        work = asyncio.create_task(guard.run(asyncio.sleep(60)))
        await asyncio.sleep(0.1)
        other.kill()
        with pytest.raises(EngineDied, match=f"process {other.pid} of the engine is gone"):
            await work
        with pytest.raises(EngineDied):
            await guard.run(asyncio.sleep(0))

    asyncio.run(asyncio.wait_for(scenario(), 20))
    other.wait()
    assert len(family) == 2
    assert not any(alive(p) for p in family)
    with pytest.raises(EngineDied):
        guard.check()


def test_other_endings_are_the_works_own():
    guard = Guard()

    async def fails():
        raise KeyError("mine")

    async def scenario():
        assert await guard.run(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(KeyError, match="mine"):
            await guard.run(fails())
        work = asyncio.create_task(guard.run(asyncio.sleep(60)))
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(asyncio.wait_for(scenario(), 20))
    guard.check()


def test_a_process_that_is_gone_already_is_a_failure(process):
    process.kill()
    process.wait()
    guard = Guard()
    guard.watch([process.pid])
    with pytest.raises(EngineDied, match="is gone"):
        guard.check()


def test_nothing_fails_after_the_end(process):
    guard = Guard()
    guard.watch([process.pid])
    guard.closed.set()
    process.kill()
    time.sleep(0.6)
    guard.fail("too late")
    guard.check()
