"""Whether this machine can compile the engine's kernels. Where it cannot the engine decodes with torch, and so do tests."""

from __future__ import annotations

import shlex
import shutil

import pytest

from rollyard.environment import compiler_command

FOUND = shutil.which(shlex.split(compiler_command())[0]) is not None
needs_compiler = pytest.mark.skipif(not FOUND, reason=f"there is no C++ compiler {compiler_command()!r}")
