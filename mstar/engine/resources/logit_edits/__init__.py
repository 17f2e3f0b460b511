"""Changes to a request's logits before they are sampled: what may be drawn, biases, penalties on what was generated."""
