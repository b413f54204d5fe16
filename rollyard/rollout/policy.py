"""The rules of a run's rollouts (PURE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollyard.types import Sampling


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """What the core is told once. `batches` counts the batches of the whole run, also those before a resume."""

    group_size: int
    groups_per_batch: int
    batches: int
    sampling: Sampling
    window: int  # tokens of prompt and completion at most
    max_staleness: int = 0
    exact: bool = False  # a group is written by the oldest version that the limit allows, and by no other
    max_live_groups: int = 0  # 0: no other cap than the staleness rule
    oversample: int = 0  # groups under way beyond those of one batch; 0: as many as the staleness rule allows
    order: Literal["admission", "longest"] = "admission"  # of members that are due at the same version
    moves: int = 0  # times a member may go from a crowded engine to an idle one
    overtaking: Literal["allow", "never"] = "allow"
    on_stale: Literal["wait", "drop"] = "wait"
    retries: int = 2
    faults: int = 0  # wrong answers that make an engine unfit; 0: it may give as many as it likes
    failures: int = 0  # prompts in a row that fail at an engine and make it unfit; 0: as many as there are
    min_scored: int = 2
    give_up_after: int = 100  # prompts dropped in a row, those that were filtered left out
    filter: Literal["none", "flat"] = "none"  # groups whose verdicts are all equal: trained, or others asked instead
    refills: int = 0  # groups filtered for each batch at most
    mask_truncated: bool = False  # members that a limit cut are in a group's record, and are not trained on
    seed: int = 0
    turns: int = 0  # of an episode at most; 0: no episodes, one answer to each prompt
