"""``mstar bench``: what the engine and a server deliver, beside the floor that the hardware sets."""
