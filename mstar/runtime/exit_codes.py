"""How an engine process says why it left."""

LOAD_ERROR = 3  # the folder's ``load_error`` says more
STALLED = 70  # a step that would not end
DEVICE_FAILED = 71  # a fault after which only a new process can use the device
