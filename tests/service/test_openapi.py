"""The description of the service says what the service does."""

from __future__ import annotations

from typing import Any

import jsonschema

from tests.service.served import Served

PATHS = {
    "/v1/health": {"get"},
    "/v1/metrics": {"get"},
    "/v1/rows": {"get"},
    "/v1/rollouts": {"post"},
    "/v1/policy": {"put"},
    "/v1/sessions": {"post"},
    "/v1/sessions/{session_id}": {"get", "delete"},
    "/v1/sessions/{session_id}/step": {"post"},
    "/run": {"post"},
    "/aggregate_metrics": {"post"},
}


def test_every_path_is_described_with_its_refusals_and_the_token(served: Served) -> None:
    described = served.get("/openapi.json")
    assert {path: set(methods) for path, methods in described["paths"].items()} == PATHS
    for path, methods in described["paths"].items():
        for method, what in methods.items():
            assert {"401", "413", "422", "429", "503"} <= what["responses"].keys(), (path, method)
            assert what["description"]
    assert described["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert described["security"] == [{"token": []}]


def test_answers_are_what_the_description_says(served: Served) -> None:
    described = served.get("/openapi.json")

    def fits(value: Any, schema: dict[str, Any]) -> None:
        whole = {**schema, "components": described["components"]}
        jsonschema.Draft202012Validator(whole).validate(value)

    def answer_of(path: str, method: str, status: str = "200", kind: str = "application/json") -> dict[str, Any]:
        found: dict[str, Any] = described["paths"][path][method]["responses"][status]["content"][kind]["schema"]
        return found

    fits(served.get("/v1/health"), answer_of("/v1/health", "get"))
    fits(served.get("/v1/rows"), answer_of("/v1/rows", "get"))
    key = served.keys()[0]
    lines, end = served.batch(rows=[key], n=2)
    for line in [*lines, end]:
        fits(line, answer_of("/v1/rollouts", "post", kind="application/x-ndjson"))
    refused = served.ask("POST", "/v1/rollouts", {"rows": []})
    fits(refused.json, answer_of("/v1/rollouts", "post", "422"))
    turn = served.post("/v1/sessions", {"row": key})
    fits(turn, answer_of("/v1/sessions", "post"))
    ended = served.post(f"/v1/sessions/{turn['id']}/step", {"message": "The sum is 3."})
    fits(ended, answer_of("/v1/sessions/{session_id}/step", "post"))
    served.ask("DELETE", f"/v1/sessions/{turn['id']}")


def test_requests_are_described(served: Served) -> None:
    described = served.get("/openapi.json")
    for path, methods in PATHS.items():
        for method in methods & {"post", "put"}:
            schema = described["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
            name = schema.get("$ref", "").rpartition("/")[2]
            assert name in described["components"]["schemas"] or path == "/aggregate_metrics"
    batch = described["components"]["schemas"]["RolloutsRequest"]
    assert batch["additionalProperties"] is False
    assert set(batch["properties"]) == {"rows", "n", "batch", "split", "sampling", "max_staleness", "policy"}
