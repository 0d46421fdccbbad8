"""Endpoints for operators: health, metrics, the API's description, administration."""
