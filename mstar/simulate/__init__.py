"""The real conductor over an engine that only keeps time: how policies of scheduling are compared."""
