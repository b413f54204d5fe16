"""The config of a choice, for `rollyard run`."""

from __future__ import annotations

from collections.abc import Collection

import tomli_w

from rollyard.config import Config
from rollyard.plan.scenario import Scenario


def config_of(scenario: Scenario) -> Config:
    """The options of the run among those of a scenario."""
    return Config(**{name: getattr(scenario, name) for name in Config.model_fields})


def toml_of(config: Config, lines: Collection[str]) -> str:
    """As a file: what is not the default, under these lines of comment."""
    comment = "".join(f"# {line}\n" for line in lines)
    return f"{comment}\n{tomli_w.dumps(config.model_dump(mode='json', exclude_defaults=True))}"
