"""Which requests the next step runs: admission, queue, batching, deadlines."""
