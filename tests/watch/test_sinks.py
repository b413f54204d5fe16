import json
import warnings
from pathlib import Path

import pytest

from rollyard.watch.sinks import JsonlSink, cut
from tests.watch.records import STEP


def lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_a_line_after_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n')
    sink = JsonlSink(path)
    sink.write({"step": 1, "reward_mean": None, "loss": float("nan"), "gap": float("-inf")})
    sink.write(STEP.to_metrics())
    sink.close({}, failed=False)
    assert lines(path) == [
        {"step": 0},
        {"step": 1, "reward_mean": None, "loss": "nan", "gap": "-inf"},
        STEP.to_metrics(),
    ]


@pytest.mark.parametrize("record", [{"step": 1}, {"step": object()}])
def test_a_sink_that_fails_warns_once_and_stops_nothing(tmp_path: Path, record: dict[str, object]) -> None:
    path = tmp_path / "metrics.jsonl"
    if record == {"step": 1}:
        path.mkdir()
    sink = JsonlSink(path)
    with pytest.warns(RuntimeWarning, match=r"no more metrics are written to .*metrics\.jsonl"):
        sink.write(record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink.write(record)
    sink.close({}, failed=False)


def test_what_will_be_done_again_is_cut_off(tmp_path: Path) -> None:
    """Of a step that was done twice the last record counts; half a line, and what is no record, is left out."""
    path = tmp_path / "metrics.jsonl"
    assert cut(path, 3) == () and not path.exists()
    path.write_text('{"step": 1}\n{"step": 2, "life": 0}\n[]\n{"step": 2, "life": 1}\n{"step": 4}\n{"step": 3}\n{"step": 1, "a')
    assert cut(path, 3) == ({"step": 1}, {"step": 2, "life": 1}, {"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2, "life": 1}\n{"step": 3}\n'
    assert cut(path, 0) == () and path.read_text() == ""
