"""The HTTP service: routes, middleware and server. The farm and the compiler produce the content."""
