"""The OpenAPI document is what is served: schemathesis makes requests by it, right and wrong ones, and looks at the answers.

It knows no lease and no batch; test_document.py has those, and the streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from tests.serve.beside import Beside

pytestmark = pytest.mark.slow
RIGHT = ["2xx", 400, 403, 404, 409, 410, 422, 429]  # the document knows neither what is going on nor how the run samples
EXAMPLES = 8  # requests of each kind for each operation


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Streams end when the service does."""
    with Beside(tmp_path_factory.mktemp("served")) as beside:
        config = SchemathesisConfig.from_dict({"checks": {"positive_data_acceptance": {"expected-statuses": RIGHT}}})
        url = f"http://127.0.0.1:{beside.port}/openapi.json"
        found = schemathesis.openapi.from_url(url, config=config)
        yield found.exclude(path="/v1/groups/stream")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_what_is_served_is_what_the_document_says(served: Any, mode: GenerationMode) -> None:
    operations = [found.ok() for found in served.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:

        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.call_and_validate(timeout=10)

        with suppress(Unsatisfiable) if mode is GenerationMode.NEGATIVE else nullcontext():  # nothing of it can be wrong
            ask()
