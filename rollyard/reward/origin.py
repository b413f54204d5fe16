"""How a function gets into another process: by the name it is imported by, or else written to a file.

The file is read by the run's own workers alone: it lies in the run's folder, belongs to its user, and nobody else may read
or write it. Nothing that comes over a line is ever unpickled.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollyard.errors import ConfigError, RollyardError
from rollyard.functions import Function
from rollyard.settle import PRIVATE


def import_name(function: Function) -> str:
    """The `module:function` by which another process with the same `sys.path` finds it; empty when there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or "." in name or not _findable(module):
        return ""
    return f"{module}:{name}" if getattr(sys.modules[module], name, None) is function else ""


def pickled(function: Function, name: str, where: str) -> bytes:
    """The function itself. Raises ConfigError when it holds what cannot leave this process."""
    import cloudpickle

    owners = (function, type(function), getattr(function, "func", None))  # the last: of a partial
    modules = {module for owner in owners if (module := getattr(owner, "__module__", None)) in sys.modules}
    whole = [sys.modules[module] for module in modules if not _findable(module)]  # of no use there by their names
    try:
        with ExitStack() as undo:
            for module in whole:
                cloudpickle.register_pickle_by_value(module)
                undo.callback(cloudpickle.unregister_pickle_by_value, module)
            content: bytes = cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects that it holds raise
        problem = f"{name} cannot be given to a worker process: {type(error).__name__}: {error}"
        remedy = "define it in a module, without open files, locks or threads around it"
        raise ConfigError(problem, where=where, remedy=remedy) from error
    return content


def _findable(module: str) -> bool:
    """Another process finds a module of this name."""
    top = module.partition(".")[0]
    found = (finder.find_spec(top, None) for finder in sys.meta_path)
    return module in sys.modules and module != "__main__" and any(spec is not None for spec in found)


def write(path: Path, content: bytes) -> None:
    """For no other user to read. Raises OSError."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE), "wb") as file:
        file.write(content)


def read(path: Path) -> Callable[..., Any]:
    """In a worker. Raises RollyardError when another user may have written it, ConfigError when it cannot be read there."""
    import cloudpickle

    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & ~PRIVATE:
            raise RollyardError(f"{path} is not this user's alone: it is not read")
        try:
            function: Callable[..., Any] = cloudpickle.load(file)
        except Exception as error:
            problem = f"a function cannot be read in a worker process: {type(error).__name__}: {error}"
            raise ConfigError(problem, where="reward.function", remedy="define it in a module") from error
    return function
