"""Members of groups that harnesses elsewhere play: an environment whose episodes are sessions of clients.

A member begins to wait for a harness when its prompt is admitted. Who opens a session gets one, asks as often as it likes, and
ends it with a verdict. One that does nothing for too long has none, and neither has one that nobody opens
(`environment.limit_s`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from rollyard.conversation import Conversation
from rollyard.protocols.rollouts import Ask
from rollyard.serve.refusals import Refused
from rollyard.serve.streamed import Progress
from rollyard.types import Prompt, Reward

REMEMBERED = 4096  # sessions that are over, whose end can be asked for
NAME = "harness"  # of its verdict, among those of rewards


@dataclass(frozen=True, slots=True)
class Ended:
    """How a session ended. `verdict` None: the configured rewards judge."""

    why: str  # judged, failed, idle, or gone: its member was dropped, or the run ended
    verdict: Reward | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Sessions so far. `matched` and `rendered` are answers in the histories that came back, see `conversation.Rendered`."""

    waiting: int  # members without a harness
    going: int
    judged: int = 0
    failed: int = 0
    idle: int = 0
    gone: int = 0
    matched: int = 0
    rendered: int = 0


@dataclass(eq=False)
class Question:
    """What clients ask in a session, until one has heard the answer."""

    content: str  # tells one question from another
    task: asyncio.Task[Any]  # the answer
    progress: Progress  # while it is written
    clients: int = 0  # that wait for it


@dataclass(eq=False)
class Session:
    """A member of a group, as its harness plays it."""

    prompt: Prompt
    ask: Ask
    ended: asyncio.Future[Ended]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    key: str = ""  # of the client that opened it
    turns: int = 0  # that were answered
    matched: int = 0
    rendered: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # a policy answers one question of a member at a time
    idle: asyncio.TimerHandle | None = None
    asking: list[Question] = field(default_factory=list)  # what was asked and not heard yet, the oldest first

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.prompt, self.ask.chat, self.ask.chat_after, self.ask.encode)

    @property
    def busy(self) -> bool:
        """An answer is being written."""
        return any(not question.task.done() for question in self.asking)


