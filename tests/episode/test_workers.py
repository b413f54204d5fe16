"""Episodes in processes that may be lost: who did it loses its verdict, the others begin again and notice nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rollyard.episode import workers
from rollyard.episode.host import ASK, PLAY, PLAYED, REPLY, Order
from rollyard.episode.load import FromFunction
from rollyard.episode.stage import Played
from rollyard.episode.workers import InWorkers
from rollyard.errors import EngineError, EngineLost, WorkersUsedUp
from rollyard.place.child import Children
from rollyard.settle import Surroundings
from rollyard.types import Asking, FinishReason, Prompt, Reply, Reward
from tests.episode.toys import stage
from tests.tiny import tiny_folder

ORDER = Order("own.py:episode", "", "", 8, 9, 8, 0.1, Surroundings("", (), {}))


def prompt(number: int) -> Prompt:
    return Prompt(number, number, (4,), "?")


class Sham:
    """A process in name only. An environment that blocks it stops all that goes on in it."""

    def __init__(self, name: str, plays, lost: asyncio.Event) -> None:
        self._lost = lost
        self.name, self._stage = name, stage(FromFunction(lambda ask, prompt: plays(self, ask, prompt)))
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._blocked = asyncio.Event()
        self.stopped: list[bytes] = []
        self.begun = 0

    def handle(self, name, handler) -> None:
        self._ask = handler

    def ready(self) -> None: ...

    def tell(self, name: str, content: bytes = b"") -> None:
        self.stopped.append(content)

    async def block(self) -> None:
        self._blocked.set()
        await asyncio.Event().wait()

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        if name == "start":
            return b""
        number, asked = PLAY.validate_json(content)
        self.begun += 1

        async def answer(asking: Asking, hearing: object = None) -> Reply:
            (reply,) = REPLY.validate_json(await self._ask(ASK.dump_json((number, asking))))
            if self._blocked.is_set():
                await asyncio.Event().wait()
            return reply

        episode = asyncio.ensure_future(self._stage.play(asked, answer))
        try:
            await asyncio.wait((episode, self._end), return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                raise EngineLost(f"{self.name} {self._end.result()}")
            return PLAYED.dump_json((episode.result(),))
        finally:
            episode.cancel()

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    def end(self, cause: str) -> None:
        if not self._end.done():
            self._end.set_result(cause)
            self._lost.set()

    def kill(self) -> None:
        self.end("was ended by signal 9")

    async def close(self) -> None:
        self.end("was closed")


@asynccontextmanager
async def unheard() -> AsyncIterator[list[str]]:
    """What the loop says of tasks whose errors nobody asked for."""
    loop, said = asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(lambda _, context: said.append(f"{context['message']}: {context.get('exception')}"))
    try:
        yield said
        await asyncio.sleep(0)
        gc.collect()
    finally:
        loop.set_exception_handler(None)


class Crew:
    def __init__(self, plays, monkeypatch, places: int = 8, size: int = 1) -> None:
        monkeypatch.setattr(workers, "GRACE_S", 0.1)
        self.started: list[Sham] = []
        self._plays, self.lost = plays, asyncio.Event()
        self.player = InWorkers(self.launch, ORDER, size, places)

    async def launch(self, target, order, *, name, environment, python=None) -> Sham:
        self.started.append(Sham(name, self._plays, self.lost))
        return self.started[-1]


class Policy:
    """Writes 1 after each question, when it is let to; counts what it wrote for whom."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.written = 0

    async def __call__(self, asking: Asking, hearing: object = None) -> Reply:
        await self.open.wait()
        self.written += 1
        return Reply((1,), "he", FinishReason.STOP)


