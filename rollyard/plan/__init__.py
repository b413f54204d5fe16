"""What a run would cost: the conductor of a real run, on a virtual clock, with modelled engines, trainers, judges and links.

scenario    what is simulated: the options of a run, the devices, the workload, what costs how much
hardware    kinds of device and their links; measured    this machine as one; devices    how many of them do what
shape       a model as its config.json says; models    those that go by a name
step        the form of what an engine step takes; decoding    its numbers
learning    training; moving    weight sync; memory    what fits
costs       all of these, of a scenario
workload    how long prompts and completions are
tokens      what stands for tokens: how many they are
unheeded    which of these change nothing
check       what they must satisfy; joins    engines that come and go; split    so many devices, and who gets which
command     `rollyard simulate`
engine      continuous batching, from completion to completion
clock       virtual time; engines, links, proving, coming    what becomes of requests, weights, engines that come and go
world       carries out what the conductor says, and tells it what came of that
simulate    one simulated run, and its report
space       what may be chosen; sample, bounds    what a choice takes at least, and should take
search      which choices are simulated; ran    one of them; advise    all together; advice, ready    how it is read, and run
plan_command    `rollyard plan`
"""
