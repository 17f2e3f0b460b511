"""One step of a model: inputs, resources, capture and replay."""
