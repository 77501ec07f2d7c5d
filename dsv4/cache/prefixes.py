"""Blocks of earlier requests by their tokens, for later requests that begin alike. Host memory
only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from dsv4.cache.allocator import BlockAllocator


class Node:
    """A block of a known sequence of tokens: those of its parents, then its own.

    Attributes:
        parent: the block before; None: of the root, which has no block.
        tokens: its own.
        block: where its entries lie.
        snapshot: of the rings at its end, if there is one.
        is_known: whether it is still part of the tree.
    """

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Node] = {}
        self.snapshot: int | None = None
        self.is_known = True


class Match(NamedTuple):
    """The longest known beginning of a sequence.

    Attributes:
        blocks: that hold it, first to last.
        snapshot: of the rings at its end; None: nothing is known.
        node: its end.
    """

    blocks: list[int]
    snapshot: int | None
    node: Node | None


class Prefixes:
    """Tree of the blocks that are kept, with snapshots of the rings at ends of some.

    A request can begin where there is a snapshot, so every path ends with one. Snapshots are few;
    the one that was of no use for the longest time makes way for a new one, and for blocks that
    requests need.

    Args:
        allocator: of the blocks.
        block_size: tokens of a block.
        snapshots: how many there are, 0 .. snapshots - 1.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, snapshots: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._root = Node(None, (), -1)
        self._free = list(range(snapshots - 1, -1, -1))
        self._ends: OrderedDict[Node, None] = OrderedDict()  # nodes with one, the latest used last

    def find(self, tokens: Sequence[int], most: int) -> Match:
        """Return the longest known beginning of `tokens`, of at most `most` tokens."""
        node, end = self._root, self._root
        while (node.depth + 1) * self._block_size <= most:
            node = node.children.get(self._part(tokens, node.depth))
            if node is None:
                break
            if node.snapshot is not None:
                end = node
        if end is self._root:
            return Match([], None, None)
        self._ends.move_to_end(end)
        blocks, node = [], end
        while node is not self._root:
            blocks.append(node.block)
            node = node.parent
        return Match(blocks[::-1], end.snapshot, end)

    def take_snapshot(self) -> int | None:
        """Take a snapshot to be filled, from the end that was of no use for the longest time if
        need be; None: all are being filled."""
        if not self._free and self._ends:
            self._forget(next(iter(self._ends)))
        return self._free.pop() if self._free else None

    def give_snapshot(self, snapshot: int) -> None:
        """Give one back that nothing was put under."""
        self._free.append(snapshot)

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], snapshot: int, after: Node | None = None
    ) -> Node:
        """Keep the blocks of a sequence, which a request holds, and the snapshot of its end.

        What is known of the sequence already stays as it is.

        Args:
            tokens: whole blocks.
            blocks: of these.
            snapshot: from `take_snapshot`.
            after: the node of the sequence's beginning, as `find` or an earlier call gave it.

        Returns:
            The sequence's end.
        """
        node = after if after is not None and after.is_known else self._root
        for depth in range(node.depth, len(blocks)):
            part = self._part(tokens, depth)
            child = node.children.get(part)
            if child is None:
                self._allocator.keep(blocks[depth])
                child = node.children[part] = Node(node, part, blocks[depth])
            node = child
        if node.snapshot is None:
            node.snapshot = snapshot
            self._ends[node] = None
        else:
            self._free.append(snapshot)
        self._ends.move_to_end(node)
        return node

    def make_room(self, count: int) -> None:
        """Let `count` blocks be free, if all that no request holds are so many."""
        allocator = self._allocator
        if allocator.num_free + allocator.num_idle < count:
            return
        while allocator.num_free < count:
            idle = (node for node in self._ends if not allocator.is_held(node.block))
            # A block without a holder may lead to one with: to that of a request which computed
            # the beginning beside it, in blocks of its own.
            self._forget(next(idle, None) or next(iter(self._ends)))

    def _forget(self, node: Node) -> None:
        """Drop an end, and the blocks that then lead nowhere."""
        del self._ends[node]
        self._free.append(node.snapshot)
        node.snapshot = None
        while node is not self._root and node.snapshot is None and not node.children:
            self._allocator.drop(node.block)
            del node.parent.children[node.tokens]
            node.is_known = False
            node = node.parent

    def _part(self, tokens: Sequence[int], depth: int) -> tuple[int, ...]:
        return tuple(tokens[depth * self._block_size : (depth + 1) * self._block_size])
