"""What stands for the stations of a simulated run, as a scenario has them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rollyard.errors import ConfigError
from rollyard.events import EngineId
from rollyard.plan.check import check_window
from rollyard.plan.coming import Failures
from rollyard.plan.cores import Machine
from rollyard.plan.costs import Costs, costs_of
from rollyard.plan.engine import EngineModel
from rollyard.plan.scenario import Scenario
from rollyard.plan.tokens import Told
from rollyard.plan.trace import lengths_of
from rollyard.plan.workload import Lengths
from rollyard.plan.world import Stations
from rollyard.types import Activity, Completion, Group, Prompt, Request, Reward, WeightVersion
from rollyard.watch.spans import SpanLog

ANY = 2**31  # tokens of a window that nobody knows
TOLD = 16  # tokens of a running request that are told at once, where it may move: as engines do


class Priced:
    """What the cost model says (plan.world.Takes)."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.copy_s, self.deliver_s, self._load_s = costs.copy_s, costs.transfer_s, costs.load_s
        self.handoff_s, self.checkpoint_s = costs.handoff_s, costs.checkpoint_s
        self.sent_bytes = int(costs.moving.bytes)

    def prepare_s(self, engine: EngineId) -> float:
        return self.deliver_s

    def load_s(self, engine: EngineId) -> float:
        return self._load_s

    def probe_s(self, engine: EngineId) -> float:
        return self._costs.probe_s

    def sleep_s(self, engine: EngineId) -> float:
        return self._costs.sleep_s

    def wake_s(self, engine: EngineId) -> float:
        return self._costs.wake_s

    def start_s(self, engine: EngineId) -> float:
        return self._costs.restart_s

    def train_s(self, groups: Sequence[Group]) -> float:
        return self._costs.batch_s(
            (len(group.prompt.token_ids), [len(rollout.completion.token_ids) for rollout in group.rollouts]) for group in groups
        )

    def score_s(self, completion: Completion) -> float:
        return self._costs.score_s(len(completion.token_ids))

    def refuses(self, engine: EngineId, version: WeightVersion) -> str:
        return ""


class Prompts:
    """Prompts without end, of which only the length is known (protocols.PromptSource); and what is written after them."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._firsts, self._steps = [0], [0]  # prompts that were the first to be admitted under a version, and its step
        self.cursor = 0

    def learnt(self, step: int) -> None:
        """The trainer has this version."""
        if self._firsts[-1] == self.cursor:  # none was admitted under the last one
            self._steps[-1] = step
        else:
            self._firsts.append(self.cursor)
            self._steps.append(step)

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        begin, self.cursor = self.cursor, self.cursor + count
        return tuple(map(self.prompt, range(begin, self.cursor))), False

    def prompt(self, number: int) -> Prompt:
        """One of them; those that are held out are below 0."""
        return Prompt(number, number, Told(self._lengths.prompt(number)), "")

    def length(self, request: Request) -> int:
        """Tokens of the whole completion."""
        group, member, _ = request.id
        step = self._steps[bisect_right(self._firsts, group) - 1] if group >= 0 else 0
        return self._lengths.completion(group, member, step)


def judged(done: Completion) -> Reward:
    """Any verdict will do; members of a group differ, so that there is something to learn."""
    return Reward(float(done.member % 2))


def stations_of(scenario: Scenario) -> Stations:
    """Of a scenario that was checked.

    Raises:
        ConfigError: the model does not fit on its devices, prompts in its window, or a sync takes longer than it may.
    """
    costs, prompts, engine = costs_of(scenario), Prompts(lengths_of(scenario)), scenario.engine
    window, pages = room_of(costs, scenario)
    beside = engine.prefill_tokens if engine.kind == "embedded" else engine.step_tokens  # no other has such a limit

    def make(name: EngineId, spans: SpanLog) -> EngineModel:
        def busy(activity: Activity, began: float, ended: float) -> None:
            spans.add(activity, int(began * 1e9), int(ended * 1e9))

        return EngineModel(
            name,
            engine.slots,
            costs.engine,
            prompts.length,
            pages=pages,
            page_tokens=engine.page_tokens,
            step_tokens=engine.step_tokens,
            prefill_tokens=beside,
            window=window,
            share=engine.share_prompts,
            tell_every=TOLD if scenario.rollout.moves else 0,
            busy=busy,
        )

    devices, spent = costs.devices, scenario.costs
    several = devices.tensor_parallel / devices.hardware.node  # nodes of an engine
    return Stations(
        engines=devices.engines,
        make=make,
        takes=Priced(costs),
        source=prompts,
        judge=judged,
        workers=scenario.costs.score_workers,
        window=window,
        learnt=prompts.learnt,
        held_out=tuple(prompts.prompt(-1 - number) for number in range(scenario.prompts.held_out)),
        trainers=devices.train,
        failures=Failures(scenario.run.seed, scenario.failures.node_hours * 3600 / max(several, 1), max(int(1 / several), 1)),
        machine=Machine(scenario.cluster.cores, spent.request_s, spent.message_s, spent.batch_s),
    )


def room_of(costs: Costs, scenario: Scenario) -> tuple[int, int]:
    """Tokens of a window, and pages of an engine's cache.

    Raises:
        ConfigError: prompts do not fit in the window, requests not in the pages, or a sync takes longer than it may.
    """
    engine = scenario.engine
    _check_limit(costs, scenario)
    window = engine.window or costs.shape.window or ANY
    pages = engine.pages or costs.engine.kv_tokens // engine.page_tokens
    check_window(scenario, window, pages * engine.page_tokens)
    return window, pages


def _check_limit(costs: Costs, scenario: Scenario) -> None:
    """A sync that is too slow fails in a run, each time."""
    seconds, limit = max(costs.copy_s + costs.transfer_s, costs.load_s), scenario.weights.limit_s
    if seconds > limit:
        problem = f"a weight sync takes {seconds:.4g} s, and may take {limit:g}"
        raise ConfigError(problem, where="weights.limit_s", remedy=f"use {2 * seconds:.0f}, or another weights.transport")
