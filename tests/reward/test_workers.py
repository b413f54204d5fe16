"""Judges in worker processes: with doubles what is asked when, with real ones what ends a process and what is left of it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollyard
from rollyard.config import Config
from rollyard.errors import ConfigError, RollyardError, ScoringError, WorkersUsedUp
from rollyard.place.child import Children
from rollyard.reward import origin
from rollyard.reward.combine import Combined
from rollyard.reward.host import Asked, Judge, Order, loaded
from rollyard.reward.open import check_rewards, open_functions
from rollyard.reward.workers import Crew
from rollyard.types import Completion, FinishReason, Prompt, Reward
from tests.workers import Died, FakeLauncher, Hung

PROMPT = Prompt(0, 0, (1,), "2+3=", {"answer": "5", "level": 2})


def completion(text: str) -> Completion:
    return Completion(0, 0, (1,), (-1.0,), (), FinishReason.STOP, text)


def config(**changes: object) -> Config:
    overrides = {f"reward.{name}": value for name, value in changes.items()}
    return rollyard.resolve(preset="tiny", environment={}, overrides=overrides).config


async def judge(launcher, scratch: Path, given, texts, **changes: object) -> list[Reward]:
    scorer = Combined(open_functions(config(**changes), given, launcher.launch, scratch))
    try:
        return await asyncio.gather(*(scorer.score(PROMPT, completion(text)) for text in texts))
    finally:
        await scorer.close()


class Here(FakeLauncher):
    """Runs functions in this process, and notes what is asked for together."""

    def __init__(self) -> None:
        super().__init__(self.answer)
        self.asked: list[list[str]] = []
        self._judges: list[Judge] = []

    async def launch(self, target: str, order: bytes, **how):
        ordered = Order.read(order)
        self._judges = [Judge(source.name, loaded(source)) for source in ordered.functions]
        return await super().launch(target, order, **how)

    async def answer(self, name: str, content: bytes) -> bytes:
        if name == "start":
            return b""
        asked = Asked(*json.loads(content))
        self.asked.append([text for _, text in asked.texts])
        return json.dumps(await self._judges[asked.function].judge(asked)).encode()


async def lengths(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    if "die" in completions:
        raise KeyError("die")
    return [len(text) for text in completions]


async def test_what_waits_goes_together_and_what_fails_together_is_asked_one_by_one(tmp_path):
    launcher = Here()
    texts = ["a"] * 5 + ["die"] + ["bb"] * 4
    found = await judge(launcher, tmp_path, lengths, texts, batch=4, concurrency=1)
    assert [reward.value for reward in found] == [1.0] * 5 + [None] + [2.0] * 4
    assert found[5].problem == "KeyError: 'die'"
    together = [asked for asked in launcher.asked if len(asked) > 1]
    assert together == [["a"] * 4, ["a", "die", "bb", "bb"], ["bb"] * 2]
    assert sorted(asked[0] for asked in launcher.asked if len(asked) == 1) == ["a", "bb", "bb", "die"]


RUNNING: list[str] = []


async def mortal(prompt, completion):
    RUNNING.append(completion)
    await asyncio.sleep(0.02)
    return 1.0


def where_one_exits() -> Here:
    """Who is asked for `exit` ends its process, with whatever else it judges."""
    launcher = Here()

    async def answer(name: str, content: bytes) -> bytes:
        if b"exit" in content:
            await asyncio.sleep(0.01)
            raise Died("os._exit")
        return await launcher.answer(name, content)

    launcher.handle = answer
    return launcher


async def test_who_was_lost_with_another_is_asked_alone(tmp_path):
    launcher = where_one_exits()
    found = await judge(launcher, tmp_path, mortal, ["a", "exit", "b"])
    assert [reward.value for reward in found] == [1.0, None, 1.0] and "died of os._exit" in found[1].problem
    names = {process.name for process in launcher.started}
    assert names >= {"coroutine reward worker 0", "reward worker 0"} and launcher.started[0].killed


async def test_coroutines_that_are_lost_among_others_that_judge_do_not_end_the_run(tmp_path):
    """Where all functions are coroutines, the processes for one call have suspects only."""
    launcher = where_one_exits()
    scorer = Combined(open_functions(config(give_up_after=4), mortal, launcher.launch, tmp_path))
    for _ in range(4):
        lost = await asyncio.gather(*(scorer.score(PROMPT, completion(text)) for text in ("exit", "exit")))
        assert [reward.value for reward in lost] == [None, None]
        assert (await scorer.score(PROMPT, completion("a"))).value == 1.0
    await scorer.close()


async def each(prompt, completion):
    return float(len(completion))


def all_(completions):
    return [float(len(text)) for text in completions]


def one(prompt, completion):
    return float(len(completion))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([each, all_, one]),
    st.lists(st.sampled_from(["a", "bb", "ccc", "die", "hang"]), max_size=12),
    st.integers(1, 3),
    st.integers(1, 5),
)
async def test_whoever_hangs_or_dies_the_others_have_their_verdicts(tmp_path, function, texts, workers, batch):
    launcher = Here()

    async def answer(name: str, content: bytes) -> bytes:
        await asyncio.sleep(0)
        if b'"die"' in content:
            raise Died("it")
        if b'"hang"' in content:
            raise Hung
        return await launcher.answer(name, content)

    launcher.handle = answer
    how = {"workers": workers, "give_up_after": 99, **{each: {"concurrency": batch}, all_: {"batch": batch}}.get(function, {})}
    found = await judge(launcher, tmp_path, {"it": function}, texts, **how)
    assert [reward.value for reward in found] == [None if text in ("die", "hang") else float(len(text)) for text in texts]
    for reward, text in zip(found, texts, strict=True):
        assert {"die": "died of it", "hang": "no verdict within 10 s"}.get(text, "") in reward.problem
    assert all(process.closed for process in launcher.started)


async def test_a_function_that_always_dies_ends_the_run(tmp_path):
    launcher = Here()

    async def answer(name: str, content: bytes) -> bytes:
        if name == "judge":
            raise Died("hunger")
        return b""

    launcher.handle = answer
    with pytest.raises(ScoringError, match=r"right: 3 reward workers in a row were lost .* died of hunger"):
        await judge(launcher, tmp_path, {"right": lambda prompt, completion: 1.0}, "a" * 9, give_up_after=3, workers=1)


async def test_one_after_the_other_each_has_its_verdict(tmp_path):
    """Who asks as soon as the one before was told comes while what asked for that one is about to end."""
    (part,) = open_functions(config(workers=1), one, Here().launch, tmp_path)
    async with asyncio.timeout(5):
        for text in ("a", "bb", "ccc"):
            assert (await part.scorer.score(PROMPT, completion(text))).value == len(text)
    await part.scorer.close()


async def test_an_error_that_nobody_foresaw_is_told_to_all_who_wait(tmp_path):
    launcher = Here()

    async def answer(name: str, content: bytes) -> bytes:
        await asyncio.sleep(0.01)
        return b"no JSON"

    launcher.handle = answer
    (part,) = open_functions(config(workers=1), one, launcher.launch, tmp_path)
    async with asyncio.timeout(5):
        found = await asyncio.gather(*(part.scorer.score(PROMPT, completion("a")) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in found] == [ScoringError] * 3
    assert "one cannot be asked: JSONDecodeError: Expecting value" in str(found[0])
    await part.scorer.close()


async def test_a_crew_that_is_closed_starts_no_process(tmp_path):
    launcher = Here()
    crew = Crew(config().reward, launcher.launch, [], tmp_path)
    await crew.close()
    with pytest.raises(WorkersUsedUp, match="are closed"):
        await crew.single.call("judge", limit_s=1)
    assert not launcher.started


async def test_a_column_that_is_no_json_is_no_verdict(tmp_path):
    scorer = Combined(open_functions(config(), mortal, Here().launch, tmp_path))
    prompt = Prompt(0, 0, (1,), "p", {"set": {1}})
    assert (await scorer.score(prompt, completion("a"))).value == 1.0  # it does not take the column
    await scorer.close()
    scorer = Combined(open_functions(config(), lambda prompt, completion, **columns: 1.0, Here().launch, tmp_path))
    found = await scorer.score(prompt, completion("a"))
    assert found.value is None and "set is not JSON serializable" in found.problem
    await scorer.close()


# ---------------------------------------------------------------------------------------------- from here to there


def test_how_a_function_gets_into_another_process():
    assert origin.import_name(mortal) == "tests.reward.test_workers:mortal"
    for nameless in (lambda: 0, Judge("x", mortal), Judge.judge, test_how_a_function_gets_into_another_process.__call__):
        assert not origin.import_name(nameless)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="locked cannot be given to a worker process: TypeError"):
        check_rewards(config(), {"locked": lambda prompt, completion: lock.locked()}, set())


def test_what_another_user_may_write_is_not_read(tmp_path):
    file = tmp_path / "it.pickle"
    origin.write(file, origin.pickled(lambda: 7, "it", "here"))
    assert file.stat().st_mode & 0o777 == 0o600 and origin.read(file)() == 7
    file.chmod(0o620)
    with pytest.raises(RollyardError, match="not this user's alone"):
        origin.read(file)


# -------------------------------------------------------------------------------------------------- real processes


def wild(prompt, completion, **columns):
    print(f"judging {completion}", file=sys.stderr if completion == "a" else sys.stdout)
    match completion:
        case "regex":
            re.match("(a+)+$", "a" * 64 + "b")  # holds the interpreter
        case "exit":
            os._exit(3)
        case "crash":
            ctypes.string_at(0)
        case "signal":  # only the main thread may set one
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        case "script":
            command = [sys.executable, "-c", "import os, sys; print(os.environ.get('PYTHONSAFEPATH'), 'package' in sys.path[1])"]
            assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "None False\n"
    return os.getpid()


async def test_whatever_a_function_does_costs_its_own_verdict_only(tmp_path):
    children = Children(at_once=True)
    began = time.monotonic()
    texts = ["a", "regex", "b", "exit", "crash", "signal", "script"]
    found = await judge(children, tmp_path, wild, texts, time_limit_s=2, workers=2)
    assert time.monotonic() - began < 20
    pids = [reward.value for reward in found]
    assert [pid is None for pid in pids] == [False, True, False, True, True, False, False]
    assert os.getpid() not in pids and all(_state(f"{pid:.0f}") == "Z" for pid in pids if pid)
    assert found[1].problem == "no verdict within 2 s"
    assert "ended with exit code 3" in found[3].problem
    assert "ended by signal 11" in found[4].problem and "in wild" in found[4].problem
    assert sorted((tmp_path / "reward.log").read_text().splitlines()) == sorted(f"judging {text}" for text in texts)
    await children.close()


async def blocking(prompt, completion):
    if completion == "block":
        time.sleep(600)  # noqa: ASYNC251 - that is the mistake
    await asyncio.sleep(0.05)
    return 1.0


async def test_a_coroutine_that_blocks_the_loop_costs_its_own_verdict_only(tmp_path):
    children = Children(at_once=True)
    found = await judge(children, tmp_path, blocking, ["a", "block", "b"], time_limit_s=1)
    assert [reward.value for reward in found] == [1.0, None, 1.0]
    assert found[1].problem == "no verdict within 1 s"
    await children.close()
    assert not list(tmp_path.glob("*.pickle"))


PARENT = """
import asyncio, sys
from pathlib import Path
import rollyard
from rollyard.place.child import Children
from rollyard.reward.combine import Combined
from rollyard.reward.open import open_functions
from tests.reward.test_workers import PROMPT, completion, config, stuck

async def main():
    scorer = Combined(open_functions(config(time_limit_s=600), stuck, Children(at_once=True).launch, Path(sys.argv[1])))
    await scorer.score(PROMPT, completion(sys.argv[1]))

asyncio.run(main())
"""


def stuck(prompt, completion):
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    partial = Path(completion, "partial")
    partial.write_text(f"{os.getpid()} {started.pid}")
    partial.rename(Path(completion, "pids"))
    re.match("(a+)+$", "a" * 64 + "b")


def test_workers_end_with_a_run_that_is_killed_even_where_they_hold_the_interpreter(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=Path(__file__).parents[2])
    until = time.monotonic() + 30
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < until and parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    pids, until = (tmp_path / "pids").read_text().split(), time.monotonic() + 3
    while any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
