"""What a run would cost: the conductor of a real run, on a virtual clock, with modelled engines, trainers, judges and links.

scenario    what is simulated: the options of a run, the devices, the workload, what costs how much
hardware    devices and links; shape    a model as its config.json says
step        what an engine step takes; costs    what everything takes, from hardware, shape and a few constants
workload    how long prompts and completions are
engine      continuous batching, from completion to completion
clock       virtual time; engines, links, coming    what becomes of requests, weights, engines that come and go
world       carries out what the conductor says, and tells it what came of that
simulate    one simulated run, and its report
"""
