"""What lies on each device, and what has to go when something else is needed there."""

from collections.abc import Callable

from sd_tpu.serving.plan import Batch, Weights

Item = Batch | Weights


class Memory:
    """Batches and weights by device, within a bound; a batch lies on all devices alike."""

    def __init__(self, devices: int, limit: int | None = None):
        """Begins with nothing; `limit` is that of each device in bytes, None for no bound."""
        self.limit = limit
        self._items: list[dict[Item, None]] = [{} for _ in range(devices)]  # last used, last

    def holds(self, device: int, item: Item) -> bool:
        """Whether it is there, or on its way."""
        return item in self._items[device]

    def on(self, device: int) -> list[Item]:
        """What is there, the least recently used first."""
        return list(self._items[device])

    def used(self, device: int) -> int:
        """Bytes of what is there."""
        return sum(item.memory for item in self._items[device])

    def fits(self, *items: Item) -> bool:
        """Whether a device that holds nothing else has room for all of these."""
        return self.limit is None or sum(item.memory for item in items) <= self.limit

    def use(self, device: int, item: Item) -> None:
        """Adds it, or takes down that it is used again."""
        self._items[device].pop(item, None)
        self._items[device][item] = None

    def remove(self, device: int, item: Item) -> None:
        """Takes down that it is gone, if it was there."""
        self._items[device].pop(item, None)

    def room_for(self, device: int, item: Item,
                 needed: Callable[[int, Item], bool]) -> list[Item] | None:
        """What has to go for `item` to fit, the least recently used first, nothing that is
        `needed` on the device; None if it does not fit even so."""
        if self.limit is None:
            return []
        over, gone = self.used(device) + item.memory - self.limit, []
        for other in self._items[device]:
            if over <= 0:
                break
            if not needed(device, other):
                gone.append(other)
                over -= other.memory
        return gone if over <= 0 else None
