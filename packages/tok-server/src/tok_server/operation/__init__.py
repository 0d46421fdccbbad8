"""Endpoints for operators: health, metrics, the API's description, administration."""

from __future__ import annotations

from tok_server.operation import admin, health, metrics_endpoint, schema_endpoint
from tok_server.operation.schema_endpoint import DOCUMENT, OpenAPIDocument

__all__ = [
    "DOCUMENT",
    "OPERATOR_OPERATIONS",
    "OpenAPIDocument",
]

OPERATOR_OPERATIONS = (
    *health.OPERATIONS,
    *metrics_endpoint.OPERATIONS,
    *schema_endpoint.OPERATIONS,
    *admin.OPERATIONS,
)
