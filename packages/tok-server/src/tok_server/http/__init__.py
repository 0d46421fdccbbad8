"""The HTTP server: connections, middleware, what handlers share, who may ask."""
