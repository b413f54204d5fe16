"""Files that somebody has spoilt on purpose: each is read, or refused in one clear error, and nothing else happens."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import strategies as st

from rollyard.chaos.faults import read_faults
from rollyard.config import RewardModelConfig
from rollyard.durable import WHOLE, check_whole
from rollyard.errors import ConfigError, DurableError, ExchangeError, JournalError, WeightSyncError
from rollyard.events import Admit, Drop
from rollyard.exchange.folder import Folder
from rollyard.inspect.check import check
from rollyard.journal.check import check_journal
from rollyard.journal.folder import RunFolder
from rollyard.journal.reader import JournalReader
from rollyard.journal.recover import read_past
from rollyard.layers import options, resolve
from rollyard.prompts.jsonl import read_rows
from rollyard.types import DropReason, Manifest, TensorInfo, WeightVersion
from rollyard.watch.read import read_report
from rollyard.watch.sinks import cut
from rollyard.weights import wire
from tests.journal.test_recover import Life, complete, group_of, prompt, wrote
from tests.security.hostile import bent, flipped, fuzzed, of_bytes, of_json, words

LINE = {"prompt": "2+3=", "answer": "5", "messages": [{"role": "user", "content": "x"}]}
LINES = b'{"prompt": "2+3=", "answer": "5"}\n{"prompt": [{"role": "user", "content": "x"}]}\n'


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


# -------------------------------------------------------------------------------------------------- what users write


@fuzzed(60, 375, content=of_bytes(LINES) | of_json(LINE) | bent(LINE).map(lambda line: json.dumps(line).encode()))
def test_prompts(scratch: Path, content: bytes) -> None:
    (scratch / "prompts.jsonl").write_bytes(content)
    with suppress(ConfigError):
        for row in read_rows(scratch / "prompts.jsonl", "prompt"):
            assert row.prompt


NAMES = [option.name for option in options()]
TREE = {"run": {"name": "a", "steps": 3}, "rollout": {"stop": ["a"]}, "train": {"lr": 1e-3}, "reward": {"judge": {"scale": 1.0}}}


@st.composite
def toml(draw: st.DrawFn) -> bytes:
    found = draw(bent(TREE))
    try:
        return tomli_w.dumps(found).encode()
    except (TypeError, ValueError, AttributeError):  # what TOML has no words for
        return draw(flipped(tomli_w.dumps(TREE).encode()))


@fuzzed(40, 200, content=toml() | of_bytes(tomli_w.dumps(TREE).encode()))
def test_config_files(scratch: Path, content: bytes) -> None:
    (scratch / "config.toml").write_bytes(content)
    with suppress(ConfigError):
        resolve(file=scratch / "config.toml", environment={})


texts = words | st.sampled_from(
    ["1", "-1", "0.5", "true", "inf", "1,2", "http://a:b@c", "http://[::1", "{", "9" * 5000, "[" * 9999]
)


@fuzzed(40, 200, layer=st.dictionaries(st.sampled_from(NAMES) | words, texts, max_size=4))
def test_variables_and_the_command_line(layer: dict[str, str]) -> None:
    variables = {f"ROLLYARD_{name.upper().replace('.', '__')}": value for name, value in layer.items()}
    for given in ({"environment": variables}, {"environment": {}, "overrides": layer}):
        with suppress(ConfigError):
            resolve(**given)  # type: ignore[arg-type]


FAULTS = {
    "fault": [{"what": "kill", "which": "engine", "step": 3}, {"what": "slow", "which": "run", "for_s": 1.0, "factor": 2.0}]
}


@st.composite
def faults(draw: st.DrawFn) -> bytes:
    try:
        return tomli_w.dumps(draw(bent(FAULTS))).encode()
    except (TypeError, ValueError, AttributeError):
        return draw(flipped(tomli_w.dumps(FAULTS).encode()))


@fuzzed(40, 200, content=faults() | of_bytes(tomli_w.dumps(FAULTS).encode()))
def test_faults(scratch: Path, content: bytes) -> None:
    (scratch / "faults.toml").write_bytes(content)
    with suppress(ConfigError):
        read_faults(scratch / "faults.toml")


# ---------------------------------------------------------------------------------------------- what a run has written


@pytest.fixture(scope="module")
def journal(scratch: Path) -> bytes:
    """Of a run with something in every table that a resume reads."""
    (scratch / "sound").mkdir()
    life = Life(scratch / "sound" / "journal.sqlite")
    for id_ in range(3):
        life.step(*complete(group_of(id_)))
    life.train(0, 0)
    life.checkpoint(WeightVersion(1))
    life.train(1, 1)
    life.step(Admit(prompt(3)), wrote(3, 0, (1, 2)))
    life.step(Admit(prompt(4)), Drop(4, None, DropReason.STALE))
    life.journal.flush()
    life.journal.close()
    return (scratch / "sound" / "journal.sqlite").read_bytes()


PLACES = st.integers(0, 2**20)  # in a file, counted round and round


@fuzzed(25, 100, changes=st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=6), end=st.none() | PLACES)
def test_journals(scratch: Path, journal: bytes, changes: list[tuple[int, int]], end: int | None) -> None:
    """Bytes are changed anywhere in it, or it ends early."""
    folder = RunFolder(scratch / "run")
    (folder.path / "checkpoints").mkdir(parents=True, exist_ok=True)
    content = bytearray(journal)
    for at, byte in changes:
        content[at % len(content)] = byte
    folder.journal.write_bytes(content if end is None else content[: end % (len(content) + 1)])
    found = check_journal(folder.journal, lambda name: None)
    assert found.tables or found.findings
    list(check(folder))
    with suppress(JournalError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what is damaged is told so, and left out
        read_past(folder.journal, lambda name: True)
    with suppress(JournalError), JournalReader(folder.journal) as reader:
        with suppress(JournalError):
            reader.batches()
        with suppress(JournalError):
            reader.group(0)


METRICS = {"step": 3, "incarnation": 0, "loss": 0.5}


@fuzzed(40, 100, content=of_json(METRICS))
def test_metrics_and_reports(scratch: Path, content: bytes) -> None:
    """Of metrics, lines that are none are left out; a report is one, or it is not."""
    path = scratch / "metrics.jsonl"
    path.write_bytes(content + b"\n" + json.dumps(METRICS).encode())
    assert METRICS in cut(path, 10**9)
    path.write_bytes(content)
    with suppress(JournalError):
        read_report(path)


SIZES = {"model.safetensors": 8, "config.json": 2}


@fuzzed(40, 200, content=of_json(SIZES), other=st.binary(max_size=8))
def test_notes_of_what_is_whole(scratch: Path, content: bytes, other: bytes) -> None:
    folder = scratch / "sealed"
    folder.mkdir(exist_ok=True)
    (folder / WHOLE).write_bytes(content)
    (folder / "model.safetensors").write_bytes(other)
    (folder / "config.json").write_bytes(b"{}")
    with suppress(DurableError):
        check_whole(folder)


@pytest.fixture(scope="module")
def shared(scratch: Path) -> tuple[Folder, dict[str, tuple[Callable[[], object], Any]]]:
    from tests.exchange.test_folder import group

    folder = Folder(scratch / "shared")
    folder.make()
    folder.write_group(group(7))
    folder.write_batch(3, (1, 2))
    folder.write_offered(3)
    reads: dict[str, Callable[[], object]] = {
        "groups/7.json": lambda: folder.group(7),
        "batches/000003.json": folder.batches,
        "offered.json": folder.offered,
        "stats/000003.json": lambda: folder.stats(3),
    }
    (folder.path / "stats/000003.json").write_text("[{}]")
    return folder, {name: (read, json.loads((folder.path / name).read_text())) for name, read in reads.items()}


@fuzzed(60, 300, data=st.data())
def test_what_two_jobs_share(shared: tuple[Folder, dict[str, tuple[Callable[[], object], Any]]], data: st.DataObject) -> None:
    folder, files = shared
    name = data.draw(st.sampled_from(sorted(files)))
    read, valid = files[name]
    (folder.path / name).write_bytes(data.draw(of_json(valid)))
    with suppress(ExchangeError):
        read()


# ------------------------------------------------------------------------------------------------------------ weights

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [1, 2],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@fuzzed(60, 375, content=of_json(CONFIG))
def test_configurations_of_models(scratch: Path, content: bytes) -> None:
    from rollyard.model.architecture import Architecture

    folder = scratch / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(content)
    with suppress(ConfigError):
        Architecture.from_folder(folder)


@fuzzed(30, 125, content=of_json({"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
def test_indices_of_weights(scratch: Path, content: bytes) -> None:
    from rollyard.model.folder import INDEX, weight_files

    folder = scratch / "indexed"
    folder.mkdir(exist_ok=True)
    for name in ("one.safetensors", "two.safetensors"):
        (folder / name).touch()
    (folder / INDEX).write_bytes(content)
    with suppress(ConfigError):
        assert {path.parent for path in weight_files(folder)} <= {folder}


CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}


@fuzzed(40, 300, content=of_json(CLASSIFIER))
def test_configurations_of_classifiers(scratch: Path, content: bytes) -> None:
    from rollyard.reward.classifier import check_folder

    (scratch / "classifier").mkdir(exist_ok=True)
    (scratch / "classifier" / "config.json").write_bytes(content)
    with suppress(ConfigError):
        check_folder(RewardModelConfig(folder=str(scratch / "classifier"), label="good"))


INFO = TensorInfo("a", (2, 3), "torch.float32")
OFFER = json.loads(wire.MANIFEST.dump_json(Manifest(WeightVersion(3), (INFO,), 24, "/nowhere", (7,), name="x", base="")))
HEAD = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
FILE = struct.pack("<Q", len(HEAD)) + HEAD + bytes(24)


@fuzzed(60, 250, content=of_json(OFFER), file=st.just(FILE) | of_bytes(FILE))
def test_manifests_and_the_weights_beside_them(scratch: Path, content: bytes, file: bytes) -> None:
    import torch

    from rollyard.weights.checkpoint import CheckpointReceiver
    from rollyard.weights.record import MANIFEST, manifest_of

    folder = scratch / "offered"
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).write_bytes(content)
    (folder / "model.safetensors").write_bytes(file)
    with suppress(WeightSyncError):
        CheckpointReceiver((INFO,), torch.device("cpu")).prepare(manifest_of(folder))
