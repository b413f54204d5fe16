"""Functions that a config names: `FILE.py:function` or `package.module:function`, of users and of other packages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from threading import Timer
from typing import Any

from rollyard.errors import ConfigError
from rollyard.verdict import cause_of

Function = Callable[..., Any]
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
TOLD_AFTER_S = 10.0  # whoever waits for an import is told so


def load_function(name: str, where: str, *, classes: bool = False) -> Function:
    """Import what `name` says. Raises ConfigError saying what went wrong.

    Args:
        where: the option that has the name, such as `reward.function`.
        classes: those of the module itself may be named too.
    """
    module_name, separator, attribute = name.rpartition(":")
    remedy = "give FILE.py:function or package.module:function"
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{name!r} names no function", where=where, remedy=remedy)
    module = _load_file(Path(module_name), where) if module_name.endswith(".py") else _load_module(module_name, where)
    function = getattr(module, attribute, None)
    if function is None:
        members = vars(module).items()
        own = [key for key, value in members if inspect.isclass(value) and value.__module__ == module.__name__]
        functions = [key for key, value in members if inspect.isfunction(value)]
        kinds, found = ("classes and functions", [*own, *functions]) if classes else ("functions", functions)
        remedy = f"its {kinds}: {', '.join(found) or 'none'}"
        raise ConfigError(f"{module_name} has no {attribute!r}", where=where, remedy=remedy)
    return check_callable(function, name, where)


def check_callable(function: Any, name: str, where: str) -> Function:
    """`function`. Raises ConfigError when it cannot be called, or does not tell what parameters it takes."""
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, not a function", where=where, remedy="name a function")
    try:
        inspect.signature(function)
    except ValueError:
        problem = f"{name} does not tell what parameters it takes"
        raise ConfigError(problem, where=where, remedy="wrap it in a Python function") from None
    return function


def check_takes(function: Function, count: int, name: str, where: str, called_with: str) -> None:
    """Raises ConfigError when it cannot be called with `count` positional arguments, which are `called_with`."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = sum(parameter.kind in POSITIONAL for parameter in parameters)
    if positional < count and all(parameter.kind is not Parameter.VAR_POSITIONAL for parameter in parameters):
        problem = f"{name} takes {positional} positional arguments"
        raise ConfigError(problem, where=where, remedy=f"it is called with {called_with}")


def _load_file(path: Path, where: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", where=where, remedy="give the path of a Python file")
    name = f"rollyard_{where.replace('.', '_')}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importing(str(path), where, "mend the file"):
        spec.loader.exec_module(module)
    return module


def _load_module(name: str, where: str) -> Any:
    with _importing(name, where, "give FILE.py:function, or a module that Python finds"):
        return importlib.import_module(name)


@contextmanager
def _importing(name: str, where: str, remedy: str) -> Iterator[None]:
    """Around the import of a user's module: it may raise anything, leave by sys.exit, and take as long as it likes."""
    slow = Timer(TOLD_AFTER_S, _tell, (f"still importing {name} ({where}) after {TOLD_AFTER_S:g} s",))
    slow.daemon = True
    slow.start()
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name} cannot be imported: {cause_of(error)}", where=where, remedy=remedy) from error
    finally:
        slow.cancel()


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
