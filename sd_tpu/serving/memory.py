"""The items on each replica, and which of them go when another needs room; and what is kept of
prompts.

Items that several others need (`Item.needs`) count once, and stay as long as any of these.
"""

from collections.abc import Callable, Container

from sd_tpu.serving.plan import Batch, Prompt, Training, Weights

Item = Batch | Weights | Training


class Memory:
    """Items by replica, within a bound; batches and trainings lie on all replicas alike."""

    def __init__(self, replicas: int, limit: int | None = None):
        """Begin with nothing; `limit` is that of each chip in bytes, None for no bound."""
        self.limit = limit
        self._items: list[dict[Item, None]] = [{} for _ in range(replicas)]  # last used, last

    def holds(self, replica: int, item: Item) -> bool:
        """Whether it is there, or on its way."""
        return item in self._items[replica]

    def on(self, replica: int) -> list[Item]:
        """Return the items on a replica, the least recently used first."""
        return list(self._items[replica])

    def used(self, replica: int) -> int:
        """Bytes of what is there."""
        return sum(item.memory for item in self._items[replica])

    def fits(self, *items: Item) -> bool:
        """Whether a replica that holds nothing else has room for all of these."""
        everything = {each for item in items for each in (item, *item.needs)}
        return self.limit is None or sum(each.memory for each in everything) <= self.limit

    def use(self, replica: int, item: Item) -> None:
        """Add an item and all that it needs, or record that they are used again."""
        for each in (item, *item.needs):  # needed items come last, so they are never older
            self._items[replica].pop(each, None)
            self._items[replica][each] = None

    def remove(self, replica: int, item: Item) -> None:
        """Forget that the item is on the replica, if it was there."""
        self._items[replica].pop(item, None)

    def room_for(
        self, replica: int, item: Item, needed: Callable[[int, Item], bool]
    ) -> list[Item] | None:
        """Return the items to drop so that `item` fits with all that it needs; None if it cannot.

        The least recently used go first, and none that is `needed` on the replica.
        """
        if self.limit is None:
            return []
        items, gone = self._items[replica], []
        more = sum(each.memory for each in (item, *item.needs) if each not in items)
        over = self.used(replica) + more - self.limit
        for other in items:
            if over <= 0:
                break
            left = (item, *(each for each in items if each not in gone))
            if not (needed(replica, other) or any(other in each.needs for each in left)):
                gone.append(other)
                over -= other.memory
        return gone if over <= 0 else None


class KeptPrompts:
    """Prompts of which a worker keeps what was made of them on its host, within a bound.

    It lies on the host, where it takes no room of weights, and from where it comes to whichever
    replica draws the picture.
    """

    def __init__(self, limit: int):
        """Begin with nothing; `limit` is in bytes."""
        self.limit, self.used = limit, 0
        self._prompts: dict[Prompt, None] = {}  # last used, last

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self._prompts

    def use(self, prompt: Prompt) -> None:
        """Add a prompt, or record that it is used again."""
        self.remove(prompt)
        self._prompts[prompt] = None
        self.used += prompt.memory

    def remove(self, prompt: Prompt) -> None:
        """Forget a prompt, if it was there."""
        if prompt in self._prompts:
            del self._prompts[prompt]
            self.used -= prompt.memory

    def trim(self, needed: Callable[[], Container[Prompt]]) -> list[Prompt]:
        """Forget the least recently used beyond the bound; return them.

        None of those `needed` goes, which is called if some have to.
        """
        if self.used <= self.limit:
            return []
        stay, gone = needed(), []
        for prompt in [*self._prompts]:
            if self.used > self.limit and prompt not in stay:
                self.remove(prompt)
                gone.append(prompt)
        return gone

    def clear(self) -> list[Prompt]:
        """Forget all, and return them."""
        gone = [*self._prompts]
        for prompt in gone:
            self.remove(prompt)
        return gone