async def test_what_goes_on_beside_a_blocked_environment_is_not_lost(monkeypatch):
    """Episode 0 blocks whatever process it is in, after its first turn; 1 waits for the policy then, 2 is at work."""

    async def plays(process, ask, prompt):
        first = await ask((4,))
        if prompt.id == 0:
            await process.block()
        if prompt.id == 2:
            await asyncio.sleep(0.05)
        second = await ask((4, *first.token_ids, 5))
        return float(len(second.token_ids))

    crew, policy, late = Crew(plays, monkeypatch), Policy(), Policy()
    policy.open.set()
    going = [asyncio.create_task(crew.player.play(prompt(number), late if number == 1 else policy)) for number in range(3)]
    async with asyncio.timeout(5):
        await crew.lost.wait()
        late.open.set()
        blocked, waited, worked = await asyncio.gather(*going)
    assert blocked.verdict is not None and blocked.verdict.value is None
    assert "the environment blocked its process for 0.1 s" in blocked.verdict.problem and blocked.text == "he"
    assert waited == worked == Played(Reward(1.0, {"environment": 1.0}), "he=he")
    assert (policy.written, late.written) == (1 + 2, 2), "nothing is written twice"
    names = ("environment", "lone")
    begun = [sum(process.begun for process in crew.started if process.name.startswith(name)) for name in names]
    assert begun == [3 + 1, 2], "who waited for the policy is no suspect"
    await crew.player.close()


async def test_a_process_that_dies_with_one_episode_in_it_is_started_again(monkeypatch):
    async def plays(process, ask, prompt):
        if prompt.id == 0:
            process.end("ended with exit code 3")
            await asyncio.sleep(5)
        return 1.0

    crew = Crew(plays, monkeypatch)
    async with asyncio.timeout(5):
        dead = await crew.player.play(prompt(0), Policy())
        alive = await crew.player.play(prompt(1), Policy())
    assert dead.verdict is not None and "exit code 3" in dead.verdict.problem
    assert alive.verdict == Reward(1.0, {"environment": 1.0})
    await crew.player.close()


async def test_an_environment_that_asks_otherwise_the_second_time_has_no_verdict(monkeypatch):
    async def plays(process, ask, prompt):
        await ask((4,) * (1 + (process.begun > 0) * len(crew.started)))
        if len(crew.started) == 1:
            process.end("ended with exit code 3")
            await asyncio.sleep(5)
        return 1.0

    crew, policy = Crew(plays, monkeypatch), Policy()
    policy.open.set()
    async with unheard() as errors, asyncio.timeout(5):
        played = await crew.player.play(prompt(0), policy)
        await crew.player.close()
    assert played.verdict is not None and "did not ask as before" in played.verdict.problem and policy.written == 1
    assert not errors


async def test_a_policy_that_fails_while_nobody_waits_for_it_is_no_news(monkeypatch):
    """Its process is lost, and what comes next asks otherwise: nobody asks for the first answer again."""

    async def plays(process, ask, prompt):
        if len(crew.started) == 1:
            asyncio.get_running_loop().call_later(0.02, process.end, "ended with exit code 3")
        else:
            failing.set()
            await asyncio.sleep(0.02)
        await ask((4,) * len(crew.started))

    async def breaks(asking):
        await failing.wait()
        raise EngineError("no engine is left")

    crew, failing = Crew(plays, monkeypatch), asyncio.Event()
    async with unheard() as errors, asyncio.timeout(5):
        played = await crew.player.play(prompt(0), breaks)
        await crew.player.close()
    assert played.verdict is not None and "did not ask as before" in played.verdict.problem
    assert not errors


async def test_what_breaks_the_policy_is_not_the_environments_fault(monkeypatch):
    async def plays(process, ask, prompt):
        await ask((4,))

    async def breaks(asking):
        raise EngineError("no engine is left")

    crew = Crew(plays, monkeypatch)
    with pytest.raises(EngineError, match="no engine is left"):
        async with asyncio.timeout(5):
            await crew.player.play(prompt(0), breaks)
    await crew.player.close()


async def test_a_dropped_member_ends_in_its_process_too(monkeypatch):
    async def plays(process, ask, prompt):
        await ask((4,))

    crew = Crew(plays, monkeypatch)
    going = asyncio.create_task(crew.player.play(prompt(0), Policy()))
    await asyncio.sleep(0.05)
    going.cancel()
    await asyncio.wait((going,))
    assert going.cancelled() and crew.started[0].stopped == [b"0"]
    await crew.player.close()


