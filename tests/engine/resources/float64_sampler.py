"""A sampler of one request in double precision, written from the rules alone: plain Python, one step at a time."""

from functools import cache

import numpy as np

MASK = 2**32 - 1


@cache
def philox(seed, offset, token):
    """Output word 0 of Philox4x32-10 (Salmon et al., SC 2011)."""
    key, counter = [seed & MASK, seed >> 32 & MASK], [offset & MASK, offset >> 32 & MASK, token, 0]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [key[0] + 0x9E3779B9 & MASK, key[1] + 0xBB67AE85 & MASK]
    return counter[0]


def noise(seed, offset, vocab):
    """Exponential noise of every token."""
    words = np.array([philox(seed, offset, token) for token in range(vocab)], np.float32)
    v = np.minimum((words + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -np.log1p(-v.astype(np.float64))


class Float64Sampler:
    """``tokens``: what was drawn and kept so far."""

    def __init__(self, config, stop_ids=(), prompt=()):
        self.config, self.stop_ids, self.prompt = config, list(stop_ids), list(prompt)
        self.tokens = []

    def draw(self, logits, apply_penalty=True, apply_filters=True):
        """The next token for ``logits`` [V], and by how much it won."""
        c, x = self.config, np.array(logits, np.float64)
        if apply_penalty:
            for token, factor in self.factors().items():
                x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        if len(self.tokens) < c.min_tokens:
            others = np.delete(x, self.stop_ids)
            if (others > -np.inf).any():
                x[self.stop_ids] = -np.inf
        if c.temperature == 0 or (apply_filters and c.top_k == 1):
            return int(np.argmax(x)), np.ptp(np.sort(x)[-2:])
        p = self.filtered(x / c.temperature, apply_filters)
        with np.errstate(divide="ignore"):
            results = np.log(p) - np.log(noise(c.seed, len(self.tokens), x.size))
        return int(np.argmax(results)), np.ptp(np.sort(results)[-2:])

    def factors(self):
        """By token, what its logit is penalised with."""
        c = self.config
        if c.repetition_window:
            recent = self.tokens[-c.repetition_window :]
            return {token: c.repetition_penalty ** recent.count(token) for token in recent}
        met = set(self.tokens) | (set(self.prompt) if c.penalize_prompt else set())
        return dict.fromkeys(met, c.repetition_penalty)

    def filtered(self, x, apply_filters):
        c = self.config
        p = np.exp(x - x.max())
        p = np.where(p >= c.min_p * p.max(), p, 0)
        p /= p.sum()
        if not apply_filters:
            return p
        rank = np.array([(p > value).sum() for value in p])
        above = np.array([p[p > value].sum() for value in p])
        in_k = rank < c.top_k if c.top_k else np.ones(p.size, bool)
        total = 1 if c.top_p_first else p[in_k].sum()
        in_p = (above < c.top_p * total) | (rank < c.top_p_min_keep) if c.top_p < 1 else np.ones(p.size, bool)
        p = np.where(in_k & in_p, p, 0)
        return p / p.sum()
