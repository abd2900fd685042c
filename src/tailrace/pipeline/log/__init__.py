"""Reading and inspecting a pipeline's logs."""
