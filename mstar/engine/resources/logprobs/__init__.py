"""Log-probabilities of generated and of prompt tokens, in the model's own distribution."""
