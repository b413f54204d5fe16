"""The error tree. Everything Rollyard raises on purpose derives from `RollyardError`.

RollyardError                  retryable: may the same call work if made again?
├── ConfigError                a user's mistake: what was wrong, where, what would be right (exit code 2)
├── EngineError                an inference engine could not do what it was asked
│   ├── EngineLost             the engine is gone; only tokens received so far count (retryable elsewhere)
│   ├── RequestRejected        this request can never run on this engine
│   ├── ServerError            an OpenAI-compatible server was not there, or refused (in `engine.openai.failure`)
│   └── StaleWeights           a forward pass was about to run on weights the engine did not acknowledge
├── WorkerLost                 a worker process is gone, and with it the call that it had
├── WorkersUsedUp              worker processes were lost one after the other; no more are started
├── ScoringError               a judge failed; the member has no verdict
├── TrainError                 the policy could not be updated
│   ├── NonFinite              a loss or gradient was NaN or infinite; the parameters were left as they were
│   ├── TrainerLost            a trainer in another process is gone, or one of several does not answer
│   └── RanksApart             a data-parallel rank did not hear from the others, for whatever reason they had
├── CheckpointError            a checkpoint could not be written; earlier ones are untouched
├── WeightSyncError            a version did not reach an engine; the version there is unchanged
├── PeerError                  a benchmark's peer failed, or did not do the work that was asked (in `bench.peer`)
├── ExchangeError              what two jobs share by a folder cannot be read or written, or did not come in time
├── JournalError               the run's record could not be written or read
│   └── Damaged                a row of it is not what was written there (in `journal.decode`)
├── DurableError               a folder is not what was sealed there
└── TimeLimitExceeded          a bounded wait ran out
"""


class RollyardError(Exception):
    """Base of all errors raised on purpose. `retryable` says whether the same call may work if made again."""

    retryable = False


class ConfigError(RollyardError):
    """A user's mistake, raised before anything loads.

    Args:
        problem: what is wrong, in one sentence.
        where: the option, file or line it was found in, such as `rollout.group_size` or `prompts.jsonl:3`.
        remedy: what would be right.
    """

    def __init__(self, problem: str, *, where: str, remedy: str) -> None:
        super().__init__(f"{where}: {problem} ({remedy})")
        self.problem, self.where, self.remedy = problem, where, remedy


class EngineError(RollyardError):
    """An inference engine could not do what it was asked."""


class EngineLost(EngineError):
    """The engine is gone. Only the tokens received so far count as written."""

    retryable = True


class RequestRejected(EngineError):
    """This request can never run on this engine."""


class StaleWeights(EngineError):
    """A forward pass was about to run on weights the engine did not acknowledge."""


class WorkerLost(RollyardError):
    """A worker process is gone, and with it the call that it had."""

    retryable = True


class WorkersUsedUp(RollyardError):
    """Worker processes were lost one after the other. No more are started."""


class ScoringError(RollyardError):
    """A judge failed. The member has no verdict; it is never counted as 0."""


class TrainError(RollyardError):
    """The policy could not be updated."""


class NonFinite(TrainError):
    """A loss or gradient was NaN or infinite. The parameters were left as they were."""


class TrainerLost(TrainError):
    """A trainer in another process is gone, or one of several does not answer."""


class RanksApart(TrainError):
    """A data-parallel rank did not hear from the others. Why, they know: this is never the first cause."""


class CheckpointError(RollyardError):
    """A checkpoint could not be written. Earlier ones are untouched."""


class WeightSyncError(RollyardError):
    """A version did not reach an engine. The version there is unchanged."""

    retryable = True


class ExchangeError(RollyardError):
    """What two jobs share by a folder cannot be read or written, or the other job did not come in time."""


class JournalError(RollyardError):
    """The run's record could not be written or read."""


class DurableError(RollyardError):
    """A folder is not what was sealed there: something is missing, or damaged."""


class TimeLimitExceeded(RollyardError):
    """A bounded wait ran out."""


class RunFailed(RollyardError):
    """The run ended before it was done. What it had reached is in its report."""