async def test_a_column_that_cannot_be_given_to_a_process_is_no_verdict(monkeypatch):
    async def plays(process, ask, prompt):
        return 1.0

    crew = Crew(plays, monkeypatch)
    async with asyncio.timeout(5):
        played = await crew.player.play(Prompt(0, 0, (4,), "?", {"answer": "\ud83d"}), Policy())
        other = await crew.player.play(prompt(1), Policy())
    assert played.verdict is not None and played.verdict.value is None
    assert played.verdict.problem.startswith("a column cannot be given to a worker process: PydanticSerializationError")
    assert other.verdict == Reward(1.0, {"environment": 1.0})
    await crew.player.close()


@pytest.mark.parametrize(("size", "at_once"), [(1, 2), (3, 3)])
async def test_several_suspects_at_a_time_each_alone(monkeypatch, size, at_once):
    """All block the first process; half of them do it again."""
    at_work: list[Sham] = []
    most = 0

    async def plays(process, ask, prompt):
        nonlocal most
        if process.name.startswith("lone"):
            assert process not in at_work
            at_work.append(process)
            most = max(most, len(at_work))
        try:
            if prompt.id % 2 or process not in at_work:
                await process.block()
            return 1.0
        finally:
            if process in at_work:
                at_work.remove(process)

    crew = Crew(plays, monkeypatch, places=10, size=size)
    async with asyncio.timeout(5):
        played = await asyncio.gather(*(crew.player.play(prompt(number), Policy()) for number in range(10)))
        await crew.player.close()
    assert [each.verdict is not None and each.verdict.value for each in played] == [1.0, None] * 5
    assert most == at_once


@pytest.mark.parametrize(("size", "lost"), [(1, 8), (2, 16)])
async def test_environments_that_always_die_end_the_run(monkeypatch, size, lost):
    async def plays(process, ask, prompt):
        process.end("ended with exit code 3")
        await asyncio.sleep(5)

    crew = Crew(plays, monkeypatch, size=size)
    with pytest.raises(WorkersUsedUp, match=rf"^{lost} (lone )?environment workers in a row were lost.*exit code 3"):
        async with asyncio.timeout(5):
            for number in range(20):
                await crew.player.play(prompt(number), Policy())
    await crew.player.close()


async def test_blocked_episodes_among_others_that_end_are_no_reason_to_end_the_run(monkeypatch):
    """Who blocks goes on in a pool of its own, where nothing else ever ends."""

    async def plays(process, ask, prompt):
        if prompt.id % 2:
            process.end("ended with exit code 3")
            await asyncio.sleep(5)
        return 1.0

    crew = Crew(plays, monkeypatch)
    async with asyncio.timeout(5):
        played = [await crew.player.play(prompt(number), Policy()) for number in range(24)]
    assert [each.verdict is not None and each.verdict.value for each in played] == [1.0, None] * 12
    await crew.player.close()


async def test_suspects_that_wait_for_one_another_both_end(monkeypatch):
    """The younger is answered only once the older has ended, as with `swap`, where a version comes between their batches."""
    monkeypatch.setattr(workers, "PATIENCE_S", 0.05)
    monkeypatch.setattr(workers, "SUSPECTS", 1)

    async def plays(process, ask, prompt):
        if prompt.id == 9:
            await asyncio.sleep(0.01)
            process.end("ended with exit code 3")
            await asyncio.sleep(5)
        await asyncio.sleep(0.03)
        first = await ask((4,))
        second = await ask((4, *first.token_ids))
        return float(len(second.token_ids))

    crew, policy, younger, older = Crew(plays, monkeypatch), Policy(), Policy(), Policy()
    older.open.set()
    async with asyncio.timeout(5):
        waits = asyncio.create_task(crew.player.play(prompt(1), younger))
        ends = asyncio.create_task(crew.player.play(prompt(0), older))
        ends.add_done_callback(lambda _: younger.open.set())
        dies = asyncio.create_task(crew.player.play(prompt(9), policy))
        played = await asyncio.gather(waits, ends, dies)
    assert [each.verdict is not None and each.verdict.value for each in played] == [1.0, 1.0, None]
    assert (younger.written, older.written) == (2, 2), "nothing is written twice"
    alone = [process for process in crew.started if process.name == "lone environment worker 0"]
    assert [process.begun for process in alone] == [1, 2, 1], "who leaves takes its process along"
    await crew.player.close()


