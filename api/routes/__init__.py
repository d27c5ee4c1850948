"""Routes, one module a resource. Each is a typed request, one call, a typed response."""
