"""Prompts from tables: a Parquet file, or a data set of Hugging Face `datasets`, in a folder or on the hub."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.config import PromptsConfig
from rollyard.errors import ConfigError
from rollyard.prompts.jsonl import read_rows
from rollyard.prompts.rows import row_of, shorten
from rollyard.prompts.source import Row
from rollyard.texts import in_a_line

if TYPE_CHECKING:
    from datasets import Dataset

ON_HUB = "HF_HUB_OFFLINE=0"
SAVED = ("state.json", "dataset_dict.json")  # in a folder that `save_to_disk` made


def read_data(prompts: PromptsConfig) -> list[Row]:
    """All rows of the file, the folder or the data set that is named. Raises ConfigError saying what is wrong, and where."""
    path = Path(prompts.path)
    if prompts.dataset:
        return _rows(_hub(prompts), prompts, prompts.dataset, "prompts.dataset")
    if path.exists() and not (path.is_file() or path.is_dir()):
        remedy = "write what comes through it to a file, and give that"
        raise ConfigError(f"{path} is a pipe or a device, and it is read more than once", where="prompts.path", remedy=remedy)
    if path.is_dir():
        return _rows(_folder(path, prompts), prompts, str(path), "prompts.path")
    if name := next((name for name in ("subset", "split") if getattr(prompts, name)), ""):
        problem = f"a {name} is of a folder or a data set of the hub, and {path} is a file"
        raise ConfigError(problem, where=f"prompts.{name}", remedy="leave it out")
    if path.suffix == ".parquet":
        return _rows(_parquet(path), prompts, str(path), "prompts.path")
    return read_rows(path, prompts.field, prompts.columns)


def _rows(records: Iterable[Mapping[str, Any]], prompts: PromptsConfig, name: str, where: str) -> list[Row]:
    example = f"a row has a {prompts.field!r} with something in it"
    found: list[Row] = []
    for number, record in enumerate(records):
        place = f"{name}, row {number}"
        found.append(row_of(record, prompts.field, prompts.columns, place, shorten(repr(record)), example))
    if not found:
        raise ConfigError(f"{name} has no rows in it", where=where, remedy="give another one")
    return found


def _parquet(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise _missing(f"{path} is a Parquet file", "pyarrow", "parquet", error) from None
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        problem = f"{path} cannot be read: {in_a_line(error)}"
        raise ConfigError(problem, where="prompts.path", remedy="give a Parquet file, or one of JSON Lines") from None
    return rows


def _folder(path: Path, prompts: PromptsConfig) -> Dataset:
    """One that `save_to_disk` made, or one with files that `load_dataset` reads."""
    datasets = _library(f"{path} is a folder", "prompts.path")
    saved = any((path / name).exists() for name in SAVED)
    if saved and prompts.subset:
        problem = "a folder that save_to_disk has made has no subsets"
        raise ConfigError(problem, where="prompts.subset", remedy="leave it out, or give the folder of the subset")
    try:
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path), prompts.subset or None)
    except Exception as error:  # a builder may raise anything
        problem = f"{path} cannot be read as a data set: {type(error).__name__}: {in_a_line(error)}"
        remedy = "give a file, or a folder that datasets' save_to_disk made or load_dataset reads"
        raise ConfigError(problem, where="prompts.path", remedy=remedy) from error
    return _split(found, prompts.split, str(path))


def _hub(prompts: PromptsConfig) -> Dataset:
    name = prompts.dataset
    datasets = _library(f"{name} is a data set of the hub", "prompts.dataset")
    try:
        found = datasets.load_dataset(name, prompts.subset or None)
    except Exception as error:  # the network, the hub, or a builder
        problem = f"{name} cannot be loaded: {type(error).__name__}: {shorten(in_a_line(error))}"
        remedy = f"nothing asks the hub unless the environment says {ON_HUB}; without the network give its folder to prompts.path"
        raise ConfigError(problem, where="prompts.dataset", remedy=remedy) from error
    return _split(found, prompts.split, name)


def _split(found: Any, split: str, name: str) -> Dataset:
    """The part that is asked for; the only one there is needs no name."""
    if not isinstance(found, dict):
        if split:
            raise ConfigError(f"{name} has no splits", where="prompts.split", remedy="leave it out")
        return found
    there: Sequence[str] = list(found)
    if not split and len(there) != 1:
        problem = f"{name} has several splits, and none is named"
        raise ConfigError(problem, where="prompts.split", remedy=f"one of: {', '.join(there)}")
    if split and split not in there:
        near = difflib.get_close_matches(split, there, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"one of: {', '.join(there)}"
        raise ConfigError(f"{name} has no split {split!r}", where="prompts.split", remedy=remedy)
    return found[split or there[0]]


def _library(what: str, where: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise _missing(what, "datasets", "datasets", error, where) from None
    datasets.disable_progress_bars()
    return datasets


def _missing(what: str, package: str, extra: str, error: ImportError, where: str = "prompts.path") -> ConfigError:
    problem = f"{what}, and {package} is not installed ({error})"
    return ConfigError(problem, where=where, remedy=f"pip install 'rollyard[{extra}]'")