async def test_a_suspect_that_waits_for_the_policy_alone_stays_where_it_is(monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE_S", 0.02)

    async def plays(process, ask, prompt):
        if len(crew.started) == 1:
            process.end("ended with exit code 3")
            await asyncio.sleep(5)
        await ask((4,))
        return 1.0

    crew, policy = Crew(plays, monkeypatch), Policy()
    async with asyncio.timeout(5):
        going = asyncio.create_task(crew.player.play(prompt(0), policy))
        await asyncio.sleep(0.15)
        policy.open.set()
        played = await going
    assert played.verdict == Reward(1.0, {"environment": 1.0})
    alone = [process for process in crew.started if process.name == "lone environment worker 0"]
    assert [process.begun for process in alone] == [1]
    await crew.player.close()


TOOLS = """
import os, subprocess, sys
import elsewhere

async def episode(ask, prompt):
    tool = subprocess.run([sys.executable, prompt.columns["tool"]], capture_output=True, text=True)
    print("the tool says", tool.stdout, tool.stderr, "caf\\udce9")
    os.write(2, b"said\\n")
    try:
        await ask(prompt.token_ids, stop=("so<eos>",))
    except ValueError as error:
        print(error)
    await ask(prompt.token_ids)
    return float("elsewhere" in sys.modules)
"""


async def test_a_process_for_environments_is_set_up_as_one_for_rewards(tmp_path, monkeypatch):
    """A tool finds what lies beside it, the path is the run's, odd texts can be printed, and stderr is heard."""
    for name, text in (("own", TOOLS), ("tool", "import sibling; print(7, end='')"), ("sibling", "")):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "path").mkdir()
    (tmp_path / "path/elsewhere.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "path")
    tokenizer = Tokenizer(WordLevel({"?": 0, "<eos>": 1}, "?"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokens"))
    prints = tmp_path / "environment.log"
    around = Surroundings.here(prints)
    order = Order(f"{tmp_path}/own.py:episode", str(tmp_path / "tokens"), "", 8, 9, 8, 20.0, around)
    children = Children(at_once=True)
    player = InWorkers(children.launch, order, 1, 8)
    policy = Policy()
    policy.open.set()
    try:
        async with asyncio.timeout(50):
            played = await player.play(Prompt(0, 0, (4,), "?", {"tool": f"{tmp_path}/tool.py"}), policy)
    finally:
        await player.close()
        await children.close()
    assert played.verdict == Reward(1.0, {"environment": 1.0})
    tool, said, stop = prints.read_text().splitlines()
    assert said == "said" and tool == "the tool says 7  caf\\udce9" and "no text ever holds the special token <eos>" in stop


OWN = """
class Own:
    async def episode(self, ask, prompt):
        first = await ask(prompt.token_ids)
        print("played", prompt.id)
        if prompt.columns["do"] == "block":
            while True:
                pass
        if prompt.columns["do"] == "hoard":
            bytearray(2**31)
        second = await ask((*prompt.token_ids, *first.token_ids, *ask.encode("b")))
        return len(second.text) / 10
"""


@pytest.mark.slow
async def test_real_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0.2)
    (tmp_path / "own.py").write_text(OWN)
    prints = tmp_path / "environment.log"
    folder = tiny_folder(tmp_path)
    around = Surroundings.here(prints, memory_mib=1024)
    order = Order(f"{tmp_path}/own.py:Own", str(folder / "tokenizer.json"), str(folder), 50, 9, 8, 0.5, around)
    children = Children(at_once=True)
    player = InWorkers(children.launch, order, 1, 8)
    policy = Policy()
    policy.open.set()
    prompts = [Prompt(number, number, (4,), "?", {"do": do}) for number, do in enumerate(("fine", "block", "fine", "hoard"))]
    try:
        async with asyncio.timeout(50):
            played = await asyncio.gather(*(player.play(each, policy) for each in prompts))
    finally:
        await player.close()
        await children.close()
    assert [each.verdict and each.verdict.value for each in played] == [0.2, None, 0.2, None]
    assert "blocked its process for 0.5 s" in played[1].verdict.problem
    assert "MemoryError: more than 1024 MiB" in played[3].verdict.problem
    assert policy.written == 2 * 2 + 2 and "played 0" in prints.read_text()
