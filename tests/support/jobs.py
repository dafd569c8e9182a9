"""Jobs whose events have already happened."""


class FakeJob:
    """A job whose events have already happened."""

    def __init__(self, *events):
        self._events = events

    def events(self):
        return iter(self._events)

    def cancel(self, index=None):
        pass
