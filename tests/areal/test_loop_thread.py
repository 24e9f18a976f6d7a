from __future__ import annotations

import asyncio
import threading

import pytest

from areal.rollout.loop import LoopThread


async def fail() -> None:
    raise ZeroDivisionError


async def answer() -> int:
    return 42


def test_runs_coroutines_with_a_deadline_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    loop = LoopThread("rollout")
    assert loop.run(answer(), 5, "the answer") == 42
    with pytest.raises(ZeroDivisionError):
        loop.run(fail(), 5, "a failure")
    with pytest.raises(TimeoutError, match=r"waited 0\.\d s for evaluation"):
        loop.run(asyncio.sleep(60), 0.05, "evaluation")
    loop.stop(5)
    loop.stop(5)
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="the answer: the thread 'rollout' has ended"):
        loop.run(answer(), 5, "the answer")


def test_waiting_for_itself_is_refused() -> None:
    loop = LoopThread("rollout")

    async def inner() -> None:
        loop.run(answer(), 5, "the answer")

    with pytest.raises(RuntimeError, match="the loop cannot wait for itself"):
        loop.run(inner(), 5, "inner")
    loop.stop(5)


def test_blocked_loop_is_named_at_stop() -> None:
    loop, release = LoopThread("rollout"), threading.Event()

    async def block() -> None:
        release.wait(20)

    with pytest.raises(TimeoutError, match=r"the loop is at\n(.|\n)*release\.wait"):
        loop.run(block(), 0.1, "a blocking call")
    with pytest.raises(TimeoutError, match=r"'rollout' did not end within 0.1 s(.|\n)*release\.wait"):
        loop.stop(0.1)
    release.set()
    loop.stop(5)


def test_an_exit_inside_a_task_is_reported() -> None:
    loop = LoopThread("rollout")
    reported: list[BaseException] = []
    told = threading.Event()
    loop.on_crash = lambda error: (reported.append(error), told.set())

    async def leave() -> None:
        raise SystemExit(3)

    tasks: list[asyncio.Task[None]] = []
    loop.call(lambda: tasks.append(loop.loop.create_task(leave())))
    assert told.wait(5)
    assert reported == [tasks[0].exception()] and isinstance(reported[0], SystemExit)
    loop.stop(5)
