"""/openapi.json describes every route and every answer of the server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.patience import PATIENCE
from support.serving import NAME, Server, serving
from tok_server.app import OPERATIONS
from tok_server.wire.openapi import Operation

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = int(os.environ.get("TOK_SCHEMA_EXAMPLES", "6"))


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Generated requests ask for any n and any length; the limits keep answers short and few.
    data = tmp_path_factory.mktemp("data")
    with serving(tiny_model, max_n=4, engine_options={"max_model_len": 48}, data_dir=str(data)) as running:
        yield running


@pytest.fixture(scope="module")
def openapi_document(server: Server) -> dict[str, Any]:
    answer = server.call("GET", "/openapi.json")
    assert answer.status == 200
    return answer.json()


def test_openapi_document_has_every_route(openapi_document: dict[str, Any]) -> None:
    found = {(method.upper(), url) for url, methods in openapi_document["paths"].items() for method in methods}
    assert found == {(one.method, one.url) for one in OPERATIONS}
    assert len(found) == len(OPERATIONS)
    for methods in openapi_document["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")
            assert {"401", "500"} <= operation["responses"].keys()


def test_every_ref_in_the_openapi_document_resolves(openapi_document: dict[str, Any]) -> None:
    schemas = openapi_document["components"]["schemas"]

    def walk(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            value = list(value.values())
        for one in value if isinstance(value, list) else ():
            yield from walk(one)

    names = [reference.removeprefix("#/components/schemas/") for reference in walk(openapi_document)]
    assert "ChatCompletionRequest" in names
    assert set(names) == schemas.keys()


WITH_BODY = [one for one in OPERATIONS if one.request]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.url}")
def test_answers_to_valid_requests_conform_to_the_openapi_document(
    server: Server, openapi_document: dict[str, Any], operation: Operation
) -> None:
    varies = operation.request or operation.query or "{" in operation.url
    run(server, openapi_document, operation, GenerationMode.POSITIVE, EXAMPLES if varies else 1)


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda one: f"{one.method} {one.url}")
def test_answers_to_invalid_bodies_conform_to_the_openapi_document(
    server: Server, openapi_document: dict[str, Any], operation: Operation
) -> None:
    run(server, openapi_document, operation, GenerationMode.NEGATIVE, EXAMPLES)


def run(
    server: Server, openapi_document: dict[str, Any], operation: Operation, mode: GenerationMode, examples: int
) -> None:
    """Call `operation` with generated parameters and bodies, and check the answers."""
    found = schemathesis.openapi.from_dict(openapi_document)[operation.url][operation.method]
    # Generating requests takes longer than serving them; explaining and shrinking would take longest.
    bounds = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @bounds
    @given(case=found.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = NAME  # else most requests would end with 404
        case.call_and_validate(base_url=f"http://127.0.0.1:{server.port}", checks=CHECKS, timeout=PATIENCE)

    check()
