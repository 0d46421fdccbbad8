"""Decide which waiting samples start: queue, fair shares, length model, forecast of page use."""
