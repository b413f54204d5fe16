"""Options of the service: those of a run, and a section of its own."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pydantic import Field

from rollyard import combinations
from rollyard.config import Config, Count, Positive, Section, Words
from rollyard.errors import ConfigError
from rollyard.serve.tools import Parser
from rollyard.texts import Host

MIB, GIB = 2**20, 2**30


class ServiceConfig(Section):
    """`rollyard serve`: rollouts over HTTP."""

    host: Host = Field("127.0.0.1", description="address to listen on; any but a loopback address needs ROLLYARD_TOKEN")
    port: int = Field(8000, ge=0, lt=2**16, description="port to listen on (0: one that the system chooses)")
    names: tuple[Words, ...] = Field(
        (),
        description="names by which it may be asked for, besides its own and addresses in numbers (separate several with commas)",
    )
    episodes: bool = Field(
        False, description="members are played by harnesses, through sessions and an OpenAI-compatible address, not answered once"
    )
    tool_parser: Parser = Field(
        "hermes",
        description="how calls of tools are read in answers: hermes (<tool_call>, JSON, </tool_call>, as Hermes, Qwen and SmolLM"
        " write it), or none: they stay text",
    )
    idle_s: Positive = Field(300.0, description="seconds a session may do nothing; beyond it there is no verdict")
    lease_s: Positive = Field(600.0, description="seconds after which another trainer may take over from one that says nothing")
    wait_s: Positive = Field(60.0, description="seconds at most that a request may ask to wait for something to happen")
    body_mib: Count = Field(16, description="MiB of a request's body at most, weights aside")
    weights_gib: Positive = Field(64.0, description="GiB of weights in one upload at most")
    weights_folder: str = Field(
        "", description="folder below which weights may be published from files by their path (empty: none are)"
    )
    group_address: Host = Field(
        "127.0.0.1", description="of this machine: where a torch group meets by which a trainer sends weights"
    )
    body_s: Positive = Field(60.0, description="seconds a request's body may take to come; weights: between two MiB of it")
    connections: Count = Field(512, description="connections at a time; beyond it a client is told to come back")
    drain_s: Positive = Field(30.0, description="seconds that what is under way may take to end once the service is told to stop")


class ServeConfig(Config):
    """Everything a service depends on."""

    serve: ServiceConfig = ServiceConfig()

    @property
    def run_config(self) -> Config:
        """That of the run inside it."""
        return Config(**{name: getattr(self, name) for name in Config.model_fields})


def check(config: ServeConfig) -> None:
    """What the options together must satisfy. Raises ConfigError for the first that does not hold."""
    serve, prompts = config.serve, config.prompts
    if prompts.source != "given" and not (prompts.path or prompts.task):
        problem = "nothing says where prompts come from"
        raise ConfigError(problem, where="prompts.source", remedy="use --prompts.source given: clients submit them")
    if serve.episodes and config.environment.name:
        problem = f"members are played by harnesses, and by {config.environment.name}"
        raise ConfigError(problem, where="environment.name", remedy="leave it or --serve.episodes out")
    if serve.episodes and config.environment.limit_s < serve.idle_s:
        problem = f"a member waits {config.environment.limit_s:g} s for its harness, less than a session may do nothing"
        raise ConfigError(problem, where="environment.limit_s", remedy=f"give at least serve.idle_s, {serve.idle_s:g}")
    if serve.lease_s <= (longest := max(serve.wait_s, serve.body_s)):
        problem = (
            f"a trainer that waits for an answer is not heard for {longest:g} s, and its lease ends after {serve.lease_s:g} s"
        )
        raise ConfigError(problem, where="serve.lease_s", remedy="give more than serve.wait_s and serve.body_s")
    combinations.check(config.run_config)


def check_address(host: str, token: str) -> None:
    """Raises ConfigError for an address that others reach, without a token."""
    if not token and not is_loopback(host):
        remedy = "set ROLLYARD_TOKEN to a secret that clients give too, or listen on 127.0.0.1"
        raise ConfigError(f"whoever reaches {host} could publish weights", where="serve.host", remedy=remedy)


def check_folder(path: str) -> None:
    """Raises ConfigError where weights are to be published from a folder that is not there."""
    if path and not Path(path).is_dir():
        problem = f"there is no folder {path}"
        raise ConfigError(problem, where="serve.weights_folder", remedy="make it, or give another one")


def is_loopback(host: str) -> bool:
    """Is it this machine, for itself?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
