"""Forward passes over a batch besides those that are learnt from (PURE): those of our own trainer, see `train.trainer`.

With a correction the logprobs of what a later optimizer step of a batch learns from are looked at before the first one. A
reference policy and a value head look at all of it. Where a loss or a weight needs a whole row before it has the gradient of the
row's first token, the head, and no more, is passed once more (`train.loss.needs_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rollyard.objective import correction_of, has_values
from rollyard.plan.scenario import Scenario

ROWS: Final = "gspo"  # a loss whose ratio is one for all of a row


@dataclass(frozen=True, slots=True)
class Passes:
    """Over all tokens of a batch; parts of one where only some of its optimizer steps make it.

    Args:
        bodies: of the model.
        heads: of its head alone; below 0 where the model is passed without it.
    """

    bodies: float = 0.0
    heads: float = 0.0


def passes_of(scenario: Scenario) -> Passes:
    """What the options ask for. Passes of other trainers are as `costs.logprob_passes` says, in the place of our correction's."""
    train, values = scenario.train, float(has_values(scenario))
    later = 1 - 1 / train.minibatches  # share of a batch that is not learnt from first
    rows, weighed = float(train.loss == ROWS), float(train.correction_level == "sequence")
    looked, heads = 0.0, rows
    if correction_of(scenario) != "none":
        looked, heads = later, later * rows + (1 - later) * weighed
    return Passes((scenario.costs.logprob_passes or looked) + (train.kl > 0) + values, heads - values)