class Sessions:
    """Implements `protocols.Environment` by having clients play.

    Args:
        idle_s: seconds that a session may do nothing.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._waiting: list[Session] = []
        self._going: dict[str, Session] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._ends = dict.fromkeys(("judged", "failed", "idle", "gone"), 0)
        self._matched = self._rendered = 0
        self._over = ""  # why no more members come
        self._changed = asyncio.Event()

    async def episode(self, ask: Ask, prompt: Prompt) -> Reward | None:
        """One member: it waits for its harness, and ends as that says."""
        session = Session(prompt, ask, asyncio.get_running_loop().create_future())
        self._waiting.append(session)
        self._change()
        try:
            return (await session.ended).verdict
        finally:
            self._close(session, Ended("gone"))

    async def open(self, key: str, group: int | None, wait_s: float) -> Session:
        """A session with the member that waits longest. The same key, of a client, opens the same one.

        Raises Refused when no member waits, of this group where one is named, or none comes any more.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    if key and (session := self._with_key(key)) is not None:
                        return session
                    fits = (each for each in self._waiting if group in (None, each.prompt.id))
                    if (session := next(fits, None)) is not None:
                        return self._begin(session, key)
                    if self._over:
                        raise Refused(HTTPStatus.GONE, f"no more members come: {self._over}", "over")
                    await self._changed.wait()
        except TimeoutError:
            of_it = "" if group is None else f" of group {group}"
            problem, remedy = f"no member{of_it} waits for a harness", "submit prompts, or ask again"
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, problem, "no_member", "group", remedy, after_s=1.0) from None

    def close(self, cause: str) -> None:
        """No more members come."""
        self._over = cause
        self._change()

    def of(self, id_: str) -> Session:
        """Raises Refused for one that is over, or never was."""
        if (session := self._going.get(id_)) is not None:
            return session
        if (ended := self._ended.get(id_)) is not None:
            why = f": {ended.verdict.problem}" if ended.verdict is not None and ended.verdict.problem else ""
            raise Refused(HTTPStatus.GONE, f"the session is over ({ended.why}{why})", "session_over", "session")
        raise Refused(
            HTTPStatus.NOT_FOUND, "there is no such session", "no_session", "session", "open one with POST /v1/sessions"
        )

    def end(self, id_: str, ended: Ended) -> None:
        """Its harness is done with it. Harmless when the same is said again. Raises Refused."""
        if self._ended.get(id_) == ended:
            return
        session = self.of(id_)
        if session.busy:
            remedy = "wait for the answer; then it is known what is judged"
            raise Refused(HTTPStatus.CONFLICT, "an answer is being written in this session", "busy", "session", remedy)
        self._close(session, ended)

    @contextmanager
    def asking(
        self, session: Session, content: str, again: bool, work: Callable[[Progress], Coroutine[Any, Any, object]]
    ) -> Iterator[Question]:
        """Ask something, as a client that waits for the answer: see `answer`, `heard`.

        Who asks the same after a client has hung up hears the answer that nobody has heard: clients try again by themselves. The
        same asked by several at a time is several questions, each with a turn of its own.

        Args:
            content: tells one question from another.
            again: the client says that it has asked this before.
        """
        same = [question for question in session.asking if question.content == content]
        left = [question for question in same if not question.clients]
        question = next(iter(left or same), None) if left or again else None
        if question is None:
            progress = Progress()
            question = Question(content, asyncio.ensure_future(self._in_turn(session, lambda: work(progress))), progress)
            question.task.add_done_callback(_hear)
            session.asking.append(question)
        question.clients += 1
        try:
            yield question
        finally:
            question.clients -= 1

    async def answer(self, session: Session, question: Question) -> object:
        """Raises Refused when there is none, or the session ends meanwhile."""
        await asyncio.wait((question.task,))
        if question.task.cancelled() or question.task.exception() is not None:
            self.heard(session, question)
        if question.task.cancelled():
            self.of(session.id)
        result: object = question.task.result()
        return result

    def heard(self, session: Session, question: Question) -> None:
        """A client has the answer: the next one that asks the same wants another one."""
        if question in session.asking:
            session.asking.remove(question)

    def note(self, session: Session, matched: int, rendered: int) -> None:
        """An answer was given to a history with so many answers."""
        session.turns += 1
        session.matched, session.rendered = matched, rendered
        self._matched += matched
        self._rendered += rendered

    @property
    def counts(self) -> Counts:
        return Counts(len(self._waiting), len(self._going), **self._ends, matched=self._matched, rendered=self._rendered)

    # -------------------------------------------------------------------------------------------------- inside

    async def _in_turn(self, session: Session, work: Callable[[], Coroutine[Any, Any, object]]) -> object:
        async with session.turn:
            self._rest(session, None)
            try:
                return await work()
            finally:
                if not session.ended.done():
                    self._rest(session, self._idle_s)

    def _with_key(self, key: str) -> Session | None:
        return next((each for each in self._going.values() if each.key == key), None)

    def _begin(self, session: Session, key: str) -> Session:
        self._waiting.remove(session)
        session.key = key
        self._going[session.id] = session
        self._rest(session, self._idle_s)
        return session

    def _rest(self, session: Session, limit_s: float | None) -> None:
        """Its harness may do nothing for so long, from now on; None: it is not its harness that is waited for."""
        if session.idle is not None:
            session.idle.cancel()
            session.idle = None
        if limit_s is not None:
            problem = f"the harness did nothing for {limit_s:g} s"
            ended = Ended("idle", Reward(None, problem=problem))
            session.idle = asyncio.get_running_loop().call_later(limit_s, self._close, session, ended)

    def _close(self, session: Session, ended: Ended) -> None:
        """Harmless when it is over already."""
        if session in self._waiting:
            self._waiting.remove(session)
        elif self._going.pop(session.id, None) is not None:
            self._ends[ended.why] += 1
            self._ended[session.id] = ended
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        self._rest(session, None)
        for question in session.asking:
            question.task.cancel()
        if not session.ended.done():
            session.ended.set_result(ended)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def failed(error: str) -> Ended:
    """The harness could not go on: no verdict, which is not 0."""
    return Ended("failed", Reward(None, problem=error))


def _hear(done: asyncio.Task[Any]) -> None:
    """What nobody waits for is no news."""
    if not done.cancelled():
        done.exception()
