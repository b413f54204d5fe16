"""What is simulated: the options of a run, and besides what the run would find: devices, lengths, costs, failures."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from rollyard.config import Config, Section

LEAST_RATE: Final = 1e3
LEAST_HOURS: Final = 1e-6  # between failures: a run has to get on


def _rate(value: float) -> float:
    if 0 < value < LEAST_RATE:
        raise ValueError(f"use 0, or at least {LEAST_RATE:g}")
    return value


def _hours(value: float) -> float:
    if 0 < value < LEAST_HOURS:
        raise ValueError(f"use 0, or at least {LEAST_HOURS:g}")
    return value


# Bounds lie far outside of what there is; within them no number of a run becomes infinite.
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Rate = Annotated[float, Field(ge=0, le=1e21), AfterValidator(_rate)]  # of bytes or operations, 0: not given; and bytes
Mean = Annotated[float, Field(ge=0, le=1e9)]
Disk = Annotated[float, Field(ge=LEAST_RATE, le=1e21)]
Size = Annotated[float, Field(ge=0, le=1e4)]  # bytes of a parameter
Share = Annotated[float, Field(ge=1e-6, le=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Natural = Annotated[int, Field(ge=0, le=10**9)]
Workers = Annotated[int, Field(ge=1, le=10**6)]
Spread = Annotated[float, Field(ge=0, le=4)]  # of a logarithm; at 4 two lengths in three lie within a factor of 3,000


class ClusterConfig(Section):
    """How many devices there are follows from the options of `place`."""

    hardware: str = Field("H100", description="kind of device, of the table in docs/costs.md; or cpu, this machine measured")
    node: Natural = Field(0, description="devices of a node (0: as the table says)")
    memory: Rate = Field(0.0, description="bytes that a device holds (0: as the table says; also of what follows)")
    bandwidth: Rate = Field(0.0, description="bytes/s of its memory")
    flops: Rate = Field(0.0, description="dense operations/s, in whatever format is computed in")
    link: Rate = Field(0.0, description="bytes/s to the others of its node, in one direction")
    nic: Rate = Field(0.0, description="bytes/s to other nodes, in one direction")
    host: Rate = Field(0.0, description="bytes/s to the memory of its machine, in one direction")
    cores: Natural = Field(0, description="processors that all processes of the run share (0: every process has its own)")
    price: Annotated[float, Field(ge=0, le=1e12)] = Field(0.0, description="money that one device costs an hour (0: not told)")


class WorkloadConfig(Section):
    """How long prompts and completions are. A completion is cut at rollout.max_tokens."""

    mean_tokens: Mean = Field(0.0, description="mean of a completion once it is cut (0: a quarter of rollout.max_tokens)")
    sigma: Spread = Field(1.0, description="standard deviation of the logarithm of a completion's length")
    between: Annotated[float, Field(ge=0, le=1)] = Field(
        0.65, description="share of that variance that lies between prompts, the rest between completions of one prompt"
    )
    growth: Annotated[float, Field(gt=-1, le=1e6)] = Field(
        0.0, description="how much longer completions get at each step, as a share, until they are cut (0.01: by 1 %)"
    )
    prompt_tokens: Count = Field(512, description="mean of a prompt")
    prompt_sigma: Spread = Field(0.0, description="standard deviation of the logarithm of a prompt's length")
    trace: str = Field(
        "",
        description="lengths of a run instead: its folder, or JSONL or Parquet as `rollyard inspect RUN export FILE` writes it "
        "(empty: as above)",
    )


class CostsConfig(Section):
    """Constants of the cost model; `--calibrate RUN` fits them to a run. What hardware states is multiplied by a share."""

    decode_bandwidth: Share = Field(0.7, description="share of the memory's bandwidth that decoding reaches")
    decode_flops: Share = Field(0.5, description="share of peak FLOPs that decoding reaches")
    prefill_flops: Share = Field(0.5, description="share of peak FLOPs that prefill reaches")
    step_s: Seconds = Field(0.003, description="seconds of a decode step besides")
    sequence_s: Seconds = Field(0.0, description="seconds that each running sequence adds to that")
    process_s: Seconds = Field(
        0.0, description="seconds that it adds to have a process of its own, from which the driver is told"
    )
    tensor_parallel_s: Seconds = Field(0.002, description="seconds that tensor parallelism adds to that")
    nodes_s: Seconds = Field(
        1e-4, description="seconds that each of a layer's two sums waits where devices of an engine lie on several nodes"
    )
    train_flops: Share = Field(0.35, description="share of peak FLOPs that training reaches")
    recompute: bool = Field(
        True,
        description="activations are computed again backwards: 8 FLOPs a parameter and token, not 6 (false: as train.recompute "
        "says, by which our own trainer goes)",
    )
    weight_bytes: Size = Field(0.0, description="bytes of a parameter in an engine (0: as engine.dtype has it; 1: 8 bits)")
    state_bytes: Size = Field(
        0.0,
        description="bytes that training keeps of a parameter besides itself: gradient, moments, a finer copy (0: gradient and "
        "two moments in model.dtype, as our own trainer does)",
    )
    state_devices: Natural = Field(
        0,
        description="devices that share one copy of parameters and their state (0: all with train.shard, else those of one rank)",
    )
    gather: Literal["microbatch", "step"] = Field(
        "microbatch",
        description="how often devices that share parameters gather them: for each micro-batch (FSDP), or once an optimizer step",
    )
    packed: Literal["evenly", "whole"] = Field(
        "evenly",
        description="micro-batches of training share tokens out evenly, or hold whole sequences, each rank as many, and all wait "
        "for the fullest",
    )
    stages: Count = Field(1, description="pipeline stages that training spreads its layers over")
    stage_devices: Natural = Field(
        0, description="devices that share the sequences of a stage: tensor and context parallelism (0: those of a rank)"
    )
    offload: bool = Field(False, description="that state lies in the machine's memory while an engine generates (colocated)")
    changed: Share = Field(0.02, description="share of the numbers that a version changed, with weights.delta")
    shared_prompts: bool = Field(
        True, description="training computes a prompt once for its completions, as our own trainer does, not once for each"
    )
    logprob_passes: Natural = Field(
        0,
        description="forward passes over a batch besides, of 2 FLOPs a parameter and token (0: our own trainer's for "
        "train.correction, of all but the first of train.minibatches)",
    )
    minibatch_s: Seconds = Field(0.0, description="seconds of an optimizer step besides")
    microbatch_s: Seconds = Field(
        0.0,
        description="seconds of each micro-batch besides, its logprob passes included: kernels that start, and waits for others",
    )
    token_s: Seconds = Field(0.0, description="seconds that training takes a token besides")
    link: Share = Field(0.8, description="share of a link's or network card's rate that weights reach")
    collective: Share = Field(0.8, description="the same of what devices of an engine, or that train, tell each other")
    parts: bool = Field(
        False,
        description="broadcast sends each device of an engine its part alone (false: one of each machine all, as ours does)",
    )
    cards: Count = Field(
        1, description="network cards of a machine that broadcast uses where all is sent to it (1, as ours; a ring of NCCL: all)"
    )
    sent_copy: bool = Field(
        False, description="with broadcast a device that trains holds a copy of all that travels (our own: its first one does)"
    )
    trainer_sends: bool = Field(
        False, description="with broadcast the trainer trains on once weights are there (false: a copy travels, beside its work)"
    )
    disk: Disk = Field(2e9, description="bytes/s of the common disk, of one reader or writer")
    barrier_s: Seconds = Field(0.1, description="seconds of a weight sync besides")
    probe_s: Seconds = Field(0.0, description="seconds that a probe takes an engine at a load")
    evidence_s: Seconds = Field(0.0, description="seconds of the trainer, at each version, for what probes compare with")
    sleep_s: Seconds = Field(0.0, description="seconds that an engine takes to sleep, and again to wake (colocated)")
    score_s: Seconds = Field(0.0, description="seconds of a verdict")
    score_token_s: Seconds = Field(0.0, description="seconds that each token of a completion adds to that")
    score_workers: Workers = Field(64, description="verdicts at a time")
    request_s: Seconds = Field(0.0, description="seconds that the driver is busy with handing out a request")
    message_s: Seconds = Field(0.0, description="seconds that it is busy with what becomes of one")
    batch_s: Seconds = Field(0.0, description="seconds that it is busy with a batch, before its training begins")


class FailuresConfig(Section):
    """Engines that are lost, and engines that come and go."""

    node_hours: Annotated[float, Field(ge=0, le=1e9), AfterValidator(_hours)] = Field(
        0.0, description="mean hours between two failures of a node (0: none)"
    )
    restart_s: Seconds = Field(300.0, description="seconds until an engine that was lost is up again")
    joins: tuple[str, ...] = Field(
        (), description="STEP:+N or STEP:-N: so many engines come, or leave, once so many steps are trained (with commas)"
    )


class Scenario(Config):
    """Everything a simulated run depends on; all options of a run are among them."""

    cluster: ClusterConfig = ClusterConfig()
    workload: WorkloadConfig = WorkloadConfig()
    costs: CostsConfig = CostsConfig()
    failures: FailuresConfig = FailuresConfig()

    @property
    def recomputes(self) -> bool:
        """Does training compute activations again?"""
        return self.costs.recompute or self.train.recompute
