"""The reward pool: scores, deadlines, errors by name, and functions however they are given."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from areal.rewards.functions import RewardError, RewardTimeout, RewardWorkerDied
from areal.rewards.pool import RewardPool

MODULE = """
import asyncio, sys, time

def length(prompt, completion, prompt_ids, completion_ids, **data):
    return len(completion) * data.get("factor", 1)

async def patient(prompt, completion, prompt_ids, completion_ids, seconds=0.0, **data):
    await asyncio.sleep(seconds)
    return 0.5

def torch_loaded(*arguments):
    return float("torch" in sys.modules)

class Judge:
    def score(self):
        return 7

not_callable = 3
"""


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def with_pool(use, **options):
    pool = RewardPool(**{"workers": 2, "timeout": 5.0} | options)
    try:
        return await use(pool)
    finally:
        await pool.close()


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "user_rewards"
    sys.modules.pop("user_rewards", None)


def test_function_by_import_path_callable_closure_and_object(user_module):
    factor = 3

    def closure(prompt, completion, prompt_ids, completion_ids, **data):
        return factor * len(completion_ids)

    class Scorer:
        def __init__(self, weight: float) -> None:
            self.weight = weight

        def __call__(self, *arguments, **data):
            return self.weight

    async def use(pool: RewardPool):
        import user_rewards

        call = ("p", "four", [1], [2, 3])
        return [
            await pool.call("user_rewards.length", *call, factor=10),
            await pool.call("user_rewards:Judge.score", None),
            await pool.call(user_rewards.length, *call),
            await pool.call(closure, *call),
            await pool.call(Scorer(0.25), *call),
            await pool.call(lambda *a: True, *call),
        ]

    assert run(with_pool(use)) == [40.0, 7.0, 4.0, 6.0, 0.25, 1.0]


def test_function_of_a_script_without_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from areal.rewards.pool import RewardPool\n"
        "OFFSET = 2\n"
        "def reward(prompt, completion, prompt_ids, completion_ids, **data):\n"
        "    return OFFSET + len(completion)\n"
        "async def main():\n"
        "    pool = RewardPool(1)\n"
        "    print(await pool.call(reward, 'p', 'abc', [], []))\n"
        "    await pool.close()\n"
        "asyncio.run(main())\n"
    )
    import subprocess

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.returncode) == ("5.0\n", 0), done.stderr


def test_coroutine_functions_run_on_the_loop_with_a_deadline(user_module):
    async def use(pool: RewardPool):
        import user_rewards

        assert await pool.call("user_rewards.patient", "p", "c", [], []) == 0.5
        assert await pool.call(user_rewards.patient, "p", "c", [], []) == 0.5
        with pytest.raises(RewardTimeout, match=r"user_rewards\.patient ran longer than 0\.2 s"):
            await pool.call("user_rewards.patient", "p", "c", [], [], seconds=30)

        async def own_timeout(*arguments):
            raise TimeoutError("of a web service")

        with pytest.raises(RewardError, match="of a web service") as caught:
            await pool.call(own_timeout, "p")
        assert not isinstance(caught.value, RewardTimeout)

    run(with_pool(use, timeout=0.2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan; a reward is a finite number"),
        (float("-inf"), "returned -inf; a reward is a finite number"),
        (None, "returned None, a NoneType; return one number"),
        ("1.0", "returned '1.0', a str; return one number"),
        ([1.0], "a list; return one number"),
    ],
)
def test_a_result_that_is_no_finite_number_is_an_error_by_name(value, message):
    def odd(*arguments):
        return value

    async def use(pool: RewardPool):
        with pytest.raises(RewardError, match="odd") as caught:
            await pool.call(odd)
        assert message in str(caught.value)

    run(with_pool(use, workers=1))


def test_numbers_of_other_libraries_are_scores():
    async def use(pool: RewardPool):
        return [
            await pool.call(lambda: __import__("numpy").float32(0.5)),
            await pool.call(lambda: __import__("fractions").Fraction(1, 4)),
            await pool.call(lambda: True),
        ]

    assert run(with_pool(use, workers=1)) == [0.5, 0.25, 1.0]


def test_a_missing_function_is_named(user_module):
    async def use(pool: RewardPool):
        for path, words in {
            "user_rewards.lenght": "'user_rewards.lenght' not found",
            "no_such_module.f": "'no_such_module.f' not found",
            "user_rewards.not_callable": "is a int, not a function",
        }.items():
            with pytest.raises(RewardError, match=words):
                await pool.call(path)

    run(with_pool(use, workers=1))


def test_arguments_that_cannot_be_sent_are_an_error_of_that_call():
    async def use(pool: RewardPool):
        lock = threading.Lock()
        for function, argument in ((lambda x: 1.0, lock), (lambda x: lock is None, 0)):
            with pytest.raises(RewardError, match="lambda> or its arguments cannot be sent to a worker: cannot pickle"):
                await pool.call(function, argument)
        return await pool.call(lambda x: 1.0, 0)

    assert run(with_pool(use, workers=1)) == 1.0


def test_workers_start_lazily_and_without_torch(user_module):
    async def use(pool: RewardPool):
        assert pool._handles == []
        assert await pool.call("user_rewards.torch_loaded") == 0.0
        assert len(pool._handles) == 1

    run(with_pool(use))


def test_a_cancelled_caller_leaves_the_pool_usable():
    async def use(pool: RewardPool):
        task = asyncio.create_task(pool.call(time.sleep, 0.3))
        waiting = [asyncio.create_task(pool.call(lambda: 1.0)) for _ in range(5)]
        await asyncio.sleep(0.15)
        for each in (task, *waiting):
            each.cancel()
        return await pool.call(lambda: 2.0)

    assert run(with_pool(use, workers=1)) == 2.0


def test_a_pool_belongs_to_one_loop():
    pool = RewardPool(1)
    assert run(pool.call(lambda: 1.0)) == 1.0
    with pytest.raises(RuntimeError, match="another asyncio loop"):
        run(pool.call(lambda: 1.0))
    for handle in pool._handles:
        handle.process.kill()
        handle.process.wait()


def test_a_worker_that_dies_is_named_and_replaced():
    async def use(pool: RewardPool):
        def suicide():
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)

        def leave():
            import os

            os._exit(3)

        with pytest.raises(RewardWorkerDied, match=r"ended by signal SIGKILL while running .*suicide"):
            await pool.call(suicide)
        with pytest.raises(RewardWorkerDied, match=r"ended by exit code 3 while running .*leave"):
            await pool.call(leave)
        assert await asyncio.gather(*(pool.call(lambda: 1.0) for _ in range(20))) == [1.0] * 20
        assert pool.metrics() == {
            "reward/calls": 22,
            "reward/errors": 2,
            "reward/timeouts": 0,
            "reward/worker_deaths": 2,
        }

    run(with_pool(use))


def test_a_function_that_hangs_on_import_has_its_own_deadline(tmp_path, monkeypatch):
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def use(pool: RewardPool):
        with pytest.raises(RewardTimeout, match=r"importing reward function slow_import\.reward took longer than 1 s"):
            await pool.call("slow_import.reward")
        return await pool.call(lambda: 1.0)

    assert run(with_pool(use, start_timeout=1.0)) == 1.0


def test_large_arguments_and_many_functions_pass():
    async def use(pool: RewardPool):
        ids = list(range(200_000))
        sizes = await asyncio.gather(*(pool.call(lambda a: len(a), ids) for _ in range(4)))
        values = await asyncio.gather(*(pool.call(lambda n=n: n) for n in range(150)))
        assert len(pool._functions) == 64
        return sizes, values

    assert run(with_pool(use)) == ([200_000.0] * 4, [float(n) for n in range(150)])


def test_trivial_rewards_pass_at_thousands_per_second_with_little_work_in_the_parent():
    def exact(prompt, completion, prompt_ids, completion_ids, **data):
        return float(completion == data["answer"])

    async def use(pool: RewardPool):
        arguments = ("Spell this word backward: glink", "knilg", list(range(20)), list(range(8)))
        await pool.call(exact, *arguments, answer="knilg")
        start, work = time.perf_counter(), time.thread_time()
        scores = await asyncio.gather(*(pool.call(exact, *arguments, answer="knilg") for _ in range(3000)))
        assert scores == [1.0] * 3000
        return time.perf_counter() - start, time.thread_time() - work

    best = min(run(with_pool(use)) for _ in range(3))
    assert best[0] < 1.0, f"3,000 rewards took {best[0]:.2f} s"
    assert best[1] < 0.5, f"the loop spent {best[1]:.2f} s on 3,000 rewards"
