"""SGLang: a running server, spoken to over its HTTP interface, of releases 0.5.6 to 0.5.23.

Written from what these releases document and tested against a double of them (tests/engine/sglang_double.py). It has not
met a real server yet; tests/engine/sglang/folder.py gives the command that runs the contract suite with one. How a
server must be started stands in `server`.
"""
