"""Rewards that hang, raise, run off the main thread, score zero, or outlive their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from areal.rewards.functions import RewardError, RewardTimeout
from areal.rewards.pool import RewardPool


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def hang_in_c(*arguments):
    """A catastrophic regular expression: it holds the interpreter lock, so no thread or signal handler can stop it."""
    import re

    return re.match(r"(a+)+$", "a" * 40 + "b") is not None


def hang_in_python(*arguments):
    while True:
        pass


@pytest.mark.parametrize("hang", [hang_in_c, hang_in_python, lambda: __import__("time").sleep(1000)])
def test_a_hung_reward_is_killed_alone_and_the_pool_stays_at_full_size(hang):
    async def scenario():
        pool = RewardPool(workers=2, timeout=1.0)
        slow = [asyncio.create_task(pool.call(lambda: __import__("time").sleep(0.7) or 0.25)) for _ in range(1)]
        start = time.perf_counter()
        hung = asyncio.create_task(pool.call(hang))
        quick = [asyncio.create_task(pool.call(lambda: 0.5)) for _ in range(200)]
        with pytest.raises(RewardTimeout, match=r"ran longer than 1 s"):
            await hung
        assert 0.9 < time.perf_counter() - start < 3.0
        assert await asyncio.gather(*slow, *quick) == [0.25] + [0.5] * 200
        # full size again: two calls that only pass if two workers run them at the same time
        started = time.perf_counter()
        await asyncio.gather(*(pool.call(lambda: 1.0) for _ in range(2)))  # both workers are up
        started = time.perf_counter()
        await asyncio.gather(*(pool.call(lambda: __import__("time").sleep(0.6) or 1.0) for _ in range(2)))
        assert time.perf_counter() - started < 1.1
        assert pool.metrics()["reward/timeouts"] == 1
        await pool.close()

    run(scenario())


def test_calls_queued_behind_a_hung_one_neither_wait_for_it_nor_expire_with_it():
    async def scenario():
        pool = RewardPool(workers=2, timeout=20.0)

        def reward(hang):
            while hang:
                pass
            return 1.0

        await asyncio.gather(*(pool.call(reward, False) for _ in range(500)))  # known to be fast: sent ahead in batches
        start = time.perf_counter()
        tasks = [asyncio.create_task(pool.call(reward, index == 3)) for index in range(64)]
        await asyncio.gather(*(task for index, task in enumerate(tasks) if index != 3))
        assert time.perf_counter() - start < 5.0
        assert not tasks[3].done()
        tasks[3].cancel()
        await pool.close()

    run(scenario())


def test_a_worker_that_gets_no_processor_for_a_while_answers_every_call():
    """It finds its calls and the request to give them back at the same time, and has begun none."""

    async def scenario():
        pool = RewardPool(workers=2, timeout=10.0)
        first = [pool.call(divmod_of, n) for n in range(64)]
        assert await asyncio.gather(*first) == [float(n) for n in range(64)]
        workers = [handle.process.pid for handle in pool._handles]
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        later = [asyncio.create_task(pool.call(divmod_of, n)) for n in range(64)]
        await asyncio.sleep(0.3)  # beyond the time after which waiting calls are asked back
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
        assert await asyncio.wait_for(asyncio.gather(*later), 5) == [float(n) for n in range(64)]
        assert all(value == 0 for name, value in pool.metrics().items() if name != "reward/calls")
        await pool.close()

    run(scenario())


def divmod_of(n):
    return float(divmod(n, 1)[0])


def test_one_worker_serves_the_next_reward_after_a_hung_one():
    async def scenario():
        pool = RewardPool(workers=1, timeout=0.5)
        results = await asyncio.gather(
            pool.call(hang_in_c), *(pool.call(lambda: 1.0) for _ in range(8)), return_exceptions=True
        )
        assert isinstance(results[0], RewardTimeout) and "hang_in_c" in str(results[0])
        assert results[1:] == [1.0] * 8
        await pool.close()

    run(scenario())


def test_a_busy_loop_in_the_parent_expires_no_reward():
    async def scenario():
        pool = RewardPool(workers=1, timeout=0.5)
        await pool.call(lambda: 1.0)
        task = asyncio.create_task(pool.call(lambda: __import__("time").sleep(0.2) or 1.0))
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # the loop is late, the reward was not
        assert await task == 1.0
        await pool.close()

    run(scenario())


def test_a_pathological_formula_ends_at_the_deadline_and_the_worker_is_usable_again():
    def compares_formulas(prompt, completion, prompt_ids, completion_ids, *, answer):
        from math_verify import parse, verify

        return float(
            verify(parse(answer, parsing_timeout=None), parse(completion, parsing_timeout=None), timeout_seconds=None)
        )

    async def scenario():
        pool = RewardPool(workers=1, timeout=3.0)
        with pytest.raises(RewardTimeout, match="compares_formulas ran longer than 3 s"):
            await pool.call(compares_formulas, "p", "$9^{9^{9^{9}}}$", [], [], answer="$3$")
        assert await pool.call(compares_formulas, "p", "$\\frac{6}{2}$", [], [], answer="$3$") == 1.0
        # a word problem's answer is a number: there such a formula is simply wrong
        assert await pool.call("areal.rewards.gsm8k.reward", "p", "$9^{9^{9^{9}}}$", [], [], answer="3") == 0.0
        await pool.close()

    run(scenario())


def test_what_a_hung_reward_started_ends_with_it(tmp_path):
    def starts_a_process(path):
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        with open(path, "w") as file:
            file.write(str(child.pid))
        child.wait()

    async def scenario():
        pool = RewardPool(workers=1, timeout=0.5)
        with pytest.raises(RewardTimeout):
            await pool.call(starts_a_process, str(tmp_path / "pid"))
        await pool.close()

    run(scenario())
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_reward_that_raises_gives_its_traceback_and_harms_nobody():
    def broken(prompt):
        table = {"a": 1}
        return table[prompt]

    async def scenario():
        pool = RewardPool(workers=1)
        results = await asyncio.gather(pool.call(broken, "b"), pool.call(broken, "a"), return_exceptions=True)
        assert isinstance(results[0], RewardError)
        for words in ("broken raised", "Traceback", "in broken", "KeyError: 'b'"):
            assert words in str(results[0])
        assert results[1] == 1.0
        with pytest.raises(RewardError, match=r"(?s)return _default_decoder\.decode\(s\).*JSONDecodeError"):
            await pool.call("json.loads", "{")  # an importable function shows its source lines
        with pytest.raises(RewardError, match="SystemExit"):
            await pool.call(sys.exit, 3)
        await pool.close()

    run(scenario())


def test_zero_is_a_score():
    async def scenario():
        pool = RewardPool(workers=1)
        assert await pool.call(lambda: 0.0) == 0.0
        assert await pool.call(lambda: False) == 0.0
        assert pool.metrics()["reward/errors"] == 0
        await pool.close()

    run(scenario())


def test_rewards_score_right_when_called_off_the_main_thread():
    from areal.rewards import gsm8k

    scores: list[float] = []

    def call():
        scores.append(gsm8k.reward("p", "so it is \\boxed{18}", [], [], answer="#### 18"))

        async def pooled():
            pool = RewardPool(workers=1)
            scores.append(await pool.call(gsm8k.reward, "p", "The answer is 18.", [], [], answer="#### 18"))
            await pool.close()

        asyncio.run(pooled())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=60)
    assert scores == [1.0, 1.0]


def test_closing_does_not_wait_for_a_hung_reward():
    async def scenario():
        pool = RewardPool(workers=2, timeout=100.0)
        tasks = [asyncio.create_task(pool.call(hang_in_c)) for _ in range(4)]
        await asyncio.sleep(0.5)
        pids = [handle.process.pid for handle in pool._handles]
        start = time.perf_counter()
        await pool.close(deadline=5.0)
        assert time.perf_counter() - start < 2.0
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RewardError) and "closed while" in str(result)
        assert all(gone(pid) for pid in pids)
        await pool.close()
        with pytest.raises(RewardError, match="closed"):
            await pool.call(lambda: 1.0)

    run(scenario())


@pytest.mark.parametrize("busy", [True, False])
def test_killing_the_parent_leaves_no_worker(busy: bool, tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, re, sys\n"
        "from areal.rewards.pool import RewardPool\n"
        "def hang(): return re.match(r'(a+)+$', 'a' * 40 + 'b')\n"
        "async def main():\n"
        "    pool = RewardPool(2, timeout=100)\n"
        "    await asyncio.gather(*(pool.call(lambda: 1.0) for _ in range(2)))\n"
        "    tasks = [asyncio.create_task(pool.call(hang)) for _ in range(2)] if sys.argv[1] == 'True' else []\n"
        "    await asyncio.sleep(0.5)\n"
        "    print(*(handle.process.pid for handle in pool._handles), flush=True)\n"
        "    await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    parent = subprocess.Popen([sys.executable, script, str(busy)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert pids and all(gone(pid) for pid in pids)


def gone(pid: int, deadline: float = 5.0) -> bool:
    """Whether a process ends (or is a zombie that nobody reaps) within the deadline."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
