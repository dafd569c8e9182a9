"""The items on each device, and which of them go when another needs room.

Items that several others need (`Item.needs`) count once, and stay as long as any of these.
"""

from collections.abc import Callable

from sd_tpu.serving.plan import Batch, Weights

Item = Batch | Weights


class Memory:
    """Batches and weights by device, within a bound; a batch lies on all devices alike."""

    def __init__(self, devices: int, limit: int | None = None):
        """Begin with nothing; `limit` is that of each device in bytes, None for no bound."""
        self.limit = limit
        self._items: list[dict[Item, None]] = [{} for _ in range(devices)]  # last used, last

    def holds(self, device: int, item: Item) -> bool:
        """Whether it is there, or on its way."""
        return item in self._items[device]

    def on(self, device: int) -> list[Item]:
        """Return the items on a device, the least recently used first."""
        return list(self._items[device])

    def used(self, device: int) -> int:
        """Bytes of what is there."""
        return sum(item.memory for item in self._items[device])

    def fits(self, *items: Item) -> bool:
        """Whether a device that holds nothing else has room for all of these."""
        everything = {each for item in items for each in (item, *item.needs)}
        return self.limit is None or sum(each.memory for each in everything) <= self.limit

    def use(self, device: int, item: Item) -> None:
        """Add an item and all that it needs, or record that they are used again."""
        for each in (item, *item.needs):  # needed items come last, so they are never older
            self._items[device].pop(each, None)
            self._items[device][each] = None

    def remove(self, device: int, item: Item) -> None:
        """Forget that the item is on the device, if it was there."""
        self._items[device].pop(item, None)

    def room_for(
        self, device: int, item: Item, needed: Callable[[int, Item], bool]
    ) -> list[Item] | None:
        """Return the items to drop so that `item` fits with all that it needs; None if it cannot.

        The least recently used go first, and none that is `needed` on the device.
        """
        if self.limit is None:
            return []
        items, gone = self._items[device], []
        more = sum(each.memory for each in (item, *item.needs) if each not in items)
        over = self.used(device) + more - self.limit
        for other in items:
            if over <= 0:
                break
            left = (item, *(each for each in items if each not in gone))
            if not (needed(device, other) or any(other in each.needs for each in left)):
                gone.append(other)
                over -= other.memory
        return gone if over <= 0 else None
