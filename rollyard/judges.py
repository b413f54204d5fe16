"""Who judges beside the reward functions: a sequence classifier here or in a process of its own, a language model, an address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from rollyard import worker
from rollyard.config import Config
from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.limits import Limits
from rollyard.environment import judge_key, process_environment, reward_key
from rollyard.place.inline import DeviceThread
from rollyard.pool import Launch
from rollyard.protocols.devices import Device
from rollyard.protocols.processes import Channel
from rollyard.protocols.rollouts import Scorer
from rollyard.reward.batched import Batched
from rollyard.reward.judge import Answer, Judge
from rollyard.reward.model import RemoteModel
from rollyard.reward.model import serve as serve_model
from rollyard.reward.open import JUDGE, MODEL, REMOTE, open_reading
from rollyard.reward.remote import Remote
from rollyard.types import Sampling

CONFIG = TypeAdapter(Config)


@dataclass(slots=True)
class Judges:
    """Those of a run, by their names in reports; `remote` is among them where it has a process of its own."""

    scorers: dict[str, Scorer] = field(default_factory=dict)
    remote: RemoteModel | None = None


async def build_judges(
    config: Config, device: Device, launch: Callable[..., Awaitable[Channel]] | None, workers: Launch, scratch: Path
) -> Judges:
    """Raises ConfigError for what only loading shows.

    Args:
        device: the trainer's, where the model is to be colocated.
        launch: of protocols.Launcher; starts its process where it is not.
        workers: starts a process that reads a judge's answers, where an expression is to do that.
        scratch: the run's folder.
    """
    found, model = Judges(), config.reward.model
    if launch is not None:
        found.remote = RemoteModel(partial(_launched, config, launch), model, config.engine.start_s)
        found.scorers[MODEL] = found.remote
    elif model.folder:
        found.scorers[MODEL] = await device.run(_reward_model, config, device)
    if config.reward.judge.url:
        found.scorers[JUDGE] = _judge(config, workers, scratch)
    if config.reward.remote.url:
        found.scorers[REMOTE] = Remote(config.reward.remote, reward_key())
    return found


def _judge(config: Config, workers: Launch, scratch: Path) -> Judge:
    judge = config.reward.judge
    limits = Limits(per_server=judge.concurrency, tries=judge.retries + 1, total_s=judge.limit_s, silence_s=judge.limit_s)
    client, sampling = OpenAIClient(judge.url, judge.model, judge_key(), limits), Sampling(judge.max_tokens, judge.temperature)

    async def ask(text: str) -> Answer:
        piece = await client.chat([{"role": "user", "content": text}], sampling)
        return Answer(piece.text, piece.finish == "length")

    return Judge(ask, judge, client.close, open_reading(config, workers, scratch))


def _reward_model(config: Config, device: Device, alone: bool = False) -> Batched:
    """Called on the device's thread. Raises ConfigError when it cannot be read. `alone`: nothing else runs there."""
    from rollyard.reward.classifier import Classifier

    model = config.reward.model
    classifier = Classifier(model, worker.device_of(config))
    if alone:
        worker.set_threads(worker.threads_for(config, classifier.parameters))
    return Batched(classifier, device, model.token_budget, model.limit_s, model.wait_s)


async def _launched(config: Config, launch: Callable[..., Awaitable[Channel]]) -> Channel:
    """A process with the reward model. Raises EngineLost when it cannot be started."""
    order = CONFIG.dump_json(_anywhere(config))
    return await launch("rollyard.judges:serve_reward_model", order, name="reward model", environment=process_environment())


def _anywhere(config: Config) -> Config:
    """The same for a process that works in another folder."""
    reward, model = config.reward, config.reward.model
    here = model.model_copy(update={"folder": str(Path(model.folder).resolve())})
    return config.model_copy(update={"reward": reward.model_copy(update={"model": here})})


async def serve_reward_model(channel: Channel, order: bytes) -> None:
    """What it runs: load the model and judge until the line ends."""
    config, device = CONFIG.validate_json(order), DeviceThread()
    try:
        model = await device.run(_reward_model, config, device, True)
        await serve_model(model, device.spans, channel)
    finally:
        device.close()
