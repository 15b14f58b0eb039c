"""The HTTP service: create_app() puts the routes together; everything it answers comes from the farm and the core."""
